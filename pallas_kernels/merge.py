"""Attention states and their merge, stated once for every op that splits keys into parts.

The state of a query over some keys is `(out, lse)`: `out` is the softmax-weighted mean of the values, `lse` the natural
logarithm of the softmax denominator. A query without a visible key has the empty state `(0, -inf)`.

    merge(a, b) = (wa * a.out + wb * b.out) / (wa + wb)    with w = exp(lse - max(lse))
    empty + x = x (the same bits)     empty + empty = empty (zero and -inf, never NaN)

A sink is one more logit per head in the denominator, with no value. It belongs to the query and not to a part: compute
every part without sinks, merge, then call `add_sinks` once. (Method: FlashAttention; FlashInfer's `state.cuh`.)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

EMPTY_LSE = -jnp.inf


def merge_states(out_a: jax.Array, lse_a: jax.Array, out_b: jax.Array, lse_b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """State over the union of two disjoint sets of keys.

    Args:
        out_a, out_b: `[..., D]` f32 (other dtypes are computed in f32 and cast back to `out_a.dtype`).
        lse_a, lse_b: `[...]` f32, natural log.

    Returns:
        `(out [..., D], lse [...])`.
    """
    top = jnp.maximum(lse_a, lse_b)
    top = jnp.where(jnp.isneginf(top), 0.0, top)  # both empty: -inf minus -inf would be NaN
    weight_a, weight_b = jnp.exp(lse_a - top), jnp.exp(lse_b - top)
    total = weight_a + weight_b
    safe = jnp.where(total == 0, 1.0, total)
    mean = out_a.astype(jnp.float32) * (weight_a / safe)[..., None]
    mean += out_b.astype(jnp.float32) * (weight_b / safe)[..., None]
    # Selecting instead of multiplying by one keeps the other side's bits, and keeps an unwritten empty part out.
    empty_a, empty_b = jnp.isneginf(lse_a), jnp.isneginf(lse_b)
    out = jnp.where(empty_b[..., None], out_a, jnp.where(empty_a[..., None], out_b, mean.astype(out_a.dtype)))
    out = jnp.where((empty_a & empty_b)[..., None], jnp.zeros((), out.dtype), out)
    lse = jnp.where(empty_b, lse_a, jnp.where(empty_a, lse_b, top + jnp.log(safe)))
    return out, lse


def add_sinks(out: jax.Array, lse: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Final normalisation with one sink logit per head: once per query, after all merges.

    Args:
        out: `[..., H, D]`.
        lse: `[..., H]` f32, without sinks.
        sinks: `[H]` logits, not scaled.

    Returns:
        `(out, lse)` with the sink in the denominator; the empty state stays empty.
    """
    sinks = sinks.astype(jnp.float32)
    empty = jnp.isneginf(lse)
    keep = jax.nn.sigmoid(jnp.where(empty, 0.0, lse) - sinks)
    new_out = jnp.where(empty[..., None], 0.0, out.astype(jnp.float32) * keep[..., None])
    return new_out.astype(out.dtype), jnp.where(empty, EMPTY_LSE, jnp.logaddexp(lse, sinks))
