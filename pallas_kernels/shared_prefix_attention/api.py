"""Decode attention where rows that share leading pages read them together, once per tile of rows."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels import checks, dispatch, layout
from pallas_kernels.shared_prefix_attention.plan import SharedPrefixPlan


def shared_prefix_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    page_table: jax.Array,
    kv_lens: jax.Array,
    plan: SharedPrefixPlan,
    *,
    layer: int | jax.Array,
    scale: float | None = None,
    window: int | None = None,
    sinks: jax.Array | None = None,
    soft_cap: float | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> Any:
    """The result of `paged_decode_attention`, with shared pages read once per tile (Hydragen; FlashInfer's cascade).

    Nothing is donated and no state changes. States of all splits are merged once, in order of position and in base 2.

    Args:
        q, kv_pages, page_table, kv_lens, layer, scale, window, sinks, soft_cap, return_lse: as in
            `paged_decode_attention`.
        plan: from `plan_shared_prefix` of this table.
        implementation: "reference" (plain decode), "triton", "mosaic_gpu", or None for the best on this device.

    Returns:
        `out [B, H, D]`, or `(out, lse)`.

    Raises:
        ValueError: shapes or dtypes do not fit together.
        NotImplementedError: the named implementation does not support the case.
    """
    scale = checks.check_attention(
        q, kv_pages, page_table, layer=layer, scale=scale, window=window, sinks=sinks, soft_cap=soft_cap
    )
    if q.shape[0] != page_table.shape[0]:
        raise ValueError(f"q has {q.shape[0]} rows but page_table has {page_table.shape[0]}")
    batch, columns = page_table.shape
    checks.check_int32("kv_lens", kv_lens, (batch,))
    page_size = layout.page_size_of(kv_pages)
    if plan.split % page_size:
        raise ValueError(f"plan.split {plan.split} is no multiple of the page size {page_size}")
    checks.check_int32("plan.order", plan.order, (batch,))
    checks.check_int32("plan.tiles", plan.tiles, (None, 3))
    checks.check_int32("plan.lanes", plan.lanes, (batch, max(1, -(-columns * page_size // plan.split))))
    out, lse = dispatch.call(
        "shared_prefix_attention",
        implementation,
        q,
        kv_pages,
        page_table,
        kv_lens,
        plan,
        layer=checks.as_layer(layer),
        scale=scale,
        window=window,
        sinks=sinks,
        soft_cap=soft_cap,
        return_lse=return_lse,
    )
    return (out, lse) if return_lse else out
