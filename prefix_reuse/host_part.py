"""Parts of host pages, and the bundles in which they are copied and kept.

A copy over the link costs some 10 us beside its bytes, which is a quarter of the time of a page of GPT-OSS. Neighbouring pages
therefore go to the host as one array, a bundle; a `HostPart` is one entry of it, and stands for an array `[L, *page_shape]`.
A bundle's memory is freed with its last part. So that a few parts do not hold much more memory than their own, bundles with
half of their parts or fewer are dissolved: each part that is left gets an array of its own (`Bundles.dissolve`).
"""

from __future__ import annotations

import weakref
from typing import Any

import jax
import numpy as np

from prefix_reuse.errors import TransferError


class Bundle:
    """An immutable array `[N, L, *page_shape]` in host memory, and its parts that are alive."""

    __slots__ = ("__weakref__", "array", "dtype", "live", "own_ref", "owner", "part_shape", "parts", "size")

    def __init__(self, array: jax.Array, owner: Bundles):
        self.array, self.owner = array, owner
        # Not asked of the array for each part: a load of 256 pages of two groups would begin half a millisecond later.
        (self.size, *shape), self.dtype = array.shape, array.dtype
        self.part_shape = tuple(shape)
        self.own_ref: Any = weakref.ref(self)  # made now: parts may die when the interpreter ends, without its modules
        self.live = 0
        self.parts: list[weakref.ref[HostPart]] = []

    def part(self, index: int) -> HostPart:
        """Entry `index`; each is asked for once."""
        part = HostPart(self, index)
        self.parts.append(weakref.ref(part))
        self.live += 1
        return part

    def lose(self) -> None:
        """One part less. Only counts: it runs wherever the garbage collector does."""
        self.live -= 1
        if self.live and self.live == self.size // 2:
            self.owner.sparse.append(self.own_ref)


class HostPart:
    """The bytes of one layer group in one host page; reads as an array `[L, *page_shape]`. Immutable, as its bundle is."""

    __slots__ = ("__weakref__", "bundle", "index")

    def __init__(self, bundle: Bundle, index: int):
        self.bundle, self.index = bundle, index

    @property
    def shape(self) -> tuple[int, ...]:
        return self.bundle.part_shape

    @property
    def dtype(self) -> Any:
        return self.bundle.dtype

    @property
    def nbytes(self) -> int:
        return self.bundle.array.nbytes // self.bundle.size

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """A view of the bundle's memory, which the array that is returned keeps alive."""
        view = np.asarray(self.bundle.array)[self.index]
        return np.array(view, dtype=dtype, copy=copy)

    def __getitem__(self, key: Any) -> np.ndarray:
        return np.asarray(self)[key]

    def __deepcopy__(self, memo: Any) -> HostPart:
        return self.bundle.owner.alone(np.array(self))

    def __del__(self) -> None:
        self.bundle.lose()


class Bundles:
    """Makes the parts of one engine's host pages.

    Args:
      host: sharding of the host memory in which they live.
    """

    def __init__(self, host: Any):
        self.host = host
        self.sparse: list[weakref.ref[Bundle]] = []
        """Bundles that have lost half of their parts. Weak: one that loses the others too is gone at once."""

    def of(self, array: jax.Array) -> list[HostPart]:
        """All parts of an array `[N, L, *page_shape]`."""
        bundle = Bundle(array, self)
        return [bundle.part(i) for i in range(array.shape[0])]

    def alone(self, array: np.ndarray) -> HostPart:
        """A part with memory of its own. The caller must not write to `array` any more: it may be aliased."""
        return self.of(jax.device_put(array[None], self.host))[0]

    def dissolve(self, most: int | None = 1) -> int:
        """Gives what is left of sparse bundles arrays of its own, so that their memory is freed.

        It is an economy, which nobody's work must fail for: where there is no memory for the copies, it is left for later.

        Args:
          most: bundles at most that are dissolved; None = all.

        Returns:
          Parts that were moved.

        Raises:
          TransferError: a part could not be copied; its bytes are where they were, and the next call tries it again.
        """
        moved = done = 0
        while self.sparse and (most is None or done < most):
            bundle = self.sparse.pop()()
            if bundle is None:
                continue
            try:
                for part in [ref() for ref in bundle.parts]:
                    if part is not None and part.bundle is bundle:
                        self._move_out(part)
                        moved += 1
            except Exception as error:
                self.sparse.insert(0, bundle.own_ref)
                raise TransferError(
                    f"a bundle with {bundle.live} of {bundle.size} pages left stays as it is: {error}"
                ) from error
            done += 1
        return moved

    def _move_out(self, part: HostPart) -> None:
        other = self.alone(np.array(part))
        # `other` was only the way to a bundle of one; the part takes its place there.
        other.bundle.live, other.bundle.parts = other.bundle.live + 1, [weakref.ref(part)]
        part.bundle.live -= 1
        part.bundle, part.index = other.bundle, 0
