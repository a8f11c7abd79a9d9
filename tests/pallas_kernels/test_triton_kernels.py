"""Pallas-Triton kernels in Pallas' interpreter, and lowered for CUDA without a GPU."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels import pallas_gpu

MODULES = (
    "add_rms_norm", "append_kv", "copy_pages", "grouped_matmul", "paged_decode_attention", "qkv_rope",
    "ragged_paged_attention", "shared_prefix_attention",
)  # fmt: skip
LENS, Q_LENS = [0, 1, 16, 100, 128, 33], [0, 1, 3, 37, 128, 1]


def attention_inputs(heads, kv_heads, head_dim, page, *, seed=0, dtype=jnp.float32):
    """Rows of LENS keys; unowned pages and slots past the end are NaN; 128 queries and more."""
    rng = np.random.default_rng(seed)
    batch, columns = len(LENS), -(-max(LENS) // page) + 1
    pool = np.full(pk.pool_shape(2, batch * columns + 3, page, kv_heads, head_dim), np.nan, np.float32)
    order = rng.permutation(pool.shape[1])[: batch * columns].reshape(batch, columns)
    table = np.full((batch, columns), -1, np.int32)
    for row, n in enumerate(LENS):
        for column in range(-(-n // page)):
            table[row, column] = order[row, column]
            used = min(page, n - column * page)
            pool[:, order[row, column], :, :, :used] = rng.normal(size=(2, kv_heads, 2, used, head_dim))
    q = rng.normal(size=(sum(Q_LENS) + 3, heads, head_dim))
    return jnp.asarray(q, dtype), jnp.asarray(pool, dtype), jnp.asarray(table), jnp.asarray(LENS, jnp.int32)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page", "options"),
    [
        (8, 2, 64, 16, {}),
        (6, 2, 80, 32, {"soft_cap": 5.0, "sinks": True}),
        (4, 4, 64, 16, {"window": 40}),
        (16, 1, 96, 128, {"window": 17, "sinks": True}),
    ],
)
def test_attention_agrees_with_the_reference(heads, kv_heads, head_dim, page, options):
    q, pool, table, lens = attention_inputs(heads, kv_heads, head_dim, page)
    options = {**options, "sinks": jnp.linspace(-1, 1, heads) if options.get("sinks") else None}
    options |= {"layer": 1, "return_lse": True}
    offsets = jnp.asarray(np.cumsum([0, *Q_LENS]), jnp.int32)
    for run in (
        functools.partial(pk.paged_decode_attention, q[: len(LENS)], pool, table, lens, **options),
        functools.partial(pk.ragged_paged_attention, q, pool, table, offsets, lens, **options),
    ):
        for got, want in zip(run(implementation="triton"), run(implementation="reference"), strict=True):
            np.testing.assert_allclose(got, want, atol=1e-5)


def test_decode_bits_of_a_row_do_not_depend_on_its_batch():
    q, pool, table, lens = attention_inputs(8, 2, 64, 16)
    run = functools.partial(pk.paged_decode_attention, layer=0, implementation="triton")
    together = run(q[:6], pool, table, lens)
    for row in range(6):
        alone = run(q[row : row + 1], pool, table[row : row + 1], lens[row : row + 1])
        np.testing.assert_array_equal(alone[0], together[row])


def test_prefill_bits_of_a_row_do_not_depend_on_how_it_was_split():
    q, pool, table, _ = attention_inputs(8, 2, 64, 16)
    run = functools.partial(pk.ragged_paged_attention, layer=0, implementation="triton")
    row = table[4:5]
    whole = run(q[:128], pool, row, jnp.array([0, 128], jnp.int32), jnp.array([128], jnp.int32))
    first = run(q[:48], pool, row, jnp.array([0, 48], jnp.int32), jnp.array([48], jnp.int32))
    second = run(q[48:128], pool, row, jnp.array([0, 80], jnp.int32), jnp.array([128], jnp.int32))
    np.testing.assert_array_equal(np.concatenate([first, second]), whole)


@pytest.mark.parametrize("layer", [0, 1])
def test_append_agrees_with_the_reference_and_refuses_the_same(layer):
    rng = np.random.default_rng(0)
    pool = jnp.asarray(rng.normal(size=pk.pool_shape(2, 7, 16, 3, 80)), jnp.float32)
    k, v = (jnp.asarray(rng.normal(size=(9, 3, 80)), jnp.float32) for _ in range(2))
    ids = jnp.array([0, 0, 1, -1, 2, 3, 6, 7, 5], jnp.int32)
    slots = jnp.array([0, 1, 2, 3, 4, 5, 15, 0, 16], jnp.int32)
    writable = jnp.array([1, 1, 0, 1, 1, 1, 1], bool)
    counts = jnp.array([1, 1, 1, 2, 1, 1, 1], jnp.int32)
    run = functools.partial(pk.append_kv, pool, k, v, ids, slots, writable, counts, layer=layer)
    (got, refused), (want, want_refused) = run(implementation="triton"), run(implementation="reference")
    np.testing.assert_array_equal(got, want)
    assert int(refused) == int(want_refused) == 4


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(64, jnp.bfloat16), (80, jnp.float32), (96, jnp.float16), (128, jnp.bfloat16), (256, jnp.bfloat16)],
)
def test_every_kernel_lowers_for_cuda_without_a_gpu(head_dim, dtype, monkeypatch):
    for name in MODULES:
        module = importlib.import_module(f"pallas_kernels.{name}.triton")
        monkeypatch.setattr(module, "interpret_here", lambda: False)
    monkeypatch.setattr(pallas_gpu, "tuned", lambda op, key, default: default)

    def shape(*dims, kind=jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(dims, kind)

    pool = shape(*pk.pool_shape(2, 64, 16, 2, head_dim), kind=dtype)
    q, kv = shape(9, 8, head_dim, kind=dtype), shape(9, 2, head_dim, kind=dtype)
    table, lens = shape(9, 128), shape(9)
    plan = pk.SharedPrefixPlan(shape(9), shape(4, 3), shape(9, 2))
    options = {"layer": 1, "implementation": "triton"}
    flags = shape(64, kind=jnp.bool_), shape(64)
    programs = {
        pk.paged_decode_attention: (q, pool, table, lens),
        pk.ragged_paged_attention: (q, pool, table, shape(10), lens),
        pk.shared_prefix_attention: (q, pool, table, lens, plan),
        pk.append_kv: (pool, kv, kv, shape(9), shape(9), *flags),
    }
    page_shape = pool.shape[2:]
    copies = {
        pk.gather_pages: (pool, shape(9)),
        pk.scatter_pages: (pool, shape(9), shape(9, 2, *page_shape, kind=dtype)),
        pk.copy_within: (pool, shape(9), shape(9)),
    }
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=None)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        x, rotation = shape(9, 12 * head_dim, kind=dtype), shape(9, 1, head_dim // 2, kind=jnp.float32)
        norm = shape(head_dim, kind=dtype)
        pieces = {
            functools.partial(pk.add_rms_norm, eps=1e-5): (x, x, shape(12 * head_dim, kind=dtype)),
            lambda x, w, p, weight, **k: pk.add_rms_norm(x, pk.ExpertSum(x, w, p), weight, 1e-5, **k): (
                x, shape(9, 4, kind=jnp.float32), shape(9, 4), shape(12 * head_dim, kind=dtype),
            ),
            lambda x, b, **k: pk.add_rms_norm(x, x, b, 1e-5, bias=b, **k): (x, shape(12 * head_dim, kind=dtype)),
            lambda x, c, s, b, **k: pk.qkv_rope(x, c, s, num_heads=8, num_kv_heads=2, bias=b, **k): (
                x, rotation, rotation, shape(12 * head_dim, kind=dtype),
            ),
            functools.partial(pk.qkv_rope, num_heads=8, num_kv_heads=2): (x, rotation, rotation),
            lambda x, c, s, n, **k: pk.qkv_rope(x, c, s, num_heads=8, num_kv_heads=2, q_norm=n, k_norm=n, **k): (
                x, rotation, rotation, norm,
            ),
        }  # fmt: skip
        for op, args in {**programs, **copies, **pieces}.items():
            keywords = options if op in programs else {"implementation": "triton"}
            traced = jax.jit(functools.partial(op, **keywords)).trace(*args)
            assert "__gpu$xla.gpu.triton" in traced.lower(lowering_platforms=("cuda",)).as_text(), op
