"""Rotary position embedding: plain, linear, Llama-3 and YaRN frequencies, half-split rotation.

Positions are absolute and given by the caller, so a suffix that follows a cached prefix is rotated as if the prefix had
just been computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.checkpoint import flag, integer, number, section
from models.errors import CheckpointError

KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """Frequencies of the rotation.

    Attributes:
        head_dim: rotated numbers per head, D; there are D/2 frequencies.
        theta: base of the geometric row of frequencies.
        kind: one of `KINDS`; the rest is read only by the kinds that scale.
        factor: by how much the context was stretched.
        original_context: tokens before stretching.
        low_freq_factor, high_freq_factor: (llama3) bounds of the blend, in turns per original context.
        beta_fast, beta_slow: (yarn) the same, high and low.
        truncate: (yarn) round the bounds of the ramp outwards to whole dimensions.
        attention_factor: (yarn) factor on cos and sin; None: 0.1 ln(factor) + 1.
    """

    head_dim: int
    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], head_dim: int) -> RopeConfig:
        """Reads either dialect: `rope_theta` + `rope_scaling`, or one dict `rope_parameters`."""
        rope = section(config, "rope_parameters", "rope_scaling")
        kind = rope.get("rope_type", rope.get("type"))
        if kind is None and not rope.keys() <= {"rope_theta", "partial_rotary_factor"}:
            raise CheckpointError(f"this rotary embedding names no rope_type: {dict(rope)}")
        kind = "default" if kind is None else kind
        if kind not in KINDS:
            raise CheckpointError(f"rope type {kind!r} is not supported; supported: {', '.join(KINDS)}")
        both = {**config, **{key: value for key, value in rope.items() if value is not None}}
        if both.get("partial_rotary_factor") not in (None, 1.0) or "mscale" in rope:
            raise CheckpointError(f"this rotary embedding is not supported: {dict(rope) or dict(config)}")
        scales, llama3 = kind != "default", kind == "llama3"
        contexts = ["original_max_position_embeddings"]
        if not llama3:  # which has no meaning without it
            contexts += ["initial_context_length", "max_position_embeddings"]
        low = number(rope, "low_freq_factor", default=None if llama3 else 1.0)
        high = number(rope, "high_freq_factor", default=None if llama3 else 4.0)
        if llama3 and low >= high:
            raise CheckpointError(f"low_freq_factor = {low} is not below high_freq_factor = {high}")
        attention_factor = rope.get("attention_factor")
        return cls(
            head_dim=head_dim,
            theta=number(both, "rope_theta", default=10000.0),
            kind=kind,
            factor=number(rope, "factor") if scales else 1.0,
            original_context=integer(both, *contexts, default=None if kind in ("llama3", "yarn") else 0),
            low_freq_factor=low,
            high_freq_factor=high,
            beta_fast=number(rope, "beta_fast", default=32.0),
            beta_slow=number(rope, "beta_slow", default=1.0),
            truncate=flag(rope, "truncate", default=True),
            attention_factor=None if attention_factor is None else number(rope, "attention_factor"),
        )

    @property
    def amplitude(self) -> float:
        """Factor on cos and on sin; q.k therefore grows by its square."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def frequencies(self) -> np.ndarray:
        """Radians per position, float32 [D/2]."""
        plain = self.theta ** -(np.arange(0, self.head_dim, 2) / self.head_dim)
        if self.kind == "linear":
            plain = plain / self.factor
        elif self.kind == "llama3":
            plain = self._llama3(plain)
        elif self.kind == "yarn":
            plain = self._yarn(plain)
        return plain.astype(np.float32)

    def _llama3(self, plain: np.ndarray) -> np.ndarray:
        """Llama 3.1: slow frequencies are divided by `factor`, fast ones kept, a linear blend between."""
        turns = self.original_context * plain / (2 * np.pi)
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep = np.clip(keep, 0.0, 1.0)
        return plain * (keep + (1 - keep) / self.factor)

    def _yarn(self, plain: np.ndarray) -> np.ndarray:
        """YaRN (arXiv 2309.00071): the same idea, with a ramp that is linear in the dimension."""

        def dimension(turns: float) -> float:
            """The (fractional) dimension that makes `turns` turns in the original context."""
            return self.head_dim * math.log(self.original_context / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.head_dim - 1)
        ramp = np.clip((np.arange(self.head_dim // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
        return plain * (1 - ramp) + plain / self.factor * ramp


def rope_table(rope: RopeConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin, float32 [T, 1, D/2] each, of absolute positions int32 [T]; shared by all layers and heads."""
    angles = positions.astype(jnp.float32)[:, None, None] * rope.frequencies()
    return jnp.cos(angles) * rope.amplitude, jnp.sin(angles) * rope.amplitude
