"""Where a run first differs from a cold one: the layers' queries, keys, values and attention, read out of the same steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

STAGES = ("queries", "keys", "values", "attention")


@dataclass(frozen=True)
class Section:
    """Columns of a tapped hidden state: one stage of one layer, or the final hidden state behind the last layer."""

    name: str
    columns: slice


class Tapped:
    """`model`, its hidden states followed by what each layer handed to attention and got from it, all in float32.

    Works in any step, since it needs nothing but the model's own outputs; `unembed` reads the hidden part alone.
    """

    def __init__(self, model: Any):
        self._model = model
        widths: list[tuple[int, list[int]]] = []

        def attend(kv: Any, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, **_: Any) -> tuple[jax.Array, Any]:
            widths.append((layer, [math.prod(x.shape[1:]) for x in (q, k, v, q)]))
            return q, kv

        two = jax.ShapeDtypeStruct((2,), jnp.int32)
        hidden = jax.eval_shape(lambda p, t, x: model.forward(p, t, x, None, attend)[0], model.params, two, two)
        self._width, self._dtype = hidden.shape[1], hidden.dtype
        self.sections = []
        end = self._width
        for layer, stages in widths:
            for stage, width in zip(STAGES, stages, strict=True):
                start, end = end, end + width
                self.sections.append(Section(f"layer {layer} ({stage})", slice(start, end)))
        self.sections.append(Section("what follows the last layer's attention", slice(0, self._width)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(
        self, params: Any, tokens: jax.Array, positions: jax.Array, kv: Any, attend: Callable[..., Any]
    ) -> tuple[jax.Array, Any]:
        """See `steps.PagedModel.forward`; hidden is f32 [T, E + taps]."""
        taps = []

        def tapped(
            kv: Any, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, **options: Any
        ) -> tuple[jax.Array, Any]:
            out, kv = attend(kv, layer, q, k, v, **options)
            taps.extend((q, k, v, out))
            return out, kv

        hidden, kv = self._model.forward(params, tokens, positions, kv, tapped)
        parts = [x.reshape(tokens.shape[0], -1).astype(jnp.float32) for x in (hidden, *taps)]
        return jnp.concatenate(parts, axis=1), kv

    def unembed(self, params: Any, hidden: jax.Array) -> jax.Array:
        """See `steps.PagedModel.unembed`."""
        return self._model.unembed(params, hidden[:, : self._width].astype(self._dtype))


def first_difference(
    sections: Sequence[Section], pairs: Sequence[tuple[np.ndarray, np.ndarray]], tolerance: float
) -> str:
    """Name of the first section in which some pair differs, or an empty string.

    Args:
      sections: in the order of computation.
      pairs: (cold, other) tapped hidden states [N, E + taps] of the same tokens.
      tolerance: 0 compares bits; otherwise the difference that counts, as a part of the section's largest cold value.
    """
    for section in sections:
        for cold, other in pairs:
            a, b = cold[:, section.columns], other[:, section.columns]
            if tolerance == 0:
                differs = a.tobytes() != b.tobytes()
            else:
                differs = not np.abs(a - b).max(initial=0.0) <= tolerance * np.abs(a).max(initial=0.0)
            if differs:
                return section.name
    return ""
