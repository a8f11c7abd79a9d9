"""Whether matmuls have equal bits, seen on the card with random numbers: the kernel's tiles, and XLA beside them.

A process sees each thing once: what is known of a type of card serves every engine on it.
"""

from __future__ import annotations

import concurrent.futures
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.pallas_gpu import tuned
from pallas_kernels.row_invariant_matmul import triton, xla
from pallas_kernels.row_invariant_matmul.mode import MatmulShape, row_invariance

TILE_ROWS, TILE_OUTPUTS, TILE_COLUMNS = 256, 1024, 2048
"""Size of the matmul at which tiles are compared: the sum of a result does not know of the other ones."""
DISTINCT_ROWS, DISTINCT_RESULTS = 64, 1 << 15
"""Different rows and results at least; two orders of summation differ in one bfloat16 of 500, and in more of other dtypes."""
WORKERS = 8

Launch = tuple[tuple[str, int], ...]
Weight = tuple[int, int, str, str]
_same_tiles: dict[tuple[str, str, tuple[Launch, ...]], bool] = {}
_same_as_xla: dict[tuple[str, bool, MatmulShape], bool] = {}


def random(seed: int, shape: tuple[int, int], dtype: Any) -> jax.Array:
    """Normal numbers by the generator that compiles and runs fastest."""
    return jax.random.normal(jax.random.key(seed, impl="rbg"), shape, dtype)


def forget() -> None:
    """Look at everything again."""
    _same_tiles.clear()
    _same_as_xla.clear()


def xla_rows() -> int:
    """From how many rows on XLA's matmul is worth a comparison on this card."""
    return tuned("row_invariant_matmul", "", {"xla_rows": triton.FEW_ROWS + 1})["xla_rows"]


def tiles_agree(shapes: Iterable[MatmulShape], device: Any) -> bool:
    """Whether all tiles that the Triton kernel would use at these shapes give the same bits."""
    launches: dict[str, set[Launch]] = defaultdict(set)
    for shape in shapes:
        launch = triton.launch(shape.rows, shape.outputs, shape.columns, shape.dtype)
        launches[shape.dtype].add(tuple(sorted(launch.items())))
    agree = True
    for dtype, some in sorted(launches.items()):
        key = (device.device_kind, dtype, tuple(sorted(some)))
        if key not in _same_tiles:
            with jax.default_device(device):
                first, *others = _tile_results(dtype, key[2])
                _same_tiles[key] = all(bool(jnp.array_equal(other, first)) for other in others)
        agree = agree and _same_tiles[key]
    return agree


def _tile_results(dtype: str, launches: Sequence[Launch]) -> list[jax.Array]:
    """The float32 sums of one matmul with each of `launches`."""
    x, weight = random(0, (TILE_ROWS, TILE_COLUMNS), dtype), random(1, (TILE_OUTPUTS, TILE_COLUMNS), dtype)

    def run(launch: Launch) -> Any:
        def multiply(x: jax.Array, weight: jax.Array) -> jax.Array:
            return triton.row_invariant_matmul(x, weight, None, out_dtype=jnp.dtype("float32"), config=dict(launch))

        return jax.jit(multiply, compiler_options=xla.COMPILER_OPTIONS).lower(x, weight)

    return [program(x, weight) for program in _compiled([run(launch) for launch in launches])]


def _compiled(lowered: Iterable[Any]) -> list[Any]:
    """Compiles several at a time."""
    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        return list(pool.map(lambda program: program.compile(), lowered))


def compare(shapes: Iterable[MatmulShape], device: Any, *, least_rows: int | None = None) -> dict[MatmulShape, bool]:
    """Whether XLA's matmul has the kernel's bits, for each shape of at least `least_rows` (default: `xla_rows()`) rows."""
    least_rows = xla_rows() if least_rows is None else least_rows
    wanted = sorted(shape for shape in shapes if shape.rows >= least_rows)
    mode = row_invariance()
    kind = device.device_kind, mode is not None and mode.fixed_tile
    new: dict[Weight, list[MatmulShape]] = defaultdict(list)
    for shape in wanted:
        if (*kind, shape) not in _same_as_xla:
            new[shape[1:]].append(shape)
    with jax.default_device(device):
        programs = _compiled([_comparison(weight, [shape.rows for shape in some]) for weight, some in new.items()])
        for some, program in zip(new.values(), programs, strict=True):  # one at a time: each holds a weight and results
            for shape, same in zip(some, program(), strict=True):
                _same_as_xla[*kind, shape] = bool(same)
    return {shape: _same_as_xla[*kind, shape] for shape in wanted}


def compared_with(shape: MatmulShape) -> MatmulShape:
    """The call of the kernel that stands for XLA's matmul of `shape` in the comparison."""
    return shape._replace(rows=_distinct_rows(shape.outputs))


def _distinct_rows(outputs: int) -> int:
    return max(DISTINCT_ROWS, -(-DISTINCT_RESULTS // outputs))


def _comparison(weight: Weight, sizes: Sequence[int]) -> Any:
    """Lowered: for each number of rows, whether XLA's matmul with one weight has the kernel's bits.

    The kernel multiplies a few rows; XLA the same ones over and over, so that every place in its result is looked at.
    """
    outputs, columns, dtype, out_dtype = weight
    distinct = _distinct_rows(outputs)

    def same() -> list[jax.Array]:
        x, w = random(0, (distinct, columns), dtype), random(1, (outputs, columns), dtype)
        x, w = jax.lax.optimization_barrier((x, w))
        want = dispatch.call("row_invariant_matmul", None, x, w, None, out_dtype=jnp.dtype(out_dtype))
        found = []
        for rows in sizes:
            place = jnp.arange(rows) % distinct
            # Each depends on the one before: they are not joined, and one result is held at a time.
            x, w, want, found = jax.lax.optimization_barrier((x, w, want, found))
            got = xla.matmul(x[place], w, out_dtype=jnp.dtype(out_dtype))
            found = [*found, jnp.all(got == want[place])]
        return found

    return jax.jit(same, compiler_options=xla.COMPILER_OPTIONS).lower()
