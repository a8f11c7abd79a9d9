"""A GGUF file that presents itself in the dialect of transformers: names, config keys, row order.

Weights are dequantised by the `gguf` package, a tensor at a time. llama.cpp stores the rows of q and k permuted, for
its rotation of neighbouring pairs; they are put back for the half-split rotation.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from models.checkpoint import TensorInfo, digest_of
from models.errors import CheckpointError, UnsupportedModelError

ARCHITECTURES = {"llama": "LlamaForCausalLM"}

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


class GgufCheckpoint:
    """One GGUF file.

    Args:
        path: the file.

    Raises:
        CheckpointError: it is truncated or not a GGUF file.
        UnsupportedModelError: its architecture is not supported.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            self._reader = gguf.GGUFReader(self.path)
        except (ValueError, OSError, IndexError, KeyError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{self.path} is not a whole GGUF file: {error}") from error
        architecture = self.field("general.architecture")
        if architecture not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise UnsupportedModelError(f"{self.path} holds {architecture!r}; supported in GGUF: {known}")
        self._by_name = {_hf_name(tensor.name): tensor for tensor in self._reader.tensors}
        self.config = self._hf_config(architecture)

    def field(self, key: str, default: Any = None) -> Any:
        """The value of a metadata field, or `default`."""
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def _hf_config(self, architecture: str) -> Mapping[str, Any]:
        def value(key: str, default: Any = None) -> Any:
            return self.field(f"{architecture}.{key}", default)

        heads = value("attention.head_count")
        if value("rope.scaling.type", "none") != "none":
            raise CheckpointError(f"{self.path}: rope scaling {value('rope.scaling.type')!r} of GGUF is not supported")
        embed = self._by_name.get(
            "model.embed_tokens.weight"
        )  # where it is missing, that will be said with all the rest
        rows = None if embed is None else int(embed.shape[-1])
        return {
            "architectures": [ARCHITECTURES[architecture]],
            "model_type": architecture,
            "vocab_size": value("vocab_size") or rows,
            "hidden_size": value("embedding_length"),
            "intermediate_size": value("feed_forward_length"),
            "num_hidden_layers": value("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": value("attention.head_count_kv", heads),
            "head_dim": value("attention.key_length"),
            "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
            "rope_theta": value("rope.freq_base", 10000.0),
            "max_position_embeddings": value("context_length"),
            "tie_word_embeddings": "lm_head.weight" not in self._by_name,
        }

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor under its transformers name; quantised ones as the F32 that they are read as."""
        return {
            name: TensorInfo(tuple(int(n) for n in reversed(tensor.shape)), "F32")
            for name, tensor in self._by_name.items()
        }

    def read(self, name: str) -> np.ndarray:
        """The tensor's values, float32, dequantised."""
        tensor = self._by_name[name]
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise CheckpointError(f"{name} of {self.path} is stored as {tensor.tensor_type.name}: {error}") from error
        values = np.array(values, np.float32)  # its own memory, not the mapped file's
        if name.endswith("q_proj.weight"):
            return _unpermute(values, self.config["num_attention_heads"])
        if name.endswith("k_proj.weight"):
            return _unpermute(values, self.config["num_key_value_heads"])
        return values

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End of sequence and, where it is another, end of turn."""
        ids = (self.field(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot"))
        return tuple(dict.fromkeys(int(i) for i in ids if i is not None))

    @property
    def revision(self) -> str:
        """See `Checkpoint.revision`."""
        shapes = sorted((name, info.shape) for name, info in self.tensors.items())
        return digest_of(self.config, shapes, self.path.stat().st_size)


def _hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; unknown names stay (reported as extra)."""
    if name in _TOP:
        return _TOP[name]
    match name.split(".", 2):
        case ["blk", number, rest] if rest in _LAYER:
            return f"model.layers.{number}.{_LAYER[rest]}"
    return name


def _unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Within each head, rows 0, 1, 2, 3, ... (pairs d, d + D/2 side by side) go back to 0, D/2, 1, D/2 + 1, ..."""
    dim, columns = rows.shape[0] // heads, rows.shape[1]
    return rows.reshape(heads, dim // 2, 2, columns).swapaxes(1, 2).reshape(rows.shape)
