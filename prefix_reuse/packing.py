"""The host arrays of a pytree as one array: a jitted call then makes one transfer, where it would make one for each.

A transfer of a few numbers costs the host some 20 to 50 us, and a batch has two dozen of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

WORDS = (np.dtype(np.int32), np.dtype(np.uint32), np.dtype(np.float32))
"""Kept bit by bit; bools are kept as 0 and 1, anything else is left alone."""


class Layout(NamedTuple):
    """Where the arrays lie; hashable, so that a jitted function takes it as a static argument."""

    tree: Any
    leaves: tuple[tuple[tuple[int, ...], np.dtype[Any]] | None, ...]
    """Shape and dtype of each packed leaf; None = left alone."""


def pack(tree: Any) -> tuple[np.ndarray, list[Any], Layout]:
    """The numpy arrays and scalars of `tree` in new memory, int32 [N]; its other leaves; and what `unpack` needs to know."""
    leaves, structure = jax.tree.flatten(tree)
    words, rest, places = [], [], []
    for leaf in leaves:
        if isinstance(leaf, np.ndarray | np.generic) and (leaf.dtype.kind == "b" or leaf.dtype in WORDS):
            places.append((leaf.shape, leaf.dtype))
            flat = leaf.reshape(-1)
            words.append(flat.astype(np.int32) if leaf.dtype.kind == "b" else flat.view(np.int32))
        else:
            places.append(None)
            rest.append(leaf)
    return np.concatenate(words or [np.zeros(0, np.int32)]), rest, Layout(structure, tuple(places))


def unpack(words: jax.Array, rest: list[Any], layout: Layout) -> Any:
    """The tree again, inside of a jitted function."""
    others, leaves, start = iter(rest), [], 0
    for place in layout.leaves:
        if place is None:
            leaves.append(next(others))
            continue
        shape, dtype = place
        end = start + math.prod(shape)
        leaf = words[start:end].reshape(shape)
        leaves.append(leaf != 0 if dtype.kind == "b" else jax.lax.bitcast_convert_type(leaf, dtype))
        start = end
    return jax.tree.unflatten(layout.tree, leaves)


class PackedCall:
    """A jitted function that takes the host arrays of its last argument, a pytree, in one transfer.

    Args:
      function: its other arguments are passed as they are.
      options: those of `jax.jit`.
    """

    def __init__(self, function: Callable[..., Any], **options: Any):
        def packed(*first: Any, words: jax.Array, rest: list[Any], layout: Layout) -> Any:
            return function(*first, unpack(words, rest, layout))

        packed.__name__ = function.__name__
        self._jitted = jax.jit(packed, static_argnames="layout", **options)

    def __call__(self, *args: Any) -> Any:
        words, rest, layout = pack(args[-1])
        return self._jitted(*args[:-1], words=words, rest=rest, layout=layout)

    def lower(self, *args: Any) -> Any:
        """As `lower` of `jax.jit`; what it compiles to takes `words` and `rest` for the last argument (see `pack`)."""
        words, rest, layout = pack(args[-1])
        return self._jitted.lower(*args[:-1], words=words, rest=rest, layout=layout)
