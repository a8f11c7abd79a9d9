"""Body of the Mosaic GPU prefill kernel (Hopper): FlashAttention-3's roles over paged keys.

Three warpgroups run in one block. The last one, the producer, reads page ids and starts one TMA copy per page into a
ring of K and V tiles. The first two, the consumers, own 64 query rows each: S = Q K^T (wgmma), softmax, O += P V
(wgmma). They take turns on the tensor cores: while one multiplies, the other does its softmax.

    rows of a consumer = query heads of the group (outer) x tokens (inner): row = head * tokens + token

The running maximum is rounded up to an integer in base 2. Every rescaling is then by a power of two and exact, which
makes the sum over chunks of keys have the same bits whether one block adds them up or XLA merges several blocks' parts.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as mosaic_gpu_module
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic import store_rows
from pallas_kernels.ragged_paged_attention import mosaic_schedule as schedule

plgpu: Any = mosaic_gpu_module  # its annotations call concrete transforms abstract and accumulators no arrays
LOG2E = math.log2(math.e)
EMPTY_TOP = -1e30  # maximum of no keys; finite, so that differences are never inf - inf
ROWS = 64  # query rows of one consumer: M of one wgmma
CONSUMERS = 2


@dataclasses.dataclass(frozen=True)
class Shape:
    """Everything static about one kernel: sizes, options and tuning."""

    num_blocks: int  # thread blocks of the persistent grid
    page_size: int
    pages_per_layer: int
    num_kv_heads: int
    heads_per_kv_head: int
    heads_per_tile: int
    head_dim: int
    dtype: Any
    scale: float
    window: int | None
    soft_cap: float | None
    has_sinks: bool
    want_stats: bool
    split: bool  # one item per chunk; partial sums go out in f32
    merge_chunks: bool  # an item may have more than one chunk and sums them in shared memory
    chunk: int
    block_kv: int
    stages: int
    consumer_registers: int
    producer_registers: int
    overlap: bool  # scores of a tile while the values of the one before
    simulate: bool

    @property
    def tokens(self) -> int:
        """Tokens of one consumer."""
        return ROWS // self.heads_per_tile

    @property
    def out_dtype(self) -> Any:
        """What results leave in."""
        return jnp.float32 if self.split else self.dtype

    @property
    def row_padding(self) -> int:
        """Numbers that lie between two results in shared memory where each is to be copied alone, from whole 128 bytes."""
        return -self.head_dim % (128 // jnp.dtype(self.out_dtype).itemsize)


def tiled(minor: int, dtype: Any) -> tuple[Any, ...]:
    """Transforms of an SMEM buffer for wgmma: widest swizzle that the minor dimension allows."""
    bits = jnp.finfo(dtype).bits
    swizzle = plgpu.find_swizzle(minor * bits)
    return (plgpu.TilingTransform((8, 8 * swizzle // bits)), plgpu.SwizzleTransform(swizzle))


def scratch(s: Shape) -> dict[str, Any]:
    """Shared memory and barriers of the kernel."""
    d, operand = s.head_dim, tiled(s.head_dim, s.dtype)
    copies = max(1, s.block_kv // s.page_size)
    stage = plgpu.SMEM((CONSUMERS, 1, ROWS, d), s.out_dtype)
    if s.merge_chunks:
        total = plgpu.SMEM((CONSUMERS, ROWS, d), jnp.float32, transforms=tiled(d, jnp.float32))
        if s.simulate or s.row_padding:  # the simulator knows unions only as a whole; narrow heads have room for both
            stage = (stage, total)
        else:
            # Twice the rows, so that a consumer's half is the same bytes in both views and nobody touches the other's.
            stage = plgpu.RefUnion(plgpu.SMEM((CONSUMERS, 2, ROWS, d), s.dtype), total)
    padded = plgpu.SMEM((CONSUMERS, ROWS, d + s.row_padding), s.out_dtype)
    refs = {
        "q_smem": plgpu.SMEM((CONSUMERS, ROWS, d), s.dtype, transforms=operand),
        "k_smem": plgpu.SMEM((s.stages, s.block_kv, d), s.dtype, transforms=operand),
        "v_smem": plgpu.SMEM((s.stages, s.block_kv, d), s.dtype, transforms=operand),
        "stage": stage,
        "padded": padded if s.row_padding else None,
        "stats_smem": plgpu.SMEM((CONSUMERS, 2, ROWS), jnp.float32) if s.want_stats else None,
        "q_full": plgpu.Barrier(num_arrivals=s.heads_per_tile, num_barriers=CONSUMERS),
        "k_full": plgpu.Barrier(num_arrivals=copies, num_barriers=s.stages),
        "v_full": plgpu.Barrier(num_arrivals=copies, num_barriers=s.stages),
        "k_free": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=s.stages),
        "v_free": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=s.stages),
        "turn": plgpu.Barrier(num_arrivals=1, num_barriers=CONSUMERS),
        "v_clean": plgpu.Barrier(num_arrivals=1),
    }
    return {name: ref for name, ref in refs.items() if ref is not None}


@dataclasses.dataclass(frozen=True)
class Item:
    """Scalars of one work item."""

    row: jax.Array
    heads: jax.Array
    token: jax.Array
    first: jax.Array
    last: jax.Array
    position: jax.Array
    begin: jax.Array
    end: jax.Array
    slot: jax.Array
    chunk: jax.Array
    kv_len: jax.Array

    def first_column(self, s: Shape) -> jax.Array:
        """First page column that the item may read; earlier ones may be -1."""
        if s.window is None:
            return jnp.int32(0)
        return jnp.maximum(self.position + self.first - (s.window - 1), 0) // s.page_size


def my_items(s: Shape, items_ref: Any, count_ref: Any, run: Any) -> jax.Array:
    """Run this block's items, heavy ones first, dealt back and forth over the blocks so that sums even out.

    Returns the number of key tiles.
    """
    block = lax.axis_index("block")
    total = count_ref[0]
    rounds, left = total // s.num_blocks, total % s.num_blocks

    def place(r: jax.Array) -> jax.Array:
        return jnp.where(r % 2 == 0, block, s.num_blocks - 1 - block)

    rounds = rounds + jnp.where(place(rounds) < left, 1, 0)

    def one(r: jax.Array, done: jax.Array) -> jax.Array:
        number = r * s.num_blocks + place(r)
        item = Item(*[items_ref[number, field] for field in range(schedule.FIELDS)])
        run(item, done)
        return done + jnp.maximum(item.end - item.begin, 0)

    return lax.fori_loop(0, rounds, one, jnp.int32(0))


def produce(s: Shape, refs: dict[str, Any], item: Item, done: jax.Array) -> None:
    """Copy the item's K and V tiles into the ring; `done` tiles went before."""
    size = min(s.page_size, s.block_kv)
    kv_head = item.heads * s.heads_per_tile // s.heads_per_kv_head
    first = item.first_column(s)
    last = jnp.maximum(item.kv_len - 1, 0) // s.page_size
    layer_row = refs["layer"][0] * s.pages_per_layer

    def tile(index: jax.Array, step: jax.Array) -> jax.Array:
        slot = step % s.stages
        sources = []
        for part in range(s.block_kv // size):
            key = index * s.block_kv + part * size
            # A column outside the row is replaced by one inside; consumers zero those rows of V.
            column = jnp.clip(key // s.page_size, first, last)
            page = refs["table"][item.row, column]
            head_row = (layer_row + page) * s.num_kv_heads + kv_head
            sources.append(pl.multiple_of(head_row * (2 * s.page_size) + key % s.page_size, size))
        for name, shift in (("k", 0), ("v", s.page_size)):
            full, free, smem = refs[name + "_full"], refs[name + "_free"], refs[name + "_smem"]

            @pl.when(step >= s.stages)
            def _wait(free: Any = free) -> None:
                plgpu.barrier_wait(free.at[slot])

            for part, source in enumerate(sources):
                plgpu.copy_gmem_to_smem(
                    refs["kv"].at[pl.ds(pl.multiple_of(source + shift, size), size)],
                    smem.at[slot, pl.ds(part * size, size)],
                    full.at[slot],
                )
        return step + 1

    lax.fori_loop(item.begin, item.end, tile, done)


def consume(s: Shape, refs: dict[str, Any], item: Item, done: jax.Array) -> None:
    """Attention of one consumer's query rows over the item's key tiles."""
    wg = lax.axis_index("wg")
    d, n = s.head_dim, s.tokens
    token = pl.multiple_of(item.token + wg * n, schedule.ALIGN)
    q_smem = refs["q_smem"].at[wg]
    stage, total = refs["stage"] if s.merge_chunks else (refs["stage"], refs["stage"])
    head = item.heads * s.heads_per_tile

    for g in range(s.heads_per_tile):
        plgpu.copy_gmem_to_smem(
            refs["q"].at[pl.ds(token, n), head + g], q_smem.at[pl.ds(g * n, n)], refs["q_full"].at[wg]
        )
    plgpu.barrier_wait(refs["q_full"].at[wg])

    if not s.merge_chunks:
        acc, top, sum_ = lax.cond(
            item.begin < item.end, lambda: attend(s, refs, item, item.begin, item.end, done), lambda: empty(s)
        )
    else:
        mine = total.at[wg]
        per_chunk = s.chunk // s.block_kv

        def chunk(number: jax.Array, carry: Any) -> Any:
            top_before, sum_before = carry
            first, end = jnp.maximum(number * per_chunk, item.begin), jnp.minimum((number + 1) * per_chunk, item.end)
            acc, top, sum_ = attend(s, refs, item, first, end, done + first - item.begin)
            new_top = jnp.maximum(top_before, top)
            keep, add = jnp.exp2(top_before - new_top), jnp.exp2(top - new_top)
            acc = acc * rows(add, d)

            @pl.when(first == item.begin)
            def _set() -> None:
                mine[...] = acc

            @pl.when(first != item.begin)
            def _add() -> None:
                mine[...] = plgpu.layout_cast(mine[...], plgpu.Layout.WGMMA) * rows(keep, d) + acc

            return new_top, sum_before * keep + sum_ * add

        first_chunk, end_chunk = item.begin // per_chunk, (item.end + per_chunk - 1) // per_chunk
        zero, top, sum_ = empty(s)

        @pl.when(item.begin >= item.end)  # no chunk will write the sum
        def _zero() -> None:
            mine[...] = zero

        top, sum_ = lax.fori_loop(first_chunk, end_chunk, chunk, (top, sum_))
        acc = plgpu.layout_cast(mine[...], plgpu.Layout.WGMMA)

    if s.want_stats:
        write_stats(refs, item, top, sum_)
    if not s.split:
        if s.has_sinks:
            row_layout = plgpu.Layout.WGMMA.reduce(1)
            sink_top = plgpu.load(refs["sink_top"].at[item.heads], layout=row_layout, optimized=False)
            sink_sum = plgpu.load(refs["sink_sum"].at[item.heads], layout=row_layout, optimized=False)
            new_top = jnp.maximum(top, sink_top)
            keep = jnp.exp2(top - new_top)
            acc = acc * rows(keep, d)
            sum_ = sum_ * keep + sink_sum * jnp.exp2(sink_top - new_top)
        acc = acc * rows(jnp.where(sum_ > 0, 1.0 / sum_, 0.0), d)
    mine = stage.at[wg, 0]
    acc = acc.astype(s.out_dtype)
    if not s.row_padding:
        store_rows(mine, acc)
        plgpu.commit_smem()
    first, end = (jnp.clip(lane - wg * n, 0, n) for lane in (item.first, item.last))
    write_out(s, refs, item, acc, mine, token=token, first=first, end=end)


def empty(s: Shape) -> Any:
    """State of no keys: sum of values, maximum, denominator."""
    row_layout = plgpu.Layout.WGMMA.reduce(1)
    return (
        plgpu.layout_cast(jnp.full((ROWS, s.head_dim), 0, jnp.float32), plgpu.Layout.WGMMA),
        plgpu.layout_cast(jnp.full((ROWS,), EMPTY_TOP, jnp.float32), row_layout),
        plgpu.layout_cast(jnp.full((ROWS,), 0, jnp.float32), row_layout),
    )


def rows(x: jax.Array, columns: int) -> jax.Array:
    """`[ROWS]` to `[ROWS, columns]`."""
    return lax.broadcast_in_dim(x, (ROWS, columns), [0])


def attend(s: Shape, refs: dict[str, Any], item: Item, first: jax.Array, end: jax.Array, done: jax.Array) -> Any:
    """Sum over key tiles first..end-1, at least one; `done` tiles of the ring came before tile `first`.

    The scores of a tile are multiplied while the values of the tile before are, and its softmax runs under the latter:
    the tensor cores have work of this consumer even while the other one has none.
    """
    wg = lax.axis_index("wg")
    q_smem = refs["q_smem"].at[wg]

    def slot(index: jax.Array) -> jax.Array:
        return (done + index - first) % s.stages

    def keys(index: jax.Array) -> Any:
        return refs["k_smem"].at[slot(index)].transpose((1, 0))

    def values(index: jax.Array) -> Any:
        return refs["v_smem"].at[slot(index)]

    def ready_values(index: jax.Array) -> None:
        plgpu.barrier_wait(refs["v_full"].at[slot(index)])
        clean_values(s, refs, item, slot(index), index * s.block_kv)

    def start(index: jax.Array) -> jax.Array:
        """Scores of the first tile, with nothing to overlap."""
        begin_turn(refs)
        plgpu.barrier_wait(refs["k_full"].at[slot(index)])

        def multiply(ref: Any) -> jax.Array:
            plgpu.wgmma(ref, q_smem, keys(index))
            end_turn(refs)
            return ref[...]

        qk = pl.run_scoped(multiply, plgpu.ACC((ROWS, s.block_kv), jnp.float32))
        plgpu.barrier_arrive(refs["k_free"].at[slot(index)])
        return qk

    def finish(index: jax.Array, acc: jax.Array, p: jax.Array) -> jax.Array:
        """Values of the last tile."""
        begin_turn(refs)
        ready_values(index)
        if s.simulate:  # the simulator has neither run_state nor wgmma with an operand in registers
            acc = acc + jnp.dot(p, values(index)[...], preferred_element_type=jnp.float32)
            plgpu.commit_smem()  # unlike wgmma, this read has to be ordered before the next copy into the slot
            end_turn(refs)
        else:

            def multiply(ref: Any) -> None:
                plgpu.wgmma(ref, p, values(index))
                end_turn(refs)

            acc = pl.run_state(multiply)(plgpu.ACC.init(acc))
        plgpu.barrier_arrive(refs["v_free"].at[slot(index)])
        return acc

    def both(index: jax.Array, carry: Any) -> Any:
        """Scores of tile `index`, values of the tile before."""
        acc, p, top, sum_ = carry
        if s.simulate or not s.overlap:
            acc = finish(index - 1, acc, p)
            p, top, sum_, keep = softmax(s, item, start(index), top, sum_, index)
            return acc * rows(keep, s.head_dim), p, top, sum_
        begin_turn(refs)
        plgpu.barrier_wait(refs["k_full"].at[slot(index)])

        def multiply(state: Any) -> None:
            acc_ref, p_ref, top_ref, sum_ref, keep_ref = state
            p = p_ref[...]

            def inner(qk_ref: Any) -> None:
                plgpu.wgmma(qk_ref, q_smem, keys(index))
                ready_values(index - 1)
                plgpu.wgmma(acc_ref, p, values(index - 1))
                end_turn(refs)
                qk = plgpu.wgmma_accumulator_load(qk_ref, wait_n=1)
                plgpu.barrier_arrive(refs["k_free"].at[slot(index)])
                new = softmax(s, item, qk, top_ref[...], sum_ref[...], index)
                p_ref[...], top_ref[...], sum_ref[...], keep_ref[...] = new

            pl.run_scoped(inner, plgpu.ACC((ROWS, s.block_kv), jnp.float32))

        acc, p, top, sum_, keep = pl.run_state(multiply)((plgpu.ACC.init(acc), p, top, sum_, top))
        plgpu.barrier_arrive(refs["v_free"].at[slot(index - 1)])
        return acc * rows(keep, s.head_dim), p, top, sum_

    acc, top, sum_ = empty(s)
    p, top, sum_, _ = softmax(s, item, start(first), top, sum_, first)
    acc, p, top, sum_ = lax.fori_loop(first + 1, end, both, (acc, p, top, sum_))
    return finish(end - 1, acc, p), top, sum_


def softmax(
    s: Shape, item: Item, qk: jax.Array, top: jax.Array, sum_: jax.Array, index: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Probabilities of one tile (not normalised), new maximum and denominator, and the factor of what came before."""
    first_key = index * s.block_kv
    position = item.position + lax.axis_index("wg") * s.tokens
    factor = s.scale * LOG2E
    if s.soft_cap is not None:
        # cap * tanh(x) = cap - 2 cap / (exp(2 x) + 1); in units of base 2. tanh.approx is too coarse for logits.
        e = jnp.exp2(qk * (2 * s.scale / s.soft_cap * LOG2E))
        qk = s.soft_cap - (2 * s.soft_cap) / (e + 1.0)
        factor = LOG2E

    def mask(qk: jax.Array) -> jax.Array:
        shape = (ROWS, s.block_kv)
        query = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
        key = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
        ahead = key - (query & (s.tokens - 1))
        visible = ahead <= position - first_key
        if s.window is not None:
            visible = visible & (ahead > position - first_key - s.window)
        return jnp.where(visible, qk, -jnp.inf)

    needed = first_key + (s.block_kv - 1) > position
    if s.window is not None:
        needed = needed | (first_key <= position + (s.tokens - 1) - s.window)
    qk = lax.cond(needed, mask, lambda qk: qk, qk)

    # The smallest integer that is surely not below the maximum (round half to even of x + 0.5 is at least x).
    new_top = jnp.maximum(top, lax.round(qk.max(axis=1) * factor + 0.5, lax.RoundingMethod.TO_NEAREST_EVEN))
    keep = jnp.exp2(top - new_top)
    p = jnp.exp2(qk * factor - rows(new_top, s.block_kv))
    return p.astype(s.dtype), new_top, sum_ * keep + p.sum(axis=1), keep


def begin_turn(refs: dict[str, Any]) -> None:
    """Wait until the other consumer has started its multiplications."""
    plgpu.barrier_wait(refs["turn"].at[lax.axis_index("wg")])


def end_turn(refs: dict[str, Any]) -> None:
    """Let the other consumer start its multiplications."""
    plgpu.barrier_arrive(refs["turn"].at[1 - lax.axis_index("wg")])


def clean_values(s: Shape, refs: dict[str, Any], item: Item, slot: jax.Array, first_key: jax.Array) -> None:
    """Zero the rows of V that are no keys of this row: they may hold NaN, and 0 * NaN would reach the sum.

    The first consumer does it for both; it is ahead by half a step, so the second hardly waits.
    """
    begin, end = item.first_column(s) * s.page_size - first_key, item.kv_len - first_key
    needed = end < s.block_kv
    if s.window is not None:
        needed = needed | (begin > 0)
    wg = lax.axis_index("wg")

    @pl.when(needed & (wg == 0))
    def _clean() -> None:
        for part in range(s.block_kv // ROWS):
            ref = refs["v_smem"].at[slot, pl.ds(part * ROWS, ROWS)]
            number = plgpu.broadcasted_iota(jnp.int32, (ROWS, s.head_dim), 0, layout=plgpu.Layout.WGMMA) + part * ROWS
            values = plgpu.layout_cast(ref[...], plgpu.Layout.WGMMA)
            ref[...] = jnp.where((number < end) & (number >= begin), values, jnp.zeros((), s.dtype))
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs["v_clean"])

    @pl.when(needed & (wg == 1))
    def _wait() -> None:
        plgpu.barrier_wait(refs["v_clean"])


def write_stats(refs: dict[str, Any], item: Item, top: jax.Array, sum_: jax.Array) -> None:
    """Maximum and denominator of every row, by tile; XLA picks out the tokens."""
    wg = lax.axis_index("wg")
    smem = refs["stats_smem"].at[wg]
    smem[0] = top
    smem[1] = sum_
    plgpu.commit_smem()
    for part in range(2):
        plgpu.copy_smem_to_gmem(smem.at[part], refs["stats"].at[item.slot, item.heads, part, pl.ds(wg * ROWS, ROWS)])
    plgpu.wait_smem_to_gmem(0)


def write_out(
    s: Shape,
    refs: dict[str, Any],
    item: Item,
    acc: jax.Array,
    stage: Any,
    *,
    token: jax.Array,
    first: jax.Array,
    end: jax.Array,
) -> None:
    """Copy the row's own tokens: whole boxes if all are, else one by one (the others are another item's).

    A copy begins at whole 128 bytes of shared memory. Where results are no such number, they lie close together for boxes
    and with `row_padding` in between to be copied alone; else `stage` holds them already.
    """
    n = s.tokens
    out = refs["out"].at[item.chunk] if s.split else refs["out"]
    head = item.heads * s.heads_per_tile

    def put(ref: Any) -> None:
        store_rows(ref, acc)
        plgpu.commit_smem()

    whole = (first == 0) & (end == n)

    @pl.when(whole)
    def _all() -> None:
        if s.row_padding:
            put(stage)
        for g in range(s.heads_per_tile):
            plgpu.copy_smem_to_gmem(stage.at[pl.ds(g * n, n)], out.at[pl.ds(token, n), head + g])

    @pl.when(jnp.logical_not(whole))
    def _some() -> None:
        rows = stage
        if s.row_padding:
            rows = refs["padded"].at[lax.axis_index("wg"), :, pl.ds(0, s.head_dim)]
            put(rows)

        def one(i: jax.Array, _: None) -> None:
            for g in range(s.heads_per_tile):
                plgpu.copy_smem_to_gmem(rows.at[g * n + i], out.at[token + i, head + g])

        lax.fori_loop(first, end, one, None)

    plgpu.wait_smem_to_gmem(0)


def body(s: Shape, refs: dict[str, Any]) -> None:
    """Roles of the three warpgroups."""
    wg = lax.axis_index("wg")

    @pl.when(wg < CONSUMERS)
    def _consumers() -> None:
        plgpu.set_max_registers(s.consumer_registers, action="increase")
        pl.when(wg == 1)(lambda: end_turn(refs))  # the first consumer begins
        my_items(s, refs["items"], refs["count"], lambda item, done: consume(s, refs, item, done))
        pl.when(wg == 0)(lambda: begin_turn(refs))  # take the other's last signal

    @pl.when(wg == CONSUMERS)
    def _producer() -> None:
        plgpu.set_max_registers(s.producer_registers, action="decrease")
        done = my_items(s, refs["items"], refs["count"], lambda item, done: produce(s, refs, item, done))

        def drain(step: jax.Array, _: None) -> None:  # leave no signal unread in the barriers
            plgpu.barrier_wait(refs["k_free"].at[step % s.stages])
            plgpu.barrier_wait(refs["v_free"].at[step % s.stages])

        lax.fori_loop(jnp.maximum(done - s.stages, 0), done, drain, None)
