"""Choosing the next token inside the jitted steps: greedy, temperature, top-k, top-p and penalties, per row.

A row's token depends on its logits, its own parameters and its own random stream only, never on the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from prefix_reuse.config import SamplingParams

NEG_INF = float("-inf")


class SamplingState(struct.PyTreeNode):
    """Per-row sampling parameters as arrays [B], plus two scalars that let a batch skip what none of its rows uses."""

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    repetition: jax.Array
    presence: jax.Array
    frequency: jax.Array
    seed: jax.Array
    """uint32 [B]"""
    stream: jax.Array
    """int32 [B]: which of the n samples of its prompt the row is."""
    any_random: jax.Array
    """bool scalar"""
    any_penalty: jax.Array
    """bool scalar"""


def sampling_state(params: Sequence[SamplingParams | None], streams: Sequence[int], num_rows: int) -> SamplingState:
    """Packs the parameters of up to `num_rows` rows (None = padding) into numpy arrays for a jitted step."""
    rows = list(params) + [None] * (num_rows - len(params))
    default = SamplingParams()
    rows = [p or default for p in rows]
    stream = np.zeros(num_rows, np.int32)
    stream[: len(streams)] = streams

    def field(name: str, dtype: type) -> np.ndarray:
        return np.array([getattr(p, name) for p in rows], dtype)

    return SamplingState(
        temperature=field("temperature", np.float32),  # type: ignore[arg-type]
        top_k=field("top_k", np.int32),  # type: ignore[arg-type]
        top_p=field("top_p", np.float32),  # type: ignore[arg-type]
        repetition=field("repetition_penalty", np.float32),  # type: ignore[arg-type]
        presence=field("presence_penalty", np.float32),  # type: ignore[arg-type]
        frequency=field("frequency_penalty", np.float32),  # type: ignore[arg-type]
        seed=field("seed", np.uint32),  # type: ignore[arg-type]
        stream=stream,  # type: ignore[arg-type]
        any_random=np.array(any(p.temperature > 0 for p in rows)),  # type: ignore[arg-type]
        any_penalty=np.array(any(p.uses_penalties for p in rows)),  # type: ignore[arg-type]
    )


def apply_penalties(logits: jax.Array, counts: jax.Array, state: SamplingState) -> jax.Array:
    """Penalises tokens seen so far. logits f32 [B, V]; counts int32 [B, V] of the whole text, prompt included."""
    seen = counts > 0
    repetition = state.repetition[:, None]
    logits = jnp.where(seen, jnp.where(logits > 0, logits / repetition, logits * repetition), logits)
    return logits - seen * state.presence[:, None] - counts * state.frequency[:, None]


def keep_likely(logits: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Sets to -inf what top-k, then top-p (Holtzman et al. 2019) cut off. logits f32 [B, V] after the temperature.

    The most likely token always stays. Equal logits at the border of top-k all stay; top-p breaks ties by token id.
    """
    vocab = logits.shape[-1]
    order = jnp.argsort(-logits, axis=-1, stable=True)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    k = jnp.where(top_k > 0, jnp.minimum(top_k, vocab), vocab)
    ranked = jnp.where(ranked >= jnp.take_along_axis(ranked, k[:, None] - 1, axis=-1), ranked, NEG_INF)
    probs = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(probs, axis=-1) - probs
    ranked = jnp.where(before < top_p[:, None], ranked, NEG_INF)
    rank = jnp.argsort(order, axis=-1)
    return jnp.take_along_axis(ranked, rank, axis=-1)


def sample(
    logits: jax.Array, counts: jax.Array, state: SamplingState, index: jax.Array, draw_rows: int = 0
) -> jax.Array:
    """The next token of each row, int32 [B].

    Args:
      logits: f32 [B, V].
      counts: int32 [B, V]; read only when some row has a penalty.
      state: per-row parameters.
      index: int32 [B]: how many tokens the row has generated so far; picks the place in its random stream, so that a
        row continues identically after a hold, an eviction or in another batch.
      draw_rows: random draws are made in a batch of at least this many rows, the rest padding: one shape, so one order in
        which XLA adds up a row's probabilities.
    """
    rows = logits.shape[0]
    more = max(draw_rows - rows, 0)

    def padded(x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, more)] + [(0, 0)] * (x.ndim - 1))

    def draw(logits: jax.Array, likeliest: jax.Array) -> jax.Array:
        scaled = logits / jnp.where(state.temperature > 0, state.temperature, 1.0)[:, None]
        scaled = keep_likely(*(padded(x) for x in (scaled, state.top_k, state.top_p)))[:rows]

        def one(row: jax.Array, seed: jax.Array, stream: jax.Array, i: jax.Array) -> jax.Array:
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), stream), i)
            return jax.random.categorical(key, row)

        drawn = jax.vmap(one)(scaled, state.seed, state.stream, index).astype(jnp.int32)
        return jnp.where(state.temperature > 0, drawn, likeliest)

    def choose(logits: jax.Array) -> jax.Array:
        logits = jax.lax.cond(state.any_penalty, lambda x: apply_penalties(x, counts, state), lambda x: x, logits)
        return jax.lax.cond(state.any_random, draw, lambda _, likeliest: likeliest, logits, greedy(logits))

    # One question for a batch that is all greedy: on a GPU the host waits for its answer, and a branch that hands the logits
    # on copies them.
    likeliest = greedy(logits)
    return jax.lax.cond(state.any_random | state.any_penalty, choose, lambda _: likeliest, logits)


def greedy(logits: jax.Array) -> jax.Array:
    """int32 [B]: the likeliest token of each row of logits [B, V], the first of equals."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def add_counts(counts: jax.Array, tokens: jax.Array, live: jax.Array, state: SamplingState) -> jax.Array:
    """Counts one new token per live row; a no-op while no row has a penalty. counts int32 [B, V], tokens int32 [B]."""

    def add(counts: jax.Array) -> jax.Array:
        rows = jnp.arange(tokens.shape[0])
        return counts.at[rows, tokens].add(live.astype(jnp.int32))

    return jax.lax.cond(state.any_penalty, add, lambda c: c, counts)


def token_counts(token_ids: Sequence[np.ndarray], num_rows: int, vocab_size: int) -> np.ndarray:
    """int32 [B, V]: how often each token occurs in each row's text."""
    counts = np.zeros((num_rows, vocab_size), np.int32)
    for row, ids in enumerate(token_ids):
        counts[row] = np.bincount(ids, minlength=vocab_size)
    return counts
