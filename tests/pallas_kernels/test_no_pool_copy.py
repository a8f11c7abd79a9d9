"""A step that appends and attends, layer after layer, on a donated pool holds no second copy of the pool."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import append_kv, copy_within, gather_pages, layout, paged_decode_attention, ragged_paged_attention
from pallas_kernels.testing.writes import temp_share

LAYERS, PAGES, HEADS, KV_HEADS, DIM = 4, 4000, 4, 2, 64


def _shape(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _arguments(layers: int, tokens: int, rows: int, pages: int = PAGES) -> tuple[Any, ...]:
    pool = _shape(*layout.pool_shape(layers, pages, 16, KV_HEADS, DIM), dtype=jnp.float32)
    x = _shape(tokens, HEADS, DIM, dtype=jnp.float32)
    return pool, x, _shape(tokens), _shape(pages, dtype=jnp.bool_), _shape(pages), _shape(rows, 8), _shape(rows)


def _prefill(pool: Any, x: Any, ids: Any, writable: Any, refs: Any, table: Any, lens: Any) -> Any:
    offsets = jnp.arange(table.shape[0] + 1, dtype=jnp.int32) * (x.shape[0] // table.shape[0])
    for layer in range(pool.shape[0]):
        k, v = x[:, :KV_HEADS] * 2, x[:, KV_HEADS : 2 * KV_HEADS] + 1
        pool, _ = append_kv(pool, k, v, ids, ids % 16, writable, refs, layer=layer)
        x = x + ragged_paged_attention(x, pool, table, offsets, lens, layer=layer, window=50)
    return pool, x


def _decode(pool: Any, x: Any, ids: Any, writable: Any, refs: Any, table: Any, lens: Any) -> Any:
    for layer in range(pool.shape[0]):
        k, v = x[:, :KV_HEADS] * 2, x[:, KV_HEADS : 2 * KV_HEADS] + 1
        pool, _ = append_kv(pool, k, v, ids, ids % 16, writable, refs, layer=layer)
        x = x + paged_decode_attention(x, pool, table, lens, layer=layer)
    return pool, x


def _decode_loop(pool: Any, x: Any, ids: Any, writable: Any, refs: Any, table: Any, lens: Any) -> Any:
    def body(carry: Any) -> Any:
        step, pool, x, lens = carry
        pool, x = _decode(pool, x, ids + step, writable, refs, table, lens)
        return step + 1, pool, x, lens + 1

    _, pool, x, _ = jax.lax.while_loop(lambda carry: carry[0] < 4, body, (jnp.int32(0), pool, x, lens))
    return pool, x


def test_prefill_step() -> None:
    assert temp_share(_prefill, *_arguments(LAYERS, 32, 2)) < 0.05


def test_decode_step_in_a_loop_of_steps() -> None:
    assert temp_share(_decode_loop, *_arguments(LAYERS, 2, 2)) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("function", [_prefill, _decode_loop])
def test_thirty_layers(function: Any) -> None:
    tokens = 64 if function is _prefill else 4
    assert temp_share(function, *_arguments(30, tokens, 4, pages=2000)) < 0.05


KERNELS = {"pallas_call", "mpmd_map", "core_map"}


def _readers(jaxpr: Any, pool: Any) -> set[str]:
    """Primitives that are given the pool, or the pool by another shape; what calls a function is looked into."""
    found, names = set(), {pool}
    for equation in jaxpr.eqns:
        used = [i for i, var in enumerate(equation.invars) if not hasattr(var, "val") and var in names]
        inner = [p.jaxpr for p in equation.params.values() if hasattr(p, "jaxpr") and hasattr(p, "consts")]
        name = equation.primitive.name
        if used and name == "reshape":
            names.add(equation.outvars[0])
        elif used and name not in KERNELS and len(inner) == 1 and len(inner[0].invars) == len(equation.invars):
            found |= {reader for i in used for reader in _readers(inner[0], inner[0].invars[i])}
        elif used:
            found.add(name)
    return found


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("op", [ragged_paged_attention, paged_decode_attention])
@pytest.mark.parametrize("implementation", ["triton", "mosaic_gpu"])
def test_kernels_read_pages_where_they_lie(implementation: str, op: Any, window: int | None) -> None:
    """A19: prefix and suffix alike; nothing before the kernel gathers, slices or copies the pool."""
    pool = _shape(*layout.pool_shape(2, 50, 64, 2, 64), dtype=jnp.bfloat16)
    q, ends = _shape(32, 8, 64, dtype=jnp.bfloat16), (_shape(3),)
    rows = 32 if op is paged_decode_attention else 2
    more = () if op is paged_decode_attention else ends

    def attend(implementation: str, q: Any, pool: Any, *rest: Any) -> Any:
        return op(q, pool, *rest, layer=1, window=window, implementation=implementation)

    arguments = q, pool, _shape(rows, 9), *more, _shape(rows)
    readers = {}
    for name in (implementation, "reference"):
        jaxpr = jax.make_jaxpr(partial(attend, name))(*arguments).jaxpr
        readers[name] = _readers(jaxpr, jaxpr.invars[1])
    assert readers[implementation]
    assert readers[implementation] <= KERNELS
    assert not readers["reference"] & KERNELS  # which does gather


def test_no_reference_flattens_the_page_axis_into_a_32_bit_offset() -> None:
    """A pool of 70,001 pages, 16 slots, 8 heads of 128, 32 layers has 7e10 numbers: it must be indexed by axes."""
    shape = layout.pool_shape(32, 70_001, 16, 8, 128)
    pool, ids, flags = _shape(*shape, dtype=jnp.bfloat16), _shape(4), _shape(shape[1], dtype=jnp.bool_)
    q, k = _shape(4, 32, 128, dtype=jnp.bfloat16), _shape(4, 8, 128, dtype=jnp.bfloat16)
    programs = [
        jax.jit(lambda *a: ragged_paged_attention(*a, layer=31, implementation="reference")).lower(
            q, pool, _shape(2, 9), _shape(3), _shape(2)
        ),
        jax.jit(lambda *a: paged_decode_attention(*a, layer=31, implementation="reference")).lower(
            q, pool, _shape(4, 9), _shape(4)
        ),
        jax.jit(lambda *a: append_kv(*a, layer=31, implementation="reference")).lower(
            pool, k, k, ids, ids, flags, _shape(shape[1])
        ),
        jax.jit(lambda *a: gather_pages(*a, implementation="reference")).lower(pool, ids),
        jax.jit(lambda *a: copy_within(*a, implementation="reference")).lower(pool, ids, ids),
    ]
    whole = "x".join(map(str, shape))
    for program in programs:
        text = program.as_text()
        assert whole in text
        assert not re.search(rf"stablehlo\.(reshape|transpose)[^\n]*tensor<{whole}x", text)
