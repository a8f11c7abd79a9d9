"""How the XLA references read keys: in chunks at absolute positions, one softmax state carried along.

A chunk is a fixed number of tokens at multiples of itself, whatever the batch, the table's padding or the split of the
queries. The reduction over keys therefore has one order for one row, and a row's bits do not depend on its company.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import layout

CHUNK_TOKENS = 256
NEVER = jnp.iinfo(jnp.int32).max  # position of a key that no query may see


class SoftmaxState(NamedTuple):
    """Running softmax of some query rows: maximum, denominator and weighted values, all f32."""

    top: jax.Array  # [..., R, 1]
    total: jax.Array  # [..., R, 1]
    values: jax.Array  # [..., R, D]


def pages_per_chunk(page_size: int) -> int:
    """Pages that make up one chunk."""
    return max(1, CHUNK_TOKENS // page_size)


def pad_table(page_table: jax.Array, page_size: int) -> jax.Array:
    """Table with -1 columns up to a whole number of chunks, so that no slice is clamped onto another chunk."""
    missing = -page_table.shape[1] % pages_per_chunk(page_size)
    return jnp.pad(page_table, ((0, 0), (0, missing)), constant_values=-1)


def dot(a: jax.Array, b: jax.Array, *, contract: tuple[int, int], batch: int) -> jax.Array:
    """Batched matmul with f32 accumulation; f32 operands are not rounded to TF32."""
    dims = tuple(range(batch))
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        a, b, (((contract[0],), (contract[1],)), (dims, dims)), precision=precision, preferred_element_type=jnp.float32
    )


def empty_state(rows: tuple[int, ...], head_dim: int) -> SoftmaxState:
    """State that has seen no key."""
    return SoftmaxState(
        jnp.full((*rows, 1), -jnp.inf, jnp.float32),
        jnp.zeros((*rows, 1), jnp.float32),
        jnp.zeros((*rows, head_dim), jnp.float32),
    )


def update(
    state: SoftmaxState,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    visible: jax.Array,
    *,
    scale: float,
    soft_cap: float | None,
) -> SoftmaxState:
    """State after one more chunk.

    Args:
        q: `[..., R, D]` query rows of one KV head.
        k, v: `[..., C, D]`; v is zero where no query may look, since 0 * NaN is NaN.
        visible: bool, broadcasts to `[..., R, C]`.
    """
    batch = q.ndim - 2
    logits = dot(q, k, contract=(q.ndim - 1, k.ndim - 1), batch=batch) * scale
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    # Materialised, or XLA computes mask (and tanh) twice, for the maximum and for the exponential.
    logits = jax.lax.optimization_barrier(jnp.where(visible, logits, -jnp.inf))
    top = jnp.maximum(state.top, jnp.max(logits, axis=-1, keepdims=True))
    finite_top = jnp.where(jnp.isneginf(top), 0.0, top)  # no key seen yet: -inf minus -inf would be NaN
    weights = jnp.exp(logits - finite_top)
    keep = jnp.exp(state.top - finite_top)
    total = state.total * keep + jnp.sum(weights, axis=-1, keepdims=True)
    values = state.values * keep + dot(weights.astype(v.dtype), v, contract=(q.ndim - 1, v.ndim - 2), batch=batch)
    return SoftmaxState(top, total, values)


def finish(state: SoftmaxState, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Final normalisation, the one place where a sink enters: `(out [..., R, D], lse [..., R, 1])`, f32."""
    empty = state.total == 0
    top = jnp.where(empty, 0.0, state.top)
    if sinks is None:
        total, values = state.total, state.values
    else:
        new_top = jnp.maximum(top, sinks)
        keep = jnp.exp(top - new_top)
        total = state.total * keep + jnp.exp(sinks - new_top)
        values, top = state.values * keep, new_top
    safe = jnp.where(empty, 1.0, total)
    out = jnp.where(empty, 0.0, values / safe)
    return out, jnp.where(empty, -jnp.inf, top + jnp.log(safe))


def gather(kv_pages: jax.Array, layer: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """K and V `[..., K, C, D]` of pages `ids [..., N]`; unused ids stay inside the pool and are masked by the caller.

    The head is an index and not part of the slice, so that the result comes out head first: a gather of whole pages
    and a transpose take twice as long on CPU (52 against 25 us for 256 tokens of 3 heads of 64 in f32).
    The L and P axes are indexed as axes: no flat offset exists that could overflow 32 bits in a large pool.
    """
    page_size, num_kv_heads = page_size_and_heads(kv_pages)
    heads = jnp.arange(num_kv_heads, dtype=jnp.int32)[:, None]
    shape = (*ids.shape[:-1], num_kv_heads, ids.shape[-1] * page_size, layout.head_dim_of(kv_pages))
    ids = ids[..., None, :]
    k, v = (kv_pages.at[layer, ids, heads, part].get(mode="clip").reshape(shape) for part in (0, 1))
    return k, v


def attend(
    rows: jax.Array,
    query_position: jax.Array,
    kv_pages: jax.Array,
    table_row: jax.Array,
    begin: jax.Array,
    end: jax.Array,
    *,
    layer: jax.Array,
    scale: float,
    window: int | None,
    sinks: jax.Array | None,
    soft_cap: float | None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of queries of one row over its keys `begin` to `end - 1`, chunk by chunk.

    Args:
        rows: `[K, R, D]`, the query heads of a KV head (and the tokens of a block) as rows of one matmul.
        query_position: int32 `[R, 1]`, absolute.
        table_row: int32 `[M]` padded by `pad_table`.
        begin, end: first key that the first query sees, and one past the last key that the last query sees.
        sinks: f32 `[K, R, 1]` or None.

    Returns:
        `(out [K, R, D], lse [K, R, 1])`, f32.
    """
    page_size, num_kv_heads = page_size_and_heads(kv_pages)
    per_chunk = pages_per_chunk(page_size)
    chunk = per_chunk * page_size

    def run_chunk(number: jax.Array, state: SoftmaxState) -> SoftmaxState:
        ids = jax.lax.dynamic_slice(table_row, (number * per_chunk,), (per_chunk,))
        k, v = gather(kv_pages, layer, ids)
        position = number * chunk + jnp.arange(chunk, dtype=jnp.int32)
        owned = (position >= begin) & (position < end) & jnp.repeat(ids >= 0, page_size)
        # One materialised vector, or XLA looks the table up again for every logit. Unowned keys lie in the future.
        position = jax.lax.optimization_barrier(jnp.where(owned, position, NEVER))
        v = jnp.where((position != NEVER)[:, None], v, jnp.zeros((), v.dtype))  # a weight of 0 times NaN is NaN
        visible = position <= query_position
        if window is not None:
            visible &= position > query_position - window
        return update(state, rows, k, v, visible, scale=scale, soft_cap=soft_cap)

    first, last = begin // chunk, (end + chunk - 1) // chunk
    state = jax.lax.fori_loop(first, last, run_chunk, empty_state((num_kv_heads, rows.shape[1]), rows.shape[2]))
    return finish(state, sinks)


def page_size_and_heads(kv_pages: jax.Array) -> tuple[int, int]:
    """`(S, K)` of a pool."""
    return layout.page_size_of(kv_pages), layout.num_kv_heads_of(kv_pages)
