"""What every model family has in common, and all that the rest of the world asks of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax

from models.tokenizer import Tokenizer
from pallas_kernels.layout import LayerGroup

Params = Any  # a pytree of arrays; params["layers"] is a list of per-layer dicts


class Attend(Protocol):
    """Attention of one layer, given by the caller, who alone knows where keys and values are kept."""

    def __call__(
        self,
        kv: Any,
        layer: int,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        scale: float | None = None,
        window: int | None = None,
        sinks: jax.Array | None = None,
        soft_cap: float | None = None,
    ) -> tuple[jax.Array, Any]:
        """Stores the new keys and values, then attends.

        Args:
            kv: the caller's own state; a model only hands it on.
            layer: layer number of the model, 0..L-1; each is called once per forward, in order.
            q: queries [T, H, D], rotated.
            k: keys [T, K, D], rotated.
            v: values [T, K, D].
            scale: factor on q.k, `D ** -0.5` by default.
            window: key j is visible to query i iff i - window < j <= i; None: every earlier key.
            sinks: [H], one logit per head that joins the softmax denominator.
            soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`.

        Returns:
            (attention output [T, H, D], new kv).
        """
        ...


@dataclass(frozen=True, eq=False)
class Model:
    """A language model: what it is, its weights, and a forward pass over pages that somebody else keeps.

    Instances are compared and hashed by identity, so that one may be closed over by, or static in, a jitted function.
    `forward` and `unembed` read the `params` they are given and never `self.params`.

    Attributes:
        name: what to call it in tables.
        config: the family's frozen config dataclass; it has at least `vocab_size`, `max_context`, `dtype`.
        params: pytree of arrays; `params["layers"]` is a list of per-layer dicts.
        tokenizer: text to ids and back, or None if the checkpoint has none.
        eos_token_ids: ids that end an answer.
        identity: what tells this model's KV from another's (id, revision, tokenizer, config); empty: unknown.
    """

    name: str
    config: Any
    params: Params
    tokenizer: Tokenizer | None = None
    eos_token_ids: tuple[int, ...] = ()
    identity: Mapping[str, str] = field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        """Number of token ids, i.e. of logits."""
        return self.config.vocab_size

    @property
    def max_context(self) -> int:
        """Longest sequence in tokens that the position encoding was made for."""
        return self.config.max_context

    @property
    def row_invariant_matmuls(self) -> bool:
        """Whether every matmul of `forward` and `unembed` goes through `layers.linear` or `moe.grouped_linear`.

        Then deterministic mode can have rows with the same bits in programs of any shape; a model that does not say so is
        computed by one program.
        """
        return False

    @property
    def kv_groups(self) -> tuple[LayerGroup, ...]:
        """Layers grouped by what their pages look like and need."""
        raise NotImplementedError

    def forward(
        self, params: Params, tokens: jax.Array, positions: jax.Array, kv: Any, attend: Attend
    ) -> tuple[jax.Array, Any]:
        """Runs all layers over packed tokens.

        Args:
            params: the weights, as in `self.params`.
            tokens: int32 [T], tokens of any number of sequences; only `attend` knows which.
            positions: int32 [T], absolute position of each token in its sequence.
            kv: handed from layer to layer through `attend`.
            attend: attention of one layer, see `Attend`.

        Returns:
            (hidden states [T, E] after the final norm, kv).
        """
        raise NotImplementedError

    def unembed(self, params: Params, hidden: jax.Array) -> jax.Array:
        """Logits, float32 [N, V], of hidden states [N, E]."""
        raise NotImplementedError
