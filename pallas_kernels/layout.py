"""The bytes of one page, known here and nowhere else.

A pool holds the pages of one group of layers: `kv_pages[L, P, K, 2, S, D]`.

    layer L -> page P -> KV head K -> key (0) or value (1) -> slot S -> D numbers

The KV head is the outermost axis of a page, so that the keys (and the values) of one head in one page are one
contiguous block of `S * D` numbers: one copy for a kernel, one matrix operand for a matmul, and an axis that can be
sharded. Other packages treat the trailing axes as opaque: they index the L and P axes, ask `page_shape` for the rest,
and use `split_kv` to look inside.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

LAYOUT = "K,2,S,D"
"""Order of a page's axes; part of every cache namespace, so that pages of another layout never match."""
HEAD_AXIS, KV_AXIS, SLOT_AXIS, DIM_AXIS = -4, -3, -2, -1  # within one page
PAGE_NDIM = 4


@dataclass(frozen=True)
class LayerGroup:
    """Layers whose pages have one geometry and one attention window.

    Attributes:
        layers: layer numbers of the model, ascending; layer `layers[i]` is layer `i` of the group's pool.
        num_kv_heads: KV heads of each layer.
        head_dim: numbers in one key or value vector.
        dtype: dtype of the pool.
        window: sliding window in tokens (key j is visible to query i iff i - window < j <= i), or None.
        num_heads: query heads of each layer, or None where the model does not say: a hint for sizes of kernels.
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    dtype: Any
    window: int | None = None
    num_heads: int | None = None


def page_shape(page_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
    """Shape of one page of one layer."""
    return (num_kv_heads, 2, page_size, head_dim)


def pool_shape(num_layers: int, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
    """Shape of a page pool: `(L, P, *page_shape)`."""
    return (num_layers, num_pages, *page_shape(page_size, num_kv_heads, head_dim))


def page_bytes(group: LayerGroup, page_size: int) -> int:
    """Bytes of one page over all layers of `group`."""
    numbers = math.prod(page_shape(page_size, group.num_kv_heads, group.head_dim))
    return len(group.layers) * numbers * jnp.dtype(group.dtype).itemsize


def split_kv(pages: Any) -> tuple[Any, Any]:
    """Keys and values of pages, slot first: for tests, integrity checks and displays, not for the hot path.

    Args:
        pages: `[..., *page_shape]`, a jax or numpy array.

    Returns:
        `(k, v)`, each `[..., S, K, D]`.
    """
    k, v = pages[..., 0, :, :], pages[..., 1, :, :]
    return k.swapaxes(-3, -2), v.swapaxes(-3, -2)


def join_kv(k: jax.Array, v: jax.Array) -> jax.Array:
    """Inverse of `split_kv`: `[..., S, K, D]` keys and values to `[..., *page_shape]`."""
    return jnp.stack([k.swapaxes(-3, -2), v.swapaxes(-3, -2)], axis=KV_AXIS)


def page_size_of(kv_pages: Any) -> int:
    """Slots in a page of this pool (or of these pages)."""
    return kv_pages.shape[SLOT_AXIS]


def num_kv_heads_of(kv_pages: Any) -> int:
    """KV heads of this pool (or of these pages)."""
    return kv_pages.shape[HEAD_AXIS]


def head_dim_of(kv_pages: Any) -> int:
    """Head dimension of this pool (or of these pages)."""
    return kv_pages.shape[DIM_AXIS]
