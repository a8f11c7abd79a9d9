"""Merge of a row's softmax states: those of tiles, as the Mosaic kernel leaves them, and those of its own splits.

Both count in base 2. A tile's state is `(maximum, denominator, sum of values)`, its maximum an integer; an own split's is
a mean and its log-sum-exp, that is `(lse, 1, mean)`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.paged_decode_attention.triton import finish
from pallas_kernels.pallas_gpu import LOG2E, power_of_two, triton_call
from pallas_kernels.shared_prefix_attention.plan import SharedPrefixPlan


def merge_states(
    tiles: tuple[jax.Array, jax.Array],
    own: tuple[jax.Array, jax.Array],
    kv_lens: jax.Array,
    sinks: jax.Array | None,
    plan: SharedPrefixPlan,
    *,
    dtype: jnp.dtype,
    heads_per_tile: int,
    splits_per_step: int,
    num_warps: int,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Final `(out [B, H, D], lse [B, H])`; the states of `splits_per_step` splits at a time, steps in order of position.

    Args:
        tiles: sums of values f32 `[N, places, H, D]`, and f32 `[T, H / heads_per_tile, 2, 128]`: maximum (0) and
            denominator (1) of each lane, where heads of a tile are outer and lanes inner in each half of the 128.
        own: means f32 `[B, N, H, D]` and log-sum-exps f32 `[B, N, K, H / K]`.
        kv_lens: int32 `[B]`; a row has states of the splits before its end.
        plan: says which of the two each state is in.
        heads_per_tile: query heads of one tile.
    """
    batch, _, num_heads, head_dim = own[0].shape
    inputs = (kv_lens, plan.order, plan.lanes, *tiles, *own, *(() if sinks is None else (sinks,)))
    kernel = functools.partial(
        _kernel,
        split=plan.split,
        rows_per_tile=plan.rows_per_tile,
        group=num_heads // own[1].shape[2],
        heads_per_tile=heads_per_tile,
        step=splits_per_step,
    )
    return triton_call(
        kernel,
        grid=(batch, num_heads),
        out_shape=(
            jax.ShapeDtypeStruct((batch, num_heads, head_dim), dtype),
            jax.ShapeDtypeStruct((batch, num_heads), jnp.float32),
        ),
        num_inputs=len(inputs),
        num_warps=num_warps,
        num_stages=2,
        interpret=interpret,
        name="shared_prefix_attention_merge",
    )(*inputs)


def _kernel(
    lens_ref, order_ref, lanes_ref, sums_ref, stats_ref, means_ref, lses_ref, *refs,
    split, rows_per_tile, group, heads_per_tile, step,
):  # fmt: skip
    """One place and query head."""
    *sink_refs, out_ref, lse_ref = refs
    place, head = pl.program_id(0), pl.program_id(1)
    row = order_ref[place]
    head_dim = out_ref.shape[-1]
    column = jnp.arange(power_of_two(head_dim), dtype=jnp.int32)
    inside = column < head_dim
    count = pl.cdiv(lens_ref[row], split)
    half = stats_ref.shape[-1] // 2  # lanes of the first half of a tile, for each of its heads
    lanes_of_half = half // heads_per_tile

    def body(index, carry):
        top, total, values = carry
        part = index * step + jnp.arange(step, dtype=jnp.int32)
        live = part < count
        lane = pltriton.load(lanes_ref.at[row, part], mask=live, other=-1)
        in_tile, alone = live & (lane >= 0), live & (lane < 0)
        lane = jnp.maximum(lane, 0)
        tile, lane = lane // rows_per_tile, lane % rows_per_tile
        stat = lane // lanes_of_half * half + head % heads_per_tile * lanes_of_half + lane % lanes_of_half
        heads = head // heads_per_tile
        tile_top = pltriton.load(stats_ref.at[tile, heads, 0, stat], mask=in_tile, other=-jnp.inf)
        tile_total = pltriton.load(stats_ref.at[tile, heads, 1, stat], mask=in_tile, other=0.0)
        own_top = pltriton.load(lses_ref.at[row, part, head // group, head % group], mask=alone, other=-jnp.inf)
        at = part[:, None], column[None, :]
        sums = pltriton.load(sums_ref.at[at[0], place, head, at[1]], mask=in_tile[:, None] & inside, other=0.0)
        means = pltriton.load(means_ref.at[row, at[0], head, at[1]], mask=alone[:, None] & inside, other=0.0)

        part_top = jnp.where(in_tile, tile_top, own_top)
        new_top = jnp.maximum(top, jnp.max(part_top))
        finite = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        keep, weight = jnp.exp2(top - finite), jnp.exp2(part_top - finite)
        total = total * keep + jnp.sum(jnp.where(in_tile, tile_total, 1.0) * weight)
        return new_top, total, values * keep + jnp.sum((sums + means) * weight[:, None], axis=0)

    zero = jnp.float32(0)
    empty = jnp.float32(-jnp.inf), zero, jnp.zeros(column.shape, jnp.float32)
    top, total, values = jax.lax.fori_loop(0, pl.cdiv(count, step), body, empty)
    out, lse = finish(top, total, values, sink_refs[0][head].astype(jnp.float32) * LOG2E if sink_refs else None)
    pltriton.store(out_ref.at[row, head, column], out.astype(out_ref.dtype), mask=inside)
    lse_ref[row, head] = lse
