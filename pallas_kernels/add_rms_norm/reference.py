"""XLA implementation of add_rms_norm."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def add_rms_norm(
    x: jax.Array, delta: jax.Array | None, weight: jax.Array, *, eps: float, round_last: bool
) -> tuple[jax.Array, jax.Array]:
    """See `api.add_rms_norm`."""
    x = x if delta is None else x + delta
    return x, rms_norm(x, weight, eps, round_last=round_last)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, *, round_last: bool = False) -> jax.Array:
    """The norm alone, over the last axis of x [..., E]."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    if round_last:
        return (normed * weight.astype(jnp.float32)).astype(x.dtype)
    return normed.astype(x.dtype) * weight
