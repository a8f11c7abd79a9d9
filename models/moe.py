"""Mixture of experts: each token goes through its top-k experts, and their outputs are added up.

    sort the T * k (token, expert) pairs by expert -> one matmul per expert over its rows -> weighted sum in token order

The sort is stable and the sum over k has a fixed order, so a token's result does not depend on who shares its batch, as
far as the matmul of a row does not. For one token a matmul takes as long as ten launches of small kernels, so what is around it
is written to become few of them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from models.params import Source
from pallas_kernels import Mxfp4, grouped_matmul, row_invariance

MOST_COMPARED = 256
"""Keys up to which each is compared with each other one: two small kernels, where a sort is several."""
Rows = Callable[[jax.Array, jax.Array], jax.Array]


def softmax_then_topk(logits: jax.Array, k: int, normalise: bool) -> tuple[jax.Array, jax.Array]:
    """Qwen3: probabilities over all experts, of which the k largest are kept (and, if asked, made to sum to one).

    Args:
        logits: [T, E] of the router.
        k: experts a token.
        normalise: `norm_topk_prob`.

    Returns:
        (weights f32 [T, k], experts int32 [T, k]).
    """
    weights, experts = jax.lax.top_k(softmax(logits.astype(jnp.float32)), k)
    if normalise:
        weights = weights / sum_last(weights)
    return weights, experts


def topk_then_softmax(logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """GPT-OSS: the k largest logits, and a softmax over those alone. As `softmax_then_topk`."""
    values, experts = jax.lax.top_k(logits.astype(jnp.float32), k)
    return softmax(values), experts


def softmax(x: jax.Array) -> jax.Array:
    """Over the last axis; in row-invariant mode with `sum_last`."""
    if row_invariance() is None:
        return jax.nn.softmax(x, axis=-1)
    powers = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))
    return powers / sum_last(powers)


def sum_last(x: jax.Array) -> jax.Array:
    """Sum over the last axis, which stays as 1. In row-invariant mode halves are added to each other, over and over.

    XLA's own order of a short sum follows the number of rows: a GPU reads several numbers at once where there are enough rows.
    """
    if row_invariance() is None:
        return jnp.sum(x, axis=-1, keepdims=True)
    while (count := x.shape[-1]) > 1:
        half = -(-count // 2)
        x = x[..., :half] + jnp.pad(x[..., half:], [(0, 0)] * (x.ndim - 1) + [(0, 2 * half - count)])
    return jax.lax.optimization_barrier(x)  # computed once, not again for every number that is divided by it


def grouped_linear(
    x: jax.Array,
    weight: jax.Array | Mxfp4,
    group_sizes: jax.Array,
    bias: jax.Array | None = None,
    *,
    fixed_tile: bool | None = None,
) -> jax.Array:
    """Row r of x times the weight of the group that r falls in.

    Args:
        x: [N, in], rows sorted by group.
        weight: [E, out, in], in x's dtype or MXFP4.
        group_sizes: int32 [E], rows of each group; they add up to N.
        bias: [E, out] or None.
        fixed_tile: equal bits of a row in calls of different N, see `pallas_kernels.grouped_matmul`; None = where row-invariant
            matmuls are asked for (`pallas_kernels.row_invariance`).

    Returns:
        [N, out].
    """
    fixed = row_invariance() is not None if fixed_tile is None else fixed_tile
    return grouped_matmul(x, weight, group_sizes, bias=bias, fixed_tile=fixed)


def mix_experts(x: jax.Array, weights: jax.Array, experts: jax.Array, num_experts: int, expert_mlp: Rows) -> jax.Array:
    """Sends each token through its experts.

    Args:
        x: [T, E].
        weights: f32 [T, k].
        experts: int32 [T, k].
        num_experts: how many there are.
        expert_mlp: (rows sorted by expert [T * k, E], group sizes int32 [num_experts]) -> [T * k, E].

    Returns:
        [T, E].
    """
    tokens, k = experts.shape
    chosen = experts.reshape(-1)
    order, place = sort_stably(chosen)
    group_sizes = jnp.sum(chosen[:, None] == jnp.arange(num_experts), axis=0, dtype=jnp.int32)
    rows = x[order // k] if tokens > 1 else jnp.broadcast_to(x, (k, x.shape[1]))
    out, place = expert_mlp(rows, group_sizes), place.reshape(tokens, k)
    parts = (weights[:, j, None] * out[place[:, j]].astype(jnp.float32) for j in range(k))
    return functools.reduce(jnp.add, parts).astype(x.dtype)


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


def stacked_experts(experts: Sequence[Source]) -> Source:
    """One parameter [E, ...] of a `Source` per expert."""

    def build(arrays: Sequence[np.ndarray]) -> np.ndarray:
        unread = iter(arrays)
        return np.stack([expert.build(list(itertools.islice(unread, len(expert.tensors)))) for expert in experts])

    tensors = tuple(tensor for expert in experts for tensor in expert.tensors)
    return Source((len(experts), *experts[0].shape), tensors, build, fan_in=experts[0].fan_in)
