"""Merging attention states (H18): parts, empty parts and sinks (a sink belongs to the query, never to a part)."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import add_sinks, merge_states

TOKENS, HEADS, KEYS, DIM = 5, 4, 24, 16
SINKS = np.array([-50.0, 0.0, 2.0, 10.0], np.float32)


def _problem(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits `[T, H, N]` and values `[N, H, D]`; token 3 sees nothing before key 12, token 4 sees nothing at all."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((TOKENS, HEADS, KEYS)) * 3
    logits[3, :, :12] = -np.inf
    logits[4] = -np.inf
    return logits, rng.standard_normal((KEYS, HEADS, DIM))


def _state(logits: np.ndarray, values: np.ndarray) -> tuple[jnp.ndarray, jnp.ndarray]:
    """State of one part in f32, computed in f64; NaN where a part is empty would be legal, zero is what ops give."""
    with np.errstate(invalid="ignore"):
        top = logits.max(-1, keepdims=True, initial=-1e300)
        weights = np.exp(logits - top)
    total = weights.sum(-1)
    safe = np.where(total == 0, 1.0, total)
    out = np.einsum("thn,nhd->thd", weights, values) / safe[..., None]
    lse = np.where(total == 0, -np.inf, top[..., 0] + np.log(safe))
    return jnp.asarray(out, jnp.float32), jnp.asarray(lse, jnp.float32)


def _single_pass(logits: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Softmax over all keys and one sink, in f64."""
    top = np.maximum(logits.max(-1), SINKS)
    weights = np.exp(logits - top[..., None])
    total = weights.sum(-1) + np.exp(SINKS - top)
    return np.einsum("thn,nhd->thd", weights, values) / total[..., None]


def _merged(logits: np.ndarray, values: np.ndarray, parts: int) -> tuple[jnp.ndarray, jnp.ndarray]:
    states = [
        _state(l, v)
        for l, v in zip(np.split(logits, parts, axis=-1), np.split(values, parts, axis=0), strict=True)  # noqa: E741
    ]
    state = states[0]
    for other in states[1:]:
        state = merge_states(*state, *other)
    return state


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_parts_with_one_sink_equal_a_single_pass(parts: int) -> None:
    logits, values = _problem(parts)
    out, lse = add_sinks(*_merged(logits, values, parts), jnp.asarray(SINKS))
    assert np.abs(np.asarray(out) - _single_pass(logits, values)).max() < 1e-5
    assert not np.any(out[4])
    assert np.all(np.isneginf(lse[4]))


@pytest.mark.parametrize("parts", [2, 4])
def test_a_sink_per_part_would_be_caught(parts: int) -> None:
    """The bar of the test above must reject the classic mistake."""
    logits, values = _problem(parts)
    sinks = jnp.asarray(SINKS)
    pieces = zip(np.split(logits, parts, axis=-1), np.split(values, parts, axis=0), strict=True)
    state = None
    for logit, value in pieces:
        mutant = add_sinks(*_state(logit, value), sinks)
        state = mutant if state is None else merge_states(*state, *mutant)
    assert state is not None
    assert np.abs(np.asarray(state[0]) - _single_pass(logits, values)).max() > 1e-2


def test_merging_with_an_empty_part_keeps_every_bit() -> None:
    state = _state(*_problem(0))
    unwritten = jnp.full_like(state[0], jnp.nan), jnp.full_like(state[1], -jnp.inf)
    for merged in (merge_states(*state, *unwritten), merge_states(*unwritten, *state)):
        for got, want in zip(merged, state, strict=True):
            np.testing.assert_array_equal(np.asarray(got)[:4], np.asarray(want)[:4])


def test_two_empty_parts_are_empty_and_never_nan() -> None:
    empty = jnp.zeros((2, 3, 8)), jnp.full((2, 3), -jnp.inf)
    out, lse = add_sinks(*merge_states(*empty, *empty), jnp.array([-50.0, 0.0, 10.0]))
    assert not np.any(out)
    assert np.all(np.isneginf(lse))


def test_merge_is_symmetric_in_its_bits_and_keeps_the_dtype() -> None:
    logits, values = _problem(7)
    a, b = _state(logits[..., :12], values[:12]), _state(logits[..., 12:], values[12:])
    for got, want in zip(merge_states(*a, *b), merge_states(*b, *a), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    assert merge_states(a[0].astype(jnp.bfloat16), a[1], b[0].astype(jnp.bfloat16), b[1])[0].dtype == jnp.bfloat16
