"""Rows sorted by group, each times its group's weight: the matmul of a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import checks, dispatch
from pallas_kernels.grouped_matmul.mxfp4 import BLOCK, Mxfp4, padded_scales
from pallas_kernels.grouped_matmul.plan import FEW_ROWS, TilePlan, count_tiles


def grouped_matmul(
    x: jax.Array,
    weight: jax.Array | Mxfp4,
    group_sizes: jax.Array,
    *,
    bias: jax.Array | None = None,
    rows: jax.Array | None = None,
    activation: Callable[[jax.Array], jax.Array] | None = None,
    tiles: TilePlan | None = None,
    fixed_tile: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """`x[r] @ weight[g].T + bias[g]` for every row r, where g is the group that r falls in; nothing is donated.

    Work and memory traffic follow the rows: weights of a group without rows are not read. Products are added up in
    float32 in one fixed order, in one accumulator, so that a row's bits do not depend on the other rows, on the size of
    its group or on its place in it. They may depend on the tile, which suits the rows per group unless `fixed_tile`.

    Args:
        x: `[N, in]`, f32, bf16 or f16, sorted by group; or as `rows` say.
        weight: `[E, out, in]` in x's dtype, or `Mxfp4` of that shape, which is dequantised a tile at a time and never
            written out.
        group_sizes: int32 `[E]`, rows of each group. Their sum may be less than N; rows past it give zeros.
        bias: `[E, out]`, any float dtype, added in float32; or None.
        rows: int32 `[N]`, which row of x `[M, in]` each of the N rows is, 0 to M - 1; None: x has them in order. Read as they
            are needed, so that no sorted copy of x is made.
        activation: what to make of rows of x, `[R, any]` in its dtype, before they are multiplied, `[R, in]` in its dtype,
            each row by itself; None: x as it is. An implementation that moves rows does both at once.
        tiles: what `plan_tiles` makes of `group_sizes`, as `route_experts` gives it; used where its tiles have the size that
            is wanted here. Tiles of another number of rows or groups are refused.
        fixed_tile: use one tile for every N, so that a row has equal bits in calls of different N.
        implementation: "reference", "triton", "mosaic_gpu" (MXFP4 in bf16, no fixed tile), or None for the best on this device.

    Returns:
        `[N, out]` in x's dtype.

    Raises:
        ValueError: shapes or dtypes do not fit together.
    """
    if x.ndim != 2 or x.dtype not in checks.FLOAT_DTYPES:
        raise ValueError(f"x must be [N, in] in f32, bf16 or f16, got {x.dtype} {x.shape}")
    made = x if activation is None else jax.eval_shape(activation, x)
    if made.ndim != 2 or made.shape[0] != x.shape[0] or made.dtype != x.dtype:
        raise ValueError(f"activation must make {x.dtype} [{x.shape[0]}, in] of x, got {made.dtype} {made.shape}")
    if weight.ndim != 3 or weight.shape[2] != made.shape[1]:
        raise ValueError(f"weight must be [E, out, {made.shape[1]}] for x {made.shape}, got {weight.shape}")
    groups, out, columns = weight.shape
    if isinstance(weight, Mxfp4):
        scales = (groups, out, padded_scales(columns))
        if columns % BLOCK or weight.blocks.dtype != jnp.uint16 or weight.scales.dtype != jnp.uint8:
            raise ValueError(
                f"an Mxfp4 weight has uint16 words and uint8 scales of {BLOCK} columns each, got {columns} columns in "
                f"{weight.blocks.dtype} and {weight.scales.dtype}"
            )
        if weight.scales.shape != scales:
            raise ValueError(f"scales of {weight.shape} weights must be {scales}, got {weight.scales.shape}")
    elif weight.dtype != x.dtype:
        raise ValueError(f"x is {x.dtype} but weight is {weight.dtype}; cast x")
    checks.check_int32("group_sizes", group_sizes, (groups,))
    if bias is not None and bias.shape != (groups, out):
        raise ValueError(f"bias must be ({groups}, {out}), got {bias.shape}")
    if rows is not None:
        checks.check_int32("rows", rows, (rows.size,))
    num_rows = x.shape[0] if rows is None else rows.size
    if 0 in (x.shape[0], num_rows, out, columns, groups):
        return jnp.zeros((num_rows, out), x.dtype)
    if tiles is not None and tiles.group.shape != (count := count_tiles(num_rows, groups, tiles.block),):
        raise ValueError(
            f"{num_rows} rows of {groups} groups make {count} tiles of {tiles.block}, got {tiles.group.shape}"
        )
    packed = isinstance(weight, Mxfp4) and x.dtype == jnp.bfloat16 and not fixed_tile and num_rows > FEW_ROWS
    options: dict[str, Any] = {
        "bias": bias,
        "rows": rows,
        "activation": activation,
        "tiles": tiles,
        "fixed_tile": fixed_tile,
    }
    case = "mxfp4" if packed else None
    return dispatch.call("grouped_matmul", implementation, x, weight, group_sizes, case=case, **options)
