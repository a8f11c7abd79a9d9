"""Qwen3: Llama with a norm on every query and key head, dense or with a mixture of experts.

tokens -> embed -> [norm -> attention -> + -> norm -> SwiGLU or experts -> +] x L -> norm -> hidden -> unembed
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
from models.moe import combine, grouped_linear, route, router_logits, stacked_experts
from models.params import Source, matrix, norm, stacked_rows
from models.rope import RopeConfig, rope_table
from pallas_kernels import ExpertSum, add_rms_norm, qkv_rope
from pallas_kernels.layout import LayerGroup

ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")


@dataclass(frozen=True)
class Qwen3Config:
    """Shape of a model.

    Attributes:
        vocab_size: token ids, V.
        hidden_size: width of the residual stream, E.
        intermediate_size: width of a dense MLP, I.
        num_layers, num_heads, num_kv_heads, head_dim: L, H, K, D; H * D is often not E.
        rope: rotary embedding.
        rms_norm_eps: added to the mean square.
        max_context: longest sequence in tokens.
        tied: the unembedding is the embedding.
        dtype: dtype of weights, activations and KV.
        num_experts, experts_per_token, expert_size: of the layers in `sparse_layers`.
        normalise_topk: make the weights of a token's experts sum to one.
        sparse_layers: layers with experts; empty: a dense model.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    rms_norm_eps: float = 1e-6
    max_context: int = 40960
    tied: bool = False
    dtype: Any = jnp.bfloat16
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    normalise_topk: bool = True
    sparse_layers: tuple[int, ...] = ()

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], dtype: Any = None) -> Qwen3Config:
        """Reads the keys of a `config.json`. Raises CheckpointError for what is missing or not supported."""
        for key, only in (("attention_bias", False), ("hidden_act", "silu"), ("use_sliding_window", False)):
            if config.get(key, only) != only:
                raise CheckpointError(f"a Qwen3 with {key} = {config[key]!r} is not supported")
        layers = integer(config, "num_hidden_layers")
        experts = integer(config, "num_experts", "num_local_experts", default=0)
        dense = config.get("mlp_only_layers") or ()
        if not isinstance(dense, (list, tuple)):
            raise CheckpointError(f"the config has mlp_only_layers = {dense!r}, which is no list")
        step = integer(config, "decoder_sparse_step", default=1)
        sparse = tuple(i for i in range(layers) if experts and i not in dense and (i + 1) % step == 0)
        heads, kv_heads = integer(config, "num_attention_heads"), integer(config, "num_key_value_heads")
        head_dim = integer(config, "head_dim")
        check_heads(heads, kv_heads, head_dim)
        active = integer(config, "num_experts_per_tok") if sparse else 0
        if active > experts:
            raise CheckpointError(f"the config has num_experts_per_tok = {active} of {experts} experts")
        return cls(
            vocab_size=integer(config, "vocab_size"),
            hidden_size=integer(config, "hidden_size"),
            intermediate_size=integer(config, "intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rope=RopeConfig.from_hf(config, head_dim),
            rms_norm_eps=number(config, "rms_norm_eps"),
            max_context=integer(config, "max_position_embeddings"),
            tied=flag(config, "tie_word_embeddings", default=False),
            dtype=config_dtype(config, dtype),
            num_experts=experts,
            experts_per_token=active,
            expert_size=integer(config, "moe_intermediate_size") if sparse else 0,
            normalise_topk=flag(config, "norm_topk_prob", default=False),
            sparse_layers=sparse,
        )


def plan(c: Qwen3Config) -> Params:
    """The parameters and the tensors they are read from."""

    def gate_up(at: str, size: int) -> Source:
        return stacked_rows(
            matrix(at + "gate_proj.weight", size, c.hidden_size), matrix(at + "up_proj.weight", size, c.hidden_size)
        )

    def down(at: str, size: int) -> Source:
        return matrix(at + "down_proj.weight", c.hidden_size, size)

    def mlp(at: str) -> dict[str, Source]:
        return {"gate_up": gate_up(at, c.intermediate_size), "down": down(at, c.intermediate_size)}

    def experts(at: str) -> dict[str, Source]:
        each = [f"{at}experts.{e}." for e in range(c.num_experts)]
        return {
            "router": matrix(at + "gate.weight", c.num_experts, c.hidden_size),
            "gate_up": stacked_experts([gate_up(expert, c.expert_size) for expert in each]),
            "down": stacked_experts([down(expert, c.expert_size) for expert in each]),
        }

    def layer(i: int) -> dict[str, Any]:
        at = f"model.layers.{i}."
        return {
            "attn_norm": norm(at + "input_layernorm.weight", c.hidden_size),
            "qkv": stacked_rows(
                matrix(at + "self_attn.q_proj.weight", c.num_heads * c.head_dim, c.hidden_size),
                matrix(at + "self_attn.k_proj.weight", c.num_kv_heads * c.head_dim, c.hidden_size),
                matrix(at + "self_attn.v_proj.weight", c.num_kv_heads * c.head_dim, c.hidden_size),
            ),
            "q_norm": norm(at + "self_attn.q_norm.weight", c.head_dim),
            "k_norm": norm(at + "self_attn.k_norm.weight", c.head_dim),
            "out": matrix(at + "self_attn.o_proj.weight", c.hidden_size, c.num_heads * c.head_dim),
            "mlp_norm": norm(at + "post_attention_layernorm.weight", c.hidden_size),
            **(experts(at + "mlp.") if i in c.sparse_layers else mlp(at + "mlp.")),
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
class Qwen3(Model):
    """A Qwen3; see `models.model.Model` for what it can do."""

    config: Qwen3Config

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
            x, normed = add_rms_norm(x, delta, layer["attn_norm"], c.rms_norm_eps)
            norms = {"q_norm": layer["q_norm"], "k_norm": layer["k_norm"], "eps": c.rms_norm_eps}
            qkv = linear(normed, layer["qkv"])
            q, k, v = qkv_rope(qkv, *rotation, num_heads=c.num_heads, num_kv_heads=c.num_kv_heads, **norms)
            o, kv = attend(kv, i, q, k, v, scale=c.head_dim**-0.5)
            o = linear(o.reshape(x.shape[0], -1), layer["out"])
            x, normed = add_rms_norm(x, o, layer["mlp_norm"], c.rms_norm_eps)
            delta = sparse_mlp(c, layer, normed) if i in c.sparse_layers else dense_mlp(layer, normed)
        return add_rms_norm(x, delta, params["norm"], c.rms_norm_eps)[1], kv

    def unembed(self, params: Params, hidden: jax.Array) -> jax.Array:
        """See `Model.unembed`."""
        return linear(hidden, params.get("unembed", params["embed"]), out_dtype=jnp.float32)


def dense_mlp(layer: Params, x: jax.Array) -> jax.Array:
    """SwiGLU of x [T, E]."""
    return linear(swiglu(linear(x, layer["gate_up"])), layer["down"])


def sparse_mlp(c: Qwen3Config, layer: Params, x: jax.Array) -> ExpertSum:
    """Each row of x [T, E] through its experts' SwiGLU."""
    logits = router_logits(x, layer["router"])
    routing = route(logits, c.experts_per_token, softmax_first=True, normalise=c.normalise_topk)
    hidden = swiglu(grouped_linear(x, layer["gate_up"], routing, of_tokens=True))
    return combine(grouped_linear(hidden, layer["down"], routing), routing)
