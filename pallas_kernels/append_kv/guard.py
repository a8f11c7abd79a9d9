"""Which writes of append_kv may happen: the one statement of the rule, for every implementation."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import layout


def allowed_writes(
    kv_pages: jax.Array, page_ids: jax.Array, slots: jax.Array, writable: jax.Array, refcounts: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Checks every token's page and slot; arguments as in `api.append_kv`.

    Returns:
        `(allowed, safe, refused)`: bool `[T]`; int32 `[T]`, the page where page and slot exist, else 0; and an int32
        scalar, tokens that are neither allowed nor padding.
    """
    num_pages, page_size = kv_pages.shape[1], layout.page_size_of(kv_pages)
    inside = (page_ids >= 0) & (page_ids < num_pages) & (slots >= 0) & (slots < page_size)
    safe = jnp.where(inside, page_ids, 0)
    allowed = inside & writable[safe] & (refcounts[safe] == 1)
    return allowed, safe, jnp.sum((page_ids >= 0) & ~allowed, dtype=jnp.int32)
