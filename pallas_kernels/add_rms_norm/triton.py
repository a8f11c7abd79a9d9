"""Pallas-Triton implementation of add_rms_norm: one program a row."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.add_rms_norm.api import ExpertSum
from pallas_kernels.pallas_gpu import interpret_here, power_of_two, triton_call

MAX_WIDTH = 16384


def add_rms_norm(
    x: jax.Array,
    delta: jax.Array | ExpertSum | None,
    weight: jax.Array,
    *,
    bias: jax.Array | None,
    eps: float,
    round_last: bool,
) -> tuple[jax.Array, jax.Array]:
    """See `api.add_rms_norm`."""
    if x.shape[1] > MAX_WIDTH:
        raise NotImplementedError(f"Triton norms take rows of at most {MAX_WIDTH} numbers, got {x.shape[1]}.")
    return _norm(x, delta, weight, bias, eps=eps, round_last=round_last, interpret=interpret_here())


@functools.partial(jax.jit, static_argnames=("eps", "round_last", "interpret"))
def _norm(x, delta, weight, bias, *, eps, round_last, interpret):
    kind = "none" if delta is None else "sum" if isinstance(delta, ExpertSum) else "array"
    added = {"none": (), "sum": delta, "array": (delta,)}[kind]
    inputs = (x, weight, *added) if bias is None else (x, weight, *added, bias)
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    results = triton_call(
        functools.partial(_kernel, eps=eps, round_last=round_last, kind=kind, has_bias=bias is not None),
        grid=(x.shape[0],),
        out_shape=(out,) if delta is None else (out, out),
        num_inputs=len(inputs),
        num_warps=8 if x.shape[1] > 1024 else 4,
        num_stages=1,
        interpret=interpret,
        name="add_rms_norm",
    )(*inputs)
    return (x, results[0]) if delta is None else (results[1], results[0])


def _kernel(x_ref, weight_ref, *refs, eps, round_last, kind, has_bias):
    row, width = pl.program_id(0), x_ref.shape[1]
    column = jnp.arange(power_of_two(width), dtype=jnp.int32)
    inside = column < width

    def numbers(ref, *place):
        return pltriton.load(ref.at[*place, column], mask=inside, other=0.0).astype(jnp.float32)

    x32 = numbers(x_ref, row)
    if kind == "none":
        (normed_ref,) = refs
    else:
        *refs, normed_ref, sum_ref = refs
        if kind == "sum":
            rows_ref, weights_ref, place_ref = refs
            parts = (weights_ref[row, j] * numbers(rows_ref, place_ref[row, j]) for j in range(place_ref.shape[1]))
            delta = functools.reduce(jnp.add, parts)
        else:
            delta = numbers(refs[0], row)
        if has_bias:
            delta = delta + numbers(refs[-1])
        total = (x32 + delta).astype(x_ref.dtype)
        pltriton.store(sum_ref.at[row, column], total, mask=inside)
        x32 = total.astype(jnp.float32)
    weight = pltriton.load(weight_ref.at[column], mask=inside, other=0.0)
    normed = x32 * jax.lax.rsqrt(jnp.sum(x32 * x32) / width + eps)
    if round_last:
        normed = (normed * weight.astype(jnp.float32)).astype(x_ref.dtype)
    else:
        normed = (normed.astype(x_ref.dtype) * weight).astype(normed_ref.dtype)
    pltriton.store(normed_ref.at[row, column], normed, mask=inside)
