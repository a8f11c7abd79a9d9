"""Mosaic GPU implementation of shared_prefix_attention for Hopper: the prefill kernel reads the tiles.

    tiles       the prefill kernel with split keys, whose "tokens" are the batch's rows in the plan's order
    own splits  plain Triton decode, which passes over the splits that a tile has
    merge       a row's states of both kinds, in order of position

A split that a tile reads lies before all of its rows' queries, so nothing is masked.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import layout
from pallas_kernels.paged_decode_attention import triton as decode
from pallas_kernels.pallas_gpu import interpret_here, pool_rows, shape_key, tuned
from pallas_kernels.ragged_paged_attention import mosaic_gpu as prefill
from pallas_kernels.ragged_paged_attention import mosaic_kernel as kernel
from pallas_kernels.ragged_paged_attention import mosaic_schedule as schedule
from pallas_kernels.shared_prefix_attention import merge
from pallas_kernels.shared_prefix_attention.plan import SharedPrefixPlan

BEHIND = 1 << 30  # position of every query: behind all keys of a tile
DEFAULTS = {"splits_per_step": 8, "merge_warps": 1}


def rows_per_tile(group: layout.LayerGroup, heads_per_kv_head: int, page_size: int, split: int) -> int:
    """See `plan.rows_per_tile`: all lanes of the two consumers."""
    heads, dtype = heads_per_kv_head * group.num_kv_heads, group.dtype
    pool = layout.pool_shape(1, 1, page_size, group.num_kv_heads, group.head_dim)
    sizes = _sizes(
        jax.ShapeDtypeStruct((1, heads, group.head_dim), dtype),
        jax.ShapeDtypeStruct(pool, dtype),
        jax.ShapeDtypeStruct((1, split // page_size), jnp.int32),
        split=split,
        window=group.window,
    )
    return sizes.tokens * kernel.CONSUMERS


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
    config: dict[str, Any] | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """See `api.shared_prefix_attention`.

    Args:
        config: overrides of launch parameters: of the prefill kernel (`block_kv`, `stages`, ..), of the decode kernel
            (`block`, `num_warps`, `num_stages`) and of the merge (see `DEFAULTS`).
        interpret: `plgpu.InterpretGPUParams(...)` to simulate on CPU.

    Raises:
        NotImplementedError: a window, or a dtype, head_dim, page size, split, tile or scale without a kernel.
    """
    del return_lse
    key = shape_key(q.shape[1], layout.num_kv_heads_of(kv_pages), q.shape[2], q.dtype)
    launch = {
        **tuned("paged_decode_attention.triton", key, decode.DEFAULTS),
        **tuned("shared_prefix_attention.mosaic_gpu", key, DEFAULTS),
        **(config or {}),
    }
    sizes = _sizes(q, kv_pages, page_table, split=plan.split, window=window, scale=scale, overrides=launch)
    launch |= {"split": plan.split, "lane": sizes.tuned["lane"]}
    capacity = sizes.tokens * kernel.CONSUMERS
    if plan.rows_per_tile > capacity:
        raise NotImplementedError(
            f"Mosaic GPU shared-prefix decode has at most {capacity} rows a tile here, the plan has {plan.rows_per_tile}."
        )
    pool_rows(kv_pages)  # row numbers of the pool must fit in 32 bits in every kernel
    shape = prefill.kernel_shape(
        q,
        kv_pages,
        sizes,
        num_items=plan.tiles.shape[0] * sizes.head_groups,
        scale=scale,
        window=None,
        soft_cap=soft_cap,
        has_sinks=False,
        want_stats=True,
        split=True,
        merge_chunks=False,
        simulate=bool(interpret),
    )
    return _attend(
        q,
        kv_pages,
        page_table,
        kv_lens,
        plan,
        jnp.reshape(layer, (1,)),
        sinks,
        shape=shape,
        launch=tuple(sorted(launch.items())),
        interpret=interpret,
        interpret_triton=interpret_here(),
    )


def _sizes(
    q: Any, kv_pages: Any, page_table: Any, *, split: int, window: int | None, scale: float = 1.0, overrides: Any = None
) -> prefill.Sizes:
    """The prefill kernel's choices for tiles of these rows."""
    if window is not None:
        raise NotImplementedError("Mosaic GPU shared-prefix decode has no window.")
    known = {name: value for name, value in (overrides or {}).items() if name in prefill.TUNED["default"]}
    sizes = prefill.sizes(q, kv_pages, page_table, scale=scale, config={**known, "chunk": split, "split": True})
    block = sizes.tuned["block_kv"]
    if split % block:
        raise NotImplementedError(f"Mosaic GPU shared-prefix decode has splits of whole {block} keys, not {split}.")
    return sizes


@functools.partial(jax.jit, static_argnames=("shape", "launch", "interpret", "interpret_triton"))
def _attend(
    q, kv_pages, page_table, kv_lens, plan, layer, sinks, *, shape: kernel.Shape, launch, interpret, interpret_triton
):
    options = dict(launch)
    tiles = _tile_states(q, kv_pages, page_table, plan, layer, shape, options["lane"], interpret)
    own = decode.split_states(
        q, kv_pages, layer, kv_lens, page_table, plan.lanes, scale=shape.scale, window=None, soft_cap=shape.soft_cap,
        interpret=interpret_triton, options=options,
    )  # fmt: skip
    return merge.merge_states(
        tiles,
        own,
        kv_lens,
        sinks,
        plan,
        dtype=q.dtype,
        heads_per_tile=shape.heads_per_tile,
        splits_per_step=options["splits_per_step"],
        num_warps=options["merge_warps"],
        interpret=interpret_triton,
    )


def _tile_states(
    q: jax.Array,
    kv_pages: jax.Array,
    page_table: jax.Array,
    plan: SharedPrefixPlan,
    layer: jax.Array,
    shape: kernel.Shape,
    lane_semantics: bool,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Sums of values f32 `[N, places, H, D]` and statistics f32 `[T, H / heads_per_tile, 2, 128]` of all tiles."""
    batch, num_heads, head_dim = q.shape
    items, count = tile_items(plan, num_heads // shape.heads_per_tile, shape.block_kv)
    queries = q.at[plan.order].get(mode="promise_in_bounds")
    # TMA: the array is no smaller than a box, and whole tiles of 8 rows.
    places = max(shape.tokens, -(-batch // 8) * 8)
    inputs = {
        "items": items,
        "count": count,
        "layer": layer.astype(jnp.int32),
        "table": page_table,
        "q": jnp.pad(queries, ((0, places - batch), (0, 0), (0, 0))),
        "kv": pool_rows(kv_pages),
    }
    outputs = (
        jax.ShapeDtypeStruct((plan.lanes.shape[1], places, num_heads, head_dim), jnp.float32),
        jax.ShapeDtypeStruct(
            (plan.tiles.shape[0], num_heads // shape.heads_per_tile, 2, kernel.CONSUMERS * kernel.ROWS), jnp.float32
        ),
    )
    sums, stats = prefill.run(shape, inputs, outputs, interpret, lane_semantics, name="shared_prefix_attention")
    return sums, stats


def tile_items(plan: SharedPrefixPlan, head_groups: int, block_kv: int) -> tuple[jax.Array, jax.Array]:
    """Items of the prefill kernel, int32 `[T * head_groups, FIELDS]`, and int32 `[1]`, how many of them are real."""
    split, first, end = (jnp.asarray(column)[:, None] for column in plan.tiles.T)
    num_tiles, blocks = plan.tiles.shape[0], plan.split // block_kv
    token = first // schedule.ALIGN * schedule.ALIGN
    fields = {
        schedule.ROW: jnp.asarray(plan.order)[first],
        schedule.HEADS: jnp.arange(head_groups, dtype=jnp.int32),
        schedule.TOKEN: token,
        schedule.FIRST: first - token,
        schedule.LAST: end - token,
        schedule.POSITION: jnp.int32(BEHIND),
        schedule.BEGIN: split * blocks,
        schedule.END: (split + 1) * blocks,
        schedule.SLOT: jnp.arange(num_tiles, dtype=jnp.int32)[:, None],
        schedule.CHUNK: split,
        schedule.KV_LEN: (split + 1) * plan.split,
    }
    shape = num_tiles, head_groups
    items = jnp.stack([jnp.broadcast_to(fields[number], shape) for number in range(schedule.FIELDS)], axis=-1)
    count = jnp.sum(split >= 0, dtype=jnp.int32) * head_groups
    return items.reshape(num_tiles * head_groups, schedule.FIELDS), count[None]
