"""How many experts of a layer a decode step really reads: the rows' last steps once more, with what each layer's router chose.

Rows choose alike where their tokens or contexts are alike, so that a step can read far fewer experts than as many independent
choices would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models import moe
from pallas_kernels import Routing, paged_decode_attention
from pallas_kernels.layout import LayerGroup
from prefix_reuse import Engine
from prefix_reuse.programs import step_options
from prefix_reuse.sequence import Sequence as Row
from prefix_reuse.steps import PagedKV, PagedModel, Pools, paged_kv


def decoded(rows: Sequence[Row], steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that the last `steps` decode steps of these rows took, and their positions: int32 [steps, B] each.

    Raises `ValueError` when a row has not decoded as many steps.
    """
    few = min(len(row.generated) - 1 for row in rows)  # the first one is of its prefill, the last one was not taken yet
    if few < steps:
        raise ValueError(f"a row has decoded {few} steps, fewer than {steps}")
    ends = np.array([row.committed_kv_tokens for row in rows], np.int32)
    tokens = [row.tokens[end - steps : end] for row, end in zip(rows, ends, strict=True)]
    return np.stack(tokens, axis=1), ends - steps + np.arange(steps, dtype=np.int32)[:, None]


def mean_distinct(values: np.ndarray) -> float:
    """How many different numbers the last axis of [..., N] holds, on average over the others."""
    ranked = np.sort(values, axis=-1)
    return float(np.mean(1 + np.count_nonzero(np.diff(ranked, axis=-1), axis=-1)))


class ExpertReads:
    """Looks at decode steps that an engine has done. One program, for any number of rows; it changes no page.

    Args:
      engine: of a model that routes by `models.moe.route`.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        attend = reading_attend(engine.model.kv_groups, engine.config.attention)
        steps = engine.programs.counter.traced("chosen_experts", partial(chosen_experts, engine.model, attend))
        self._chosen = jax.jit(steps, compiler_options=step_options()["compiler_options"])

    def chosen(self, rows: Sequence[Row], steps: int) -> np.ndarray:
        """Experts of each row in its last steps, int32 [steps, L, B, k]; L counts layers with experts only.

        Args:
          rows: that decode.
          steps: at most those of the last turn: of a sliding window the pages that older steps saw are gone.
        """
        runner = self.engine.runner
        tokens, positions = decoded(rows, steps)
        padding = ((0, 0), (0, runner.config.max_rows - len(rows)))
        index = np.array([row.row_index for row in rows], np.int32)
        inputs = np.pad(index, padding[1], constant_values=runner.config.max_rows), np.pad(tokens, padding)
        lens = np.pad(positions + 1, padding)  # padding: rows without keys
        return np.asarray(self._chosen(runner.params, runner.pools, *inputs, lens))[:, :, : len(rows)]

    def mean(self, rows: Sequence[Row], steps: int) -> float:
        """Different experts of a layer that a step's rows chose, mean over layers and steps; arguments as of `chosen`."""
        chosen = self.chosen(rows, steps)
        return mean_distinct(chosen.reshape(*chosen.shape[:2], -1))


def chosen_experts(
    model: PagedModel,
    attend: Callable[..., Any],
    params: Any,
    pools: Pools,
    rows: jax.Array,
    tokens: jax.Array,
    kv_lens: jax.Array,
) -> jax.Array:
    """Decode steps whose K and V are in the pages, without writing: int32 [S, L, B, k], experts by layer.

    Args:
      rows: int32 [B]: of the page table; out of range = padding.
      tokens, kv_lens: int32 [S, B]: of each step the token of a row, and its keys with that token.
    """

    def step(inputs: tuple[jax.Array, jax.Array]) -> jax.Array:
        tokens, lens = inputs
        index = jnp.arange(len(rows), dtype=jnp.int32)
        positions = jnp.maximum(lens - 1, 0)
        kv = paged_kv(pools, rows, index, positions, jnp.zeros(len(rows), bool), None, lens)
        with recorded_routings() as routings:
            model.forward(params, tokens, positions, kv, attend)
        return jnp.stack([routing.experts for routing in routings])

    return jax.lax.map(step, (tokens, kv_lens))


@contextmanager
def recorded_routings() -> Iterator[list[Routing]]:
    """What `models.moe.route` returns while a forward is traced, layer by layer."""
    route, routings = moe.route_experts, []

    def recording(*args: Any, **options: Any) -> Routing:
        routings.append(route(*args, **options))
        return routings[-1]

    moe.route_experts = recording
    try:
        yield routings
    finally:
        moe.route_experts = route


def reading_attend(groups: Sequence[LayerGroup], implementation: str | None) -> Callable[..., Any]:
    """As `steps.make_attend` for decode, over pages that hold the new tokens' K and V already: k and v are not looked at."""
    place = {layer: (g, i) for g, group in enumerate(groups) for i, layer in enumerate(group.layers)}

    def attend(
        kv: PagedKV, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, **options: Any
    ) -> tuple[jax.Array, PagedKV]:
        g, index = place[layer]
        sinks = options.pop("sinks", None)
        fixed = tuple(sorted({**options, "implementation": implementation}.items()))
        return _attend(jnp.int32(index), q, kv.kv_pages[g], kv.tables[g], kv.kv_lens, sinks, options=fixed), kv

    return attend


@partial(jax.jit, static_argnames="options")
def _attend(
    layer: jax.Array,
    q: jax.Array,
    pages: jax.Array,
    table: jax.Array,
    kv_lens: jax.Array,
    sinks: jax.Array | None,
    *,
    options: tuple[tuple[str, Any], ...],
) -> jax.Array:
    """One layer's attention, traced and lowered once for all layers that are alike (the layer is an operand)."""
    return paged_decode_attention(q, pages, table, kv_lens, layer=layer, sinks=sinks, **dict(options))
