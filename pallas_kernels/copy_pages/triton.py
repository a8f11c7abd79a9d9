"""Pallas-Triton implementation of the page copies: one program moves one piece of one page of one layer."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.pallas_gpu import interpret_here, power_of_two, triton_call

PIECE = 4096
"""Numbers that one program moves."""


def gather_pages(kv_pages: jax.Array, page_ids: jax.Array) -> jax.Array:
    """See `api.gather_pages`."""
    return _gather(kv_pages, page_ids, interpret=interpret_here())


def scatter_pages(kv_pages: jax.Array, page_ids: jax.Array, pages: jax.Array) -> jax.Array:
    """See `api.scatter_pages`; the pool is an aliased operand."""
    return _scatter(kv_pages, page_ids, pages, interpret=interpret_here())


def copy_within(kv_pages: jax.Array, src: jax.Array, dst: jax.Array) -> jax.Array:
    """See `api.copy_within`; the pool is an aliased operand."""
    return _copy(kv_pages, src, dst, interpret=interpret_here())


@functools.partial(jax.jit, static_argnames="interpret")
def _gather(kv_pages, page_ids, *, interpret):
    shape = (page_ids.shape[0], kv_pages.shape[0], *kv_pages.shape[2:])
    pages = _launch(_gather_kernel, kv_pages, page_ids, _flat(kv_pages), out=shape, aliases={}, interpret=interpret)
    return pages.reshape(shape)


@functools.partial(jax.jit, static_argnames="interpret")
def _scatter(kv_pages, page_ids, pages, *, interpret):
    inputs = page_ids, pages.reshape(*pages.shape[:2], -1), _flat(kv_pages)
    return _launch(_scatter_kernel, kv_pages, *inputs, out=kv_pages.shape, aliases={2: 0}, interpret=interpret)


@functools.partial(jax.jit, static_argnames="interpret")
def _copy(kv_pages, src, dst, *, interpret):
    inputs = src, dst, _flat(kv_pages)
    return _launch(_copy_kernel, kv_pages, *inputs, out=kv_pages.shape, aliases={2: 0}, interpret=interpret)


def _flat(kv_pages: jax.Array) -> jax.Array:
    """`[L, P, numbers of a page]`; no byte moves."""
    return kv_pages.reshape(*kv_pages.shape[:2], -1)


def _launch(
    kernel: Callable[..., None],
    kv_pages: jax.Array,
    *inputs: Any,
    out: tuple[int, ...],
    aliases: dict[int, int],
    interpret: bool,
) -> jax.Array:
    numbers = math.prod(kv_pages.shape[2:])
    pages = triton_call(
        functools.partial(kernel, num_pages=kv_pages.shape[1], piece=min(PIECE, power_of_two(numbers))),
        grid=(pl.cdiv(numbers, PIECE), kv_pages.shape[0], inputs[0].shape[0]),
        out_shape=jax.ShapeDtypeStruct((*out[:2], numbers), kv_pages.dtype),
        num_inputs=len(inputs),
        num_warps=4,
        num_stages=1,
        interpret=interpret,
        name=kernel.__name__.strip("_").removesuffix("_kernel"),
        aliases=aliases,
    )(*inputs)
    return pages.reshape(out)


def _place(piece, numbers):
    """This program's layer and entry of the id arrays, its columns of a page, and which of them exist."""
    column = pl.program_id(0) * piece + jnp.arange(piece, dtype=jnp.int32)
    return pl.program_id(1), pl.program_id(2), column, column < numbers


def _gather_kernel(ids_ref, pool_ref, out_ref, *, num_pages, piece):
    layer, entry, column, inside = _place(piece, pool_ref.shape[2])
    page = ids_ref[entry]
    known = inside & (page >= 0) & (page < num_pages)
    numbers = pltriton.load(pool_ref.at[layer, jnp.clip(page, 0, num_pages - 1), column], mask=known, other=0.0)
    pltriton.store(out_ref.at[entry, layer, column], numbers, mask=inside)


def _scatter_kernel(ids_ref, pages_ref, pool_ref, out_ref, *, num_pages, piece):
    del pool_ref  # aliased to out_ref
    layer, entry, column, inside = _place(piece, out_ref.shape[2])
    page = ids_ref[entry]

    @pl.when((page >= 0) & (page < num_pages))
    def _():
        numbers = pltriton.load(pages_ref.at[entry, layer, column], mask=inside, other=0.0)
        pltriton.store(out_ref.at[layer, page, column], numbers, mask=inside)


def _copy_kernel(src_ref, dst_ref, pool_ref, out_ref, *, num_pages, piece):
    del pool_ref  # aliased to out_ref
    layer, entry, column, inside = _place(piece, out_ref.shape[2])
    source, target = src_ref[entry], dst_ref[entry]

    @pl.when((source >= 0) & (source < num_pages) & (target >= 0) & (target < num_pages))
    def _():
        numbers = pltriton.load(out_ref.at[layer, source, column], mask=inside, other=0.0)
        pltriton.store(out_ref.at[layer, target, column], numbers, mask=inside)
