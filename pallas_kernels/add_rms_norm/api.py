"""Residual addition and root-mean-square norm in one pass: between two projections of a decode step they are launches only."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import checks, dispatch


class ExpertSum(NamedTuple):
    """What a mixture of experts adds to the residual stream, not added up yet: `sum_j weights[t, j] * rows[place[t, j]]`.

    Attributes:
        rows: `[N, E]`, an output for each (token, expert) pair.
        weights: f32 `[T, k]`, how much of each a token takes.
        place: int32 `[T, k]`, 0 to N - 1: where a token's outputs lie (`Routing.place`).
    """

    rows: jax.Array
    weights: jax.Array
    place: jax.Array


def add_rms_norm(
    x: jax.Array,
    delta: jax.Array | ExpertSum | None,
    weight: jax.Array,
    eps: float,
    *,
    bias: jax.Array | None = None,
    round_last: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`x + delta`, and its root-mean-square norm over the last axis, computed in float32 (Zhang and Sennrich 2019).

    A row's result depends on that row alone: its sum is taken in one order, whatever the number of rows.

    Args:
        x: `[T, E]`, f32, bf16 or f16: the residual stream.
        delta: `[T, E]`, what the last block adds to it; or an `ExpertSum`, which is summed with j = 0 first;
            None: nothing.
        weight: `[E]`.
        eps: added to the mean square.
        bias: `[E]` in x's dtype, added to an array `delta`: that of the projection that made it; or None.
        round_last: multiply by the weight in float32 and round the product once (GPT-OSS), instead of rounding the normed
            value and multiplying in x's dtype (Llama, Qwen3). In bf16 the two differ in the last bit.
        implementation: "reference", "triton", or None for the best on this device.

    Returns:
        `(sum, normed)`, both `[T, E]` in x's dtype; the sum is computed in float32 and rounded before it is normed.

    Raises:
        ValueError: shapes or dtypes do not fit together.
    """
    if x.ndim != 2 or x.dtype not in checks.FLOAT_DTYPES:
        raise ValueError(f"x must be [T, E] in f32, bf16 or f16, got {x.dtype} {x.shape}")
    if isinstance(delta, ExpertSum):
        _check_sum(x, delta)
    elif delta is not None and not hasattr(delta, "dtype"):
        raise ValueError(f"delta must be an array, an ExpertSum or None, got {type(delta).__name__}")
    elif delta is not None and (delta.shape != x.shape or delta.dtype != x.dtype):
        raise ValueError(f"delta must be {x.dtype} {x.shape} like x, got {delta.dtype} {delta.shape}")
    if weight.shape != x.shape[1:]:
        raise ValueError(f"weight must be {x.shape[1:]}, got {weight.shape}")
    alone = delta is None or isinstance(delta, ExpertSum)
    if bias is not None and (alone or bias.shape != x.shape[1:] or bias.dtype != x.dtype):
        raise ValueError(f"bias must be {x.dtype} {x.shape[1:]} beside an array delta, got {bias.dtype} {bias.shape}")
    if 0 in x.shape:
        return x, x
    options = {"bias": bias, "eps": eps, "round_last": round_last}
    return dispatch.call("add_rms_norm", implementation, x, delta, weight, **options)


def _check_sum(x: jax.Array, delta: ExpertSum) -> None:
    rows, weights, place = delta
    if rows.ndim != 2 or rows.shape[1] != x.shape[1] or rows.dtype != x.dtype:
        raise ValueError(f"rows must be {x.dtype} [N, {x.shape[1]}], got {rows.dtype} {rows.shape}")
    if x.shape[0] and not rows.shape[0]:
        raise ValueError(f"{x.shape[0]} tokens have no rows to add up")
    if weights.ndim != 2 or weights.shape[0] != x.shape[0] or 0 in weights.shape[1:] or weights.dtype != jnp.float32:
        raise ValueError(f"weights must be float32 [{x.shape[0]}, k], got {weights.dtype} {weights.shape}")
    checks.check_int32("place", place, weights.shape)
