"""XLA implementation of route_experts."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.route_experts.api import Routing

MOST_COMPARED = 256
"""Pairs up to which each is compared with each other one: two small kernels on a GPU, where a sort is several."""


def route_experts(
    logits: jax.Array, k: int, *, bias: jax.Array | None, softmax_first: bool, normalise: bool, fixed_tile: bool
) -> Routing:
    """See `api.route_experts`."""
    tokens, num_experts = logits.shape[-2:]
    logits = functools.reduce(jnp.add, logits) if logits.ndim == 3 else logits
    logits = logits if bias is None else logits + bias.astype(jnp.float32)
    if softmax_first:
        weights, experts = jax.lax.top_k(softmax(logits, fixed_tile), k)
        weights = weights / sum_last(weights, fixed_tile) if normalise else weights
    else:
        values, experts = jax.lax.top_k(comparable(logits), k)
        weights = softmax(values, fixed_tile)
    chosen = experts.reshape(-1)
    order, place = sort_stably(chosen)
    group_sizes = jnp.sum(chosen[:, None] == jnp.arange(num_experts), axis=0, dtype=jnp.int32)
    return Routing(weights, experts, place.reshape(tokens, k), order // k, group_sizes, None)


def comparable(x: jax.Array) -> jax.Array:
    """x with no -0 and no negative NaN: `top_k` puts the one below 0 and the other below everything."""
    return jnp.where(x == 0, 0.0, jnp.where(jnp.isnan(x), jnp.nan, x))


def softmax(x: jax.Array, fixed: bool) -> jax.Array:
    """Over the last axis; see `sum_last`."""
    if not fixed:
        return jax.nn.softmax(x, axis=-1)
    powers = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))
    return powers / sum_last(powers, fixed)


def sum_last(x: jax.Array, fixed: bool) -> jax.Array:
    """Sum over the last axis, which stays as 1. If `fixed`, halves are added to each other, over and over.

    XLA's own order of a short sum follows the number of rows: a GPU reads several numbers at once where there are enough rows.
    """
    if not fixed:
        return jnp.sum(x, axis=-1, keepdims=True)
    while (count := x.shape[-1]) > 1:
        half = -(-count // 2)
        x = x[..., :half] + jnp.pad(x[..., half:], [(0, 0)] * (x.ndim - 1) + [(0, 2 * half - count)])
    return jax.lax.optimization_barrier(x)  # computed once, not again for every number that is divided by it


def sort_stably(keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Where sorted keys come from and where each goes: int32 `order` and `place` with `place[order[i]] == i`, of int32 [N]."""
    count = keys.shape[0]
    number = jnp.arange(count, dtype=jnp.int32)
    if count > MOST_COMPARED:
        order = jnp.argsort(keys, stable=True).astype(jnp.int32)
        return order, jnp.zeros_like(number).at[order].set(number, unique_indices=True)
    first, second = keys[None, :], keys[:, None]
    before = (first < second) | ((first == second) & (number[None, :] < number[:, None]))
    place = jnp.sum(before, axis=1, dtype=jnp.int32)
    return jnp.sum(jnp.where(place[None, :] == number[:, None], number, 0), axis=1), place
