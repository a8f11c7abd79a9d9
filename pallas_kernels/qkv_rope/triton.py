"""Pallas-Triton implementation of qkv_rope: one program takes a few heads of one token."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.pallas_gpu import interpret_here, power_of_two, triton_call

HEADS_PER_PROGRAM = 8


def qkv_rope(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    num_heads: int,
    num_kv_heads: int,
    bias: jax.Array | None,
    q_norm: jax.Array | None,
    k_norm: jax.Array | None,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `api.qkv_rope`."""
    heads = num_heads, num_kv_heads
    return _rotate(qkv, cos, sin, bias, q_norm, k_norm, heads=heads, eps=eps, interpret=interpret_here())


@functools.partial(jax.jit, static_argnames=("heads", "eps", "interpret"))
def _rotate(qkv, cos, sin, bias, q_norm, k_norm, *, heads, eps, interpret):
    num_heads, num_kv_heads = heads
    tokens, half = qkv.shape[0], cos.shape[-1]
    inputs = (qkv, cos.reshape(tokens, half), sin.reshape(tokens, half))
    inputs += () if bias is None else (bias,)
    inputs += () if q_norm is None else (q_norm, k_norm)
    return triton_call(
        functools.partial(_kernel, heads=heads, half=half, eps=eps, has_bias=bias is not None),
        grid=(tokens, pl.cdiv(num_heads + 2 * num_kv_heads, HEADS_PER_PROGRAM)),
        out_shape=tuple(
            jax.ShapeDtypeStruct((tokens, n, 2 * half), qkv.dtype) for n in (num_heads, num_kv_heads, num_kv_heads)
        ),
        num_inputs=len(inputs),
        num_warps=4,
        num_stages=1,
        interpret=interpret,
        name="qkv_rope",
    )(*inputs)


def _kernel(qkv_ref, cos_ref, sin_ref, *refs, heads, half, eps, has_bias):
    *norm_refs, q_ref, k_ref, v_ref = refs
    bias_refs = [norm_refs.pop(0)] if has_bias else []
    num_heads, num_kv_heads = heads
    token = pl.program_id(0)
    head = pl.program_id(1) * HEADS_PER_PROGRAM + jnp.arange(HEADS_PER_PROGRAM, dtype=jnp.int32)[:, None]
    column = jnp.arange(power_of_two(half), dtype=jnp.int32)[None, :]
    inside = column < half
    mask = (head < num_heads + 2 * num_kv_heads) & inside
    place = head * (2 * half) + column
    first = pltriton.load(qkv_ref.at[token, place], mask=mask, other=0.0)
    second = pltriton.load(qkv_ref.at[token, place + half], mask=mask, other=0.0)
    a, b = first.astype(jnp.float32), second.astype(jnp.float32)
    for ref in bias_refs:
        a = a + pltriton.load(ref.at[place], mask=mask, other=0.0).astype(jnp.float32)
        b = b + pltriton.load(ref.at[place + half], mask=mask, other=0.0).astype(jnp.float32)
        first, second = a.astype(qkv_ref.dtype), b.astype(qkv_ref.dtype)
    is_query = head < num_heads
    if norm_refs:
        q_norm, k_norm = norm_refs
        scale = jax.lax.rsqrt(jnp.sum(a * a + b * b, axis=1) / (2 * half) + eps)[:, None]

        def weigh(x, shift):
            at = column + shift
            of_q, of_k = (pltriton.load(ref.at[at], mask=inside, other=0.0) for ref in (q_norm, k_norm))
            return ((x * scale).astype(qkv_ref.dtype) * jnp.where(is_query, of_q, of_k)).astype(jnp.float32)

        a, b = weigh(a, 0), weigh(b, half)
    cos = pltriton.load(cos_ref.at[token, column], mask=inside, other=0.0)
    sin = pltriton.load(sin_ref.at[token, column], mask=inside, other=0.0)
    left, right = (a * cos - b * sin).astype(qkv_ref.dtype), (b * cos + a * sin).astype(qkv_ref.dtype)
    for ref, values, begin in (
        (q_ref, (left, right), 0),
        (k_ref, (left, right), num_heads),
        (v_ref, (first, second), num_heads + num_kv_heads),
    ):
        own = mask & (head >= begin) & (head < begin + ref.shape[1])
        for number, shift in zip(values, (0, half), strict=True):
            pltriton.store(ref.at[token, head - begin, column + shift], number, mask=own)
