"""Shapes of the models that are measured whole, and the least time that their work can take on a card.

A time is never shorter than its bytes over the card's read rate, its FLOPs over the rate of a plain matmul, and what comes over
the link over the link's rate; all three rates are measured in the same run (`measure_rates`).
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import models
from benchmarks.decode_step import QWEN3_8B, read_rate
from benchmarks.transfers import link_rates
from models.testing import tiny_hybrid, tiny_llama
from pallas_kernels.layout import page_bytes

QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "max_position_embeddings": 131072,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "mxfp4"},
}
GPT_OSS_120B: dict[str, Any] = {**GPT_OSS_20B, "num_local_experts": 128, "num_hidden_layers": 36}
TINY_MOE: dict[str, Any] = {
    **QWEN3_30B_A3B,
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "torch_dtype": "float32",
}
FULL = {
    "qwen3-8b": QWEN3_8B,
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "gpt-oss-20b": GPT_OSS_20B,
    "gpt-oss-120b": GPT_OSS_120B,
}
TINY = ("tiny-llama", "tiny-hybrid", "tiny-moe")


def make_model(name: str, embed_std: float | None = None) -> Any:
    """A model of that name, one of `FULL` or `TINY`, with random weights, made on the device.

    `embed_std`: standard deviation of the embedding; None: hidden_size ** -0.5, which the layers' outputs outweigh by far.
    """
    if name == "tiny-moe":
        model = models.from_config(TINY_MOE, name=name)
    elif name in TINY:
        model = {"tiny-llama": tiny_llama, "tiny-hybrid": tiny_hybrid}[name](max_context=8192)
    else:
        model = models.from_config(FULL[name], name=name)
    if embed_std is None:
        return model
    embed = model.params["embed"]
    factor = embed_std / jnp.std(embed[:1024].astype(jnp.float32))
    return dataclasses.replace(model, params={**model.params, "embed": embed * factor.astype(embed.dtype)})


@dataclass(frozen=True)
class Rates:
    """What the device reaches in plain XLA programs.

    Attributes:
        read: bytes a second of a sum over a large array.
        matmul: FLOPs a second of a square matmul in the model's dtype, in a jitted loop.
        to_device, to_host: bytes a second of one large pinned copy.
    """

    read: float
    matmul: float
    to_device: float
    to_host: float

    def to_json(self) -> dict[str, float]:
        names = {"read": "read_TBps", "matmul": "matmul_TFLOPs"}
        scale = {"read": 1e-12, "matmul": 1e-12}
        return {names.get(n, f"{n}_GBps"): v * scale.get(n, 1e-9) for n, v in asdict(self).items()}


def measure_rates(dtype: Any, *, small: bool = False) -> Rates:
    """Measures the card now; `small` for a CPU."""
    link = link_rates(jax.devices()[0], (1 << 24) if small else (1 << 30))
    return Rates(
        read=read_rate((1 << 22) if small else (2 << 30)),
        matmul=matmul_rate(256 if small else 8192, dtype),
        to_device=link["to_device"]["GBps"] * 1e9,
        to_host=link["to_host"]["GBps"] * 1e9,
    )


def matmul_rate(n: int, dtype: Any, repeats: int = 7) -> float:
    """FLOPs a second of [n, n] @ [n, n], from the difference of a long loop and a short one."""
    x, weight = (jax.random.normal(jax.random.key(i), (n, n), jnp.dtype(dtype)) for i in range(2))
    weight = weight * jnp.asarray(n**-0.5, weight.dtype)

    @jax.jit
    def loop(x: jax.Array, weight: jax.Array, steps: Any) -> jax.Array:
        return jax.lax.fori_loop(0, steps, lambda _, x: x @ weight, x)

    def run(steps: int) -> float:
        start = time.perf_counter()
        loop(x, weight, jnp.int32(steps)).block_until_ready()
        return time.perf_counter() - start

    run(2)
    seconds = statistics.median((run(22) - run(2)) / 20 for _ in range(repeats))
    return 2.0 * n**3 / max(seconds, 1e-9)


class Costs:
    """Bytes and FLOPs of a model's work, from its shapes and its parameters as they lie in memory.

    Where the experts that are read were not counted, they are those that B rows are expected to choose if every choice is
    independent and alike: E (1 - (1 - k / E)^B). Rows that choose the same ones read fewer, so that this is no lower bound.
    """

    def __init__(self, model: Any, page_size: int):
        c = model.config
        self.config, self.groups, self.page_size = c, model.kv_groups, page_size
        self.num_experts = getattr(c, "num_experts", 0)
        self.top_k = getattr(c, "experts_per_token", 0)
        leaves = jax.tree_util.tree_leaves_with_path(model.params)
        sizes = [(jax.tree_util.keystr(path), leaf.shape, leaf.nbytes) for path, leaf in leaves]
        self.param_bytes = sum(size for _, _, size in sizes)
        self.expert_bytes = sum(size for path, shape, size in sizes if self._is_expert(path, shape))
        # Of the embedding a forward reads one row a token, unless it is the unembedding too.
        table = 0 if c.tied else sum(size for path, _, size in sizes if path == "['embed']")
        self.dense_bytes = self.param_bytes - self.expert_bytes - table

    def _is_expert(self, path: str, shape: tuple[int, ...]) -> bool:
        stacked = "['layers']" in path and len(shape) > 1 and shape[0] == self.num_experts
        return bool(self.num_experts) and stacked and "router" not in path

    @property
    def page_bytes(self) -> int:
        """Bytes of a page over all layer groups."""
        return sum(page_bytes(group, self.page_size) for group in self.groups)

    def experts(self, tokens: int) -> float:
        """Experts of a layer that `tokens` tokens are expected to choose, if all choices are independent and alike."""
        if not self.num_experts:
            return 0.0
        return self.num_experts * (1 - (1 - self.top_k / self.num_experts) ** tokens)

    def weight_bytes(self, tokens: int, experts: float | None = None) -> float:
        """Bytes of weights that a forward of `tokens` tokens reads; of a layer `experts` experts, None: as many as expected."""
        experts = self.experts(tokens) if experts is None else experts
        return self.dense_bytes + self.expert_bytes * experts / max(1, self.num_experts)

    def kv_bytes(self, context: int, rows: int = 1, shared: int = 0) -> float:
        """Bytes of K and V that one token of each of `rows` rows sees; the first `shared` tokens are the same ones."""
        total = 0.0
        for group in self.groups:
            seen = min(context, group.window or context)
            common = max(0, seen - (context - shared))
            total += (common + rows * (seen - common)) * page_bytes(group, self.page_size) / self.page_size
        return total

    def load_bytes(self, cached: int) -> float:
        """Bytes of host pages that a hit of `cached` tokens needs: of a sliding window its last pages only."""
        total = 0
        for group in self.groups:
            pages = cached // self.page_size
            if group.window is not None:
                pages = min(pages, -(-(group.window - 1) // self.page_size))
            total += pages * page_bytes(group, self.page_size)
        return total

    def prefill_flops(self, cached: int, new: int) -> float:
        """FLOPs of `new` tokens behind `cached` ones, and of one row of logits."""
        c = self.config
        width, heads = c.hidden_size, c.num_heads * c.head_dim
        attention = width * (heads + 2 * c.num_kv_heads * c.head_dim) + heads * width
        sparse = range(c.num_layers) if not hasattr(c, "sparse_layers") else c.sparse_layers
        num_sparse = len(sparse) if self.num_experts else 0
        expert = 3 * width * (getattr(c, "expert_size", 0) or c.intermediate_size)
        mlp = num_sparse * (self.top_k * expert + width * self.num_experts)
        mlp += (c.num_layers - num_sparse) * 3 * width * c.intermediate_size
        linear = 2 * (c.num_layers * attention + mlp) * new + 2 * width * c.vocab_size
        keys = cached + 1.0 + np.arange(new)
        pairs = sum(len(g.layers) * np.minimum(keys, g.window or np.inf).sum() for g in self.groups)
        return float(linear + 4 * heads * pairs)

    # ---- least times, in milliseconds

    def decode_ms(self, rates: Rates, context: int, rows: int, shared: int = 0, experts: float | None = None) -> float:
        """One step: the weights, those of `experts` experts of a layer among them, and each byte of K and V, read once."""
        return (self.weight_bytes(rows, experts) + self.kv_bytes(context, rows, shared)) / rates.read * 1e3

    def prefill_ms(self, rates: Rates, cached: int, new: int) -> float:
        """The longer of the suffix's FLOPs and the bytes that it reads."""
        read = self.weight_bytes(new) + self.kv_bytes(cached)
        return max(self.prefill_flops(cached, new) / rates.matmul, read / rates.read) * 1e3

    def load_ms(self, rates: Rates, cached: int) -> float:
        """The host pages of a hit over the link."""
        return self.load_bytes(cached) / rates.to_device * 1e3
