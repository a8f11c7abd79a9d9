"""Whole pages, all layers: out of the pool, into the pool, and within it.

`implementation` is "reference", "triton", "mosaic_gpu", or None for the best on this device; a named one raises
NotImplementedError for a case that it does not support.
"""

from __future__ import annotations

import jax

from pallas_kernels import checks, dispatch


def gather_pages(kv_pages: jax.Array, page_ids: jax.Array, *, implementation: str | None = None) -> jax.Array:
    """Pages of all layers, page first, so that one page is one contiguous block.

    Args:
        kv_pages: `[L, P, *page_shape]`.
        page_ids: int32 `[N]`; an id below 0 or from P on gives a page of zeros.

    Returns:
        `[N, L, *page_shape]`.
    """
    checks.check_pool(kv_pages)
    checks.check_int32("page_ids", page_ids, (None,))
    return dispatch.call("gather_pages", implementation, kv_pages, page_ids)


def scatter_pages(
    kv_pages: jax.Array, page_ids: jax.Array, pages: jax.Array, *, implementation: str | None = None
) -> jax.Array:
    """Donates `kv_pages` where the caller's jit does: writes whole pages, the inverse of `gather_pages`.

    Args:
        kv_pages: `[L, P, *page_shape]`; updated in place inside a jitted function that donates it.
        page_ids: int32 `[N]`, no id twice; an id below 0 or from P on is dropped.
        pages: `[N, L, *page_shape]`, in the dtype of the pool.

    Returns:
        The updated pool.
    """
    checks.check_pool(kv_pages)
    checks.check_int32("page_ids", page_ids, (None,))
    want = (page_ids.shape[0], kv_pages.shape[0], *kv_pages.shape[2:])
    if pages.shape != want or pages.dtype != kv_pages.dtype:
        raise ValueError(f"pages must be {kv_pages.dtype} {want}, got {pages.dtype} {pages.shape}")
    return dispatch.call("scatter_pages", implementation, kv_pages, page_ids, pages)


def copy_within(kv_pages: jax.Array, src: jax.Array, dst: jax.Array, *, implementation: str | None = None) -> jax.Array:
    """Donates `kv_pages` where the caller's jit does: copies pages `src` to pages `dst`, all layers (copy on write).

    Args:
        kv_pages: `[L, P, *page_shape]`; updated in place inside a jitted function that donates it.
        src, dst: int32 `[N]`. A pair with an id out of range is dropped. No `dst` may appear twice, nor in `src`.

    Returns:
        The updated pool.
    """
    checks.check_pool(kv_pages)
    checks.check_int32("src", src, (None,))
    checks.check_int32("dst", dst, src.shape)
    return dispatch.call("copy_within", implementation, kv_pages, src, dst)
