"""Pallas-Triton implementation of append_kv: one program writes one token's key and value, in place."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import layout
from pallas_kernels.append_kv.guard import allowed_writes
from pallas_kernels.pallas_gpu import interpret_here, pool_rows, power_of_two, require_pages, triton_call


def append_kv(
    kv_pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    page_ids: jax.Array,
    slots: jax.Array,
    writable: jax.Array,
    refcounts: jax.Array,
    *,
    layer: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """See `api.append_kv`; the pool is an aliased operand, so a caller that donates it gets the same buffer back."""
    require_pages(layout.page_size_of(kv_pages))
    return _append(
        kv_pages, k, v, page_ids, slots, writable, refcounts, jnp.reshape(layer, (1,)), interpret=interpret_here()
    )


@functools.partial(jax.jit, static_argnames="interpret")
def _append(kv_pages, k, v, page_ids, slots, writable, refcounts, layer, *, interpret):
    num_layers, num_pages, num_kv_heads, _, page_size, head_dim = kv_pages.shape
    del num_layers
    allowed, safe, refused = allowed_writes(kv_pages, page_ids, slots, writable, refcounts)
    # The row of head 0's key; -1 where nothing is written. Decided here, since the guard reads two arrays per token.
    target = jnp.where(allowed, (layer[0] * num_pages + safe) * (num_kv_heads * 2 * page_size) + slots, -1)
    rows = pool_rows(kv_pages)
    pool = triton_call(
        functools.partial(_write_kernel, page_size=page_size, num_kv_heads=num_kv_heads, head_dim=head_dim),
        grid=(page_ids.shape[0],),
        out_shape=jax.ShapeDtypeStruct(rows.shape, rows.dtype),
        num_inputs=4,
        num_warps=4,
        num_stages=1,
        interpret=interpret,
        name="append_kv",
        aliases={3: 0},
    )(target, k, v, rows)
    return pool.reshape(kv_pages.shape), refused


def _write_kernel(target_ref, k_ref, v_ref, pool_ref, out_ref, *, page_size, num_kv_heads, head_dim):
    del pool_ref  # aliased to out_ref
    token = pl.program_id(0)
    target = target_ref[token]

    @pl.when(target >= 0)
    def _():
        head = jnp.arange(power_of_two(num_kv_heads), dtype=jnp.int32)[:, None]
        column = jnp.arange(power_of_two(head_dim), dtype=jnp.int32)[None, :]
        mask = (head < num_kv_heads) & (column < head_dim)
        row = target + head * (2 * page_size)
        for ref, offset in ((k_ref, 0), (v_ref, page_size)):
            numbers = pltriton.load(ref.at[token, head, column], mask=mask, other=0.0)
            pltriton.store(out_ref.at[row + offset, column], numbers, mask=mask)
