"""Merge of the chunks of split keys, as the Mosaic kernel leaves them: one launch where XLA makes seven.

A part is a sum of values, a maximum and a denominator in base 2; maxima are integers, so that every weight is a power of two
and multiplying by it is exact. Parts are added in order of position: the bits are those of one block over all chunks.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.pallas_gpu import interpret_here, power_of_two, triton_call
from pallas_kernels.ragged_paged_attention.mosaic_kernel import EMPTY_TOP
from pallas_kernels.ragged_paged_attention.mosaic_schedule import Schedule


def merge_chunks(
    sums: jax.Array,
    stats: jax.Array,
    plan: Schedule,
    sink: tuple[jax.Array, jax.Array] | None,
    *,
    num_tokens: int,
    tokens_per_consumer: int,
    dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The result of every token and head, zeros where it sees no key.

    Args:
        sums: f32 `[chunks, T or more, H, D]`, sums of values; unwritten where a chunk has no key of the token.
        stats: f32 `[chunks * slots, head groups, 2, lanes]`: maximum (0) and denominator (1) of each lane of a tile.
        plan: where each token's statistics are, and the chunks that were computed for it.
        sink: f32 `[H]` maximum, an integer, and denominator of each head's sink, or None.
        num_tokens: T.
        tokens_per_consumer: tokens of a tile's half; heads of its group are outer, tokens inner.
        dtype: of the result.

    Returns:
        `(out [T, H, D], top f32 [T, H], total f32 [T, H])`; top and total are those of the keys, without the sink.
    """
    num_chunks, _, num_heads, head_dim = sums.shape
    begin, end = plan.chunk_range
    inputs = (begin, end, plan.slots, plan.lanes, sums, stats, *(sink or ()))
    state = jax.ShapeDtypeStruct((num_tokens, num_heads), jnp.float32)
    return triton_call(
        functools.partial(
            _kernel, slots=stats.shape[0] // num_chunks, tokens=tokens_per_consumer, group=num_heads // stats.shape[1]
        ),
        grid=(num_tokens, stats.shape[1]),
        out_shape=(jax.ShapeDtypeStruct((num_tokens, num_heads, head_dim), dtype), state, state),
        num_inputs=len(inputs),
        num_warps=4,
        num_stages=2,
        interpret=interpret_here(),
        name="ragged_paged_attention_merge",
    )(*inputs)


def _kernel(begin_ref, end_ref, slots_ref, lanes_ref, sums_ref, stats_ref, *refs, slots, tokens, group):
    """One token and group of heads."""
    *sink_refs, out_ref, top_ref, total_ref = refs
    token, number = pl.program_id(0), pl.program_id(1)
    begin, end, lane = begin_ref[token], end_ref[token], lanes_ref[token]
    within = jnp.arange(group, dtype=jnp.int32)
    head = number * group + within
    head_dim = out_ref.shape[-1]
    column = jnp.arange(power_of_two(head_dim), dtype=jnp.int32)[None, :]
    inside = column < head_dim
    place = (lane // tokens * group + within) * tokens + lane % tokens

    def stat(chunk, kind):
        return pltriton.load(stats_ref.at[chunk * slots + slots_ref[token], number, kind, place])

    nothing = jnp.full(group, EMPTY_TOP, jnp.float32)  # finite: differences of maxima are never inf - inf
    top = jax.lax.fori_loop(begin, end, lambda chunk, top: jnp.maximum(top, stat(chunk, 0)), nothing)

    def add(chunk, carry):
        values, total = carry
        weight = exact_exp2(stat(chunk, 0) - top)
        part = pltriton.load(sums_ref.at[chunk, token, head[:, None], column], mask=inside, other=0.0)
        return values + part * weight[:, None], total + stat(chunk, 1) * weight

    empty = jnp.zeros((group, column.shape[1]), jnp.float32), jnp.zeros(group, jnp.float32)
    values, total = jax.lax.fori_loop(begin, end, add, empty)
    pltriton.store(top_ref.at[token, head], top)
    pltriton.store(total_ref.at[token, head], total)
    if sink_refs:
        sink_top, sink_total = (pltriton.load(ref.at[head]) for ref in sink_refs)
        new_top = jnp.maximum(top, sink_top)
        keep = exact_exp2(top - new_top)
        values, total = values * keep[:, None], total * keep + sink_total * exact_exp2(sink_top - new_top)
    out = values * jnp.where(total > 0, 1.0 / total, 0.0)[:, None]
    pltriton.store(out_ref.at[token, head[:, None], column], out.astype(out_ref.dtype), mask=inside)


def exact_exp2(x: jax.Array) -> jax.Array:
    """2**x for integers x <= 0, exactly; 0 below the range. XLA's exp2 goes through exp and rounds."""
    exponent = jnp.clip(x, -127, 0).astype(jnp.int32) + 127
    return jax.lax.bitcast_convert_type(exponent << 23, jnp.float32)
