"""Writing new keys and values into their pages, refusing pages that a write must not reach."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import checks, dispatch, layout


def append_kv(
    kv_pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    page_ids: jax.Array,
    slots: jax.Array,
    writable: jax.Array,
    refcounts: jax.Array,
    *,
    layer: int | jax.Array,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Donates `kv_pages` where the caller's jit does: token t's K and V go to slot `slots[t]` of page `page_ids[t]`.

    A write needs a private page: `writable[page]` and `refcounts[page] == 1`. Any other page keeps its bytes and the
    token is counted, so that a shared prefix can never be spoilt by a wrong plan.

    Args:
        kv_pages: `[L, P, *page_shape]`; updated in place inside a jitted function that donates it.
        k, v: `[T, K, D]`, in the dtype of the pool.
        page_ids: int32 `[T]`; below 0 is padding: not written and not counted.
        slots: int32 `[T]`, 0 to S - 1. No two tokens may have the same page and slot.
        writable: bool `[P]`.
        refcounts: int32 `[P]`.
        layer: layer inside the pool, int or traced int32 scalar.
        implementation: "reference", "triton", "mosaic_gpu", or None for the best on this device.

    Returns:
        `(kv_pages, refused)`: the updated pool, and an int32 scalar: tokens not written because their page is not
        writable, is referenced other than once, or because page or slot is out of range.

    Raises:
        ValueError: shapes or dtypes do not fit together.
        NotImplementedError: the named implementation does not support the case.
    """
    checks.check_pool(kv_pages)
    checks.check_layer(layer, kv_pages)
    tokens = page_ids.shape[0]
    want = (tokens, layout.num_kv_heads_of(kv_pages), layout.head_dim_of(kv_pages))
    for name, array in (("k", k), ("v", v)):
        if array.shape != want or array.dtype != kv_pages.dtype:
            raise ValueError(f"{name} must be {kv_pages.dtype} {want}, got {array.dtype} {array.shape}")
    checks.check_int32("page_ids", page_ids, (tokens,))
    checks.check_int32("slots", slots, (tokens,))
    if writable.shape != (kv_pages.shape[1],) or writable.dtype != jnp.bool_:
        raise ValueError(f"writable must be bool [{kv_pages.shape[1]}], got {writable.dtype} {writable.shape}")
    checks.check_int32("refcounts", refcounts, (kv_pages.shape[1],))
    return dispatch.call(
        "append_kv",
        implementation,
        kv_pages,
        k,
        v,
        page_ids,
        slots,
        writable,
        refcounts,
        layer=checks.as_layer(layer),
    )
