"""Attention of one query per row over paged keys: a decode step."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels import checks, dispatch


def paged_decode_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    page_table: jax.Array,
    kv_lens: jax.Array,
    *,
    layer: int | jax.Array,
    scale: float | None = None,
    window: int | None = None,
    sinks: jax.Array | None = None,
    soft_cap: float | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> Any:
    """Attention of row b's one query, at position `kv_lens[b] - 1`, over the row's keys.

    Nothing is donated and no state changes. Several rows may name the same pages.

    Args:
        q: `[B, H, D]`, in the dtype of the pool.
        kv_pages: `[L, P, *page_shape]` page pool. Pages that no row names, and slots past `kv_lens`, may hold anything,
            NaN included.
        page_table: int32 `[B, M]`; -1 is unused and never read; columns that a window has passed may be -1.
        kv_lens: int32 `[B]`, at most `M * S`; 0 is an empty row.
        layer: layer inside the pool, int or traced int32 scalar.
        scale: factor of the logits; `1 / sqrt(D)` if None.
        window: only the last `window` keys are visible; None is no limit.
        sinks: `[H]`, one more logit per head in the denominator, not scaled and not capped.
        soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`.
        return_lse: also return the log of the softmax denominator.
        implementation: "reference", "triton", "mosaic_gpu", or None for the best on this device.

    Returns:
        `out [B, H, D]` in q's dtype, or `(out, lse)` with `lse` f32 `[B, H]`, natural log, sink included if given.
        Rows without a visible key have out 0 and lse -inf (see `pallas_kernels.merge`).

    Raises:
        ValueError: shapes or dtypes do not fit together.
        NotImplementedError: the named implementation does not support the case.
    """
    scale = checks.check_attention(
        q, kv_pages, page_table, layer=layer, scale=scale, window=window, sinks=sinks, soft_cap=soft_cap
    )
    if q.shape[0] != page_table.shape[0]:
        raise ValueError(f"q has {q.shape[0]} rows but page_table has {page_table.shape[0]}")
    checks.check_int32("kv_lens", kv_lens, (page_table.shape[0],))
    out, lse = dispatch.call(
        "paged_decode_attention",
        implementation,
        q,
        kv_pages,
        page_table,
        kv_lens,
        layer=checks.as_layer(layer),
        scale=scale,
        window=window,
        sinks=sinks,
        soft_cap=soft_cap,
        return_lse=return_lse,
    )
    return (out, lse) if return_lse else out
