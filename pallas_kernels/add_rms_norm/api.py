"""Residual addition and root-mean-square norm in one pass: between two projections of a decode step they are launches only."""

from __future__ import annotations

import jax

from pallas_kernels import checks, dispatch


def add_rms_norm(
    x: jax.Array,
    delta: jax.Array | None,
    weight: jax.Array,
    eps: float,
    *,
    round_last: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`x + delta`, and its root-mean-square norm over the last axis, computed in float32 (Zhang and Sennrich 2019).

    A row's result depends on that row alone: its sum is taken in one order, whatever the number of rows.

    Args:
        x: `[T, E]`, f32, bf16 or f16: the residual stream.
        delta: `[T, E]`, what the last block adds to it; None: nothing.
        weight: `[E]`.
        eps: added to the mean square.
        round_last: multiply by the weight in float32 and round the product once (GPT-OSS), instead of rounding the normed
            value and multiplying in x's dtype (Llama, Qwen3). In bf16 the two differ in the last bit.
        implementation: "reference", "triton", or None for the best on this device.

    Returns:
        `(sum, normed)`, both `[T, E]` in x's dtype; the sum is rounded before it is normed.

    Raises:
        ValueError: shapes or dtypes do not fit together.
    """
    if x.ndim != 2 or x.dtype not in checks.FLOAT_DTYPES:
        raise ValueError(f"x must be [T, E] in f32, bf16 or f16, got {x.dtype} {x.shape}")
    if delta is not None and (delta.shape != x.shape or delta.dtype != x.dtype):
        raise ValueError(f"delta must be {x.dtype} {x.shape} like x, got {delta.dtype} {delta.shape}")
    if weight.shape != x.shape[1:]:
        raise ValueError(f"weight must be {x.shape[1:]}, got {weight.shape}")
    return dispatch.call("add_rms_norm", implementation, x, delta, weight, eps=eps, round_last=round_last)
