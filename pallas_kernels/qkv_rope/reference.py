"""XLA implementation of qkv_rope."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.add_rms_norm.reference import rms_norm


def qkv_rope(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    num_heads: int,
    num_kv_heads: int,
    bias: jax.Array | None,
    q_norm: jax.Array | None,
    k_norm: jax.Array | None,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `api.qkv_rope`."""
    head_dim = 2 * cos.shape[-1]
    qkv = qkv if bias is None else qkv + bias
    parts = jnp.split(qkv, [num_heads * head_dim, (num_heads + num_kv_heads) * head_dim], axis=-1)
    q, k, v = (part.reshape(qkv.shape[0], -1, head_dim) for part in parts)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates x [T, H, D]."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
