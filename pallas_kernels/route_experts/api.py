"""Which experts each token goes to, and where its copies lie when all are sorted by expert."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.grouped_matmul.plan import TilePlan


class Routing(NamedTuple):
    """The T * k (token, expert) pairs of a batch, sorted by expert, tokens in order within each.

    Attributes:
        weights: f32 `[T, k]`, how much of each chosen expert's output a token takes, the largest first.
        experts: int32 `[T, k]`.
        place: int32 `[T, k]`, where each pair lies among the sorted ones.
        tokens: int32 `[T * k]`, token of each sorted pair: `tokens[place[t, j]] == t`.
        group_sizes: int32 `[E]`, pairs of each expert.
        tiles: for `grouped_matmul`, which makes its own where they are None or have another size.
    """

    weights: jax.Array
    experts: jax.Array
    place: jax.Array
    tokens: jax.Array
    group_sizes: jax.Array
    tiles: TilePlan | None


def route_experts(
    logits: jax.Array,
    k: int,
    *,
    bias: jax.Array | None = None,
    softmax_first: bool,
    normalise: bool = False,
    fixed_tile: bool = False,
    implementation: str | None = None,
) -> Routing:
    """The k best experts of each token, in one or two launches; nothing is donated.

    A token's weights and experts depend on its own logits alone. Of equal candidates the expert with the lower number is
    taken. A NaN or +inf among a token's logits, or nothing above -inf, makes its weights NaN; its experts are k different
    valid numbers all the same.

    Args:
        logits: f32 `[T, E]` of the router; or `[S, T, E]`, S parts of each that are added up, the first one first.
        k: experts a token, 1 to E.
        bias: `[E]`, any float dtype, added to the logits in float32; or None.
        softmax_first: the k largest of a softmax over all experts (Qwen3); otherwise a softmax over the k largest logits
            (GPT-OSS).
        normalise: with `softmax_first`, make the k weights sum to one (`norm_topk_prob`).
        fixed_tile: sums whose order does not follow T, and tiles for `grouped_matmul(..., fixed_tile=True)`.
        implementation: "reference", "triton", or None for the best on this device.

    Raises:
        ValueError: shapes, dtypes or k do not fit together.
    """
    if logits.ndim not in (2, 3) or logits.shape[:-2] == (0,) or logits.dtype != jnp.float32:
        raise ValueError(f"logits must be [T, E] or [S, T, E] in f32, got {logits.dtype} {logits.shape}")
    tokens, experts = logits.shape[-2:]
    if not 1 <= k <= experts:
        raise ValueError(f"k must be 1 to {experts}, the number of experts, got {k}")
    if bias is not None and bias.shape != (experts,):
        raise ValueError(f"bias must be ({experts},), got {bias.shape}")
    if normalise and not softmax_first:
        raise ValueError("normalise is for softmax_first: the softmax over the k largest sums to one as it is")
    if tokens == 0:
        none = jnp.zeros((0, k), jnp.int32)
        return Routing(jnp.zeros((0, k)), none, none, none.reshape(-1), jnp.zeros(experts, jnp.int32), None)
    options: dict[str, Any] = {"softmax_first": softmax_first, "normalise": normalise, "fixed_tile": fixed_tile}
    return dispatch.call("route_experts", implementation, logits, k, bias=bias, **options)
