"""The small pieces that all families share."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import row_invariance, row_invariant_matmul
from pallas_kernels.row_invariant_matmul import faster_than_xla


def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None, out_dtype: DTypeLike | None = None):
    """`x @ weight.T + bias` for x [..., in] and weight [out, in], the way checkpoints store it.

    Stored as it comes: on a CPU neither orientation won by more than the noise (30 layers of SmolLM2 at one token 20 to
    25 ms, at 64 tokens 78 to 83 ms), and joined projections (`qkv`, `gate_up`) were 3 ms faster at one token.

    float32 means float32: without `HIGHEST` a GPU would multiply in TF32. In row-invariant mode a row's bits
    do not depend on the number of rows (`pallas_kernels.RowInvariance`). In default mode the same kernel multiplies few
    rows on cards where it was measured to be faster; that depends on the shapes alone.
    """
    if row_invariance() is not None or _kernel_is_faster(x, weight, bias, out_dtype):
        return row_invariant_matmul(x, weight, bias, out_dtype=out_dtype)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    y = jax.lax.dot_general(x, weight, contract, precision=precision, preferred_element_type=out_dtype)
    return y if bias is None else y + bias


def _kernel_is_faster(x: jax.Array, weight: jax.Array, bias: jax.Array | None, out_dtype: DTypeLike | None) -> bool:
    if weight.dtype != x.dtype or (bias is not None and bias.dtype != (out_dtype or x.dtype)):
        return False  # XLA promotes; the kernel does not
    return faster_than_xla(math.prod(x.shape[:-1]), weight.shape[0], weight.shape[1], x.dtype)


def swiglu(gate_up: jax.Array) -> jax.Array:
    """`silu(gate) * up` of [..., 2 * I] whose first half is gate; in float32, rounded once."""
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    return (jax.nn.silu(gate) * up).astype(gate_up.dtype)
