"""From the joint projection to queries, keys and values: split, norm of each head, rotation; one launch instead of eight."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import checks, dispatch


def qkv_rope(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    num_heads: int,
    num_kv_heads: int,
    bias: jax.Array | None = None,
    q_norm: jax.Array | None = None,
    k_norm: jax.Array | None = None,
    eps: float = 0.0,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Splits `qkv` into heads, norms queries and keys if there are weights for it, and rotates them (RoPE, Su et al. 2021).

    Number d of a head's first half forms a plane with number d of its second half. Norm and rotation are computed in
    float32; the normed value is rounded before it is rotated.

    Args:
        qkv: `[T, (H + 2K) * D]`, f32, bf16 or f16: query heads, key heads, value heads.
        cos, sin: f32 `[T, 1, D / 2]`, of absolute positions.
        num_heads, num_kv_heads: H, K.
        bias: `[(H + 2K) * D]` in qkv's dtype, of the projection, added in that dtype (in a
            program a compiler may keep the sum wider until it is rotated); or None.
        q_norm, k_norm: `[D]`, weights of the root-mean-square norm of each head (Qwen3); both or none.
        eps: of that norm.
        implementation: "reference", "triton", or None for the best on this device.

    Returns:
        `q [T, H, D]`, `k [T, K, D]`, `v [T, K, D]`, in qkv's dtype.

    Raises:
        ValueError: shapes or dtypes do not fit together.
    """
    heads = num_heads + 2 * num_kv_heads
    if qkv.ndim != 2 or qkv.shape[1] % (2 * heads) or qkv.dtype not in checks.FLOAT_DTYPES:
        raise ValueError(
            f"qkv must be [T, {heads} * D] with an even D in f32, bf16 or f16, got {qkv.dtype} {qkv.shape}"
        )
    half = qkv.shape[1] // heads // 2
    for name, table in (("cos", cos), ("sin", sin)):
        if table.shape != (qkv.shape[0], 1, half) or table.dtype != jnp.float32:
            raise ValueError(f"{name} must be float32 ({qkv.shape[0]}, 1, {half}), got {table.dtype} {table.shape}")
    if bias is not None and (bias.shape != qkv.shape[1:] or bias.dtype != qkv.dtype):
        raise ValueError(f"bias must be {qkv.dtype} {qkv.shape[1:]}, got {bias.dtype} {bias.shape}")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm go together")
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None and weight.shape != (2 * half,):
            raise ValueError(f"{name} must be ({2 * half},), got {weight.shape}")
    if qkv.shape[0] == 0:
        q, k = (jnp.zeros((0, n, 2 * half), qkv.dtype) for n in (num_heads, num_kv_heads))
        return q, k, k
    return dispatch.call(
        "qkv_rope",
        implementation,
        qkv,
        cos,
        sin,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        bias=bias,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=eps,
    )
