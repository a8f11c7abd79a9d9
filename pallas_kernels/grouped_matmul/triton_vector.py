"""Pallas-Triton grouped_matmul of a few rows with MXFP4 weights: one program multiplies each row of a tile by some outputs.

Where a group has one row or two, tensor cores do sixteen times the work that is wanted, and every step waits for them. Here
numbers are multiplied where they are unpacked, all loads of a program are in flight at once, and nothing waits until the end.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.grouped_matmul.mxfp4 import CODES, WORDS, Mxfp4
from pallas_kernels.grouped_matmul.plan import TilePlan, count_tiles
from pallas_kernels.grouped_matmul.unpack import add_products, columns_of, factors_of
from pallas_kernels.pallas_gpu import interpret_here, triton_call


def multiply(
    x: jax.Array,
    weight: Mxfp4,
    plan: TilePlan,
    rows: jax.Array | None,
    bias: jax.Array | None,
    config: dict[str, int],
) -> jax.Array:
    """As `triton.grouped_matmul`; of `config` it takes `block_n` outputs, `block_w` words of four columns, and `num_warps`."""
    names = ("block_n", "block_w", "num_warps")
    sizes = tuple(config[name] for name in names)
    return _multiply(x, weight, plan, rows, bias, sizes=sizes, interpret=interpret_here())


@functools.partial(jax.jit, static_argnames=("sizes", "interpret"))
def _multiply(x, weight, plan, rows, bias, *, sizes, interpret):
    block_n, block_w, num_warps = sizes
    out, num_rows = weight.shape[1], x.shape[0] if rows is None else rows.shape[0]
    extra = [array for array in (rows, bias) if array is not None]
    inputs = (plan.group, plan.begin, plan.end, x, weight.blocks, weight.scales, *extra)
    kernel = functools.partial(
        _kernel,
        groups=weight.shape[0],
        has_rows=rows is not None,
        has_bias=bias is not None,
        block_m=plan.block,
        block_n=block_n,
        block_w=block_w,
        interpret=interpret,
    )
    return triton_call(
        kernel,
        grid=(pl.cdiv(out, block_n), count_tiles(num_rows, weight.shape[0], plan.block)),
        out_shape=jax.ShapeDtypeStruct((num_rows, out), x.dtype),
        num_inputs=len(inputs),
        num_warps=num_warps,
        num_stages=1,
        interpret=interpret,
        name="grouped_matmul_vector",
    )(*inputs)


def _kernel(
    group_ref, begin_ref, end_ref, x_ref, blocks_ref, scales_ref, *refs,
    groups, has_rows, has_bias, block_m, block_n, block_w, interpret,
):  # fmt: skip
    *extra_refs, out_ref = refs
    bias_ref = extra_refs.pop() if has_bias else None
    rows_ref = extra_refs.pop() if has_rows else None
    words, num_outputs = blocks_ref.shape[2], out_ref.shape[1]
    tile = pl.program_id(1)
    group, begin = group_ref[tile], begin_ref[tile]
    end = jnp.minimum(end_ref[tile], begin + block_m)
    output = pl.program_id(0) * block_n + jnp.arange(block_n, dtype=jnp.int32)
    w_row = jnp.minimum(output, num_outputs - 1)[:, None]

    def store(row, values):
        pltriton.store(out_ref.at[row, output], values.astype(out_ref.dtype), mask=output < num_outputs)

    @pl.when(group == groups)
    def _():
        jax.lax.fori_loop(begin, end, lambda row, _: store(row, jnp.zeros(block_n, jnp.float32)), None)

    @pl.when(group < groups)
    def _():
        def one_row(row, _):
            x_row = row if rows_ref is None else rows_ref[row]
            acc = jnp.zeros((block_n, block_w), jnp.float32)
            for first in range(0, words, block_w):
                word = first + jnp.arange(block_w, dtype=jnp.int32)
                inside = None if words % block_w == 0 else (word < words)[None, :]
                some = _load(blocks_ref.at[group, w_row, word[None, :]], inside, (block_n, block_w))
                block = first // WORDS + jnp.arange(block_w // WORDS, dtype=jnp.int32)
                last = scales_ref.shape[2] - 1
                scales = pltriton.load(scales_ref.at[group, w_row, jnp.minimum(block, last)[None, :]])
                factor, column = factors_of(scales, some.shape), columns_of(word)
                x = [
                    _load(x_ref.at[x_row, (column + WORDS * place)[None, :]], inside, (1, block_w)).astype(jnp.float32)
                    for place in range(CODES)
                ]
                acc = add_products(acc, some, factor, [jnp.broadcast_to(part, some.shape) for part in x], interpret)
            total = jnp.sum(acc, axis=1)
            if bias_ref is not None:
                total = total + pltriton.load(bias_ref.at[group, w_row[:, 0]]).astype(jnp.float32)
            store(row, total)

        jax.lax.fori_loop(begin, end, one_row, None)


def _load(ref, inside, shape):
    if inside is None:
        return pltriton.load(ref)
    return pltriton.load(ref, mask=jnp.broadcast_to(inside, shape), other=0)
