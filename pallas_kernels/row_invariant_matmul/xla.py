"""XLA's own matmul, held so that its bits can be compared with the kernel's once and relied upon afterwards."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

COMPILER_OPTIONS: dict[str, Any] = {
    # The library's own choice for a shape. Timing candidates may choose another one, which splits K, in every program.
    "xla_gpu_autotune_level": 0,
    # XLA's generated matmuls split K for few rows.
    "xla_gpu_enable_triton_gemm": False,
    # Otherwise XLA leaves out a rounding to bf16 between two operations that it happens to fuse, and what it fuses
    # depends on the program: a projection that is rounded as it leaves a kernel would not be as it leaves a fusion.
    "xla_allow_excess_precision": False,
}
"""XLA options of every program in row-invariant mode, and of the comparison. The first two are read on a GPU only."""


def matmul(x: jax.Array, weight: jax.Array, *, out_dtype: jnp.dtype) -> jax.Array:
    """`x @ weight.T` of `[M, K]` and `[N, K]`; barriers keep XLA from fusing anything into it or joining two of them."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    x = jax.lax.optimization_barrier(x)
    y = jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=out_dtype)
    return jax.lax.optimization_barrier(y)
