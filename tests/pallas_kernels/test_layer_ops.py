"""add_rms_norm and qkv_rope: every implementation against float64, rows on their own, and bad arguments."""

from __future__ import annotations

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
    table = jnp.ones((3, 1, 1))
    with pytest.raises(ValueError, match="qkv must be"):
        pk.qkv_rope(x, table, table, num_heads=3, num_kv_heads=1)
    with pytest.raises(ValueError, match="cos must be"):
        pk.qkv_rope(x, table[:2], table, num_heads=2, num_kv_heads=1)
    with pytest.raises(ValueError, match="go together"):
        pk.qkv_rope(x, table, table, num_heads=2, num_kv_heads=1, q_norm=jnp.ones(2))
