"""Checkpoints that are whole load in any form; broken ones are refused with the names of what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_data import TINY, copy_checkpoint, golden
from safetensors.numpy import load_file, save_file

import models
from benchmarks.model_costs import GPT_OSS_20B
from models.params import memory_needed
from models.registry import family_of
from models.testing import reference_logits, tiny_llama
from models.tokenizer import Tokenizer
from prefix_reuse.hashing import weight_fingerprint

Tensors = dict[str, np.ndarray]


def rewrite(folder: Path, change: Callable[[Tensors], None]) -> Path:
    """Changes the tensors of a copied checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def shard(folder: Path, parts: int) -> Path:
    """Splits a copied checkpoint into shards with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for part in range(parts):
        file_name = f"model-{part + 1:05d}-of-{parts:05d}.safetensors"
        names = sorted(tensors)[part::parts]
        save_file({name: tensors[name] for name in names}, folder / file_name)
        weight_map |= dict.fromkeys(names, file_name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def equal(a: models.Model, b: models.Model) -> bool:
    return jax.tree.all(jax.tree.map(lambda x, y: bool(jnp.array_equal(x, y)), a.params, b.params))


def test_shards_are_the_same_model(tmp_path: Path) -> None:
    assert equal(models.load(shard(copy_checkpoint("llama", tmp_path), 3)), models.load(TINY / "llama"))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = shard(copy_checkpoint("llama", tmp_path), 3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(models.CheckpointError, match=r"model-00002-of-00003\.safetensors"):
        models.load(folder)


def test_the_index_says_which_of_two_copies_of_a_tensor_counts(tmp_path: Path) -> None:
    """A shard may hold a stale copy of what the index has elsewhere; without an index two copies are refused."""
    folder = shard(copy_checkpoint("llama", tmp_path), 3)
    stale = load_file(folder / "model-00003-of-00003.safetensors")
    stale |= {n: np.zeros_like(t) for n, t in load_file(folder / "model-00001-of-00003.safetensors").items()}
    save_file(stale, folder / "model-00003-of-00003.safetensors")
    assert equal(models.load(folder), models.load(TINY / "llama"))
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(models.CheckpointError, match=r"is in model-00001-of-00003.* and in model-00003"):
        models.load(folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": []}, r"weight_map = \[\], which is no object"),
        ({"weight_map": {"model.norm.weight": 3}}, "names no file for model.norm.weight"),
        ({"weight_map": {}}, r"has no \*\.safetensors"),
        ({"weight_map": {"model.norm.weight": "model-9.safetensors"}}, "has no model-9.safetensors"),
    ],
)
def test_an_index_that_makes_no_sense_is_refused(index: dict[str, object], message: str, tmp_path: Path) -> None:
    folder = shard(copy_checkpoint("llama", tmp_path), 2)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(models.CheckpointError, match=message):
        models.load(folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_float_dtype_loads_and_computes(dtype: str, tmp_path: Path) -> None:
    def cast(tensors: Tensors) -> None:
        tensors.update({name: value.astype(jnp.dtype(dtype)) for name, value in tensors.items()})

    folder = rewrite(copy_checkpoint("llama", tmp_path, dtype=dtype), cast)
    model, data = models.load(folder), golden("llama")
    assert {leaf.dtype for leaf in jax.tree.leaves(model.params)} == {jnp.dtype(dtype)}
    assert model.kv_groups[0].dtype == jnp.dtype(dtype)
    logits = reference_logits(model, data["ids"][0])
    scale = np.abs(data["logits"][0]).max()
    assert logits.dtype == np.float32
    assert (
        np.abs(logits - data["logits"][0]).max() < {"float32": 1e-4, "float16": 1e-2, "bfloat16": 6e-2}[dtype] * scale
    )
    as_float32 = models.load(folder, dtype="float32")
    assert {leaf.dtype for leaf in jax.tree.leaves(as_float32.params)} == {jnp.dtype("float32")}


def test_all_that_does_not_fit_is_named_before_anything_is_read(tmp_path: Path) -> None:
    def spoil(tensors: Tensors) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(128, np.float32)
        tensors["model.norm.weight"] = np.zeros(63, np.float32)
        tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.int32)

    folder = rewrite(copy_checkpoint("llama", tmp_path), spoil)
    reports = []
    with pytest.raises(models.CheckpointError) as caught:
        models.load(folder, progress=reports.append)
    message = str(caught.value)
    assert "1 tensors missing: model.layers.1.mlp.up_proj.weight" in message
    assert "1 tensors not expected: model.layers.0.self_attn.q_proj.bias" in message
    assert "model.norm.weight is (63,), expected (64,)" in message
    assert "lm_head.weight is I32, expected F32 or F16 or BF16" in message
    assert not reports


def test_a_layer_too_many_is_named(tmp_path: Path) -> None:
    with pytest.raises(models.CheckpointError, match=r"not expected: model\.layers\.2\."):
        models.load(copy_checkpoint("llama", tmp_path, num_hidden_layers=2))


def test_tied_embeddings_need_no_head_and_may_have_one(tmp_path: Path) -> None:
    assert "unembed" not in models.load(TINY / "qwen3").params
    folder = copy_checkpoint("qwen3", tmp_path)
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}))
    assert equal(models.load(folder), models.load(TINY / "qwen3"))


@pytest.mark.parametrize("keep", [4, 1000, 100_000])
def test_a_truncated_safetensors_file_is_refused(keep: int, tmp_path: Path) -> None:
    path = copy_checkpoint("llama", tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(models.CheckpointError, match=r"model\.safetensors is not a whole safetensors file"):
        models.load(path.parent)


@pytest.mark.parametrize(
    "content", [b"", b"GGUF", b"GGUF\x03\x00\x00\x00" + b"\x01\x00\x00\x00\x00\x00\x00\x00" * 2, b"no"]
)
def test_a_truncated_gguf_file_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(models.CheckpointError, match="not a whole GGUF file"):
        models.load(path)


def test_memory_is_told_without_loading() -> None:
    model = models.load(TINY / "llama")
    assert models.checkpoint_memory(TINY / "llama") == sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    assert models.checkpoint_memory(TINY / "llama", "bfloat16") * 2 == models.checkpoint_memory(TINY / "llama")


@pytest.mark.parametrize(
    ("layers", "experts", "packed", "expanded"),
    [(24, 32, 13.8e9, 41.8e9), (36, 128, 65.3e9, 233.7e9)],
    ids=["gpt-oss-20b", "gpt-oss-120b"],
)
def test_the_memory_of_the_released_gpt_oss_is_that_of_packed_experts(
    layers: int, experts: int, packed: float, expanded: float
) -> None:
    """From their published sizes: four bits a weight and a byte for 32 of them, in all experts; bfloat16 elsewhere."""
    config = GPT_OSS_20B | {"num_hidden_layers": layers, "num_local_experts": experts}
    family = family_of(config)
    parsed = family.config.from_hf(config)
    wide = replace(parsed, dequantise=True)
    assert memory_needed(family.plan(parsed), parsed.dtype) == pytest.approx(packed, rel=5e-3)
    assert memory_needed(family.plan(wide), wide.dtype) == pytest.approx(expanded, rel=5e-3)


@pytest.mark.parametrize("name", ["gpt_oss_mxfp4", "gpt_oss_original"])
@pytest.mark.parametrize("dequantise", [False, True])
def test_memory_of_packed_weights_is_told_before_they_are_read(name: str, dequantise: bool) -> None:
    reports: list[models.LoadProgress] = []
    model = models.load(TINY / name, dtype="bfloat16", progress=reports.append, dequantise=dequantise)
    filled = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    assert models.checkpoint_memory(TINY / name, "bfloat16", dequantise=dequantise) == filled
    assert reports[0].bytes_total == reports[-1].bytes_done == filled
    assert reports[0].done == 0


def test_mxfp4_beside_float16_is_expanded() -> None:
    model = models.load(TINY / "gpt_oss_mxfp4", dtype="float16")
    assert {leaf.dtype for leaf in jax.tree.leaves(model.params)} == {jnp.dtype("float16")}


def test_a_scale_too_large_to_stay_packed_is_refused_by_name(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.down_proj_scales"
    folder = copy_checkpoint("gpt_oss_mxfp4", tmp_path)

    def set_scale(scale: int) -> Callable[[Tensors], None]:
        return lambda tensors: tensors[name].__setitem__((2, 1, 0), scale)

    with pytest.raises(models.CheckpointError, match=rf"{name} has a scale of 129; .*dequantise=True"):
        models.load(rewrite(folder, set_scale(129)))
    models.load(folder, dequantise=True)
    models.load(rewrite(folder, set_scale(128)))


def test_the_fingerprint_tells_packed_weights_apart() -> None:
    """One code or one scale, in any packed leaf."""
    model = models.load(TINY / "gpt_oss_mxfp4")
    first = weight_fingerprint(model.params)
    assert first == weight_fingerprint(models.load(TINY / "gpt_oss_mxfp4").params)
    seen = {first}
    for field in ("blocks", "scales"):
        weight = model.params["layers"][1]["down"]
        changed = weight.replace(**{field: getattr(weight, field).at[0, 1, 0].add(1)})
        layers = [model.params["layers"][0], model.params["layers"][1] | {"down": changed}, *model.params["layers"][2:]]
        seen.add(weight_fingerprint(model.params | {"layers": layers}))
    assert len(seen) == 3


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512, "qk_rope_head_dim": 64},
        {"architectures": ["DeepseekV32ForCausalLM"], "kv_lora_rank": 512, "index_topk": 2048},
        {"architectures": ["KimiLinearForCausalLM"], "kv_lora_rank": 512},
    ],
)
def test_latent_attention_is_refused_before_weights_are_looked_at(config: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"broken, and never opened")
    with pytest.raises(models.UnsupportedAttentionError) as caught:
        models.load(tmp_path)
    assert str(config["architectures"][0]) in str(caught.value)  # type: ignore[index]
    assert "supported: LlamaForCausalLM" in str(caught.value)


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    with pytest.raises(models.UnsupportedModelError, match=r"MambaForCausalLM is not supported; supported: Llama"):
        models.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope type 'longrope'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"hidden_size": None}, "no 'hidden_size'"),
        ({"dtype": "int8"}, "cannot compute in int8"),
        ({"dtype": "floaty"}, "cannot compute in floaty"),
        ({"architectures": 7}, "7 is not supported"),
        ({"architectures": "MambaForCausalLM"}, "MambaForCausalLM is not supported"),
        ({"num_attention_heads": "8"}, "num_attention_heads = '8', which is not a positive whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0, which is not a positive whole number"),
        ({"max_position_embeddings": 2048.5}, r"max_position_embeddings = 2048\.5"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps = -1e-05, which is not a positive number"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings = 'false', which is neither true nor false"),
        ({"num_key_value_heads": 3}, "8 query heads and 3 KV heads"),
        ({"eos_token_id": "</s>"}, "eos_token_id = '</s>'"),
        ({"rope_parameters": "llama3"}, "rope_parameters = 'llama3', which is no object"),
        ({"rope_parameters": {"rope_theta": 1e4, "factor": 8.0}}, "names no rope_type"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "names no rope_type"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "no 'factor'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}}, "no 'low_freq_factor'"),
    ],
)
def test_configs_that_are_not_supported_say_why(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    folder = copy_checkpoint("llama", tmp_path, **changes)
    (folder / "generation_config.json").unlink()
    with pytest.raises(models.CheckpointError, match=message):
        models.load(folder)


LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def test_a_scaled_rotation_without_its_context_is_no_rotation_of_the_whole_context(tmp_path: Path) -> None:
    with pytest.raises(models.CheckpointError, match="no 'original_max_position_embeddings'"):
        models.load(copy_checkpoint("llama", tmp_path, rope_parameters=LLAMA3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types = .* each of 4 layers"),
        ({"layer_types": ["sliding_attention", "chunked_attention"] * 2}, "layer_types = .*chunked_attention"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9 of 8 experts"),
        ({"swiglu_alpha": 1.0}, r"swiglu_alpha = 1\.0 is not supported"),
        ({"sliding_window": 0}, "sliding_window = 0"),
        ({"quantization_config": "mxfp4"}, "quantization_config = 'mxfp4', which is no object"),
        ({"rope_parameters": None}, "no 'rope_theta'"),
    ],
)
def test_a_gpt_oss_config_is_not_read_as_another_model(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(models.CheckpointError, match=message):
        models.load(copy_checkpoint("gpt_oss_fp32", tmp_path, **changes))


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt_oss_mxfp4", "gpt_oss_original"])
def test_any_value_of_a_wrong_type_in_a_config_is_refused_or_ignored(name: str) -> None:
    """Nothing but the package's own error, whatever stands in `config.json`."""
    config = json.loads((TINY / name / "config.json").read_text())
    rope = next((key for key in ("rope_parameters", "rope_scaling") if isinstance(config.get(key), dict)), None)
    refused = 0
    for value in ("x", [1], {"a": 1}, -1, 0, True, None):
        variants = [{**config, key: value} for key in config]
        variants += [{**config, rope: {**config[rope], key: value}} for key in config[rope]] if rope else []
        for variant in variants:
            try:
                family = family_of(variant)
                family.plan(family.config.from_hf(variant))
            except models.CheckpointError:
                refused += 1
    assert refused > 50


def test_what_does_not_exist_is_an_error_that_knows_the_names(tmp_path: Path) -> None:
    with pytest.raises(models.CheckpointError, match=r"no-such-model.*smollm2"):
        models.load("no-such-model")
    with pytest.raises(models.CheckpointError, match=r"has no config\.json"):
        models.load(tmp_path)
    (tmp_path / "file.txt").write_text("x")
    with pytest.raises(models.CheckpointError, match=r"neither a checkpoint folder nor a \.gguf file"):
        models.load(tmp_path / "file.txt")


def test_a_tokenizer_in_the_folder_is_used_and_a_broken_one_refused(tmp_path: Path) -> None:
    folder, toy = copy_checkpoint("llama", tmp_path), tiny_llama(vocab=512).tokenizer
    assert toy is not None
    toy.backend.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    model = models.load(folder)
    assert isinstance(model.tokenizer, Tokenizer)
    assert model.tokenizer.digest == toy.digest == model.identity["tokenizer"]
    assert model.tokenizer.chat_template == "{{ messages }}"
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(models.CheckpointError, match=r"tokenizer\.json is not a tokenizer"):
        models.load(folder)


@pytest.mark.parametrize(
    ("settings", "template"),
    [
        ('{"chat_template": "{{ one }}"}', "{{ one }}"),
        ('{"chat_template": [{"name": "tool_use", "template": "b"}, {"name": "default", "template": "a"}]}', "a"),
        ('{"chat_template": [{"name": "tool_use", "template": "b"}]}', None),
        ("{}", None),
    ],
)
def test_the_default_of_several_templates_is_the_template(settings: str, template: str | None, tmp_path: Path) -> None:
    folder, toy = copy_checkpoint("llama", tmp_path / "in"), tiny_llama(vocab=512).tokenizer
    assert toy is not None
    toy.backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(settings)
    model = models.load(folder)
    assert model.tokenizer is not None
    assert model.tokenizer.chat_template == template
    models.save(model, tmp_path / "out")
    again = models.load(tmp_path / "out").tokenizer
    assert again is not None
    assert again.chat_template == template


@pytest.mark.parametrize("content", ["{", "[]", '{"chat_template": 5}'])
def test_broken_settings_of_a_tokenizer_are_refused(content: str, tmp_path: Path) -> None:
    folder, toy = copy_checkpoint("llama", tmp_path), tiny_llama(vocab=512).tokenizer
    assert toy is not None
    toy.backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(content)
    with pytest.raises(models.CheckpointError, match=r"tokenizer_config\.json"):
        models.load(folder)


def test_a_gguf_file_without_its_metadata_is_refused(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("output_norm.weight", np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(models.CheckpointError, match="the config has no 'num_attention_heads'"):
        models.load(path)


def test_identity_changes_with_what_it_names(tmp_path: Path) -> None:
    base = models.load(TINY / "llama").identity
    longer = models.load(copy_checkpoint("llama", tmp_path, max_position_embeddings=4096)).identity
    assert base["config"] != longer["config"]
    assert base["revision"] != longer["revision"]
    assert models.load(TINY / "llama", dtype="bfloat16").identity["dtype"] != base["dtype"]
    assert models.load(TINY / "llama").identity == base
