"""Whether a model's KV can be reused: checked once, by tracing its forward, before anything is allocated (B9, B10)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from prefix_reuse.errors import ConfigError, UnsupportedAttentionError
from prefix_reuse.geometry import StoreGeometry
from prefix_reuse.steps import PagedModel

INCOMPLETE_REGISTRY = "incomplete-paged-layer-registry"
GEOMETRY_MISMATCH = "paged-layer-geometry-mismatch"


@dataclass(frozen=True)
class PrefixReuseCapability:
    """Answer of `get_prefix_reuse_capability`."""

    supported: bool
    reason: str
    """Empty when supported; otherwise a stable word, such as `incomplete-paged-layer-registry`."""
    detail: str
    store_identity: str
    """Names the page geometry of the store that the model would be bound to; equal for equal geometry."""


def check_model(model: Any) -> None:
    """Raises `UnsupportedAttentionError` for KV that has no K/V pages, `ConfigError` for an object that is no model."""
    kind = str(getattr(model, "attention_kind", "")).lower()
    if kind in ("mla", "dsa"):
        raise UnsupportedAttentionError(
            f"{getattr(model, 'name', model)!r} uses {kind.upper()}: its cache is latent, not K/V pages; "
            "models with grouped-query, multi-query or multi-head attention are supported"
        )
    missing = [
        name
        for name in ("name", "params", "kv_groups", "vocab_size", "max_context", "eos_token_ids", "forward", "unembed")
        if not hasattr(model, name)
    ]
    if isinstance(model, str | os.PathLike):
        raise ConfigError(f"{model!r} is a name or a path, not a model: Engine.from_checkpoint loads it")
    if missing:
        raise ConfigError(f"{type(model).__name__} is not a model: it has no {', '.join(missing)}")
    for group in model.kv_groups:
        if not jnp.issubdtype(group.dtype, jnp.floating) or jnp.dtype(group.dtype).itemsize < 2:
            raise ConfigError(
                f"KV pages hold f32, bf16 or f16; quantised KV ({jnp.dtype(group.dtype).name}) is not supported"
            )
    layers = sorted(layer for group in model.kv_groups for layer in group.layers)
    if not layers or layers != list(range(len(layers))):
        raise ConfigError(f"kv_groups must name each layer 0..L-1 exactly once, got {layers}")


def get_prefix_reuse_capability(model: PagedModel, page_size: int) -> PrefixReuseCapability:
    """Traces one forward with a recording `attend` and compares what it visited with the declared layer groups.

    Each layer 0..L-1 must attend exactly once per forward, with the K/V shape and dtype of its group.
    """
    identity = StoreGeometry.of(model.kv_groups, page_size).identity
    group_of = {layer: group for group in model.kv_groups for layer in group.layers}
    visited: list[int] = []
    problems: list[str] = []

    def attend(kv: Any, layer: Any, q: jax.Array, k: jax.Array, v: jax.Array, **_: Any) -> tuple[jax.Array, Any]:
        if not isinstance(layer, int) or layer not in group_of:
            visited.append(-1)
            return q, kv
        visited.append(layer)
        group = group_of[layer]
        expected = (q.shape[0], group.num_kv_heads, group.head_dim)
        for name, x in (("k", k), ("v", v)):
            if x.shape != expected or x.dtype != jnp.dtype(group.dtype):
                problems.append(
                    f"layer {layer}: {name} is {x.dtype}{list(x.shape)}, its pages hold {group.dtype}{list(expected)}"
                )
        return q, kv

    tokens = jax.ShapeDtypeStruct((2,), jnp.int32)
    jax.eval_shape(lambda p, t, x: model.forward(p, t, x, None, attend)[0], model.params, tokens, tokens)
    gaps = [layer for layer in group_of if visited.count(layer) == 0]
    twice = [layer for layer in group_of if visited.count(layer) > 1]
    if gaps or twice or -1 in visited:
        detail = f"layers without pages: {gaps}; more than once: {twice}; unknown layers: {visited.count(-1)}"
        return PrefixReuseCapability(False, INCOMPLETE_REGISTRY, detail, identity)
    if problems:
        return PrefixReuseCapability(False, GEOMETRY_MISMATCH, problems[0], identity)
    return PrefixReuseCapability(True, "", "", identity)
