"""`x @ weight.T + bias` whose rows have the same bits in calls of any number of rows ("batch invariance")."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import checks, dispatch
from pallas_kernels.row_invariant_matmul import xla
from pallas_kernels.row_invariant_matmul.mode import MatmulShape, row_invariance


def row_invariant_matmul(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    out_dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """`x @ weight.T + bias`: the bits of a row depend on that row alone, not on M nor on the place of the row.

    A library picks its kernel by M, and some split the sum over K in parts. Here the sum runs over K from first to last in
    one float32 accumulator, whatever M is (the idea: He et al., "Defeating Nondeterminism in LLM Inference", 2025). Where
    the trace is in row-invariant mode (`RowInvariance`) and XLA's own matmul was seen to give the same bits at a shape,
    XLA's runs; it is faster for many rows. float32 is multiplied in float32.

    Args:
        x: `[..., K]`, f32, bf16 or f16; M is the product of the leading dimensions.
        weight: `[N, K]` in x's dtype.
        bias: `[N]` in the result's dtype, added after the sum was rounded to it; or None.
        out_dtype: dtype of the result, x's by default.
        implementation: "reference", "triton", or None for the best on this device.

    Returns:
        `[..., N]`.

    Raises:
        ValueError: shapes or dtypes do not fit together.
        NotImplementedError: the named implementation does not support the case.
    """
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    if x.ndim < 1 or x.dtype not in checks.FLOAT_DTYPES or out_dtype not in checks.FLOAT_DTYPES:
        raise ValueError(
            f"x must be [..., K] in f32, bf16 or f16, and so out_dtype; got {x.dtype} {x.shape}, {out_dtype}"
        )
    if weight.ndim != 2 or weight.shape[1] != x.shape[-1] or weight.dtype != x.dtype:
        raise ValueError(f"weight must be {x.dtype} [N, {x.shape[-1]}], got {weight.dtype} {weight.shape}")
    outputs, columns = weight.shape
    if bias is not None and (bias.shape != (outputs,) or bias.dtype != out_dtype):
        raise ValueError(f"bias must be {out_dtype} ({outputs},), got {bias.dtype} {bias.shape}")
    rows = math.prod(x.shape[:-1])
    shape = (*x.shape[:-1], outputs)
    if 0 in (rows, outputs, columns):
        empty = jnp.zeros(shape, out_dtype)
        return empty if bias is None else empty + bias
    flat = x.reshape(rows, columns)
    mode = row_invariance()
    if implementation is None and mode is not None:
        wanted = MatmulShape(rows, outputs, columns, x.dtype.name, out_dtype.name)
        if mode.uses_xla(wanted):
            y = xla.matmul(flat, weight, out_dtype=out_dtype)
            return (y if bias is None else y + bias).reshape(shape)
    return dispatch.call("row_invariant_matmul", implementation, flat, weight, bias, out_dtype=out_dtype).reshape(shape)
