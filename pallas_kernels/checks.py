"""Checks of shapes and dtypes that the ops share. All run while tracing and cost nothing in a compiled step."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import layout

FLOAT_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def check_pool(kv_pages: Any) -> None:
    """A pool is `[L, P, *page_shape]` in f32, bf16 or f16."""
    if kv_pages.ndim != 2 + layout.PAGE_NDIM or kv_pages.shape[layout.KV_AXIS] != 2:
        raise ValueError(f"kv_pages must be [L, P, K, 2, S, D], got shape {kv_pages.shape}")
    if kv_pages.dtype not in FLOAT_DTYPES:
        raise ValueError(f"kv_pages must be f32, bf16 or f16, got {kv_pages.dtype}")


def check_layer(layer: Any, kv_pages: Any) -> None:
    """`layer` is an index inside the pool: a Python int, or a traced int32 scalar."""
    if isinstance(layer, int):
        if not 0 <= layer < kv_pages.shape[0]:
            raise ValueError(f"layer {layer} is outside the pool's {kv_pages.shape[0]} layers")
    elif jnp.shape(layer) != () or not jnp.issubdtype(jnp.result_type(layer), jnp.integer):
        raise ValueError(f"layer must be an integer scalar, got {layer!r}")


def check_int32(name: str, array: Any, shape: tuple[int | None, ...]) -> None:
    """`array` is int32 with this shape; None in `shape` accepts any size."""
    right = len(shape) == array.ndim and all(want in (None, got) for want, got in zip(shape, array.shape, strict=True))
    if not right or array.dtype != jnp.int32:
        wanted = ", ".join("?" if n is None else str(n) for n in shape)
        raise ValueError(f"{name} must be int32 [{wanted}], got {array.dtype} {array.shape}")


def check_attention(
    q: Any,
    kv_pages: Any,
    page_table: Any,
    *,
    layer: Any,
    scale: float | None,
    window: int | None,
    sinks: Any,
    soft_cap: float | None,
) -> float:
    """What both attention ops ask of their common arguments; returns the scale with its default filled in."""
    check_pool(kv_pages)
    check_layer(layer, kv_pages)
    num_kv_heads, head_dim = layout.num_kv_heads_of(kv_pages), layout.head_dim_of(kv_pages)
    if q.ndim != 3 or q.shape[2] != head_dim:
        raise ValueError(f"q must be [tokens, heads, {head_dim}] for kv_pages {kv_pages.shape}, got {q.shape}")
    if q.shape[1] % num_kv_heads:
        raise ValueError(f"{q.shape[1]} query heads are no multiple of {num_kv_heads} KV heads")
    if q.dtype != kv_pages.dtype:
        raise ValueError(f"q is {q.dtype} but kv_pages is {kv_pages.dtype}; cast q")
    check_int32("page_table", page_table, (None, None))
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"soft_cap must be positive, got {soft_cap}")
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise ValueError(f"sinks must be [{q.shape[1]}], got {sinks.shape}")
    return 1.0 / math.sqrt(head_dim) if scale is None else float(scale)


def as_layer(layer: Any) -> jax.Array:
    """`layer` as an int32 scalar, so that a jitted implementation is traced once for all layers."""
    return jnp.asarray(layer, jnp.int32)
