"""Pallas-Triton implementation of route_experts: a counting sort, since a token takes an expert once at most.

    choose   k times the best expert that is left; a table of (token, expert): 1 where it was chosen
    place    pairs of lower experts + pairs of the same expert of earlier tokens: running sums over that table

One program does both, and the tiles of the matmuls that follow, for up to 16 tokens. More take two launches: each program
chooses for a table of tokens and leaves its counts, of which each program of the second adds up those before it. Tables are
small, since a choice is a chain of reductions: on an H200 one table of 128 tokens took 10 us for 32 experts, for 128 several
times that.

Without it a layer of experts has a dozen launches around its two matmuls, which bound a short prefill and the decoding of few
rows.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.grouped_matmul.plan import TilePlan, count_tiles, rows_of_tile, tile_rows
from pallas_kernels.pallas_gpu import dot, interpret_here, power_of_two, triton_call
from pallas_kernels.route_experts.api import Routing

MOST_EXPERTS = 512
ONE_TABLE = 16
"""Tokens that are routed by one program."""
TABLES = ((256, 16), (2048, 32))
"""(tokens, rows of a table): up to so many tokens; beyond, `LARGEST`: then every program has many counts to add up."""
LARGEST = 64
NUMBERS_A_WARP = 512
"""Of a table."""
TILES = 32
"""Tiles of the matmuls that are planned at a time."""


def route_experts(
    logits: jax.Array, k: int, *, bias: jax.Array | None, softmax_first: bool, normalise: bool, fixed_tile: bool
) -> Routing:
    """See `api.route_experts`."""
    tokens, experts = logits.shape[-2:]
    if experts > MOST_EXPERTS:
        raise NotImplementedError(f"Triton routing takes at most {MOST_EXPERTS} experts, got {experts}.")
    block = rows_of_tile(tokens * k, experts, fixed_tile)
    how = {"k": k, "softmax_first": softmax_first, "normalise": normalise}
    return _route(
        logits.reshape(-1, tokens, experts), bias, block=block, interpret=interpret_here(), how=tuple(how.items())
    )


@functools.partial(jax.jit, static_argnames=("block", "interpret", "how"))
def _route(logits, bias, *, block, interpret, how):
    (_, tokens, experts), k = logits.shape, dict(how)["k"]
    width = max(16, power_of_two(experts))
    rows = table_rows(tokens)
    inputs = (logits, *(() if bias is None else (bias,)))
    table = {"rows": rows, "width": width}
    launch: dict[str, Any] = {
        "num_warps": min(16, max(1, rows * width // NUMBERS_A_WARP)),
        "num_stages": 1,
        "interpret": interpret,
    }
    pairs, tiles = (
        jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((tokens, k), (count_tiles(tokens * k, experts, block),))
    )
    chosen = (jax.ShapeDtypeStruct((tokens, k), jnp.float32), pairs)
    placed = (pairs, jax.ShapeDtypeStruct((tokens * k,), jnp.int32), jax.ShapeDtypeStruct((experts,), jnp.int32))
    planned = (tiles, tiles, tiles, jax.ShapeDtypeStruct((1,), jnp.int32))
    programs = pl.cdiv(tokens, rows)
    if programs == 1:
        weights, numbers, place, token, sizes, group, begin, end, used = triton_call(
            functools.partial(_whole_kernel, has_bias=bias is not None, block=block, **table, **dict(how)),
            grid=(1,),
            out_shape=(*chosen, *placed, *planned),
            num_inputs=len(inputs),
            name="route_experts",
            **launch,
        )(*inputs)
        return Routing(weights, numbers, place, token, sizes, TilePlan(group, begin, end, used[0], block))
    weights, numbers, counts = triton_call(
        functools.partial(_choose_kernel, has_bias=bias is not None, **table, **dict(how)),
        grid=(programs,),
        out_shape=(*chosen, jax.ShapeDtypeStruct((programs, experts), jnp.int32)),
        num_inputs=len(inputs),
        name="route_experts_choose",
        **launch,
    )(*inputs)
    place, token, sizes, group, begin, end, used = triton_call(
        functools.partial(_place_kernel, k=k, block=block, **table),
        grid=(programs,),
        out_shape=(*placed, *planned),
        num_inputs=2,
        name="route_experts_place",
        **launch,
    )(numbers, counts)
    return Routing(weights, numbers, place, token, sizes, TilePlan(group, begin, end, used[0], block))


def table_rows(tokens: int) -> int:
    """Tokens of one program, a power of two."""
    if tokens <= ONE_TABLE:
        return power_of_two(tokens)
    return next((rows for most, rows in TABLES if tokens <= most), LARGEST)


def _whole_kernel(logits_ref, *refs, has_bias, rows, width, block, **how):
    bias_ref, refs = (refs[0], refs[1:]) if has_bias else (None, refs)
    weights_ref, experts_ref, place_ref, tokens_ref, *planned = refs
    weights, experts = _choose(logits_ref, bias_ref, rows=rows, width=width, **how)
    token = jnp.arange(rows, dtype=jnp.int32)
    table = _table(experts, token < logits_ref.shape[1], width)
    sizes = jnp.sum(table, axis=0)
    _store_choice(weights_ref, experts_ref, weights, experts, token)
    _store_places(place_ref, tokens_ref, experts, table, jnp.cumsum(sizes) - sizes, token)
    _store_plan(planned, sizes, tokens_ref.shape[0], block, 0, 1)


def _choose_kernel(logits_ref, *refs, has_bias, rows, width, **how):
    bias_ref, refs = (refs[0], refs[1:]) if has_bias else (None, refs)
    weights_ref, experts_ref, counts_ref = refs
    weights, experts = _choose(logits_ref, bias_ref, rows=rows, width=width, **how)
    token = pl.program_id(0) * rows + jnp.arange(rows, dtype=jnp.int32)
    _store_choice(weights_ref, experts_ref, weights, experts, token)
    expert = jnp.arange(width, dtype=jnp.int32)
    counts = jnp.sum(_table(experts, token < logits_ref.shape[1], width), axis=0)
    pltriton.store(counts_ref.at[pl.program_id(0), expert], counts, mask=expert < counts_ref.shape[1])


def _place_kernel(experts_ref, counts_ref, place_ref, tokens_ref, *planned, k, rows, width, block):
    number, num_tokens = pl.program_id(0), experts_ref.shape[0]
    programs, num_experts = counts_ref.shape
    token, expert = number * rows + jnp.arange(rows, dtype=jnp.int32), jnp.arange(width, dtype=jnp.int32)
    live = token < num_tokens
    experts = [pltriton.load(experts_ref.at[token, j], mask=live, other=0) for j in range(k)]

    def add(step, sums):
        program = step * rows + jnp.arange(rows, dtype=jnp.int32)
        inside = (program < programs)[:, None] & (expert < num_experts)[None, :]
        counts = pltriton.load(counts_ref.at[program[:, None], expert[None, :]], mask=inside, other=0)
        earlier = jnp.where((program < number)[:, None], counts, 0)
        return sums[0] + jnp.sum(counts, axis=0), sums[1] + jnp.sum(earlier, axis=0)

    none = jnp.zeros((width,), jnp.int32)
    sizes, earlier = jax.lax.fori_loop(0, pl.cdiv(programs, rows), add, (none, none))
    first = jnp.cumsum(sizes) - sizes + earlier
    _store_places(place_ref, tokens_ref, experts, _table(experts, live, width), first, token)
    _store_plan(planned, sizes, tokens_ref.shape[0], block, number, programs)


def _choose(logits_ref, bias_ref, *, rows, width, k, softmax_first, normalise):
    """Weights and experts of `rows` tokens: k arrays `[rows]` of each."""
    parts, num_tokens, num_experts = logits_ref.shape
    token = jnp.minimum(pl.program_id(0) * rows + jnp.arange(rows, dtype=jnp.int32), num_tokens - 1)
    expert = jnp.arange(width, dtype=jnp.int32)[None, :]
    real = jnp.broadcast_to(expert < num_experts, (rows, width))
    read = (pltriton.load(logits_ref.at[s, token[:, None], expert], mask=real, other=-jnp.inf) for s in range(parts))
    logits = functools.reduce(jnp.add, read)
    if bias_ref is not None:
        bias = pltriton.load(bias_ref.at[expert[0]], mask=expert[0] < num_experts, other=0.0)
        logits = logits + bias.astype(jnp.float32)[None, :]
    broken, logits = _without_nan(logits)
    if softmax_first:
        powers = jnp.where(real, jnp.exp(logits - jnp.max(logits, axis=1)[:, None]), 0.0)
        worse, logits = _without_nan(powers / _sum_halves(powers))  # infinite logits, or none above -inf
        broken = broken | worse
    values, experts, left = [], [], real
    for _ in range(k):
        best = jnp.max(jnp.where(left, logits, -jnp.inf), axis=1)
        # Among those that are left only: a token whose logits are all -inf still gets k different experts.
        number = jnp.min(jnp.where(left & (logits == best[:, None]), expert, width), axis=1)
        left = left & (expert != number[:, None])
        values.append(best)
        experts.append(jnp.minimum(number, num_experts - 1))
    if not softmax_first:
        values = [jnp.exp(value - values[0]) for value in values]
    if normalise or not softmax_first:
        total = functools.reduce(jnp.add, values)
        values = [value / total for value in values]
    return [jnp.where(broken, jnp.nan, value) for value in values], experts


def _without_nan(x):
    """Which rows of x have a NaN; and x with -inf for it: a NaN equals nothing, so nothing would be the best that is left."""
    return jnp.sum(jnp.where(x != x, 1, 0), axis=1) > 0, jnp.where(x != x, -jnp.inf, x)


def _sum_halves(x):
    """`[M, 1]`, with an order of its own, where a reduction's follows the layout and so the number of rows."""
    rows, width = x.shape
    while width > 1:
        width //= 2
        x = jnp.sum(x.reshape(rows, 2, width), axis=1)
    return x


def _table(experts, live, width):
    """int32 `[M, width]`: 1 where a token has chosen an expert."""
    column = jnp.arange(width, dtype=jnp.int32)[None, :]
    chosen = functools.reduce(jnp.logical_or, [number[:, None] == column for number in experts])
    return jnp.where(chosen & live[:, None], 1, 0)


def _store_choice(weights_ref, experts_ref, weights, experts, token):
    for j, (weight, expert) in enumerate(zip(weights, experts, strict=True)):
        live = token < weights_ref.shape[0]
        pltriton.store(weights_ref.at[token, j], weight, mask=live)
        pltriton.store(experts_ref.at[token, j], expert, mask=live)


def _store_places(place_ref, tokens_ref, experts, table, first, token):
    """`first` int32 `[width]`: where each expert's pairs of these tokens begin."""
    rows, width = table.shape
    live, number = token < place_ref.shape[0], jnp.arange(rows, dtype=jnp.int32)
    if rows < 16:  # too few for a matmul
        before = jnp.cumsum(table, axis=0) - table
    else:
        earlier = (number[None, :] < number[:, None]).astype(jnp.bfloat16)
        before = dot(earlier, table.astype(jnp.bfloat16)).astype(jnp.int32)  # exact: at most 64 ones
    column = jnp.arange(width, dtype=jnp.int32)[None, :]
    for j, expert in enumerate(experts):
        place = jnp.sum(jnp.where(expert[:, None] == column, first[None, :] + before, 0), axis=1)
        # Past the end, too, as Pallas' interpreter writes the old number where the mask is off.
        place = jnp.where(live, place, tokens_ref.shape[0])
        pltriton.store(place_ref.at[token, j], place, mask=live)
        pltriton.store(tokens_ref.at[place], token, mask=live)


def _store_plan(refs, sizes, num_pairs, block, number, programs):
    """What is left of the routing once `sizes` int32 `[width]` are known: each of `programs` plans its share of the tiles."""
    sizes_ref, group_ref, begin_ref, end_ref, used_ref = refs
    num_experts, num_tiles = sizes_ref.shape[0], group_ref.shape[0]
    ends, tile_ends = jnp.cumsum(sizes), jnp.cumsum((sizes + (block - 1)) // block)

    def plan(step, carry):
        tile = (number + step * programs) * TILES + jnp.arange(TILES, dtype=jnp.int32)
        group, begin, end = tile_rows(ends, tile_ends, tile, num_pairs, block)
        for ref, values in ((group_ref, jnp.minimum(group, num_experts)), (begin_ref, begin), (end_ref, end)):
            pltriton.store(ref.at[tile], values, mask=tile < num_tiles)
        return carry

    jax.lax.fori_loop(0, pl.cdiv(pl.cdiv(num_tiles, TILES), programs), plan, 0)

    @pl.when(number == 0)
    def _():
        expert, one = jnp.arange(sizes.shape[0], dtype=jnp.int32), jnp.arange(1, dtype=jnp.int32)
        pltriton.store(sizes_ref.at[expert], sizes, mask=expert < num_experts)
        pltriton.store(used_ref.at[one], jnp.minimum(jnp.max(tile_ends), num_tiles) + 0 * one)
