"""Pallas-Triton implementation of shared_prefix_attention.

One launch reads everything: some programs take tiles of rows that share a split (all their query heads of one KV head
against one copy of the keys, bound by arithmetic), the others the splits that a row has to itself (plain decode, bound by
memory), so that the two overlap. Then the merge of plain decode.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import layout
from pallas_kernels.paged_decode_attention import triton as decode
from pallas_kernels.pallas_gpu import (
    empty_softmax,
    interpret_here,
    pool_rows,
    power_of_two,
    require_pages,
    shape_key,
    softmax_mean,
    softmax_step,
    triton_call,
    tuned,
)
from pallas_kernels.shared_prefix_attention.plan import ALIGN, SharedPrefixPlan

DEFAULTS = {"tile_block": 64, "own_block": 64, "num_warps": 4, "num_stages": 2}


def rows_per_tile(group: layout.LayerGroup, heads_per_kv_head: int, page_size: int, split: int) -> int:
    """See `plan.rows_per_tile`: 64 query heads of one KV head are the matrix that was measured fastest."""
    del group, split
    require_pages(page_size)
    return max(ALIGN, 64 // power_of_two(heads_per_kv_head))


def shared_prefix_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    page_table: jax.Array,
    kv_lens: jax.Array,
    plan: SharedPrefixPlan,
    *,
    layer: jax.Array,
    scale: float,
    window: int | None,
    sinks: jax.Array | None,
    soft_cap: float | None,
    return_lse: bool,
    config: dict[str, int] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `api.shared_prefix_attention`; `config` overrides the tuned launch parameters."""
    if window is not None and window <= plan.split:  # hardly a split lies inside a window: nothing to share
        return decode.paged_decode_attention(
            q, kv_pages, page_table, kv_lens, layer=layer, scale=scale, window=window, sinks=sinks, soft_cap=soft_cap,
            return_lse=return_lse,
        )  # fmt: skip
    require_pages(layout.page_size_of(kv_pages))
    key = shape_key(q.shape[1], layout.num_kv_heads_of(kv_pages), q.shape[2], q.dtype)
    chosen = tuned("shared_prefix_attention.triton", key, DEFAULTS) | (config or {})
    if config is None and q.shape[2] * q.dtype.itemsize > 256:  # deeper pipelines of wide rows overflow shared memory
        chosen |= {"num_stages": 2, "tile_block": 32, "own_block": 32}
    return _attend(
        q,
        kv_pages,
        page_table,
        kv_lens,
        plan,
        jnp.reshape(layer, (1,)),
        sinks,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        interpret=interpret_here(),
        config=tuple(sorted(chosen.items())),
    )


@functools.partial(jax.jit, static_argnames=("scale", "window", "soft_cap", "interpret", "config"))
def _attend(q, kv_pages, page_table, kv_lens, plan, layer, sinks, *, scale, window, soft_cap, interpret, config):
    options = dict(config)
    num_kv_heads = layout.num_kv_heads_of(kv_pages)
    num_splits = decode.count_splits(page_table, layout.page_size_of(kv_pages), window, plan.split)
    kernel = functools.partial(
        _kernel,
        shape=kv_pages.shape,
        num_splits=num_splits,
        group=q.shape[1] // num_kv_heads,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        split=plan.split,
        matrix_rows=power_of_two(max(16, plan.rows_per_tile * power_of_two(q.shape[1] // num_kv_heads))),
        blocks=(options["tile_block"], options["own_block"]),
    )
    parts, lses = triton_call(
        kernel,
        grid=(num_kv_heads * (plan.tiles.shape[0] + q.shape[0] * num_splits),),
        out_shape=decode.state_shapes(q, num_kv_heads, num_splits),
        num_inputs=8,
        num_warps=options["num_warps"],
        num_stages=options["num_stages"],
        interpret=interpret,
        name="shared_prefix_attention",
    )(layer, kv_lens, page_table, plan.order, plan.tiles, plan.lanes, q, pool_rows(kv_pages))
    return decode.merge_splits(
        parts, lses, kv_lens, sinks, dtype=q.dtype, window=window, split=plan.split, interpret=interpret
    )


def _kernel(
    layer_ref, lens_ref, table_ref, order_ref, tiles_ref, lanes_ref, q_ref, pool_ref, out_ref, lse_ref,
    *, num_splits, blocks, matrix_rows, **options,
):  # fmt: skip
    """Every other program takes a tile, while there are any: a multiprocessor then computes one and streams another."""
    program, num_kv_heads, batch = pl.program_id(0), options["shape"][2], q_ref.shape[0]
    tiles, own = tiles_ref.shape[0] * num_kv_heads, batch * num_splits * num_kv_heads
    pairs = min(tiles, own)
    paired = program < 2 * pairs
    takes_tile = (paired & (program % 2 == 0)) | (~paired & (tiles > own))
    number = jnp.where(paired, program // 2, program - pairs)
    head = number % num_kv_heads
    tile_block, own_block = blocks

    @pl.when(takes_tile)
    def _():
        tile = number // num_kv_heads
        _attend_tile(
            tile, head, layer_ref, lens_ref, table_ref, order_ref, tiles_ref, q_ref, pool_ref, out_ref, lse_ref,
            block=tile_block, matrix_rows=matrix_rows, **options,
        )  # fmt: skip

    @pl.when(~takes_tile)
    def _():
        place = number // num_kv_heads
        part = num_splits - 1 - place // batch  # from the last, where rows have their own tokens
        decode.attend_split(
            part, head, place % batch, layer_ref, lens_ref, table_ref, q_ref, pool_ref, lanes_ref, out_ref, lse_ref,
            block=own_block, **options,
        )  # fmt: skip


def _attend_tile(
    tile, head, layer_ref, lens_ref, table_ref, order_ref, tiles_ref, q_ref, pool_ref, out_ref, lse_ref,
    *, shape, group, matrix_rows, scale, window, soft_cap, split, block,
):  # fmt: skip
    """States of one split for all rows of a tile; matrix row r is member `r // heads`, head `r % heads` of a group."""
    _, num_pages, num_kv_heads, _, page_size, head_dim = shape
    number, first_place, end_place = tiles_ref[tile, 0], tiles_ref[tile, 1], tiles_ref[tile, 2]

    @pl.when(number >= 0)
    def _():
        heads, dims = power_of_two(group), power_of_two(head_dim)
        lane = jnp.arange(matrix_rows, dtype=jnp.int32)
        place, lane_head = first_place + lane // heads, lane % heads
        in_tile = place < end_place
        row = pltriton.load(order_ref.at[jnp.where(in_tile, place, first_place)], mask=in_tile, other=0)
        live_lane = in_tile & (lane_head < group)
        column = jnp.arange(dims, dtype=jnp.int32)[None, :]
        inside = column < head_dim
        q_head = head * group + jnp.minimum(lane_head, group - 1)
        live = live_lane[:, None] & inside
        q = pltriton.load(q_ref.at[row[:, None], q_head[:, None], column], mask=live, other=0.0)
        lead, head_base = order_ref[first_place], layer_ref[0] * num_pages
        first = jnp.zeros_like(row)
        if window is not None:
            first = jnp.maximum(pltriton.load(lens_ref.at[row]) - window, 0)

        def body(step, state):
            key = number * split + step * block + jnp.arange(block, dtype=jnp.int32)
            page = table_ref[lead, key // page_size]
            key_row = ((head_base + jnp.maximum(page, 0)) * num_kv_heads + head) * (2 * page_size) + key % page_size
            mask = jnp.broadcast_to((page >= 0)[:, None] & inside, (block, dims))
            k = pltriton.load(pool_ref.at[key_row[:, None], column], mask=mask, other=0.0)
            v = pltriton.load(pool_ref.at[(key_row + page_size)[:, None], column], mask=mask, other=0.0)
            visible = jnp.broadcast_to(key[None, :] >= first[:, None], (lane.shape[0], block))
            return softmax_step(state, q, k, v, visible, scale=scale, soft_cap=soft_cap)

        state = jax.lax.fori_loop(0, split // block, body, empty_softmax(lane.shape[0], dims))
        values, lse = softmax_mean(state)
        # A split that a row's window has passed since the plan was made has no place among its states.
        part = number - first // split
        live_lane &= part >= 0
        store = live_lane[:, None] & inside
        row = jnp.where(live_lane, row, out_ref.shape[0])  # masked lanes must not name a place that others write
        values_at = out_ref.at[row[:, None], part[:, None], (head * group + lane_head)[:, None], column]
        pltriton.store(values_at, values, mask=store)
        pltriton.store(lse_ref.at[row, part, head + jnp.zeros_like(row), lane_head], lse, mask=live_lane)
