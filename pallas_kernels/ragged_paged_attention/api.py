"""Attention of token-packed queries over paged keys: prefill of suffixes, chunks and decode rows in one batch."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels import checks, dispatch


def ragged_paged_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    page_table: jax.Array,
    q_offsets: jax.Array,
    kv_lens: jax.Array,
    *,
    layer: int | jax.Array,
    scale: float | None = None,
    window: int | None = None,
    sinks: jax.Array | None = None,
    soft_cap: float | None = None,
    return_lse: bool = False,
    fixed_tile: bool = False,
    implementation: str | None = None,
) -> Any:
    """Causal attention where each row's queries are the last positions of its keys.

    Row b's queries are tokens `q_offsets[b]:q_offsets[b + 1]` of `q`; they sit at the last positions of its
    `kv_lens[b]` keys, whose K and V are already in the pages. Page 4, kv_len 6, two queries: they are at positions
    4 and 5 and see keys 0..4 and 0..5 (causal from the bottom right). Nothing is donated and no state changes.

    Keys are added up in an order that follows their absolute positions: a query's bits depend neither on the batch nor on
    how its row is split over calls. They may depend on T, which chooses the tile, unless `fixed_tile`.

    Args:
        q: `[T, H, D]`, in the dtype of the pool. Tokens from `q_offsets[B]` on are padding.
        kv_pages: `[L, P, *page_shape]` page pool. Pages that no row names, and slots past `kv_lens`, may hold anything,
            NaN included.
        page_table: int32 `[B, M]`; page of row b's keys `m * S .. m * S + S - 1`. -1 is unused and never read; columns
            that a window has passed may be -1.
        q_offsets: int32 `[B + 1]`, ascending, from 0 to at most T.
        kv_lens: int32 `[B]`, at most `M * S`, each at least its row's number of queries; 0 is an empty row, whose queries
            see nothing.
        layer: layer inside the pool, int or traced int32 scalar.
        scale: factor of the logits; `1 / sqrt(D)` if None.
        window: key j is visible to the query at position i iff `i - window < j <= i`; None is no limit.
        sinks: `[H]`, one more logit per head in the denominator, not scaled and not capped.
        soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`.
        return_lse: also return the log of the softmax denominator.
        fixed_tile: use one tile of queries for every T, so that a query has equal bits in calls of different T, of one query
            a row (decode) or of many.
        implementation: "reference", "triton", "mosaic_gpu", or None for the best on this device.

    Returns:
        `out [T, H, D]` in q's dtype, or `(out, lse)` with `lse` f32 `[T, H]`, natural log, sink included if given.
        Padding and tokens without a visible key have out 0 and lse -inf (see `pallas_kernels.merge`).

    Raises:
        ValueError: shapes or dtypes do not fit together.
        NotImplementedError: the named implementation does not support the case.
    """
    scale = checks.check_attention(
        q, kv_pages, page_table, layer=layer, scale=scale, window=window, sinks=sinks, soft_cap=soft_cap
    )
    checks.check_int32("q_offsets", q_offsets, (page_table.shape[0] + 1,))
    checks.check_int32("kv_lens", kv_lens, (page_table.shape[0],))
    out, lse = dispatch.call(
        "ragged_paged_attention",
        implementation,
        q,
        kv_pages,
        page_table,
        q_offsets,
        kv_lens,
        layer=checks.as_layer(layer),
        scale=scale,
        window=window,
        sinks=sinks,
        soft_cap=soft_cap,
        return_lse=return_lse,
        fixed_tile=fixed_tile,
    )
    return (out, lse) if return_lse else out
