"""Pallas-Triton implementation of grouped_matmul: one program for each tile of rows of one group times a tile of outputs.

A program walks the columns from first to last with one accumulator. Which tile has which rows is computed on the device
(`plan.py`); programs of unused tiles end at once. An MXFP4 tile is read packed and unpacked in registers, two codes at a
time (see `mxfp4.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.grouped_matmul import triton_vector
from pallas_kernels.grouped_matmul.mxfp4 import BLOCK, CODES, WORDS, Mxfp4
from pallas_kernels.grouped_matmul.plan import FEW_ROWS, TilePlan, count_tiles, plan_tiles, rows_of_tile
from pallas_kernels.grouped_matmul.unpack import columns_of, factors_of, unpack
from pallas_kernels.pallas_gpu import dot, interpret_here, power_of_two, triton_call, tuned

DEFAULTS = {
    "bfloat16 M16": {"block_n": 64, "block_k": 128, "num_warps": 4, "num_stages": 4, "swap": 1},
    "bfloat16 M32": {"block_n": 64, "block_k": 128, "num_warps": 4, "num_stages": 4, "swap": 1},
    "bfloat16 M64": {"block_n": 128, "block_k": 64, "num_warps": 4, "num_stages": 3},
    "bfloat16 M128": {"block_n": 128, "block_k": 64, "num_warps": 8, "num_stages": 3},
    "mxfp4 M16": {"block_n": 64, "block_k": 128, "num_warps": 4, "num_stages": 4},
    "mxfp4 M32": {"block_n": 64, "block_k": 128, "num_warps": 4, "num_stages": 4},
    "mxfp4 M64": {"block_n": 128, "block_k": 128, "num_warps": 4, "num_stages": 3, "swap": 1},
    "mxfp4 M128": {"block_n": 128, "block_k": 128, "num_warps": 8, "num_stages": 3, "swap": 1},
    "float32": {"block_n": 64, "block_k": 32, "num_warps": 4, "num_stages": 2},
}
VECTOR = {"most_rows": FEW_ROWS, "block_n": 2, "block_w": 256, "num_warps": 1}
"""Of `triton_vector`, which takes calls of at most so many rows of MXFP4 weights."""


def grouped_matmul(
    x: jax.Array,
    weight: jax.Array | Mxfp4,
    group_sizes: jax.Array,
    *,
    bias: jax.Array | None,
    rows: jax.Array | None = None,
    activation: Callable[[jax.Array], jax.Array] | None = None,
    tiles: TilePlan | None = None,
    fixed_tile: bool,
    config: dict[str, int] | None = None,
) -> jax.Array:
    """See `api.grouped_matmul`; `config` overrides the tuned launch parameters.

    These are: `block_m` rows, `block_n` outputs and `block_k` columns of a tile; `num_warps`, `num_stages`; `swap`: the
    weight is the left operand of the tensor cores, which on Hopper can come from registers; `group_m`: tiles of rows that go
    through the outputs together; or, with `most_rows`, those of `triton_vector`.
    """
    x = x if activation is None else activation(x)
    packed = isinstance(weight, Mxfp4)
    if packed and x.dtype == jnp.float16:
        raise NotImplementedError("MXFP4 weights of float16 activations: their range is too small for the scales.")
    for name, array in (("blocks", weight.blocks),) if packed else (("weight", weight),):
        if array.size >= 2**31:
            raise NotImplementedError(f"{name} of {array.size} elements need 64-bit offsets.")
    num_rows = x.shape[0] if rows is None else rows.shape[0]
    block_m = rows_of_tile(num_rows, weight.shape[0], fixed_tile)
    if config is not None:
        block_m = config.get("block_m", block_m)
    kind = "mxfp4" if packed else "bfloat16" if x.dtype.itemsize == 2 else "float32"
    default = DEFAULTS["float32"] if x.dtype == jnp.float32 else DEFAULTS[f"{kind} M{min(block_m, 128)}"]
    key = f"{kind} {'fixed' if fixed_tile else f'M{block_m}'}"
    chosen = {"block_m": block_m, **tuned("grouped_matmul.triton", key, default), **(config or {})}
    if tiles is None or tiles.block != chosen["block_m"]:
        tiles = plan_tiles(group_sizes, num_rows, chosen["block_m"])
    few = tuned("grouped_matmul.triton", "mxfp4 vector", VECTOR) if config is None else config
    if packed and not fixed_tile and num_rows <= few.get("most_rows", 0):
        return triton_vector.multiply(x, weight, tiles, rows, bias, few)
    return _matmul(x, weight, tiles, rows, bias, interpret=interpret_here(), config=tuple(sorted(chosen.items())))


@functools.partial(jax.jit, static_argnames=("interpret", "config"))
def _matmul(x, weight, plan, rows, bias, *, interpret, config):
    options = dict(config)
    columns, (groups, out, _) = x.shape[1], weight.shape
    num_rows = x.shape[0] if rows is None else rows.shape[0]
    packed = isinstance(weight, Mxfp4)
    tiles = count_tiles(num_rows, groups, options["block_m"])
    arrays = (x, weight.blocks, weight.scales) if packed else (x, weight)
    extra = [array for array in (rows, bias) if array is not None]
    inputs = (plan.group, plan.begin, plan.end, *arrays, *extra)
    kernel = functools.partial(
        _kernel,
        tiles=tiles,
        groups=groups,
        packed=packed,
        has_rows=rows is not None,
        has_bias=bias is not None,
        block_m=options["block_m"],
        block_n=options["block_n"],
        block_k=min(options["block_k"], max(power_of_two(columns), 2 * BLOCK if packed else 16)),
        swap=bool(options.get("swap", 0)),
        early=_early(**options),
        ahead=options.get("group_m", 8),
        interpret=interpret,
    )
    return triton_call(
        kernel,
        grid=(tiles * pl.cdiv(out, options["block_n"]),),
        out_shape=jax.ShapeDtypeStruct((num_rows, out), x.dtype),
        num_inputs=len(inputs),
        num_warps=options["num_warps"],
        num_stages=options["num_stages"],
        interpret=interpret,
        name="grouped_matmul",
    )(*inputs)


def _kernel(
    group_ref, begin_ref, end_ref, x_ref, *refs,
    tiles, groups, packed, has_rows, has_bias, block_m, block_n, block_k, swap, early, ahead, interpret,
):  # fmt: skip
    """`block_m` rows of one group times `block_n` of its outputs."""
    *weight_refs, out_ref = refs
    bias_ref = weight_refs.pop() if has_bias else None
    rows_ref = weight_refs.pop() if has_rows else None
    columns, (num_rows, num_outputs) = x_ref.shape[1], out_ref.shape
    tile, number = _place(pl.program_id(0), tiles, pl.cdiv(num_outputs, block_n), ahead)
    group, begin, end = group_ref[tile], begin_ref[tile], end_ref[tile]
    row, output = begin + jnp.arange(block_m, dtype=jnp.int32), number * block_n + jnp.arange(block_n, dtype=jnp.int32)

    def across(rows, outputs):
        """Both as axes of the accumulator, which `swap` turns."""
        return (rows[None, :], outputs[:, None]) if swap else (rows[:, None], outputs[None, :])

    def store(values):
        live_row, live_output = across(row < end, output < num_outputs)
        pltriton.store(out_ref.at[across(row, output)], values, mask=live_row & live_output)

    shape = (block_n, block_m) if swap else (block_m, block_n)

    @pl.when((begin < end) & (group == groups))
    def _():
        store(jnp.zeros(shape, out_ref.dtype))

    @pl.when((begin < end) & (group < groups))
    def _():
        # Rows and outputs past the end are computed from the last one and not stored: cheaper than masks.
        x_row, w_row = jnp.minimum(row, num_rows - 1), jnp.minimum(output, num_outputs - 1)[:, None]
        x_row = (x_row if rows_ref is None else pltriton.load(rows_ref.at[x_row]))[:, None]
        read = functools.partial(_read, columns=columns, block_k=block_k)

        def dense(step, acc):
            column = step * block_k + jnp.arange(block_k, dtype=jnp.int32)
            x = read(x_ref.at[x_row, column[None, :]], block_m, column)
            w = read(weight_refs[0].at[group, w_row, column[None, :]], block_n, column)
            return acc + (dot(w, x, trans_b=True) if swap else dot(x, w, trans_b=True))

        def scales_of(step):
            block = step * (block_k // BLOCK) + jnp.arange(block_k // BLOCK, dtype=jnp.int32)
            return pltriton.load(weight_refs[1].at[group, w_row, block[None, :]])  # rows are padded: no mask

        def mxfp4(step, carry):
            acc, scales = carry
            word = step * (block_k // CODES) + jnp.arange(block_k // CODES, dtype=jnp.int32)
            words = read(weight_refs[0].at[group, w_row, word[None, :]], block_n, word, CODES)
            after = scales_of(jnp.minimum(step + 1, steps - 1)) if early else ()
            factor = factors_of(scales if early else scales_of(step), words.shape)
            column = columns_of(word)
            for place in range(CODES):
                x = read(x_ref.at[x_row, (column + WORDS * place)[None, :]], block_m, column)
                w = unpack(words, factor, place, interpret).astype(x.dtype)
                acc = acc + (dot(w, x, trans_b=True) if swap else dot(x, w, trans_b=True))
            return acc, after

        steps, acc = pl.cdiv(columns, block_k), jnp.zeros(shape, jnp.float32)
        if packed:
            acc, _ = jax.lax.fori_loop(0, steps, mxfp4, (acc, scales_of(0) if early else ()))
        else:
            acc = jax.lax.fori_loop(0, steps, dense, acc)
        if bias_ref is not None:
            bias = pltriton.load(bias_ref.at[group, jnp.minimum(output, num_outputs - 1)])
            acc = acc + across(row, bias.astype(jnp.float32))[1]
        store(acc.astype(out_ref.dtype))


def _early(*, block_n, block_k, num_warps, **_):
    """Whether a step loads the next one's scales: where a thread's share is too small to be copied ahead by itself."""
    return block_n * block_k // BLOCK < 4 * 32 * num_warps


def _place(program, tiles, numbers, ahead):
    """(tile of rows, tile of outputs): `ahead` tiles of rows go through the outputs together, to share them in the L2."""
    first = jax.lax.div(program, ahead * numbers) * ahead
    height = jnp.minimum(tiles - first, ahead)
    inside = jax.lax.rem(program, ahead * numbers)
    return first + jax.lax.rem(inside, height), jax.lax.div(inside, height)


def _read(ref, rows, column, each=1, *, columns, block_k):
    """A tile of `rows` rows whose columns past the end are zero; `column` counts elements that have `each` columns.

    It must run on without gaps: of a mask of every fourth number Triton does not see that neighbours are alike, and reads one
    element at a time (1.8 times slower).
    """
    if columns % block_k == 0:
        return pltriton.load(ref)
    mask = jnp.broadcast_to((column < columns // each)[None, :], (rows, column.shape[0]))
    return pltriton.load(ref, mask=mask, other=0)
