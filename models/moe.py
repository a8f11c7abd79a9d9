"""Mixture of experts: each token goes through its top-k experts, and their outputs are added up.

    sort the T * k (token, expert) pairs by expert -> one matmul per expert over its rows -> unsort -> weighted sum

The sort is stable and the sum over k has a fixed order, so a token's result does not depend on who shares its batch, as
far as the matmul of a row does not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from models.params import Source
from pallas_kernels import Mxfp4, grouped_matmul

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
    weights, experts = jax.lax.top_k(jax.nn.softmax(logits.astype(jnp.float32), axis=-1), k)
    if normalise:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights, experts


def topk_then_softmax(logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """GPT-OSS: the k largest logits, and a softmax over those alone. As `softmax_then_topk`."""
    values, experts = jax.lax.top_k(logits.astype(jnp.float32), k)
    return jax.nn.softmax(values, axis=-1), experts


def grouped_linear(
    x: jax.Array,
    weight: jax.Array | Mxfp4,
    group_sizes: jax.Array,
    bias: jax.Array | None = None,
    *,
    fixed_tile: bool = False,
) -> jax.Array:
    """Row r of x times the weight of the group that r falls in.

    Args:
        x: [N, in], rows sorted by group.
        weight: [E, out, in], in x's dtype or MXFP4.
        group_sizes: int32 [E], rows of each group; they add up to N.
        bias: [E, out] or None.
        fixed_tile: equal bits of a row in calls of different N, see `pallas_kernels.grouped_matmul`.

    Returns:
        [N, out].
    """
    return grouped_matmul(x, weight, group_sizes, bias=bias, fixed_tile=fixed_tile)


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
    order = jnp.argsort(experts.reshape(-1), stable=True)
    group_sizes = jnp.bincount(experts.reshape(-1), length=num_experts).astype(jnp.int32)
    sorted_out = expert_mlp(x[order // k], group_sizes)
    out = jnp.zeros_like(sorted_out).at[order].set(sorted_out, unique_indices=True).reshape(tokens, k, -1)
    return jnp.einsum("tkd,tk->td", out.astype(jnp.float32), weights, precision="highest").astype(x.dtype)


def stacked_experts(experts: Sequence[Source]) -> Source:
    """One parameter [E, ...] of a `Source` per expert."""

    def build(arrays: Sequence[np.ndarray]) -> np.ndarray:
        unread = iter(arrays)
        return np.stack([expert.build(list(itertools.islice(unread, len(expert.tensors)))) for expert in experts])

    tensors = tuple(tensor for expert in experts for tensor in expert.tensors)
    return Source((len(experts), *experts[0].shape), tensors, build, fan_in=experts[0].fan_in)
