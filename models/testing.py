"""Tiny models, a toy tokenizer and a plain attention: what tests of anything above this package need.

model = tiny_llama()
logits = reference_logits(model, tokens)                  # one dense forward, no pages
tokens = reference_generate(model, prompt, max_tokens=8)  # greedy
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from tokenizers import decoders, pre_tokenizers
from tokenizers import models as tokenizer_models

from models.llama import Llama, LlamaConfig, plan
from models.model import Attend, Model, Params
from models.params import random_params
from models.rope import RopeConfig
from models.tokenizer import Tokenizer
from pallas_kernels.layout import LayerGroup

TOY_EOS = 1
_CHARACTERS = " \n" + string.ascii_lowercase + string.digits + string.ascii_uppercase + string.punctuation


def toy_tokenizer(vocab: int = 128) -> Tokenizer:
    """One id a character: 0 is unknown, 1 ends an answer (`<eos>`), then letters; ids past the alphabet read `<k>`."""
    words = ["<unk>", "<eos>", *_CHARACTERS][:vocab]
    words += [f"<{number}>" for number in range(len(words), vocab)]
    model = tokenizer_models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<eos>"])
    return Tokenizer(backend)


def tiny_llama(
    seed: int = 0,
    *,
    layers: int = 2,
    vocab: int = 128,
    hidden: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    max_context: int = 1024,
    dtype: Any = jnp.float32,
    rope: RopeConfig | None = None,
) -> Llama:
    """A random Llama that builds in milliseconds; the same seed gives the same weights everywhere."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope=rope or RopeConfig(head_dim),
        max_context=max_context,
        tied=False,
        dtype=jnp.dtype(dtype),
    )
    return Llama(
        name="tiny-llama",
        config=config,
        params=random_params(plan(config), config.dtype, seed),
        tokenizer=toy_tokenizer(vocab),
        eos_token_ids=(TOY_EOS,),
        identity={"model_id": "tiny-llama", "revision": f"random {seed}", "config": str(config)},
    )


@dataclass(frozen=True, eq=False)
class HybridLlama(Llama):
    """A Llama whose even layers see `window` tokens, with attention sinks in every layer: two layer groups."""

    window: int = 8

    @property
    def kv_groups(self) -> tuple[LayerGroup, ...]:
        """Full layers first, then sliding ones."""
        (all_layers,) = super().kv_groups
        full, sliding = all_layers.layers[1::2], all_layers.layers[0::2]
        groups = replace(all_layers, layers=full), replace(all_layers, layers=sliding, window=self.window)
        return tuple(group for group in groups if group.layers)

    def forward(
        self, params: Params, tokens: jax.Array, positions: jax.Array, kv: Any, attend: Attend
    ) -> tuple[jax.Array, Any]:
        """See `Model.forward`."""

        def hybrid(kv: Any, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, **options: Any):
            window = self.window if layer % 2 == 0 else None
            return attend(kv, layer, q, k, v, window=window, sinks=params["sinks"][layer], **options)

        return super().forward(params, tokens, positions, kv, hybrid)


def tiny_hybrid(seed: int = 0, *, window: int = 8, layers: int = 4, **shape: Any) -> HybridLlama:
    """`tiny_llama` with sliding windows in every other layer and sinks."""
    base = tiny_llama(seed, layers=layers, **shape)
    sinks = np.random.default_rng([seed, 99]).standard_normal((layers, base.config.num_heads), np.float32)
    return HybridLlama(
        name="tiny-hybrid",
        config=base.config,
        params=base.params | {"sinks": jnp.asarray(sinks)},
        tokenizer=base.tokenizer,
        eos_token_ids=base.eos_token_ids,
        identity={**base.identity, "model_id": "tiny-hybrid", "window": str(window)},
        window=window,
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DenseKV:
    """Keys and values of one sequence, without pages.

    Attributes:
        keys, values: a list over layers of [C, K, D].
        length: int32 scalar, tokens stored; `attend` writes after them and does not change it.
    """

    keys: list[jax.Array]
    values: list[jax.Array]
    length: jax.Array


def dense_kv(model: Model, capacity: int) -> DenseKV:
    """Room for `capacity` tokens."""
    shapes = {i: ((capacity, g.num_kv_heads, g.head_dim), g.dtype) for g in model.kv_groups for i in g.layers}
    keys = [jnp.zeros(*shapes[i]) for i in range(len(shapes))]
    return DenseKV(keys, list(keys), jnp.int32(0))


def dense_attend() -> Attend:
    """Plain causal attention of one sequence over `DenseKV`, in float32: the oracle for paged runs."""

    def attend(kv, layer, q, k, v, *, scale=None, window=None, sinks=None, soft_cap=None):
        keys = jax.lax.dynamic_update_slice(kv.keys[layer], k.astype(kv.keys[layer].dtype), (kv.length, 0, 0))
        values = jax.lax.dynamic_update_slice(kv.values[layer], v.astype(kv.values[layer].dtype), (kv.length, 0, 0))
        kv = DenseKV(_put(kv.keys, layer, keys), _put(kv.values, layer, values), kv.length)

        tokens, _, dim = q.shape
        grouped = q.astype(jnp.float32).reshape(tokens, keys.shape[1], -1, dim)
        scores = jnp.einsum("tkgd,skd->kgts", grouped, keys.astype(jnp.float32), precision="highest")
        scores = scores * (dim**-0.5 if scale is None else scale)
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        at = kv.length + jnp.arange(tokens)[:, None]
        past = jnp.arange(keys.shape[0])[None, :]
        visible = past <= at
        if window is not None:
            visible &= past > at - window
        scores = jnp.where(visible, scores, -jnp.inf)
        if sinks is not None:  # one more key per head that takes its share of the softmax and has no value
            sink = sinks.astype(jnp.float32).reshape(keys.shape[1], -1, 1, 1)
            scores = jnp.concatenate([scores, jnp.broadcast_to(sink, (*scores.shape[:3], 1))], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)[..., : keys.shape[0]]
        out = jnp.einsum("kgts,skd->tkgd", weights, values.astype(jnp.float32), precision="highest")
        return out.reshape(q.shape).astype(q.dtype), kv

    return attend


@partial(jax.jit, static_argnums=0)
def dense_step(model: Model, params: Params, tokens: jax.Array, kv: DenseKV) -> tuple[jax.Array, DenseKV]:
    """Logits f32 [T, V] of tokens that follow those in `kv`, and the kv that holds them too."""
    positions = kv.length + jnp.arange(tokens.shape[0], dtype=jnp.int32)
    hidden, kv = model.forward(params, tokens, positions, kv, dense_attend())
    return model.unembed(params, hidden), replace(kv, length=kv.length + tokens.shape[0])


def reference_logits(model: Model, tokens: Sequence[int]) -> np.ndarray:
    """Logits f32 [T, V] of one sequence, in one dense forward."""
    ids = jnp.asarray(np.asarray(tokens, np.int32))
    return np.asarray(dense_step(model, model.params, ids, dense_kv(model, len(ids)))[0])


def reference_generate(model: Model, tokens: Sequence[int], max_tokens: int) -> list[int]:
    """Greedy continuation of one sequence, end tokens included and not obeyed."""
    ids = jnp.asarray(np.asarray(tokens, np.int32))
    kv = dense_kv(model, len(ids) + max_tokens)
    logits, kv = dense_step(model, model.params, ids, kv)
    answer = [int(jnp.argmax(logits[-1]))]
    while len(answer) < max_tokens:
        logits, kv = dense_step(model, model.params, jnp.asarray(answer[-1:], jnp.int32), kv)
        answer.append(int(jnp.argmax(logits[-1])))
    return answer


def _put(items: list[jax.Array], index: int, item: jax.Array) -> list[jax.Array]:
    return [*items[:index], item, *items[index + 1 :]]
