"""Pallas-Triton implementation of ragged_paged_attention: FlashAttention-2 over pages.

One program takes a block of one row's tokens times all query heads of one KV head, so that a key is read once for its
whole group, and walks the keys in blocks at absolute positions: a query's bits do not depend on the batch or on how the
row was cut into chunks.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import layout
from pallas_kernels.pallas_gpu import (
    LN2,
    LOG2E,
    empty_softmax,
    interpret_here,
    pool_rows,
    power_of_two,
    require_pages,
    shape_key,
    softmax_step,
    triton_call,
    tuned,
)

DEFAULTS = {"block_q": 128, "block_k": 64, "num_warps": 8, "num_stages": 3}


def ragged_paged_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    page_table: jax.Array,
    q_offsets: jax.Array,
    kv_lens: jax.Array,
    *,
    layer: jax.Array,
    scale: float,
    window: int | None,
    sinks: jax.Array | None,
    soft_cap: float | None,
    return_lse: bool,
    fixed_tile: bool = False,
    config: dict[str, int] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `api.ragged_paged_attention`; `config` overrides the tuned launch parameters (see `DEFAULTS`)."""
    del return_lse
    require_pages(layout.page_size_of(kv_pages))
    key = shape_key(q.shape[1], layout.num_kv_heads_of(kv_pages), q.shape[2], q.dtype)
    chosen = {**tuned("ragged_paged_attention.triton", key, DEFAULTS), **(config or {})}
    if config is None and q.shape[2] * q.dtype.itemsize > 256:  # wide rows overflow shared memory and registers
        chosen |= {"block_q": 64, "block_k": 32, "num_warps": 4, "num_stages": 2}
    return _attend(
        q,
        kv_pages,
        page_table,
        q_offsets,
        kv_lens,
        jnp.reshape(layer, (1,)),
        sinks,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        fixed_tile=fixed_tile,
        interpret=interpret_here(),
        config=tuple(sorted(chosen.items())),
    )


@functools.partial(jax.jit, static_argnames=("scale", "window", "soft_cap", "fixed_tile", "interpret", "config"))
def _attend(
    q, kv_pages, page_table, q_offsets, kv_lens, layer, sinks,
    *, scale, window, soft_cap, fixed_tile, interpret, config,
):  # fmt: skip
    options = dict(config)
    num_tokens, num_heads, _ = q.shape
    num_kv_heads = layout.num_kv_heads_of(kv_pages)
    batch = page_table.shape[0]
    heads = power_of_two(num_heads // num_kv_heads)
    tokens = options["block_q"] // heads
    if not fixed_tile:  # how a row of a tile is laid out over threads, and so its sums, may depend on the tile
        tokens = min(tokens, power_of_two(num_tokens))
    tokens = max(tokens, pl.cdiv(16, heads))  # tensor cores take 16 rows and more

    # Which row each block of tokens belongs to: at most one part-filled block a row, so the grid has a static bound.
    q_lens = q_offsets[1:] - q_offsets[:-1]
    first_block = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum((q_lens + tokens - 1) // tokens)])
    first_block = first_block.astype(jnp.int32)
    num_blocks = num_tokens // tokens + batch
    index = jnp.arange(num_blocks, dtype=jnp.int32)
    row = jnp.searchsorted(first_block, index, side="right", method="compare_all").astype(jnp.int32) - 1
    row = jnp.where(index < first_block[-1], row, -1)
    skip = (index - first_block[row]) * tokens
    plan = jnp.stack([row, skip, q_offsets[row] + skip, q_lens[row]], axis=1).astype(jnp.int32)

    inputs = [layer, plan, kv_lens, page_table, q, pool_rows(kv_pages)]
    if sinks is not None:
        inputs.append(sinks.astype(jnp.float32))
    kernel = functools.partial(
        _kernel,
        shape=kv_pages.shape,
        group=num_heads // num_kv_heads,
        tokens=tokens,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        block=options["block_k"],
        has_sinks=sinks is not None,
    )
    out, lse = triton_call(
        kernel,
        grid=(num_kv_heads, num_blocks),
        out_shape=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((num_tokens, num_heads), jnp.float32),
        ),
        num_inputs=len(inputs),
        num_warps=options["num_warps"],
        num_stages=options["num_stages"],
        interpret=interpret,
        name="ragged_paged_attention",
    )(*inputs)
    # Padding belongs to no row, so no block wrote it.
    real = jnp.arange(num_tokens, dtype=jnp.int32) < q_offsets[-1]
    return jnp.where(real[:, None, None], out, jnp.zeros((), q.dtype)), jnp.where(real[:, None], lse, -jnp.inf)


def _kernel(
    layer_ref, plan_ref, lens_ref, table_ref, q_ref, pool_ref, *refs,
    shape, group, tokens, scale, window, soft_cap, block, has_sinks,
):  # fmt: skip
    """One block of tokens of one row; tile row r is token `r // heads`, head `r % heads` of the group."""
    *sink_refs, out_ref, lse_ref = refs
    _, num_pages, num_kv_heads, _, page_size, head_dim = shape
    # Late blocks of a row are the longest: they start first.
    head, number = pl.program_id(0), pl.num_programs(1) - 1 - pl.program_id(1)
    row = plan_ref[number, 0]

    @pl.when(row >= 0)
    def _():
        heads, dims = power_of_two(group), power_of_two(head_dim)
        lane = jnp.arange(tokens * heads, dtype=jnp.int32)
        skip, start, q_len = plan_ref[number, 1], plan_ref[number, 2], plan_ref[number, 3]
        count = jnp.minimum(q_len - skip, tokens)
        kv_len = lens_ref[row]
        first_position = kv_len - q_len + skip
        position = first_position + lane // heads
        column = jnp.arange(dims, dtype=jnp.int32)[None, :]
        token, lane_head = (start + lane // heads)[:, None], (head * group + lane % heads)[:, None]
        row_live = (lane // heads < count) & (lane % heads < group)
        tile_live = row_live[:, None] & (column < head_dim)
        q = pltriton.load(
            q_ref.at[jnp.where(row_live[:, None], token, 0), jnp.where(row_live[:, None], lane_head, 0), column],
            mask=tile_live,
            other=0.0,
        )
        end = first_position + count
        begin = jnp.int32(0) if window is None else jnp.maximum(first_position - window + 1, 0)
        head_base = layer_ref[0] * num_pages

        def body(masked, step, carry):
            key = step * block + jnp.arange(block, dtype=jnp.int32)
            live = (key >= begin) & (key < end)
            entry = pltriton.load(table_ref.at[row, key // page_size], mask=live, other=-1)
            live &= entry >= 0
            key_row = ((head_base + jnp.maximum(entry, 0)) * num_kv_heads + head) * (2 * page_size) + key % page_size
            mask = jnp.broadcast_to(live[:, None] & (column < head_dim), (block, dims))
            k = pltriton.load(pool_ref.at[key_row[:, None], column], mask=mask, other=0.0)
            v = pltriton.load(pool_ref.at[(key_row + page_size)[:, None], column], mask=mask, other=0.0)
            visible = live[None, :]
            if masked:
                visible &= key[None, :] <= position[:, None]
                if window is not None:
                    visible &= key[None, :] > position[:, None] - window
            return softmax_step(carry, q, k, v, visible, scale=scale, soft_cap=soft_cap)

        state = empty_softmax(tokens * heads, dims)
        first_step, last_step = begin // block, pl.cdiv(end, block)
        if window is None:  # blocks before the first query's position need no causal mask
            middle = first_position // block
            state = jax.lax.fori_loop(first_step, middle, functools.partial(body, False), state)
            first_step = middle
        top, total, values = jax.lax.fori_loop(first_step, last_step, functools.partial(body, True), state)

        empty = total == 0
        if has_sinks:
            sink = pltriton.load(sink_refs[0].at[head * group + jnp.minimum(lane % heads, group - 1)]) * LOG2E
            finite = jnp.where(empty, 0.0, top)
            new_top = jnp.maximum(finite, sink)
            keep = jnp.exp2(finite - new_top)
            total, values, top = total * keep + jnp.exp2(sink - new_top), values * keep[:, None], new_top
        safe = jnp.where(empty, 1.0, total)
        out = jnp.where(empty[:, None], 0.0, values / safe[:, None])
        lse = jnp.where(empty, -jnp.inf, (top + jnp.log2(safe)) * LN2)
        pltriton.store(out_ref.at[token, lane_head, column], out.astype(out_ref.dtype), mask=tile_live)
        pltriton.store(lse_ref.at[start + lane // heads, head * group + lane % heads], lse, mask=row_live)
