"""GPT-OSS: sliding and full attention in turn, attention sinks, biases, and a clamped mixture of experts.

    tokens -> embed -> [norm -> attention with sinks -> + -> norm -> experts -> +] x L -> norm -> hidden -> unembed

Three layouts can be read: transformers' bfloat16, transformers' MXFP4 (as released) and OpenAI's `original/`. Weights of
experts that are stored as MXFP4 stay MXFP4 in device memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.checkpoint import check_heads, config_dtype, flag, integer, number, section
from models.errors import CheckpointError
from models.layers import linear
from models.model import Attend, Model, Params
from models.moe import combine, grouped_linear, route, router_logits
from models.mxfp4 import BLOCK, dequantise
from models.params import BYTES, Source, matrix, norm, stacked_rows, vector
from models.rope import RopeConfig, rope_table
from pallas_kernels import ExpertSum, add_rms_norm, qkv_rope
from pallas_kernels.layout import LayerGroup

ARCHITECTURES = ("GptOssForCausalLM",)
KINDS_OF_ATTENTION = ("full_attention", "sliding_attention")
SWIGLU_ALPHA = 1.702


@dataclass(frozen=True)
class GptOssConfig:
    """Shape of a model.

    Attributes:
        vocab_size: token ids, V.
        hidden_size: width of the residual stream, E.
        intermediate_size: width of an expert.
        num_layers, num_heads, num_kv_heads, head_dim: L, H, K, D; H * D is not E.
        num_experts, experts_per_token: of every layer.
        rope: rotary embedding (YaRN).
        windows: for each layer its window in tokens, the token itself included, or None for full attention.
        swiglu_limit: gate is clamped from above, up from both sides.
        rms_norm_eps: added to the mean square.
        max_context: longest sequence in tokens.
        tied: the unembedding is the embedding.
        dtype: dtype of weights, activations and KV.
        layout: how the checkpoint stores the weights: "bf16", "mxfp4" or "original".
        dequantise: expand MXFP4 weights of experts to `dtype` while loading.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    experts_per_token: int
    rope: RopeConfig
    windows: tuple[int | None, ...]
    swiglu_limit: float = 7.0
    rms_norm_eps: float = 1e-5
    max_context: int = 131072
    tied: bool = False
    dtype: Any = jnp.bfloat16
    layout: str = "bf16"
    dequantise: bool = False

    @property
    def packed(self) -> bool:
        """Whether weights of experts are MXFP4 in device memory; not beside float16, which is too small for their scales."""
        return self.layout != "bf16" and not self.dequantise and jnp.dtype(self.dtype) != jnp.float16

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], dtype: Any = None) -> GptOssConfig:
        """Reads the keys of a `config.json`, transformers' or OpenAI's own. Raises CheckpointError."""
        original = "rope_ntk_alpha" in config
        if original:
            config = _from_original(config)
        alpha = number(config, "swiglu_alpha", default=SWIGLU_ALPHA)
        if alpha != SWIGLU_ALPHA:
            raise CheckpointError(f"a GPT-OSS with swiglu_alpha = {alpha} is not supported")
        # Its base is not the usual one, so that a default would only be a wrong answer.
        number({**config, **section(config, "rope_parameters")}, "rope_theta")
        method = section(config, "quantization_config").get("quant_method")
        if method not in (None, "mxfp4"):
            raise CheckpointError(f"a GPT-OSS quantised by {method!r} is not supported; supported: mxfp4")
        layers, head_dim = integer(config, "num_hidden_layers"), integer(config, "head_dim")
        heads, kv_heads = integer(config, "num_attention_heads"), integer(config, "num_key_value_heads")
        check_heads(heads, kv_heads, head_dim)
        window = integer(config, "sliding_window")
        kinds = config.get("layer_types") or ["sliding_attention", "full_attention"] * layers
        if not isinstance(kinds, list) or len(kinds) < layers or set(map(str, kinds)) - {*KINDS_OF_ATTENTION}:
            raise CheckpointError(
                f"the config has layer_types = {kinds!r}, which must give each of {layers} layers one of: "
                f"{', '.join(KINDS_OF_ATTENTION)}"
            )
        experts = integer(config, "num_local_experts", "num_experts")
        active = integer(config, "num_experts_per_tok", "experts_per_token")
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
            num_experts=experts,
            experts_per_token=active,
            rope=RopeConfig.from_hf(config, head_dim),
            windows=tuple(window if kind == "sliding_attention" else None for kind in kinds[:layers]),
            swiglu_limit=number(config, "swiglu_limit", default=7.0),
            rms_norm_eps=number(config, "rms_norm_eps", default=1e-5),
            max_context=integer(config, "max_position_embeddings"),
            tied=flag(config, "tie_word_embeddings", default=False),
            dtype=config_dtype(config, dtype),
            layout="original" if original else method or "bf16",
        )


def _from_original(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """OpenAI's keys as transformers' keys."""
    factor, context = number(config, "rope_scaling_factor"), integer(config, "initial_context_length")
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "beta_slow": number(config, "rope_ntk_alpha"),
        "beta_fast": number(config, "rope_ntk_beta"),
        "original_max_position_embeddings": context,
        "truncate": False,
    }
    return {**config, "rope_scaling": scaling, "max_position_embeddings": int(context * factor)}


def plan(c: GptOssConfig) -> Params:
    """The parameters and the tensors they are read from.

    In files, gate and up alternate: even outputs are gate, odd ones up. Here gate comes first, then up, as everywhere.
    """
    return _plan_original(c) if c.layout == "original" else _plan_hf(c)


def _plan_hf(c: GptOssConfig) -> Params:
    def layer(i: int) -> dict[str, Source]:
        attn, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        rows = {"q": c.num_heads * c.head_dim, "k": c.num_kv_heads * c.head_dim, "v": c.num_kv_heads * c.head_dim}
        gate_up, down = f"{mlp}experts.gate_up_proj", f"{mlp}experts.down_proj"
        experts = partial(_mxfp4, c, ("_blocks", "_scales")) if c.layout == "mxfp4" else _transposed
        return {
            "attn_norm": norm(f"model.layers.{i}.input_layernorm.weight", c.hidden_size),
            "qkv": stacked_rows(*(matrix(f"{attn}{n}_proj.weight", r, c.hidden_size) for n, r in rows.items())),
            "qkv_bias": stacked_rows(*(vector(f"{attn}{n}_proj.bias", r) for n, r in rows.items())),
            "out": matrix(attn + "o_proj.weight", c.hidden_size, rows["q"]),
            "out_bias": vector(attn + "o_proj.bias", c.hidden_size),
            "sinks": vector(attn + "sinks", c.num_heads),
            "mlp_norm": norm(f"model.layers.{i}.post_attention_layernorm.weight", c.hidden_size),
            "router": matrix(mlp + "router.weight", c.num_experts, c.hidden_size),
            "router_bias": vector(mlp + "router.bias", c.num_experts),
            "gate_up": _gate_first(experts(gate_up, c.num_experts, 2 * c.intermediate_size, c.hidden_size)),
            "gate_up_bias": _gate_first(matrix(gate_up + "_bias", c.num_experts, 2 * c.intermediate_size)),
            "down": experts(down, c.num_experts, c.hidden_size, c.intermediate_size),
            "down_bias": matrix(down + "_bias", c.num_experts, c.hidden_size),
        }

    tree = {
        "embed": matrix("model.embed_tokens.weight", c.vocab_size, c.hidden_size),
        "layers": [layer(i) for i in range(c.num_layers)],
        "norm": norm("model.norm.weight", c.hidden_size),
    }
    if not c.tied:
        tree["unembed"] = matrix("lm_head.weight", c.vocab_size, c.hidden_size)
    return tree


def _plan_original(c: GptOssConfig) -> Params:
    def layer(i: int) -> dict[str, Source]:
        attn, mlp = f"block.{i}.attn.", f"block.{i}.mlp."
        qkv_rows, q_rows = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim, c.num_heads * c.head_dim
        experts = partial(_mxfp4, c, (".blocks", ".scales"))
        return {
            "attn_norm": norm(attn + "norm.scale", c.hidden_size),
            "qkv": matrix(attn + "qkv.weight", qkv_rows, c.hidden_size),
            "qkv_bias": vector(attn + "qkv.bias", qkv_rows),
            "out": matrix(attn + "out.weight", c.hidden_size, q_rows),
            "out_bias": vector(attn + "out.bias", c.hidden_size),
            "sinks": vector(attn + "sinks", c.num_heads),
            "mlp_norm": norm(mlp + "norm.scale", c.hidden_size),
            "router": matrix(mlp + "gate.weight", c.num_experts, c.hidden_size),
            "router_bias": vector(mlp + "gate.bias", c.num_experts),
            "gate_up": _gate_first(experts(mlp + "mlp1_weight", c.num_experts, 2 * c.intermediate_size, c.hidden_size)),
            "gate_up_bias": _gate_first(matrix(mlp + "mlp1_bias", c.num_experts, 2 * c.intermediate_size)),
            "down": experts(mlp + "mlp2_weight", c.num_experts, c.hidden_size, c.intermediate_size),
            "down_bias": matrix(mlp + "mlp2_bias", c.num_experts, c.hidden_size),
        }

    return {
        "embed": matrix("embedding.weight", c.vocab_size, c.hidden_size),
        "layers": [layer(i) for i in range(c.num_layers)],
        "norm": norm("norm.scale", c.hidden_size),
        "unembed": matrix("unembedding.weight", c.vocab_size, c.hidden_size),
    }


def _transposed(name: str, experts: int, rows: int, columns: int) -> Source:
    """Expert weights [E, out, in] of a tensor [E, in, out]."""
    stored = ((name, (experts, columns, rows)),)
    return Source((experts, rows, columns), stored, lambda arrays: arrays[0].swapaxes(1, 2), fan_in=columns)


def _mxfp4(c: GptOssConfig, parts: tuple[str, str], name: str, experts: int, rows: int, columns: int) -> Source:
    """Expert weights [E, out, in] of packed ones, which are stored that way round."""
    blocks, scales = (experts, rows, columns // BLOCK, BLOCK // 2), (experts, rows, columns // BLOCK)

    def expanded(arrays: Sequence[np.ndarray]) -> np.ndarray:
        # An expert at a time, in bfloat16, which holds every product of a 4-bit float and a power of two exactly.
        return np.stack([dequantise(b, s).astype(jnp.bfloat16) for b, s in zip(*arrays, strict=True)])

    stored = ((name + parts[0], blocks), (name + parts[1], scales))
    build = list if c.packed else expanded
    return Source((experts, rows, columns), stored, build, BYTES, fan_in=columns, packed=c.packed)


def _gate_first(source: Source) -> Source:
    """Outputs 0, 2, 4, ... (gate) before 1, 3, 5, ... (up), on axis 1: of a packed weight in its blocks and its scales."""

    def reordered(arrays: Sequence[np.ndarray]) -> Any:
        return jax.tree.map(
            lambda value: np.concatenate([value[:, 0::2], value[:, 1::2]], axis=1), source.build(arrays)
        )

    return replace(source, build=reordered)


@dataclass(frozen=True, eq=False)
class GptOss(Model):
    """A GPT-OSS; see `models.model.Model` for what it can do."""

    config: GptOssConfig

    @property
    def row_invariant_matmuls(self) -> bool:
        """See `Model.row_invariant_matmuls`."""
        return True

    @property
    def kv_groups(self) -> tuple[LayerGroup, ...]:
        """Layers of full attention, then a group for each window."""
        c = self.config
        groups: dict[int | None, list[int]] = {None: []}
        for i, window in enumerate(c.windows):
            groups.setdefault(window, []).append(i)
        return tuple(
            LayerGroup(tuple(layers), c.num_kv_heads, c.head_dim, jnp.dtype(c.dtype), window, c.num_heads)
            for window, layers in groups.items()
            if layers
        )

    def forward(
        self, params: Params, tokens: jax.Array, positions: jax.Array, kv: Any, attend: Attend
    ) -> tuple[jax.Array, Any]:
        """See `Model.forward`."""
        c = self.config
        rotation = rope_table(c.rope, positions)
        scale = 1 / math.sqrt(c.head_dim)
        norm = partial(add_rms_norm, eps=c.rms_norm_eps, round_last=True)
        split = partial(qkv_rope, num_heads=c.num_heads, num_kv_heads=c.num_kv_heads)
        x, delta = params["embed"][tokens], None
        for i, layer in enumerate(params["layers"]):
            x, normed = norm(x, delta, layer["attn_norm"])
            q, k, v = split(linear(normed, layer["qkv"]), *rotation, bias=layer["qkv_bias"])
            o, kv = attend(kv, i, q, k, v, scale=scale, window=c.windows[i], sinks=layer["sinks"])
            o = linear(o.reshape(x.shape[0], -1), layer["out"])
            x, normed = norm(x, o, layer["mlp_norm"], bias=layer["out_bias"])
            delta = experts_mlp(c, layer, normed)
        return norm(x, delta, params["norm"])[1], kv

    def unembed(self, params: Params, hidden: jax.Array) -> jax.Array:
        """See `Model.unembed`."""
        return linear(hidden, params.get("unembed", params["embed"]), out_dtype=jnp.float32)


def experts_mlp(c: GptOssConfig, layer: Params, x: jax.Array) -> ExpertSum:
    """Each row of x [T, E] through its experts."""
    logits = router_logits(x, layer["router"])
    routing = route(logits, c.experts_per_token, bias=layer["router_bias"], softmax_first=False)
    gate_up = grouped_linear(x, layer["gate_up"], routing, layer["gate_up_bias"], of_tokens=True)
    swiglu = partial(clamped_swiglu, limit=c.swiglu_limit)
    return combine(grouped_linear(gate_up, layer["down"], routing, layer["down_bias"], activation=swiglu), routing)


def clamped_swiglu(gate_up: jax.Array, limit: float) -> jax.Array:
    """`(up + 1) * gate * sigmoid(1.702 gate)`, gate at most `limit`, up within +-`limit`; float32, rounded once."""
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return ((up + 1) * gate * jax.nn.sigmoid(SWIGLU_ALPHA * gate)).astype(gate_up.dtype)
