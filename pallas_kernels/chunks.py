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


class SoftmaxState(NamedTuple):
    """Running softmax of some query rows: maximum, denominator and weighted values, all f32."""

    top: jax.Array  # [..., R, 1]
    total: jax.Array  # [..., R, 1]
    values: jax.Array  # [..., R, D]


def pages_per_chunk(page_size: int) -> int:
    """Pages that make up one chunk."""
    return max(1, CHUNK_TOKENS // page_size)


def pad_table(page_table: jax.Array, per_chunk: int) -> jax.Array:
    """Table with -1 columns up to a whole number of chunks, so that no slice is clamped onto another chunk."""
    return jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % per_chunk)), constant_values=-1)


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
    logits = jnp.where(visible, logits, -jnp.inf)
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


def gather(kv_pages: jax.Array, layer: jax.Array, ids: jax.Array) -> jax.Array:
    """Pages `ids` of one layer; any id is read without leaving the pool (unused ones are masked by the caller).

    The L and P axes are indexed as axes: no flat offset exists that could overflow 32 bits in a large pool.
    """
    return kv_pages.at[layer, ids].get(mode="clip")


def page_size_and_heads(kv_pages: jax.Array) -> tuple[int, int]:
    """`(S, K)` of a pool."""
    return layout.page_size_of(kv_pages), layout.num_kv_heads_of(kv_pages)
