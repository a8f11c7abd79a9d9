"""Pallas-Triton implementation of paged_decode_attention: split over the context, then merged in order.

Keys are cut into splits of a fixed number of tokens at absolute positions. One program reads one split of one KV head
of one row and writes the softmax state of its query heads; a second kernel merges a row's states from the first split
to the last. Neither depends on the batch, so a row's bits do not depend on its company (split over the context as in
FlashDecoding). A window that is no longer than a split is one split, wherever it lies, and needs no second kernel.
"""

from __future__ import annotations

import functools
from typing import Any

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
    softmax_mean,
    softmax_step,
    triton_call,
    tuned,
)

DEFAULTS = {"block": 64, "split": 1024, "num_warps": 2, "num_stages": 4}


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
) -> tuple[jax.Array, jax.Array]:
    """See `api.paged_decode_attention`; `config` overrides the tuned launch parameters (see `DEFAULTS`)."""
    del return_lse
    require_pages(layout.page_size_of(kv_pages))
    key = shape_key(q.shape[1], layout.num_kv_heads_of(kv_pages), q.shape[2], q.dtype)
    chosen = {**tuned("paged_decode_attention.triton", key, DEFAULTS), **(config or {})}
    if config is None and q.shape[2] * q.dtype.itemsize > 256:  # deeper pipelines of wide rows overflow shared memory
        chosen["num_stages"] = min(chosen["num_stages"], 2)
    return _decode(
        q,
        kv_pages,
        page_table,
        kv_lens,
        jnp.reshape(layer, (1,)),
        sinks,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        interpret=interpret_here(),
        config=tuple(sorted(chosen.items())),
    )


@functools.partial(jax.jit, static_argnames=("scale", "window", "soft_cap", "interpret", "config"))
def _decode(q, kv_pages, page_table, kv_lens, layer, sinks, *, scale, window, soft_cap, interpret, config):
    options = dict(config)
    keywords = {"scale": scale, "window": window, "soft_cap": soft_cap, "interpret": interpret, "options": options}
    in_one = window is not None and window <= options["split"]  # wherever it lies
    if in_one or count_splits(page_table, layout.page_size_of(kv_pages), window, options["split"]) == 1:
        final = jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(q.shape[:2], jnp.float32)
        inputs = layer, kv_lens, page_table, *(() if sinks is None else (sinks,))
        return _launch(_whole_kernel, q, kv_pages, *inputs, num_splits=1, out_shape=final, **keywords)
    parts, lses = split_states(q, kv_pages, layer, kv_lens, page_table, **keywords)
    return merge_splits(
        parts, lses, kv_lens, sinks, dtype=q.dtype, window=window, split=options["split"], interpret=interpret
    )


def split_states(q, kv_pages, layer, kv_lens, page_table, lanes=None, *, window, options, **keywords):
    """`(parts, lses)` of all splits, as `merge_splits` takes them; none where `lanes` (of a shared-prefix plan) has one."""
    split = options["split"]
    num_splits = count_splits(page_table, layout.page_size_of(kv_pages), window, split)
    states = state_shapes(q, layout.num_kv_heads_of(kv_pages), num_splits)
    inputs = (layer, kv_lens, page_table) if lanes is None else (layer, kv_lens, page_table, lanes)
    return _launch(
        _split_kernel, q, kv_pages, *inputs, num_splits=num_splits, out_shape=states, window=window, options=options,
        split=split, **keywords,
    )  # fmt: skip


def count_splits(page_table: jax.Array, page_size: int, window: int | None, split: int) -> int:
    """Most splits that a row of this table can have keys in."""
    splits = max(1, pl.cdiv(page_table.shape[1] * page_size, split))
    return splits if window is None else min(splits, pl.cdiv(window - 1, split) + 1)


def state_shapes(q: jax.Array, num_kv_heads: int, num_splits: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Shapes of `(parts, lses)`, which `merge_splits` takes."""
    batch, num_heads, head_dim = q.shape
    return (
        jax.ShapeDtypeStruct((batch, num_splits, num_heads, head_dim), jnp.float32),
        jax.ShapeDtypeStruct((batch, num_splits, num_kv_heads, num_heads // num_kv_heads), jnp.float32),
    )


def _launch(kernel, q, kv_pages, *inputs, num_splits, out_shape, scale, window, soft_cap, interpret, options, **more):
    """One program for each split of each KV head of each row."""
    num_kv_heads = layout.num_kv_heads_of(kv_pages)
    kernel = functools.partial(
        kernel,
        shape=kv_pages.shape,
        group=q.shape[1] // num_kv_heads,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        block=options["block"],
        **more,
    )
    return triton_call(
        kernel,
        grid=(num_splits, num_kv_heads, q.shape[0]),
        out_shape=out_shape,
        num_inputs=len(inputs) + 2,
        num_warps=options["num_warps"],
        num_stages=options["num_stages"],
        interpret=interpret,
        name="paged_decode_attention",
    )(q, pool_rows(kv_pages), *inputs)


def merge_splits(
    parts: jax.Array,
    lses: jax.Array,
    kv_lens: jax.Array,
    sinks: jax.Array | None,
    *,
    dtype: Any,
    window: int | None,
    split: int,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Softmax states of splits, in order of position, to the final `(out [B, H, D], lse [B, H])`.

    Args:
        parts: f32 `[B, N, H, D]`, normalised; entry n is the row's n-th split with a visible key; others are not read.
        lses: f32 `[B, N, K, H / K or more]`, in base 2.
    """
    batch, _, num_heads, head_dim = parts.shape
    inputs = (kv_lens, parts, lses) if sinks is None else (kv_lens, parts, lses, sinks)
    group = num_heads // lses.shape[2]
    return triton_call(
        functools.partial(_merge_kernel, window=window, split=split, group=group),
        grid=(batch, num_heads),
        out_shape=(
            jax.ShapeDtypeStruct((batch, num_heads, head_dim), dtype),
            jax.ShapeDtypeStruct((batch, num_heads), jnp.float32),
        ),
        num_inputs=len(inputs),
        num_warps=1,
        num_stages=2,
        interpret=interpret,
        name="paged_decode_attention_merge",
    )(*inputs)


def first_key(kv_len: jax.Array, window: int | None) -> jax.Array:
    return jnp.zeros_like(kv_len) if window is None else jnp.maximum(kv_len - window, 0)


def _whole_kernel(q_ref, pool_ref, layer_ref, lens_ref, table_ref, *refs, window, group, **options):
    """One (KV head, row) whose visible keys are all read here: the final output, the very numbers of a merge of one."""
    *sink_refs, out_ref, lse_ref = refs
    head, row = pl.program_id(1), pl.program_id(2)
    lane = jnp.arange(power_of_two(max(group, 16)), dtype=jnp.int32)
    heads, own = head * group + lane, lane < group  # masked lanes must not name a place that others write
    sink = None
    if sink_refs:  # before the keys, behind whose latency it hides
        sink = pltriton.load(sink_refs[0].at[heads], mask=own, other=0.0).astype(jnp.float32) * LOG2E
    kv_len = lens_ref[row]
    keys = first_key(kv_len, window), kv_len
    state, _, column = read_keys(head, row, keys, layer_ref, table_ref, q_ref, pool_ref, group=group, **options)
    values, lse = softmax_mean(state)
    out, lse = finish(lse, jnp.where(lse == -jnp.inf, 0.0, 1.0), values, sink)
    store = own[:, None] & (column < out_ref.shape[-1])[None, :]
    pltriton.store(out_ref.at[row, heads[:, None], column[None, :]], out.astype(out_ref.dtype), mask=store)
    pltriton.store(lse_ref.at[row, heads], lse, mask=own)


def _split_kernel(q_ref, pool_ref, layer_ref, lens_ref, table_ref, *refs, **options):
    """State of one (split, KV head, row): `out_ref[B, N, H, D]` normalised, `lse_ref[B, N, K, G]` in base 2."""
    part, head, row = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    *lanes, out_ref, lse_ref = refs
    lanes_ref = lanes[0] if lanes else None
    attend_split(
        part, head, row, layer_ref, lens_ref, table_ref, q_ref, pool_ref, lanes_ref, out_ref, lse_ref, **options
    )


def attend_split(
    part, head, row, layer_ref, lens_ref, table_ref, q_ref, pool_ref, lanes_ref, out_ref, lse_ref,
    *, window, split, group, **options,
):  # fmt: skip
    """Reads the row's `part`-th visible split and writes its state; nothing where `lanes_ref` has a tile for the split."""
    kv_len = lens_ref[row]
    first = first_key(kv_len, window)
    number = first // split + part
    begin, end = number * split, jnp.minimum((number + 1) * split, kv_len)

    live_split = begin < end
    if lanes_ref is not None:
        live_split &= lanes_ref[row, jnp.minimum(number, lanes_ref.shape[1] - 1)] < 0

    @pl.when(live_split)
    def _():
        keys = jnp.maximum(begin, first), end
        state, lane, column = read_keys(
            head, row, keys, layer_ref, table_ref, q_ref, pool_ref, group=group, **options
        )  # fmt: skip
        values, lse = softmax_mean(state)
        store = (lane < group)[:, None] & (column < q_ref.shape[-1])[None, :]
        pltriton.store(out_ref.at[row, part, (head * group + lane)[:, None], column[None, :]], values, mask=store)
        pltriton.store(lse_ref.at[row, part, head, lane], lse, mask=lane < group)


def read_keys(head, row, keys, layer_ref, table_ref, q_ref, pool_ref, *, shape, group, scale, soft_cap, block):
    """Softmax state of the row's query heads of one KV head over `keys` (first, end), block by block at absolute places.

    Returns `(state, lane, column)`: state rows are query heads `lane` of the group, columns `column` of the head.
    """
    _, num_pages, num_kv_heads, _, page_size, head_dim = shape
    first, end = keys
    heads, dims = power_of_two(max(group, 16)), power_of_two(head_dim)
    lane = jnp.arange(heads, dtype=jnp.int32)
    column = jnp.arange(dims, dtype=jnp.int32)
    head_rows = (head * group + jnp.minimum(lane, group - 1))[:, None]
    inside = (column < head_dim)[None, :]
    q = pltriton.load(q_ref.at[row, head_rows, column[None, :]], mask=inside & (lane < group)[:, None], other=0.0)
    head_base = layer_ref[0] * num_pages

    def body(step, carry):
        position = step * block + jnp.arange(block, dtype=jnp.int32)
        live = (position >= first) & (position < end)
        entry = pltriton.load(table_ref.at[row, position // page_size], mask=live, other=-1)
        live &= entry >= 0
        key_row = ((head_base + jnp.maximum(entry, 0)) * num_kv_heads + head) * (2 * page_size)
        key_row += position % page_size
        mask = live[:, None] & inside if dims != head_dim else live[:, None]
        mask = jnp.broadcast_to(mask, (block, dims))
        k = pltriton.load(pool_ref.at[key_row[:, None], column[None, :]], mask=mask, other=0.0)
        v = pltriton.load(pool_ref.at[(key_row + page_size)[:, None], column[None, :]], mask=mask, other=0.0)
        return softmax_step(carry, q, k, v, live[None, :], scale=scale, soft_cap=soft_cap)

    state = jax.lax.fori_loop(first // block, pl.cdiv(end, block), body, empty_softmax(heads, dims))
    return state, lane, column


def finish(top, total, values, sink):
    """Adds the sink (base 2, or None) to merged states `top [...], total [...], values [..., D]` -> `(out, lse)`."""
    empty = total == 0
    if sink is not None:
        new_top = jnp.maximum(top, sink)
        keep = jnp.exp2(top - new_top)
        total, values, top = total * keep + jnp.exp2(sink - new_top), values * keep[..., None], new_top
    safe = jnp.where(empty, 1.0, total)
    out = jnp.where(empty[..., None], 0.0, values / safe[..., None])
    return out, jnp.where(empty, -jnp.inf, (top + jnp.log2(safe)) * LN2)


def _merge_kernel(lens_ref, parts_ref, lses_ref, *refs, window, split, group):
    """One row and head: states of its splits in order of position, then the sink."""
    *sink_refs, out_ref, lse_ref = refs
    row, head = pl.program_id(0), pl.program_id(1)
    head_dim = out_ref.shape[-1]
    column = jnp.arange(power_of_two(head_dim), dtype=jnp.int32)
    inside = column < head_dim
    kv_len = lens_ref[row]
    count = jnp.where(kv_len > 0, pl.cdiv(kv_len, split) - first_key(kv_len, window) // split, 0)

    def body(part, carry):
        top, total, values = carry
        lse = lses_ref[row, part, head // group, head % group]
        new_top = jnp.maximum(top, lse)
        finite = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        keep, weight = jnp.exp2(top - finite), jnp.exp2(lse - finite)
        new = pltriton.load(parts_ref.at[row, part, head, column], mask=inside, other=0.0)
        return new_top, total * keep + weight, values * keep + new * weight

    zero = jnp.float32(0)
    top, total, values = jax.lax.fori_loop(
        0, count, body, (jnp.float32(-jnp.inf), zero, jnp.zeros(column.shape, jnp.float32))
    )
    out, lse = finish(top, total, values, sink_refs[0][head].astype(jnp.float32) * LOG2E if sink_refs else None)
    pltriton.store(out_ref.at[row, head, column], out.astype(out_ref.dtype), mask=inside)
    lse_ref[row, head] = lse
