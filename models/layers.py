"""The small pieces that all families share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import row_invariance, row_invariant_matmul


def linear(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None = None, out_dtype: DTypeLike | None = None
) -> jax.Array:
    """`x @ weight.T + bias` for x [..., in] and weight [out, in], the way checkpoints store it.

    Where a norm or a rotation follows, `add_rms_norm` and `qkv_rope` add the bias without a launch of its own.

    Stored as it comes: on a CPU neither orientation won by more than the noise (30 layers of SmolLM2 at one token 20 to
    25 ms, at 64 tokens 78 to 83 ms), and joined projections (`qkv`, `gate_up`) were 3 ms faster at one token.

    float32 means float32: without `HIGHEST` a GPU would multiply in TF32. In row-invariant mode a row's bits
    do not depend on the number of rows (`pallas_kernels.RowInvariance`). The kernel of that mode is no faster in default mode:
    alone it takes 1 to 8% less than XLA for up to 64 rows on an H200, in a whole decode step 0 to 1% more.
    """
    if row_invariance() is not None:
        return row_invariant_matmul(x, weight, bias, out_dtype=out_dtype)
    y = contract(x, weight, (((x.ndim - 1,), (1,)), ((), ())), out_dtype)
    return y if bias is None else y + bias


def contract(x: jax.Array, weight: jax.Array, axes: Any, out_dtype: DTypeLike | None) -> jax.Array:
    """`jax.lax.dot_general` over these axes, in which float32 means float32."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.dot_general(x, weight, axes, precision=precision, preferred_element_type=out_dtype)


def swiglu(gate_up: jax.Array) -> jax.Array:
    """`silu(gate) * up` of [..., 2 * I] whose first half is gate; in float32, rounded once."""
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    return (jax.nn.silu(gate) * up).astype(gate_up.dtype)
