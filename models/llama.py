"""Llama: the decoder that most others vary. Llama 2 and 3, SmolLM2, TinyLlama, ...

    tokens -> embed -> [norm -> attention -> + -> norm -> SwiGLU -> +] x L -> norm -> hidden -> unembed -> logits

Keys and values are handed to `attend`, with the absolute position already rotated into them; this file does not know
whether they are kept in pages or where they come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from models.checkpoint import check_heads, config_dtype, flag, integer, number
from models.errors import CheckpointError
from models.layers import linear, swiglu
from models.model import Attend, Model, Params
from models.params import matrix, norm, stacked_rows
from models.rope import RopeConfig, rope_table
from pallas_kernels import add_rms_norm, qkv_rope
from pallas_kernels.layout import LayerGroup

ARCHITECTURES = ("LlamaForCausalLM",)
UNUSED_TENSORS = ("*.rotary_emb.inv_freq",)  # old files carry the frequencies, which the config gives


@dataclass(frozen=True)
class LlamaConfig:
    """Shape of a model.

    Attributes:
        vocab_size: token ids, V.
        hidden_size: width of the residual stream, E.
        intermediate_size: width of the MLP, I.
        num_layers, num_heads, num_kv_heads, head_dim: L, H, K, D; H * D need not be E.
        rope: rotary embedding.
        rms_norm_eps: added to the mean square.
        max_context: longest sequence in tokens.
        tied: the unembedding is the embedding.
        dtype: dtype of weights, activations and KV.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    rms_norm_eps: float = 1e-5
    max_context: int = 2048
    tied: bool = True
    dtype: Any = jnp.float32

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], dtype: Any = None) -> LlamaConfig:
        """Reads the keys of a `config.json`. Raises CheckpointError for what is missing or not supported."""
        for key, only in (("attention_bias", False), ("mlp_bias", False), ("hidden_act", "silu")):
            if config.get(key, only) != only:
                raise CheckpointError(f"a Llama with {key} = {config[key]!r} is not supported")
        heads, hidden = integer(config, "num_attention_heads"), integer(config, "hidden_size")
        kv_heads = integer(config, "num_key_value_heads", default=heads)
        head_dim = integer(config, "head_dim", default=hidden // heads)  # missing in older files
        check_heads(heads, kv_heads, head_dim)
        return cls(
            vocab_size=integer(config, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=integer(config, "intermediate_size"),
            num_layers=integer(config, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rope=RopeConfig.from_hf(config, head_dim),
            rms_norm_eps=number(config, "rms_norm_eps"),
            max_context=integer(config, "max_position_embeddings", default=2048),
            tied=flag(config, "tie_word_embeddings", default=False),
            dtype=config_dtype(config, dtype),
        )


def plan(c: LlamaConfig) -> Params:
    """The parameters and the tensors they are read from. Projections of one input are joined: one matmul, not three."""

    def layer(i: int) -> dict[str, Any]:
        at = f"model.layers.{i}."
        return {
            "attn_norm": norm(at + "input_layernorm.weight", c.hidden_size),
            "qkv": stacked_rows(
                matrix(at + "self_attn.q_proj.weight", c.num_heads * c.head_dim, c.hidden_size),
                matrix(at + "self_attn.k_proj.weight", c.num_kv_heads * c.head_dim, c.hidden_size),
                matrix(at + "self_attn.v_proj.weight", c.num_kv_heads * c.head_dim, c.hidden_size),
            ),
            "out": matrix(at + "self_attn.o_proj.weight", c.hidden_size, c.num_heads * c.head_dim),
            "mlp_norm": norm(at + "post_attention_layernorm.weight", c.hidden_size),
            "gate_up": stacked_rows(
                matrix(at + "mlp.gate_proj.weight", c.intermediate_size, c.hidden_size),
                matrix(at + "mlp.up_proj.weight", c.intermediate_size, c.hidden_size),
            ),
            "down": matrix(at + "mlp.down_proj.weight", c.hidden_size, c.intermediate_size),
        }

    tree = {
        "embed": matrix("model.embed_tokens.weight", c.vocab_size, c.hidden_size),
        "layers": [layer(i) for i in range(c.num_layers)],
        "norm": norm("model.norm.weight", c.hidden_size),
    }
    if not c.tied:
        tree["unembed"] = matrix("lm_head.weight", c.vocab_size, c.hidden_size)
    return tree


@dataclass(frozen=True, eq=False)
class Llama(Model):
    """A Llama; see `models.model.Model` for what it can do."""

    config: LlamaConfig

    @property
    def row_invariant_matmuls(self) -> bool:
        """See `Model.row_invariant_matmuls`."""
        return True

    @property
    def kv_groups(self) -> tuple[LayerGroup, ...]:
        """One group: all layers are alike."""
        c = self.config
        layers = tuple(range(c.num_layers))
        return (LayerGroup(layers, c.num_kv_heads, c.head_dim, jnp.dtype(c.dtype), num_heads=c.num_heads),)

    def forward(
        self, params: Params, tokens: jax.Array, positions: jax.Array, kv: Any, attend: Attend
    ) -> tuple[jax.Array, Any]:
        """See `Model.forward`."""
        c = self.config
        rotation = rope_table(c.rope, positions)
        x, delta = params["embed"][tokens], None
        for i, layer in enumerate(params["layers"]):
            x, delta, kv = decoder_layer(c, layer, i, x, delta, rotation, kv, attend)
        return add_rms_norm(x, delta, params["norm"], c.rms_norm_eps)[1], kv

    def unembed(self, params: Params, hidden: jax.Array) -> jax.Array:
        """See `Model.unembed`."""
        return linear(hidden, params.get("unembed", params["embed"]), out_dtype=jnp.float32)


def decoder_layer(
    c: LlamaConfig,
    layer: Params,
    i: int,
    x: jax.Array,
    delta: jax.Array | None,
    rotation: tuple[jax.Array, jax.Array],
    kv: Any,
    attend: Attend,
) -> tuple[jax.Array, jax.Array, Any]:
    """Layer `i` over the residual stream `x + delta` [T, E]; what its MLP adds is returned beside the stream."""
    x, normed = add_rms_norm(x, delta, layer["attn_norm"], c.rms_norm_eps)
    q, k, v = qkv_rope(linear(normed, layer["qkv"]), *rotation, num_heads=c.num_heads, num_kv_heads=c.num_kv_heads)
    o, kv = attend(kv, i, q, k, v, scale=c.head_dim**-0.5)
    x, normed = add_rms_norm(x, linear(o.reshape(x.shape[0], -1), layer["out"]), layer["mlp_norm"], c.rms_norm_eps)
    return x, linear(swiglu(linear(normed, layer["gate_up"])), layer["down"]), kv
