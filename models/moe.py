"""Mixture of experts: each token goes through its top-k experts, and their outputs are added up.

    routing: the T * k (token, expert) pairs sorted by expert -> one matmul per expert over its rows -> weighted sum of a token

The sort is stable and the sum over k has a fixed order, so a token's result does not depend on who shares its batch, as
far as the matmul of a row does not. For one token a matmul takes as long as ten launches of small kernels, so there is one of
them for the routing, the first matmul reads tokens where they are, and the norm that follows takes the sum over k.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from models.layers import contract, linear
from models.params import Source
from pallas_kernels import ExpertSum, Mxfp4, Routing, grouped_matmul, route_experts, row_invariance

MOST_OF_A_SUM = 192
"""Columns of a part of the router's matmul: a multiple of 32."""
MOST_IN_PARTS = 1024
"""Tokens up to which the matmul is small."""


def router_logits(x: jax.Array, weight: jax.Array) -> jax.Array:
    """f32 logits of x [T, in] times weight [E, in].T, for `route`: [T, E], or in parts of the columns [S, T, E].

    A few tokens' logits are a small matmul with a long sum: XLA splits the sum, pads what it does not divide, and adds up, four
    launches. In parts it is one, and the routing adds them up.
    """
    tokens, columns = x.shape
    part = next((n for n in range(MOST_OF_A_SUM, 0, -32) if columns % n == 0), columns)
    if row_invariance() is not None or tokens <= 1 or tokens > MOST_IN_PARTS or part >= columns:
        return linear(x, weight, out_dtype=jnp.float32)
    x, weight = (array.reshape(array.shape[0], columns // part, part) for array in (x, weight))
    return contract(x, weight, (((2,), (2,)), ((1,), (1,))), jnp.float32)


def route(
    logits: jax.Array, k: int, *, bias: jax.Array | None = None, softmax_first: bool, normalise: bool = False
) -> Routing:
    """`pallas_kernels.route_experts`, whose sums have a fixed order in row-invariant mode.

    Args:
        logits: of the router, see `router_logits`.
        k: experts a token.
        bias: [E] or None.
        softmax_first: Qwen3: probabilities over all experts, of which the k largest are kept; GPT-OSS: a softmax over the k
            largest logits alone.
        normalise: `norm_topk_prob`: what is kept of the probabilities is made to sum to one.
    """
    fixed = row_invariance() is not None
    return route_experts(logits, k, bias=bias, softmax_first=softmax_first, normalise=normalise, fixed_tile=fixed)


def grouped_linear(
    x: jax.Array,
    weight: jax.Array | Mxfp4,
    routing: Routing,
    bias: jax.Array | None = None,
    *,
    of_tokens: bool = False,
    activation: Callable[[jax.Array], jax.Array] | None = None,
    fixed_tile: bool | None = None,
) -> jax.Array:
    """Each pair's row times the weight of its expert.

    Args:
        x: [T * k, in], a row for each pair of `routing`, in its order; with `of_tokens` [T, in], a row for each token.
        weight: [E, out, in], in x's dtype or MXFP4.
        routing: which expert each pair belongs to.
        bias: [E, out] or None.
        of_tokens: x is not sorted: a pair's row is that of its token.
        activation: from rows of x to [R, in], before they are multiplied; see `pallas_kernels.grouped_matmul`.
        fixed_tile: equal bits of a row in calls of different T, see `pallas_kernels.grouped_matmul`; None = where row-invariant
            matmuls are asked for (`pallas_kernels.row_invariance`).

    Returns:
        [T * k, out], sorted by expert.
    """
    fixed = row_invariance() is not None if fixed_tile is None else fixed_tile
    rows = routing.tokens if of_tokens else None
    return grouped_matmul(
        x,
        weight,
        routing.group_sizes,
        bias=bias,
        rows=rows,
        activation=activation,
        tiles=routing.tiles,
        fixed_tile=fixed,
    )


def combine(out: jax.Array, routing: Routing) -> ExpertSum:
    """The weighted sum over each token's experts, of out [T * k, E], sorted by expert; the norm that follows adds it up."""
    return ExpertSum(out, routing.weights, routing.place)


def stacked_experts(experts: Sequence[Source]) -> Source:
    """One parameter [E, ...] of a `Source` per expert."""

    def build(arrays: Sequence[np.ndarray]) -> np.ndarray:
        unread = iter(arrays)
        return np.stack([expert.build(list(itertools.islice(unread, len(expert.tensors)))) for expert in experts])

    tensors = tuple(tensor for expert in experts for tensor in expert.tensors)
    return Source((len(experts), *experts[0].shape), tensors, build, fan_in=experts[0].fan_in)
