"""XLA implementation of the page copies."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def _or_dropped(kv_pages: jax.Array, page_ids: jax.Array) -> jax.Array:
    """Ids with everything out of range mapped to P: -1 would wrap to the last page."""
    num_pages = kv_pages.shape[1]
    return jnp.where((page_ids >= 0) & (page_ids < num_pages), page_ids, num_pages)


@jax.jit
def gather_pages(kv_pages: jax.Array, page_ids: jax.Array) -> jax.Array:
    """See `api.gather_pages`."""
    ids = _or_dropped(kv_pages, page_ids)
    return jnp.moveaxis(kv_pages.at[:, ids].get(mode="fill", fill_value=0), 1, 0)


@jax.jit
def scatter_pages(kv_pages: jax.Array, page_ids: jax.Array, pages: jax.Array) -> jax.Array:
    """See `api.scatter_pages`."""
    return kv_pages.at[:, _or_dropped(kv_pages, page_ids)].set(jnp.moveaxis(pages, 0, 1), mode="drop")


@jax.jit
def copy_within(kv_pages: jax.Array, src: jax.Array, dst: jax.Array) -> jax.Array:
    """See `api.copy_within`."""
    ids = _or_dropped(kv_pages, src)
    target = jnp.where(ids < kv_pages.shape[1], _or_dropped(kv_pages, dst), kv_pages.shape[1])
    return kv_pages.at[:, target].set(kv_pages.at[:, ids].get(mode="fill", fill_value=0), mode="drop")
