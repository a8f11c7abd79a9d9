"""Row-invariant mode of a trace: which matmuls it must use, and where XLA's own were proven equal.

    mode = RowInvariance()
    mode.prove(shapes, device)                   # compiles and compares, once per shape
    with mode.active():                          # while tracing: `models.layers.linear` goes through the op
        hidden, kv = model.forward(...)

The mode is a part of JAX's trace context, so functions that are jitted inside are traced again for it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax

from pallas_kernels import dispatch

_mode = jax.make_user_context(None)


class MatmulShape(NamedTuple):
    """A matmul `[rows, columns] x [outputs, columns]`, by dtype names."""

    rows: int
    outputs: int
    columns: int
    dtype: str
    out_dtype: str

    def __str__(self) -> str:
        return f"[{self.rows}, {self.columns}] x [{self.outputs}, {self.columns}] {self.dtype} -> {self.out_dtype}"


class RowInvariance:
    """What the programs of one model and device know about their matmuls; one object, handed to every trace."""

    def __init__(self) -> None:
        self.equal: set[MatmulShape] = set()
        """Shapes at which XLA's matmul had the kernel's bits: it runs there."""
        self.different: set[MatmulShape] = set()
        """Shapes at which it had not: the kernel runs there, as it does for few rows."""
        self.known: set[MatmulShape] = set()
        """Shapes that `prove` was told of."""
        self.fixed_tile = False
        """The kernel's tiles did not agree on this card: it uses one for every number of rows."""
        self.seen: set[MatmulShape] = set()
        """Shapes that were traced."""

    def active(self) -> AbstractContextManager[Any]:
        """While tracing inside, matmuls of models are row-invariant."""
        return _mode(self)

    def uses_xla(self, shape: MatmulShape) -> bool:
        """Whether XLA's matmul runs at this shape; counts it in `dispatch_report` and remembers the question."""
        self.seen.add(shape)
        if shape not in self.equal:
            return False
        dispatch.count("row_invariant_matmul", "xla")
        return True

    def prove(self, shapes: set[MatmulShape], device: Any) -> None:
        """Compares XLA's matmul with the kernel where there are enough rows for it, and the tiles of all other calls.

        Args:
            shapes: everything that is going to be traced. Shapes that come later have the kernel.
        """
        new = shapes - self.known
        self.known |= new
        if not new or not has_kernel(device):
            return
        from pallas_kernels.row_invariant_matmul import proof  # imports GPU modules

        with self.active():
            self._note(proof.compare(new, device))
            kernels = (self.known - self.equal) | {proof.compared_with(shape) for shape in self.equal}
            if not self.fixed_tile and not proof.tiles_agree(kernels, device):
                self.fixed_tile = True  # the kernel's bits are other ones now
                self.equal, self.different = set(), set()
                self._note(proof.compare(self.known, device))

    def _note(self, found: dict[MatmulShape, bool]) -> None:
        for shape, same in found.items():
            (self.equal if same else self.different).add(shape)


def has_kernel(device: Any) -> bool:
    """Whether there is more than the reference on this device, and so something to compare."""
    return device.platform == "gpu"


def row_invariance() -> RowInvariance | None:
    """The mode of the trace that is going on, None in default mode."""
    return _mode.value


class _Recorder(RowInvariance):
    """Notes shapes; what is traced meanwhile is the cheapest thing of the right shape, and not counted."""

    def uses_xla(self, shape: MatmulShape) -> bool:
        self.seen.add(shape)
        return True


def matmul_shapes(function: Callable[..., Any], *args: Any) -> set[MatmulShape]:
    """Shapes of all matmuls that `function` would run in row-invariant mode; nothing is computed.

    Args:
        function: e.g. a model's forward. args: arrays or `jax.ShapeDtypeStruct`s.
    """
    mode = _Recorder()
    with mode.active():
        jax.eval_shape(function, *args)
    return mode.seen
