"""Pallas-Triton implementation of row_invariant_matmul: one program for each tile of the result, no sum over K is split.

Every tile walks K from first to last with one accumulator. Tensor cores add up 16 (half precision) products at a time,
whichever tile and whichever of their instructions runs, so that the tile may follow M: on an H200 30 launches from
16 x 16 to 128 x 256, and the library's matmul at 13 shapes of 16 to 2048 rows, gave the same bits
(benchmarks/DETERMINISTIC.md). `proof` looks again on the card that runs.
"""

from __future__ import annotations

import bisect
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.pallas_gpu import dot, interpret_here, triton_call, tuned
from pallas_kernels.row_invariant_matmul.mode import row_invariance

ROW_CLASSES = (16, 64, 128)
OUTPUT_CLASSES = (4096, 8192)
"""Calls of at most so many rows, and of so many outputs, have tiles of their own; larger ones share the last."""
FEW_ROWS, FEWEST_TILES = 64, 64
"""At few rows, weights of few outputs are cut narrower, so that at least so many programs read them."""

# Safe anywhere (shared memory of 48 KiB); the tables of measured cards have better ones.
_HALF = (
    {"block_m": 16, "block_n": 32, "block_k": 128, "num_warps": 4, "num_stages": 3},
    {"block_m": 64, "block_n": 64, "block_k": 64, "num_warps": 4, "num_stages": 3},
    {"block_m": 64, "block_n": 64, "block_k": 64, "num_warps": 4, "num_stages": 3},
    {"block_m": 128, "block_n": 64, "block_k": 32, "num_warps": 4, "num_stages": 3},
)
# float32 runs on the plain cores, product by product.
_FULL = (
    {"block_m": 16, "block_n": 32, "block_k": 32, "num_warps": 4, "num_stages": 2},
    {"block_m": 32, "block_n": 64, "block_k": 32, "num_warps": 4, "num_stages": 2},
    {"block_m": 64, "block_n": 64, "block_k": 32, "num_warps": 4, "num_stages": 2},
    {"block_m": 64, "block_n": 64, "block_k": 32, "num_warps": 4, "num_stages": 2},
)


def launch(rows: int, outputs: int, columns: int, dtype: Any) -> dict[str, int]:
    """Tile and launch parameters of a call of M = `rows`, N = `outputs`, K = `columns`.

    The table has entries for classes ("M16 N4096 bfloat16": at most 16 rows and 4096 outputs) and for shapes
    ("M16 N4096 K12288 bfloat16").
    """
    mode = row_invariance()
    if mode is not None and mode.fixed_tile:
        rows = 1
    name = jnp.dtype(dtype).name
    default = (_FULL if name == "float32" else _HALF)[bisect.bisect_left(ROW_CLASSES, rows)]
    table, kind = "row_invariant_matmul.triton", class_names(rows, outputs)
    chosen = tuned(table, f"{kind} {name}", {**default, "weight_first": 0})
    least = min(chosen["block_m"], 32)
    while rows <= FEW_ROWS and chosen["block_n"] > least and pl.cdiv(outputs, chosen["block_n"]) < FEWEST_TILES:
        chosen["block_n"] //= 2
    return tuned(table, f"{kind.split()[0]} N{outputs} K{columns} {name}", chosen)


def class_names(rows: int, outputs: int) -> str:
    """The classes that a call belongs to, such as "M16 N4096"; the last ones are "M" and "N"."""
    names = []
    for letter, size, most in (("M", rows, ROW_CLASSES), ("N", outputs, OUTPUT_CLASSES)):
        kind = bisect.bisect_left(most, size)
        names.append(f"{letter}{most[kind]}" if kind < len(most) else letter)
    return " ".join(names)


def row_invariant_matmul(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    *,
    out_dtype: jnp.dtype,
    config: dict[str, int] | None = None,
) -> jax.Array:
    """See `api.row_invariant_matmul`; x is `[M, K]`. `config` overrides the tuned launch parameters (see `launch`)."""
    (rows, columns), outputs = x.shape, weight.shape[0]
    if max(x.size, weight.size, rows * outputs) >= 2**31:
        raise NotImplementedError(f"[{rows}, {columns}] x [{outputs}, {columns}] needs 64-bit offsets.")
    chosen = {**launch(rows, outputs, columns, x.dtype), **(config or {})}
    return _multiply(
        x, weight, bias, out_dtype=out_dtype, interpret=interpret_here(), config=tuple(sorted(chosen.items()))
    )


@functools.partial(jax.jit, static_argnames=("out_dtype", "interpret", "config"))
def _multiply(x, weight, bias, *, out_dtype, interpret, config):
    options = dict(config)
    warps, stages = options.pop("num_warps"), options.pop("num_stages")
    inputs = (x, weight) if bias is None else (x, weight, bias)
    (rows, columns), outputs = x.shape, weight.shape[0]
    return triton_call(
        functools.partial(_kernel, rows=rows, outputs=outputs, columns=columns, **options),
        # Tiles of the same weights are neighbours: all but one find them in L2.
        grid=(pl.cdiv(rows, options["block_m"]), pl.cdiv(outputs, options["block_n"])),
        out_shape=jax.ShapeDtypeStruct((rows, outputs), out_dtype),
        num_inputs=len(inputs),
        num_warps=warps,
        num_stages=stages,
        interpret=interpret,
        name="row_invariant_matmul",
    )(*inputs)


def _kernel(x_ref, weight_ref, *refs, rows, outputs, columns, block_m, block_n, block_k, weight_first):
    *bias_refs, out_ref = refs
    row = pl.program_id(0) * block_m + jnp.arange(block_m, dtype=jnp.int32)
    output = pl.program_id(1) * block_n + jnp.arange(block_n, dtype=jnp.int32)

    def tile(ref, index, total, column):
        """`[block, block_k]` of an operand; zero outside of it."""
        size = (index.shape[0], block_k)
        masks = []
        if total % index.shape[0]:
            masks.append(jnp.broadcast_to((index < total)[:, None], size))
        if columns % block_k:
            masks.append(jnp.broadcast_to((column < columns)[None, :], size))
        mask = functools.reduce(jnp.logical_and, masks) if masks else None
        return pltriton.load(ref.at[index[:, None], column[None, :]], mask=mask, other=0.0 if masks else None)

    def body(step, total):
        column = step * block_k + jnp.arange(block_k, dtype=jnp.int32)
        x, weight = tile(x_ref, row, rows, column), tile(weight_ref, output, outputs, column)
        pair = (weight, x) if weight_first else (x, weight)
        return total + dot(*pair, trans_b=True)

    shape = (block_n, block_m) if weight_first else (block_m, block_n)
    y = jax.lax.fori_loop(0, pl.cdiv(columns, block_k), body, jnp.zeros(shape, jnp.float32)).astype(out_ref.dtype)
    if weight_first:
        row, output = row[None, :], output[:, None]
    else:
        row, output = row[:, None], output[None, :]
    if bias_refs:
        y = y + pltriton.load(bias_refs[0].at[output], mask=output < outputs, other=0.0)
    pltriton.store(out_ref.at[row, output], y, mask=(row < rows) & (output < outputs))
