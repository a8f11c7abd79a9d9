"""add_rms_norm and qkv_rope: every implementation against float64, rows on their own, and bad arguments."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk

IMPLEMENTATIONS = ["reference", "triton"]
BARS = {"float32": 2e-6, "bfloat16": 2**-7, "float16": 2**-9}


def normed(x, weight, eps):
    x = np.asarray(x, np.float64)
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * np.asarray(weight, np.float64)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", list(BARS))
@pytest.mark.parametrize("width", [64, 576])
@pytest.mark.parametrize("with_delta", [False, True])
def test_add_rms_norm_against_float64(implementation, dtype, width, with_delta):
    rng = np.random.default_rng(0)
    x, delta = (jnp.asarray(3 * rng.normal(size=(5, width)), dtype) for _ in range(2))
    weight = jnp.asarray(1 + rng.normal(size=width) / 4, dtype)
    total, got = pk.add_rms_norm(x, delta if with_delta else None, weight, 1e-5, implementation=implementation)
    assert total.dtype == got.dtype == x.dtype
    np.testing.assert_array_equal(total, x + delta if with_delta else x)
    want = normed(total.astype(jnp.float32), weight.astype(jnp.float32), 1e-5)
    np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=2 * BARS[dtype], atol=BARS[dtype])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", list(BARS))
@pytest.mark.parametrize(("width", "k", "num_rows"), [(64, 1, 5), (72, 4, 23), (576, 8, 40)])
def test_add_rms_norm_adds_the_outputs_of_experts_up(implementation, dtype, width, k, num_rows):
    rng = np.random.default_rng(7)
    x, rows = (jnp.asarray(rng.normal(size=(n, width)), dtype) for n in (5, num_rows))
    weights = jnp.asarray(rng.uniform(size=(5, k)), jnp.float32)
    place = jnp.asarray(rng.integers(0, num_rows, (5, k)), jnp.int32).at[0, 0].set(num_rows - 1)
    weight, options = jnp.ones(width, dtype), {"implementation": implementation}
    total, got = pk.add_rms_norm(x, pk.ExpertSum(rows, weights, place), weight, 1e-5, **options)
    wide = np.asarray(rows, np.float64)
    want = np.asarray(x, np.float64) + (np.asarray(weights, np.float64)[..., None] * wide[np.asarray(place)]).sum(1)
    np.testing.assert_allclose(total.astype(jnp.float32), want, rtol=2 * BARS[dtype], atol=2 * BARS[dtype])
    np.testing.assert_array_equal(got, pk.add_rms_norm(total, None, weight, 1e-5, **options)[1])
    alone = pk.add_rms_norm(x[2:3], pk.ExpertSum(rows, weights[2:3], place[2:3]), weight, 1e-5, **options)
    np.testing.assert_array_equal(alone[0][0], total[2])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", list(BARS))
def test_add_rms_norm_adds_a_bias(implementation, dtype):
    rng = np.random.default_rng(8)
    x, delta = (jnp.asarray(rng.normal(size=(5, 72)), dtype) for _ in range(2))
    bias, weight = jnp.asarray(rng.normal(size=72), dtype), jnp.ones(72, dtype)
    total, got = pk.add_rms_norm(x, delta, weight, 1e-5, bias=bias, implementation=implementation)
    want = sum(np.asarray(part, np.float64) for part in (x, delta, bias))
    np.testing.assert_allclose(total.astype(jnp.float32), want, rtol=BARS[dtype], atol=BARS[dtype])
    np.testing.assert_array_equal(got, pk.add_rms_norm(total, None, weight, 1e-5, implementation=implementation)[1])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_add_rms_norm_rounds_what_it_adds_up_once(implementation, dtype):
    x, delta, small = (jnp.full((1, 2), number, dtype) for number in (-1, 1, 2.0**-12))
    rows, weights, place = jnp.concatenate([delta, small]), jnp.ones((1, 2)), jnp.asarray([[0, 1]], jnp.int32)
    options = {"eps": 1e-5, "implementation": implementation}
    for added, bias in ((delta, small[0]), (pk.ExpertSum(rows, weights, place), None)):
        total, _ = pk.add_rms_norm(x, added, jnp.ones(2, dtype), bias=bias, **options)
        np.testing.assert_array_equal(total.astype(jnp.float32), [[2.0**-12, 2.0**-12]])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", list(BARS))
@pytest.mark.parametrize("norms", [False, True])
def test_qkv_rope_adds_a_bias_first(implementation, dtype, norms):
    rng = np.random.default_rng(9)
    qkv = jnp.asarray(rng.normal(size=(5, 11 * 24)), dtype)
    bias, norm = jnp.asarray(rng.normal(size=11 * 24), dtype), jnp.asarray(rng.normal(size=24), dtype)
    angles = rng.uniform(0, 6, size=(5, 1, 12))
    tables = [jnp.asarray(part, jnp.float32) for part in (np.cos(angles), np.sin(angles))]
    options = {"num_heads": 5, "num_kv_heads": 3, "implementation": implementation}
    options |= {"q_norm": norm, "k_norm": norm, "eps": 1e-6} if norms else {}
    got = pk.qkv_rope(qkv, *tables, bias=bias, **options)
    wide = {name: value.astype(jnp.float32) if hasattr(value, "astype") else value for name, value in options.items()}
    added = qkv.astype(jnp.float32) + bias.astype(jnp.float32)
    for one, other in zip(got, pk.qkv_rope(added, *tables, **wide), strict=True):
        assert one.dtype == dtype
        np.testing.assert_allclose(one.astype(jnp.float32), other, rtol=4 * BARS[dtype], atol=4 * BARS[dtype])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_no_tokens_give_empty_arrays(implementation, with_bias):
    x, table, bias = jnp.ones((0, 8)), jnp.ones((0, 1, 1)), jnp.ones(8) if with_bias else None
    heads = pk.qkv_rope(x, table, table, num_heads=2, num_kv_heads=1, bias=bias, implementation=implementation)
    assert [part.shape for part in heads] == [(0, 2, 2), (0, 1, 2), (0, 1, 2)]
    delta = x if with_bias else pk.ExpertSum(x, jnp.ones((0, 2)), jnp.zeros((0, 2), jnp.int32))
    for part in pk.add_rms_norm(x, delta, jnp.ones(8), 1e-5, bias=bias, implementation=implementation):
        assert part.shape == (0, 8)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_two_roundings_differ_in_the_last_bit_of_bfloat16_only(implementation):
    rng = np.random.default_rng(1)
    x, weight = jnp.asarray(rng.normal(size=(64, 64)), jnp.bfloat16), jnp.asarray(rng.normal(size=64), jnp.bfloat16)
    first, last = (
        pk.add_rms_norm(x, None, weight, 1e-6, round_last=flag, implementation=implementation)[1]
        for flag in (False, True)
    )
    assert not jnp.array_equal(first, last)
    np.testing.assert_allclose(first.astype(jnp.float32), last.astype(jnp.float32), rtol=2**-7)


def test_the_triton_norm_of_a_row_does_not_depend_on_the_others():
    rng = np.random.default_rng(2)
    x, weight = jnp.asarray(rng.normal(size=(6, 96)), jnp.float32), jnp.ones(96)
    together = pk.add_rms_norm(x, x, weight, 1e-5, implementation="triton")[1]
    for row in range(6):
        alone = pk.add_rms_norm(x[row : row + 1], x[row : row + 1], weight, 1e-5, implementation="triton")[1]
        np.testing.assert_array_equal(alone[0], together[row])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "norms"), [(4, 2, 16, False), (7, 3, 40, True), (16, 8, 64, True)]
)
def test_qkv_rope_against_float64(implementation, heads, kv_heads, head_dim, norms):
    rng = np.random.default_rng(3)
    tokens, half = 5, head_dim // 2
    qkv = jnp.asarray(rng.normal(size=(tokens, (heads + 2 * kv_heads) * head_dim)), jnp.float32)
    angles = rng.uniform(0, 6, size=(tokens, 1, half))
    weights = [jnp.asarray(rng.normal(size=head_dim), jnp.float32) for _ in range(2)] if norms else [None, None]
    got = pk.qkv_rope(
        qkv, jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32),
        num_heads=heads, num_kv_heads=kv_heads, q_norm=weights[0], k_norm=weights[1], eps=1e-6,
        implementation=implementation,
    )  # fmt: skip
    x = np.asarray(qkv, np.float64).reshape(tokens, -1, head_dim)
    for part, first, count in ((0, 0, heads), (1, heads, kv_heads)):
        want = x[:, first : first + count]
        if norms:
            want = normed(want, weights[part], 1e-6)
        turned = (want[..., :half] + 1j * want[..., half:]) * np.exp(1j * angles)
        np.testing.assert_allclose(got[part], np.concatenate([turned.real, turned.imag], -1), atol=1e-5)
    np.testing.assert_array_equal(got[2], qkv.reshape(tokens, -1, head_dim)[:, heads + kv_heads :])


def test_both_ops_refuse_what_does_not_fit():
    x, weight = jnp.ones((3, 8)), jnp.ones(8)
    with pytest.raises(ValueError, match="delta must be float32"):
        pk.add_rms_norm(x, x[:2], weight, 1e-5)
    with pytest.raises(ValueError, match="weight must be"):
        pk.add_rms_norm(x, None, weight[:4], 1e-5)
    with pytest.raises(NotImplementedError, match="at most 16384 numbers"):
        pk.add_rms_norm(jnp.ones((1, 16400)), None, jnp.ones(16400), 1e-5, implementation="triton")
    rows, weights, place = jnp.ones((7, 8)), jnp.ones((3, 2)), jnp.zeros((3, 2), jnp.int32)
    bad: Any
    for bad, message in (
        (pk.ExpertSum(rows[:, :4], weights, place), r"rows must be float32 \[N, 8\]"),
        (pk.ExpertSum(rows.astype(jnp.bfloat16), weights, place), "rows must be float32"),
        (pk.ExpertSum(rows, weights[:2], place), r"weights must be float32 \[3, k\]"),
        (pk.ExpertSum(rows, weights[:, :0], place[:, :0]), r"weights must be float32 \[3, k\]"),
        (pk.ExpertSum(rows, weights, place[:, :1]), "place must be int32"),
        (pk.ExpertSum(rows, weights, weights), "place must be int32"),
        (pk.ExpertSum(rows[:0], weights, place), "no rows to add up"),
        ((rows, weights, place), "an ExpertSum or None, got tuple"),
    ):
        with pytest.raises(ValueError, match=message):
            pk.add_rms_norm(x, bad, weight, 1e-5)
    for delta, bias in ((None, weight), (pk.ExpertSum(rows, weights, place), weight), (x, weight[:4])):
        with pytest.raises(ValueError, match="bias must be float32"):
            pk.add_rms_norm(x, delta, weight, 1e-5, bias=bias)
    table = jnp.ones((3, 1, 1))
    with pytest.raises(ValueError, match="qkv must be"):
        pk.qkv_rope(x, table, table, num_heads=3, num_kv_heads=1)
    with pytest.raises(ValueError, match="cos must be"):
        pk.qkv_rope(x, table[:2], table, num_heads=2, num_kv_heads=1)
    with pytest.raises(ValueError, match="bias must be float32"):
        pk.qkv_rope(x, table, table, num_heads=2, num_kv_heads=1, bias=weight[:4])
    with pytest.raises(ValueError, match="go together"):
        pk.qkv_rope(x, table, table, num_heads=2, num_kv_heads=1, q_norm=jnp.ones(2))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_norm_of_nothing_is_nothing(implementation):
    for tokens, width in ((0, 8), (3, 0)):
        x = jnp.ones((tokens, width))
        total, got = pk.add_rms_norm(x, x, jnp.ones(width), 1e-5, implementation=implementation)
        assert total.shape == got.shape == (tokens, width)
