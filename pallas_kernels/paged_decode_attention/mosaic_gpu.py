"""Mosaic GPU implementation of paged_decode_attention for Hopper: a persistent reader with a deep ring of TMA copies.

    producer warpgroup   page ids -> one TMA copy per page for K and for V -> ring of tiles (keys x D)
    consumer warpgroup   S = Q K^T (wgmma), softmax, O += P V (wgmma), state of the split to memory

One block per multiprocessor walks over items `(split, row, KV head)`; the ring keeps filling across items, so that
memory never waits for a prologue. The query heads of one KV head are rows 0.. of a 64-row operand whose other rows are
idle: tensor cores have time to spare. Splits lie at absolute positions and are merged in order by the Triton
implementation's second kernel, so a row's bits do not depend on its batch.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as mosaic
import jax.numpy as jnp
from jax import lax

from pallas_kernels import layout
from pallas_kernels.mosaic import store_rows
from pallas_kernels.paged_decode_attention.triton import count_splits, merge_splits
from pallas_kernels.pallas_gpu import LOG2E, interpret_here, pool_rows, shape_key, tuned

plgpu: Any = mosaic  # its classes and exports confuse the type checker
HEAD_DIMS = (64, 80, 96, 128, 256)
DTYPES = (jnp.bfloat16, jnp.float16)
DEFAULTS = {"block": 128, "split": 1024, "stages": 2, "num_blocks": 132}
WIDE = {"block": 64, "stages": 2}  # of heads beyond 128: shared memory has room for no more
ROWS = 64  # M of one wgmma
STAGED = 128  # most columns of a result that are staged at once on their way to memory
EMPTY_TOP = -1e30  # maximum of no keys; finite, so that differences are never inf - inf


@dataclasses.dataclass(frozen=True)
class Shape:
    """Everything static about one kernel."""

    batch: int
    page_size: int
    pages_per_layer: int
    num_kv_heads: int
    group: int
    head_dim: int
    dtype: Any
    scale: float
    window: int | None
    soft_cap: float | None
    num_splits: int
    split: int
    block: int
    stages: int
    num_blocks: int
    simulate: bool

    @property
    def q_rows(self) -> int:
        """Query heads rounded up to whole tiles of 8."""
        return -(-self.group // 8) * 8


def paged_decode_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    page_table: jax.Array,
    kv_lens: jax.Array,
    *,
    layer: jax.Array,
    scale: float,
    window: int | None,
    sinks: jax.Array | None,
    soft_cap: float | None,
    return_lse: bool,
    config: dict[str, int] | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """See `api.paged_decode_attention`.

    Args:
        config: overrides of the tuned sizes (see `DEFAULTS`).
        interpret: `plgpu.InterpretGPUParams(...)` to simulate on CPU.

    Raises:
        NotImplementedError: dtype, head_dim, page size or group without a kernel.
    """
    del return_lse
    batch, num_heads, head_dim = q.shape
    page_size, num_kv_heads = layout.page_size_of(kv_pages), layout.num_kv_heads_of(kv_pages)
    group = num_heads // num_kv_heads
    if q.dtype not in DTYPES:
        raise NotImplementedError(f"Mosaic GPU decode computes in bf16 or f16, not {q.dtype}.")
    if head_dim not in HEAD_DIMS:
        raise NotImplementedError(f"Mosaic GPU decode has head_dim {HEAD_DIMS}, not {head_dim}.")
    if page_size not in (16, 32, 64, 128):
        raise NotImplementedError(f"Mosaic GPU decode has pages of 16, 32, 64 or 128 slots, not {page_size}.")
    if group % 4 or group > ROWS or (batch * num_heads) % 8:
        raise NotImplementedError(f"Mosaic GPU decode packs 4, 8, .. {ROWS} query heads a KV head, not {group}.")
    options = {
        **DEFAULTS,
        **tuned("paged_decode_attention.mosaic_gpu", shape_key(num_heads, num_kv_heads, head_dim, q.dtype), {}),
        **(WIDE if head_dim > 128 else {}),
        **(config or {}),
    }
    num_splits = count_splits(page_table, page_size, window, options["split"])
    shape = Shape(
        batch=batch,
        page_size=page_size,
        pages_per_layer=kv_pages.shape[1],
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
        dtype=q.dtype,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        num_splits=num_splits,
        split=options["split"],
        block=options["block"],
        stages=options["stages"],
        num_blocks=min(options["num_blocks"], batch * num_kv_heads * num_splits),
        simulate=bool(interpret),
    )
    parts, lses = _split_states(q, kv_pages, page_table, kv_lens, jnp.reshape(layer, 1), shape, interpret)
    return merge_splits(
        parts, lses, kv_lens, sinks, dtype=q.dtype, window=window, split=shape.split, interpret=interpret_here()
    )


@functools.partial(jax.jit, static_argnames=("shape", "interpret"))
def _split_states(q, kv_pages, page_table, kv_lens, layer, shape: Shape, interpret: Any):
    s = shape
    queries = q.reshape(s.batch * s.num_kv_heads * s.group, s.head_dim)
    if s.simulate:  # TMA fills what lies outside an array, the simulator refuses
        queries = jnp.pad(queries, ((0, s.q_rows), (0, 0)))
    out_type = (
        jax.ShapeDtypeStruct((s.batch, s.num_splits, s.num_kv_heads * s.group, s.head_dim), jnp.float32),
        jax.ShapeDtypeStruct((s.batch, s.num_splits, s.num_kv_heads, ROWS), jnp.float32),
    )
    names = ("layer", "lens", "table", "q", "kv", "parts", "lses")

    def entry(*arrays: Any, **scratch: Any) -> None:
        _body(s, {**dict(zip(names, arrays, strict=True)), **scratch})

    return plgpu.kernel(
        entry,
        out_type=out_type,
        scratch_types=_scratch(s),
        grid=(s.num_blocks,),
        grid_names=("block",),
        num_threads=2,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            reduction_scratch_bytes=1024,
        ),
        interpret=interpret,
        kernel_name="paged_decode_attention",
    )(layer, kv_lens, page_table, queries, pool_rows(kv_pages))


def _tiled(minor: int, dtype: Any) -> tuple[Any, ...]:
    bits = jnp.finfo(dtype).bits
    swizzle = plgpu.find_swizzle(minor * bits)
    return (plgpu.TilingTransform((8, 8 * swizzle // bits)), plgpu.SwizzleTransform(swizzle))


def _scratch(s: Shape) -> dict[str, Any]:
    operand = _tiled(s.head_dim, s.dtype)
    copies = max(1, s.block // s.page_size)
    return {
        "q_smem": plgpu.SMEM((2, ROWS, s.head_dim), s.dtype, transforms=operand),
        "k_smem": plgpu.SMEM((s.stages, s.block, s.head_dim), s.dtype, transforms=operand),
        "v_smem": plgpu.SMEM((s.stages, s.block, s.head_dim), s.dtype, transforms=operand),
        "stage": plgpu.SMEM((ROWS, min(s.head_dim, STAGED)), jnp.float32),
        "lse_smem": plgpu.SMEM((ROWS,), jnp.float32),
        "q_full": plgpu.Barrier(num_arrivals=1, num_barriers=2),
        "q_free": plgpu.Barrier(num_arrivals=1, num_barriers=2),
        "k_full": plgpu.Barrier(num_arrivals=copies, num_barriers=s.stages),
        "v_full": plgpu.Barrier(num_arrivals=copies, num_barriers=s.stages),
        "free": plgpu.Barrier(num_arrivals=1, num_barriers=s.stages),
    }


@dataclasses.dataclass(frozen=True)
class Item:
    """One split of one KV head of one row: tiles first..end-1."""

    row: jax.Array
    head: jax.Array
    part: jax.Array
    begin: jax.Array  # first visible key of the row
    kv_len: jax.Array
    first: jax.Array
    end: jax.Array


def _items(s: Shape, refs: dict[str, Any], run: Any) -> jax.Array:
    """This block's items that have keys; `run(item, items before, tiles before)`. Returns the number of tiles."""
    block = lax.axis_index("block")
    total = s.num_splits * s.batch * s.num_kv_heads

    def one(index: jax.Array, carry: Any) -> Any:
        items, tiles = carry
        number = index * s.num_blocks + block
        head, rest = number % s.num_kv_heads, number // s.num_kv_heads
        row, part = rest % s.batch, rest // s.batch
        kv_len = refs["lens"][row]
        begin = jnp.int32(0) if s.window is None else jnp.maximum(kv_len - s.window, 0)
        start = (begin // s.split + part) * s.split
        stop = jnp.minimum(start + s.split, kv_len)
        first = jnp.maximum(start, begin) // s.block
        end = jnp.maximum((stop + s.block - 1) // s.block, first)
        live = stop > start
        end = jnp.where(live, end, first)

        @pl.when(live)
        def _() -> None:
            run(Item(row, head, part, begin, kv_len, first, end), items, tiles)

        return items + jnp.where(live, 1, 0), tiles + end - first

    rounds = (total - block + s.num_blocks - 1) // s.num_blocks
    return lax.fori_loop(0, rounds, one, (jnp.int32(0), jnp.int32(0)))[1]


def _produce(s: Shape, refs: dict[str, Any], item: Item, items: jax.Array, tiles: jax.Array) -> None:
    """Copy the item's queries and tiles; slots past the row's last page repeat it and are masked."""
    buffer = items % 2
    plgpu.barrier_wait(refs["q_free"].at[buffer])
    first_query = (item.row * s.num_kv_heads + item.head) * s.group
    # The box may reach into the next head's queries, or past the end: idle rows, finite numbers.
    plgpu.copy_gmem_to_smem(
        refs["q"].at[pl.ds(first_query, s.q_rows)],
        refs["q_smem"].at[buffer, pl.ds(0, s.q_rows)],
        refs["q_full"].at[buffer],
    )
    size = min(s.page_size, s.block)
    first_column, last_column = item.begin // s.page_size, (item.kv_len - 1) // s.page_size
    layer_page = refs["layer"][0] * s.pages_per_layer

    def tile(index: jax.Array, step: jax.Array) -> jax.Array:
        slot = step % s.stages
        sources = []
        for part in range(s.block // size):
            key = index * s.block + part * size
            page = refs["table"][item.row, jnp.clip(key // s.page_size, first_column, last_column)]
            head_row = (layer_page + page) * s.num_kv_heads + item.head
            sources.append(pl.multiple_of(head_row * (2 * s.page_size) + key % s.page_size, size))

        @pl.when(step >= s.stages)
        def _wait() -> None:
            plgpu.barrier_wait(refs["free"].at[slot])

        for name, shift in (("k", 0), ("v", s.page_size)):
            for part, source in enumerate(sources):
                plgpu.copy_gmem_to_smem(
                    refs["kv"].at[pl.ds(pl.multiple_of(source + shift, size), size)],
                    refs[name + "_smem"].at[slot, pl.ds(part * size, size)],
                    refs[name + "_full"].at[slot],
                )
        return step + 1

    lax.fori_loop(item.first, item.end, tile, tiles)


def _rows(x: jax.Array, columns: int) -> jax.Array:
    return lax.broadcast_in_dim(x, (ROWS, columns), [0])


def _consume(s: Shape, refs: dict[str, Any], item: Item, items: jax.Array, tiles: jax.Array) -> None:
    """State of one split: normalised values and base-2 log-sum-exp of rows 0..group-1."""
    buffer = items % 2
    row_layout = plgpu.Layout.WGMMA.reduce(1)
    plgpu.barrier_wait(refs["q_full"].at[buffer])
    q = refs["q_smem"].at[buffer]

    def tile(index: jax.Array, carry: Any) -> Any:
        acc, top, total = carry
        slot = (tiles + index - item.first) % s.stages
        plgpu.barrier_wait(refs["k_full"].at[slot])

        def scores(ref: Any) -> jax.Array:
            plgpu.wgmma(ref, q, refs["k_smem"].at[slot].transpose((1, 0)))
            return ref[...]

        qk = pl.run_scoped(scores, plgpu.ACC((ROWS, s.block), jnp.float32))
        factor = s.scale * LOG2E
        if s.soft_cap is not None:
            # cap * tanh(x) = cap - 2 cap / (exp(2 x) + 1), in base 2. tanh.approx is too coarse for logits.
            qk = s.soft_cap - (2 * s.soft_cap) / (jnp.exp2(qk * (2 * s.scale / s.soft_cap * LOG2E)) + 1.0)
            factor = LOG2E
        first_key = index * s.block
        needed = first_key + s.block > item.kv_len
        if s.window is not None:
            needed = needed | (first_key < item.begin)

        def mask(qk: jax.Array) -> jax.Array:
            key = plgpu.broadcasted_iota(jnp.int32, (ROWS, s.block), 1, layout=plgpu.Layout.WGMMA) + first_key
            return jnp.where((key < item.kv_len) & (key >= item.begin), qk, -jnp.inf)

        qk = lax.cond(needed, mask, lambda qk: qk, qk)
        new_top = jnp.maximum(top, qk.max(axis=1) * factor)
        keep = jnp.exp2(top - new_top)
        p = jnp.exp2(qk * factor - _rows(new_top, s.block))
        total = total * keep + p.sum(axis=1)
        acc = acc * _rows(keep, s.head_dim)
        p = p.astype(s.dtype)

        plgpu.barrier_wait(refs["v_full"].at[slot])

        @pl.when(needed)  # rows of V that are no keys may hold NaN, and 0 * NaN would reach the sum
        def _clean() -> None:
            for part in range(s.block // ROWS):
                ref = refs["v_smem"].at[slot, pl.ds(part * ROWS, ROWS)]
                key = plgpu.broadcasted_iota(jnp.int32, (ROWS, s.head_dim), 0, layout=plgpu.Layout.WGMMA)
                key = key + (first_key + part * ROWS)
                values = plgpu.layout_cast(ref[...], plgpu.Layout.WGMMA)
                visible = (key < item.kv_len) & (key >= item.begin)
                ref[...] = jnp.where(visible, values, jnp.zeros((), s.dtype))
            plgpu.commit_smem()

        if s.simulate:  # the simulator has neither run_state nor wgmma with an operand in registers
            acc = acc + jnp.dot(p, refs["v_smem"][slot], preferred_element_type=jnp.float32)
            plgpu.commit_smem()  # unlike wgmma, it read through the generic proxy, and TMA writes next
        else:

            def add(ref: Any) -> None:
                plgpu.wgmma(ref, p, refs["v_smem"].at[slot])

            acc = pl.run_state(add)(plgpu.ACC.init(acc))
        plgpu.barrier_arrive(refs["free"].at[slot])
        return acc, new_top, total

    start = (
        plgpu.layout_cast(jnp.full((ROWS, s.head_dim), 0, jnp.float32), plgpu.Layout.WGMMA),
        plgpu.layout_cast(jnp.full((ROWS,), EMPTY_TOP, jnp.float32), row_layout),
        plgpu.layout_cast(jnp.full((ROWS,), 0, jnp.float32), row_layout),
    )
    acc, top, total = lax.fori_loop(item.first, item.end, tile, start)
    plgpu.barrier_arrive(refs["q_free"].at[buffer])
    _write(s, refs, item, acc, top, total)


def _write(s: Shape, refs: dict[str, Any], item: Item, acc: jax.Array, top: jax.Array, total: jax.Array) -> None:
    """Copy the state of one split to memory, in pieces of `STAGED` columns."""
    for column in range(0, s.head_dim, STAGED):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the copy before has left the staging buffer
        piece = acc[:, column : column + STAGED]
        store_rows(refs["stage"], piece * _rows(1.0 / total, piece.shape[1]))
        if not column:
            refs["lse_smem"][...] = top + jnp.log2(total)
        plgpu.commit_smem()
        target = refs["parts"].at[item.row, item.part, pl.ds(item.head * s.group, s.group)]
        if s.head_dim > STAGED:
            target = target.at[:, pl.ds(column, STAGED)]
        plgpu.copy_smem_to_gmem(refs["stage"].at[pl.ds(0, s.group)], target)
    plgpu.copy_smem_to_gmem(refs["lse_smem"], refs["lses"].at[item.row, item.part, item.head])


def _body(s: Shape, refs: dict[str, Any]) -> None:
    wg = lax.axis_index("wg")

    @pl.when(wg == 0)
    def _consumer() -> None:
        for buffer in range(2):  # idle rows stay zero for good
            zero = plgpu.layout_cast(jnp.full((ROWS, s.head_dim), 0, s.dtype), plgpu.Layout.WGMMA)
            refs["q_smem"][buffer] = zero
            plgpu.commit_smem()
            plgpu.barrier_arrive(refs["q_free"].at[buffer])
        _items(s, refs, lambda *args: _consume(s, refs, *args))
        plgpu.wait_smem_to_gmem(0)

    @pl.when(wg == 1)
    def _producer() -> None:
        tiles = _items(s, refs, lambda *args: _produce(s, refs, *args))
        for buffer in range(2):  # take the last signals, so that every barrier ends as it began
            plgpu.barrier_wait(refs["q_free"].at[buffer])
        lax.fori_loop(0, jnp.minimum(tiles, s.stages), lambda slot, _: plgpu.barrier_wait(refs["free"].at[slot]), None)
