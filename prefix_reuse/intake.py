"""`Intake`: turns what a caller gives into checked token ids, and names the namespace that its pages belong to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.layout import LAYOUT
from prefix_reuse.capability import PrefixReuseCapability
from prefix_reuse.config import EngineConfig, SamplingParams
from prefix_reuse.deterministic import numerics
from prefix_reuse.errors import CapacityError, InvalidRequestError
from prefix_reuse.hashing import Namespace
from prefix_reuse.outputs import Tokenizer
from prefix_reuse.steps import PagedModel

Prompt = str | Sequence[int] | np.ndarray


class Intake:
    """Checks of one engine, before anything is allocated.

    Args:
      max_context: tokens per sequence at most. pool_tokens: tokens that the smaller page pool holds.
      fingerprint: of the weights; empty = unknown.
      means: of deterministic mode, see `deterministic_means`; empty in default mode.
    """

    def __init__(
        self,
        model: PagedModel,
        config: EngineConfig,
        capability: PrefixReuseCapability,
        max_context: int,
        pool_tokens: int,
        fingerprint: str,
        means: str = "",
    ):
        self.means = means
        self.model, self.config, self.capability = model, config, capability
        self.max_context, self.pool_tokens = max_context, pool_tokens
        self.new_weights(fingerprint)

    def new_weights(self, fingerprint: str) -> None:
        """From now on requests belong to these weights."""
        self._fingerprint = fingerprint
        self._namespaces: dict[tuple[str, str], bytes] = {}

    def tokenize(self, prompt: Prompt) -> np.ndarray:
        """Token ids of a prompt, int32. Raises `InvalidRequestError` for text without a tokenizer or a wrong dtype."""
        if isinstance(prompt, str):
            if not prompt:
                raise InvalidRequestError("the prompt is empty")
            prompt = self.tokenizer().encode(prompt)  # which may know tokens that the model does not
            if not len(prompt):
                raise InvalidRequestError("the prompt has no tokens")
        try:
            array = np.asarray(prompt)
        except ValueError as error:
            raise InvalidRequestError(f"token ids must be one flat sequence: {error}") from error
        if array.ndim != 1:
            raise InvalidRequestError(f"token ids must be one flat sequence, got shape {array.shape}")
        if array.size and not np.issubdtype(array.dtype, np.integer):
            raise InvalidRequestError(f"token ids must be integers, got {array.dtype}")
        if array.size and (array.min() < 0 or array.max() >= self.model.vocab_size):
            bad = int(array[(array < 0) | (array >= self.model.vocab_size)][0])
            raise InvalidRequestError(f"token id {bad} is outside the vocabulary of {self.model.vocab_size}")
        return array.astype(np.int32)

    def tokenizer(self) -> Tokenizer:
        tokenizer = getattr(self.model, "tokenizer", None)
        if tokenizer is None:
            raise InvalidRequestError(f"{self.model.name} has no tokenizer: give token ids and no stop strings")
        return tokenizer

    def check(self, tokens: np.ndarray, params: SamplingParams, answer: int = 1) -> np.ndarray:
        """`tokens` again, if a request of them can be served with room for `answer` more; see `Engine.submit`."""
        if not len(tokens):
            raise InvalidRequestError("the prompt is empty")
        for name, room in (("context", self.max_context), ("page pools", self.pool_tokens)):
            if len(tokens) + answer > room:
                raise CapacityError(f"a prompt of {len(tokens)} + {answer} tokens exceeds the {name} of {room} tokens")
        bad = [t for t in params.stop_token_ids if t >= self.model.vocab_size]
        if bad:
            raise InvalidRequestError(f"stop ids {bad} are outside the vocabulary of {self.model.vocab_size}")
        num_stops = len(() if params.ignore_eos else tuple(self.model.eos_token_ids)) + len(params.stop_token_ids)
        if num_stops > self.config.max_stop_ids:
            raise InvalidRequestError(f"{num_stops} stop ids, but max_stop_ids is {self.config.max_stop_ids}")
        if params.stop:
            self.tokenizer()
        return tokens

    def namespace(self, salt: str = "", adapter: str = "") -> bytes:
        """Digest of everything that makes pages interchangeable: model, weights, geometry, numerics, salt (B4)."""
        key = (salt, adapter)
        if key not in self._namespaces:
            self._namespaces[key] = (
                self.base_namespace().replace(adapter=adapter or None, tenant_salt=salt or None).digest
            )
        return self._namespaces[key]

    def base_namespace(self) -> Namespace:
        """The namespace without salt and adapter."""
        identity = dict(getattr(self.model, "identity", None) or {})
        groups = self.model.kv_groups
        identity.setdefault("model_id", self.model.name)
        tokenizer = getattr(self.model, "tokenizer", None)
        known = "none" if tokenizer is None else getattr(tokenizer, "digest", None)
        identity.setdefault("tokenizer", known)
        identity.setdefault("position_config", identity.get("config"))  # the whole config: RoPE and windows included
        if self.config.revision:
            identity["revision"] = f"{identity.get('revision') or ''}|{self.config.revision}"
        return Namespace.from_identity(
            identity,
            weights=self._fingerprint or None,
            dtype=",".join(jnp.dtype(g.dtype).name for g in groups),
            page_size=self.config.page_size,
            num_layers=sum(len(g.layers) for g in groups),
            num_kv_heads=groups[0].num_kv_heads,
            head_dim=groups[0].head_dim,
            layout=f"{LAYOUT}/{self.capability.store_identity}",
            attention=str(self.config.attention),
            # Pages that were computed by other means may differ in the last bit; default mode does not mind whose they are.
            **({"numerics": numerics(self.means, self.config)} if self.means else {}),
        )


def is_single_prompt(prompts: Any) -> bool:
    """Text, or a flat sequence of token ids."""
    if isinstance(prompts, str):
        return True
    if isinstance(prompts, np.ndarray):
        return prompts.ndim == 1
    return len(prompts) > 0 and isinstance(prompts[0], int | np.integer)
