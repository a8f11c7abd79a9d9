"""Deterministic mode: the two means by which a token gets the same bits however it comes to be computed.

    one program      every token, decoded ones too, goes through one prefill program of one shape: whatever XLA does with a
                     row there, it always does the same. Works anywhere; a decode step costs a whole prefill call.
    row-invariant    every operation treats a row alike in calls of any shape, so prefill and decode keep their own programs
                     and buckets: `row_invariant_matmul` for all matmuls, the prefill attention kernel with one query a row
                     for decode, norms and rotations that work row by row anyhow. For GPUs, and for models that say
                     (`row_invariant_matmuls`) that their matmuls go through that op.

The bits of the two differ, so their pages have different namespaces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import RowInvariance
from pallas_kernels.row_invariant_matmul.mode import MatmulShape, matmul_shapes
from prefix_reuse.config import EngineConfig
from prefix_reuse.errors import ConfigError

ONE_PROGRAM = "one program"
ROW_INVARIANT = "row-invariant"


def deterministic_means(model: Any, config: EngineConfig, device: Any) -> str:
    """`ONE_PROGRAM`, `ROW_INVARIANT`, or an empty string in default mode.

    Raises `ConfigError` when row-invariant operations are asked for and the model does not use them, or when one program
    is to decode more rows than it has tokens.
    """
    if not config.deterministic:
        return ""
    able = bool(getattr(model, "row_invariant_matmuls", False))
    means = config.deterministic_means
    if means is None:
        means = ROW_INVARIANT if able and device.platform == "gpu" else ONE_PROGRAM
    if means == ROW_INVARIANT and not able:
        raise ConfigError(
            f"deterministic_means={ROW_INVARIANT!r} needs a model whose matmuls all go through models.layers.linear and that "
            f"says so (row_invariant_matmuls = True); {model.name} does not: leave deterministic_means at None"
        )
    if means == ONE_PROGRAM and config.max_rows > config.max_prefill_tokens:
        raise ConfigError(
            f"deterministic decodes all rows in one program of max_prefill_tokens={config.max_prefill_tokens} tokens; "
            f"max_rows={config.max_rows} do not fit it"
        )
    return means


def numerics(means: str, config: EngineConfig) -> str:
    """What tells the bits of deterministic pages apart: the program's shape, which row-invariant operations do not have."""
    shape = f" {config.max_prefill_tokens}x{config.max_rows}" if means == ONE_PROGRAM else ""
    return f"deterministic {means}{shape}"


class RowInvariantModel:
    """A model's `forward` and `unembed`, traced in row-invariant mode; everything else is the model's own.

    Args:
      mode: what the traces know; see `prove`.
    """

    def __init__(self, model: Any, mode: RowInvariance):
        self._model, self._mode = model, mode

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(
        self, params: Any, tokens: jax.Array, positions: jax.Array, kv: Any, attend: Callable[..., Any]
    ) -> tuple[jax.Array, Any]:
        """See `steps.PagedModel.forward`."""
        with self._mode.active():
            return self._model.forward(params, tokens, positions, kv, attend)

    def unembed(self, params: Any, hidden: jax.Array) -> jax.Array:
        """See `steps.PagedModel.unembed`."""
        with self._mode.active():
            return self._model.unembed(params, hidden)


def prove(mode: RowInvariance, model: Any, batch_sizes: Iterable[int], device: Any) -> None:
    """Compares, on the card, the matmuls that programs of these numbers of tokens or rows will run; nothing else is computed.

    Takes a few seconds on a GPU the first time, and device memory for the largest weight and its result.
    """
    tokens = jax.ShapeDtypeStruct((2,), jnp.int32)

    def both(params: Any, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        hidden, _ = model.forward(params, tokens, positions, None, lambda kv, layer, q, k, v, **options: (q, kv))
        return model.unembed(params, hidden)

    shapes: set[MatmulShape] = set()
    for found in matmul_shapes(both, model.params, tokens, tokens):
        shapes |= {found._replace(rows=found.rows // 2 * size) for size in batch_sizes}
    mode.prove(shapes, device)
