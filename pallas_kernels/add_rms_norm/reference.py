"""XLA implementation of add_rms_norm."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.add_rms_norm.api import ExpertSum


def add_rms_norm(
    x: jax.Array,
    delta: jax.Array | ExpertSum | None,
    weight: jax.Array,
    *,
    bias: jax.Array | None,
    eps: float,
    round_last: bool,
) -> tuple[jax.Array, jax.Array]:
    """See `api.add_rms_norm`."""
    if delta is not None:
        added = expert_sum(delta) if isinstance(delta, ExpertSum) else delta.astype(jnp.float32)
        added = added if bias is None else added + bias.astype(jnp.float32)
        x = (x.astype(jnp.float32) + added).astype(x.dtype)
    return x, rms_norm(x, weight, eps, round_last=round_last)


def expert_sum(delta: ExpertSum) -> jax.Array:
    """The sum itself, f32 [T, E]."""
    rows, weights, place = delta
    parts = (weights[:, j, None] * rows[place[:, j]].astype(jnp.float32) for j in range(place.shape[1]))
    return functools.reduce(jnp.add, parts)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, *, round_last: bool = False) -> jax.Array:
    """The norm alone, over the last axis of x [..., E]."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    if round_last:
        return (normed * weight.astype(jnp.float32)).astype(x.dtype)
    return normed.astype(x.dtype) * weight
