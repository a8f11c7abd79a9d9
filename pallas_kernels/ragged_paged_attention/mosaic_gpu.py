"""Mosaic GPU implementation of ragged_paged_attention for Hopper: tensor-core prefill straight from the page pool.

`mosaic_schedule` lists the work, `mosaic_kernel` does it, this file chooses sizes and puts the parts together.

Keys are summed in chunks at absolute multiples of `chunk`, and chunks in order. A row's bits therefore do not depend on
its batch, on the split of its queries, or on whether one block ran over all chunks or each chunk had its own.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import layout
from pallas_kernels.ragged_paged_attention import mosaic_kernel as kernel
from pallas_kernels.ragged_paged_attention import mosaic_schedule as schedule
from pallas_kernels.ragged_paged_attention.chunk_merge import merge_chunks

HEAD_DIMS = (64, 80, 96, 128)
DTYPES = (jnp.bfloat16, jnp.float16)
TUNED = json.loads((pathlib.Path(__file__).parent / "mosaic_tuned.json").read_text())
MAX_PARTIAL_BYTES = 512 << 20  # f32 partial sums of a split


def heads_per_tile(heads_per_kv_head: int) -> int:
    """Query heads of one KV head that share a tile: the largest power of two, at most 8, that divides the group."""
    return next(n for n in (8, 4, 2, 1) if heads_per_kv_head % n == 0)


class Sizes(NamedTuple):
    """Static choices for one shape of arguments."""

    tuned: dict[str, Any]
    packed: int  # query heads in a tile
    tokens: int  # tokens of one consumer
    head_groups: int
    num_chunks: int
    slots: int
    split: bool  # every chunk is an item of its own: too few tiles for all multiprocessors


def sizes(
    q: jax.Array,
    kv_pages: jax.Array,
    page_table: jax.Array,
    *,
    scale: float = 1.0,
    window: int | None = None,
    config: dict[str, Any] | None = None,
) -> Sizes:
    """Choose sizes from shapes and the tuned table.

    Raises:
        NotImplementedError: dtype, head_dim, page size or scale without a kernel.
    """
    num_tokens, num_heads, head_dim = q.shape
    page_size, num_kv_heads = layout.page_size_of(kv_pages), layout.num_kv_heads_of(kv_pages)
    if q.dtype not in DTYPES:
        raise NotImplementedError(f"Mosaic GPU prefill computes in bf16 or f16, not {q.dtype}.")
    if head_dim not in HEAD_DIMS:
        raise NotImplementedError(f"Mosaic GPU prefill has head_dim {HEAD_DIMS}, not {head_dim}.")
    if scale <= 0:
        raise NotImplementedError("Mosaic GPU prefill needs a positive scale.")
    narrow = TUNED["narrow"] if window is not None and window <= TUNED["narrow_window"] else {}
    tuned = {**TUNED["default"], **TUNED["head_dim"][str(head_dim)], **narrow, **(config or {})}
    block_kv, chunk = tuned["block_kv"], tuned["chunk"]
    if page_size % 16 or (block_kv % page_size and page_size % block_kv):
        raise NotImplementedError(f"Mosaic GPU prefill has pages of 16, 32, 64 or 128 slots, not {page_size}.")
    packed = heads_per_tile(num_heads // num_kv_heads)
    tokens, head_groups = kernel.ROWS // packed, num_heads // packed
    num_chunks = -(-page_table.shape[1] * page_size // chunk)
    slots = schedule.num_slots(num_tokens, page_table.shape[0], tokens * kernel.CONSUMERS)
    split = tuned.get("split")
    if split is None:
        partial_bytes = num_chunks * num_tokens * num_heads * head_dim * 4
        split = slots * head_groups <= tuned["split_below"] and partial_bytes <= MAX_PARTIAL_BYTES
    return Sizes(tuned, packed, tokens, head_groups, num_chunks, slots, bool(split) and num_chunks > 1)


def make_plan(
    q: jax.Array,
    kv_pages: jax.Array,
    page_table: jax.Array,
    q_offsets: jax.Array,
    kv_lens: jax.Array,
    *,
    window: int | None,
    config: dict[str, Any] | None = None,
) -> schedule.Schedule:
    """Work list for these rows; depends on shapes, `q_offsets` and `kv_lens` alone, and not on the layer."""
    chosen = sizes(q, kv_pages, page_table, window=window, config=config)
    return schedule.build(
        q_offsets,
        kv_lens,
        num_tokens=q.shape[0],
        tokens_per_tile=chosen.tokens * kernel.CONSUMERS,
        num_head_groups=chosen.head_groups,
        block_kv=chosen.tuned["block_kv"],
        window=window,
        chunk=chosen.tuned["chunk"],
        num_chunks=chosen.num_chunks if chosen.split else 1,
    )


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
    fixed_tile: bool = True,
    config: dict[str, Any] | None = None,
    interpret: Any = False,
    plan: schedule.Schedule | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `api.ragged_paged_attention`; `lse` is empty (all -inf) unless asked for.

    Args:
        fixed_tile: always true: a tile is 64 rows of two warpgroups each, whatever T is.
        config: overrides of the tuned sizes (keys of `mosaic_tuned.json`, `split`).
        interpret: `plgpu.InterpretGPUParams(...)` to simulate on CPU.
        plan: `make_plan` of the same arguments. Layers of one step share it: XLA does so by itself when they are
            unrolled, a loop over layers must hand it in.

    Raises:
        NotImplementedError: dtype, head_dim, page size or scale without a kernel.
    """
    del fixed_tile
    chosen = sizes(q, kv_pages, page_table, scale=scale, window=window, config=config)
    tuned, packed, tokens, slots, split = chosen.tuned, chosen.packed, chosen.tokens, chosen.slots, chosen.split
    head_groups, num_chunks = chosen.head_groups, chosen.num_chunks
    num_tokens, num_heads, head_dim = q.shape
    if plan is None:
        plan = make_plan(q, kv_pages, page_table, q_offsets, kv_lens, window=window, config=config)
    shape = kernel_shape(
        q,
        kv_pages,
        chosen,
        num_items=plan.items.shape[0],
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        has_sinks=sinks is not None and not split,
        want_stats=return_lse or split,
        split=split,
        merge_chunks=num_chunks > 1 and not split,
        simulate=bool(interpret),
    )
    inputs = {
        "items": plan.items,
        "count": plan.count,
        "layer": jnp.reshape(layer, 1).astype(jnp.int32),
        "table": page_table,
        # TMA: the array is no smaller than a box, and whole tiles of 8 rows.
        "q": jnp.pad(q, ((0, max(tokens, -(-num_tokens // 8) * 8) - num_tokens), (0, 0), (0, 0))),
        "kv": kv_pages.reshape(-1, head_dim),
    }
    if shape.has_sinks and sinks is not None:
        inputs["sink_top"], inputs["sink_sum"] = (
            jnp.repeat(x.reshape(head_groups, packed), tokens, axis=1) for x in sink_state(sinks)
        )
    out_tokens = inputs["q"].shape[0]
    outputs = {"out": jax.ShapeDtypeStruct((out_tokens, num_heads, head_dim), q.dtype)}
    if split:
        outputs["out"] = jax.ShapeDtypeStruct((num_chunks, out_tokens, num_heads, head_dim), jnp.float32)
    if shape.want_stats:
        stats_slots = slots * (num_chunks if split else 1)
        rows = kernel.CONSUMERS * kernel.ROWS
        outputs["stats"] = jax.ShapeDtypeStruct((stats_slots, head_groups, 2, rows), jnp.float32)
    results = dict(zip(outputs, run(shape, inputs, tuple(outputs.values()), interpret, tuned["lane"]), strict=True))

    lse = jnp.full((num_tokens, num_heads), -jnp.inf, jnp.float32)
    if split:
        sink = sink_state(sinks) if sinks is not None else None
        sizes_of_out = {"num_tokens": num_tokens, "tokens_per_consumer": tokens, "dtype": q.dtype}
        out, top, total = merge_chunks(results["out"], results["stats"], plan, sink, **sizes_of_out)
    else:
        out = results["out"][:num_tokens]
        if return_lse:
            top, total = token_stats(results["stats"], plan, tokens=tokens, packed=packed, slots=slots)
    if return_lse:
        # The maximum of no keys is not an exponent: only rows with keys have a logarithm.
        live = total > 0
        lse = jnp.where(live, (top + jnp.log2(jnp.where(live, total, 1.0))) / kernel.LOG2E, -jnp.inf)
        if sinks is not None:
            lse = jnp.where(live, jnp.logaddexp(lse, sinks.astype(jnp.float32)), -jnp.inf)
    return out, lse


def kernel_shape(q: jax.Array, kv_pages: jax.Array, chosen: Sizes, *, num_items: int, **options: Any) -> kernel.Shape:
    """What the kernel has to know of these arguments; `options` are the fields that depend on neither shapes nor sizes."""
    num_kv_heads = layout.num_kv_heads_of(kv_pages)
    names = ("chunk", "block_kv", "stages", "consumer_registers", "producer_registers", "overlap")
    return kernel.Shape(
        num_blocks=min(chosen.tuned["num_blocks"], num_items),
        page_size=layout.page_size_of(kv_pages),
        pages_per_layer=kv_pages.shape[1],
        num_kv_heads=num_kv_heads,
        heads_per_kv_head=q.shape[1] // num_kv_heads,
        heads_per_tile=chosen.packed,
        head_dim=q.shape[2],
        dtype=q.dtype,
        **{name: chosen.tuned[name] for name in names},
        **options,
    )


def run(
    shape: kernel.Shape,
    inputs: dict[str, jax.Array],
    outputs: tuple[Any, ...],
    interpret: Any,
    lane: bool,
    name: str = "ragged_paged_attention",
) -> tuple[jax.Array, ...]:
    """Launch the kernel."""
    names = (*inputs, *(["out", "stats"][: len(outputs)]))

    def entry(*arrays: Any, **scratch: Any) -> None:
        kernel.body(shape, {**dict(zip(names, arrays, strict=True)), **scratch})

    semantics = plgpu.LoweringSemantics.Lane if lane else plgpu.LoweringSemantics.Warpgroup
    return plgpu.kernel(
        entry,
        out_type=outputs,
        scratch_types=kernel.scratch(shape),
        grid=(shape.num_blocks,),
        grid_names=("block",),
        num_threads=kernel.CONSUMERS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=semantics, reduction_scratch_bytes=1024
        ),
        interpret=interpret,
        kernel_name=name,
    )(*inputs.values())


def sink_state(sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A sink as maximum (an integer in base 2) and denominator."""
    logit = sinks.astype(jnp.float32) * kernel.LOG2E
    top = jnp.ceil(logit)
    return top, jnp.exp2(logit - top)


def token_stats(
    stats: jax.Array, plan: schedule.Schedule, *, tokens: int, packed: int, slots: int
) -> tuple[jax.Array, jax.Array]:
    """Maximum and denominator of every token and head, `[T, H]`."""
    head_groups = stats.shape[1]
    tiles = stats.reshape(slots, head_groups, 2, kernel.CONSUMERS, packed, tokens)
    picked = tiles[plan.slots, :, :, plan.lanes // tokens, :, plan.lanes % tokens]  # [T, groups, 2, packed]
    picked = picked.transpose(2, 0, 1, 3).reshape(2, plan.slots.shape[0], head_groups * packed)
    return picked[0], picked[1]
