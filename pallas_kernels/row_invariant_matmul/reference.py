"""XLA implementation of row_invariant_matmul: blocks of 16 rows, one after another, each by the same matmul.

Every call multiplies blocks of one shape in a loop, and XLA chooses a matmul by its shape: the number of blocks changes
nothing. Slow, but right on every backend.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

BLOCK_ROWS = 16


def row_invariant_matmul(x: jax.Array, weight: jax.Array, bias: jax.Array | None, *, out_dtype: jnp.dtype) -> jax.Array:
    """See `api.row_invariant_matmul`; x is `[M, K]`."""
    rows, columns = x.shape
    blocks = jnp.pad(x, ((0, -rows % BLOCK_ROWS), (0, 0))).reshape(-1, BLOCK_ROWS, columns)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None

    def multiply(block: jax.Array) -> jax.Array:
        # The barriers keep the matmul apart from what stands around the loop, which differs between programs.
        block, own = jax.lax.optimization_barrier((block, weight))
        y = jax.lax.dot_general(
            block, own, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
        )
        return jax.lax.optimization_barrier(y).astype(out_dtype)

    y = jax.lax.map(multiply, blocks).reshape(-1, weight.shape[0])[:rows]
    return y if bias is None else y + bias
