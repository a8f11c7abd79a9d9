"""Opened checkpoints: names, shapes, the config, and one tensor at a time.

A checkpoint is a folder as transformers writes it (`config.json` and safetensors, in one file or in shards with an
index) or a GGUF file, which presents itself in the same dialect: the same tensor names and the same config keys. So a
model file knows one dialect only.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax.numpy as jnp
import ml_dtypes  # noqa: F401  (safetensors gives bfloat16 as numpy arrays once these dtypes exist)
import numpy as np
from safetensors import SafetensorError, safe_open

from models.errors import CheckpointError

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "SafetensorsCheckpoint",
    "TensorInfo",
    "check_heads",
    "config_dtype",
    "flag",
    "integer",
    "number",
    "required",
    "section",
]

INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype ("F32", "BF16", "F16", "U8", ...) of a stored tensor."""

    shape: tuple[int, ...]
    dtype: str


class Checkpoint(Protocol):
    """Files that hold a model."""

    @property
    def path(self) -> Path:
        """The folder or file."""
        ...

    @property
    def config(self) -> Mapping[str, Any]:
        """The keys of `config.json`."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every stored tensor by name."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end an answer; may be empty."""
        ...

    @property
    def revision(self) -> str:
        """A digest of config, names, shapes and file sizes. Not of the weights: they are never read for it."""
        ...

    def read(self, name: str) -> np.ndarray:
        """The tensor's values, in host memory of their own."""
        ...


class SafetensorsCheckpoint:
    """A folder with `config.json` and `*.safetensors`.

    Args:
        folder: the folder.

    Raises:
        CheckpointError: no config, no weights, a shard that is missing, truncated or not safetensors.
    """

    def __init__(self, folder: str | Path):
        self.path = Path(folder)
        self.config = read_config(self.path)
        self.tensors: dict[str, TensorInfo] = {}
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        self._weight_map: Mapping[str, Any] = {}
        for file_name in self._file_names():
            self._open(file_name)

    def _file_names(self) -> list[str]:
        index_path = self.path / INDEX_NAME
        if index_path.is_file():
            self._weight_map = section(read_json(index_path), "weight_map")
            odd = [name for name, file in self._weight_map.items() if not isinstance(file, str)]
            if odd:
                raise CheckpointError(f"{index_path} names no file for {', '.join(odd[:5])}")
            files = sorted(set(self._weight_map.values()))
        else:
            files = sorted(path.name for path in self.path.glob("*.safetensors"))
            files = ["model.safetensors"] if "model.safetensors" in files else files
        missing = [name for name in files if not (self.path / name).is_file()]
        if missing or not files:
            raise CheckpointError(f"{self.path} has no {', '.join(missing) or '*.safetensors'}")
        return files

    def _open(self, file_name: str) -> None:
        path = self.path / file_name
        try:
            handle = safe_open(path, framework="numpy")
            for name in handle.keys():  # noqa: SIM118  (a handle is no mapping)
                if self._weight_map.get(name, file_name) != file_name:
                    continue  # a copy beside the one that the index names
                if name in self.tensors:
                    raise CheckpointError(f"{name} is in {self._file_of[name]} and in {file_name} of {self.path}")
                view = handle.get_slice(name)
                self.tensors[name] = TensorInfo(tuple(view.get_shape()), view.get_dtype())
                self._file_of[name] = file_name
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is not a whole safetensors file: {error}") from error
        self._files[file_name] = handle

    def read(self, name: str) -> np.ndarray:
        """The tensor's values."""
        return self._files[self._file_of[name]].get_tensor(name)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """From `generation_config.json` if it says so, else from the config."""
        path = self.path / "generation_config.json"
        generation = read_json(path) if path.is_file() else {}
        eos = generation.get("eos_token_id", self.config.get("eos_token_id"))
        ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise CheckpointError(f"{self.path} has eos_token_id = {eos!r}, which is no token id and no list of them")
        return tuple(ids)

    @property
    def revision(self) -> str:
        """See `Checkpoint.revision`."""
        sizes = [(name, (self.path / name).stat().st_size) for name in self._files]
        return digest_of(self.config, sorted((n, i.shape, i.dtype) for n, i in self.tensors.items()), sizes)


def read_config(folder: Path) -> Mapping[str, Any]:
    """`config.json` of a folder, without touching anything else. Raises CheckpointError."""
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} has no config.json")
    return read_json(path)


def required(config: Mapping[str, Any], *keys: str) -> Any:
    """The first of `keys` that the config has (older and newer names of one thing). Raises CheckpointError."""
    for key in keys:
        if config.get(key) is not None:
            return config[key]
    raise CheckpointError(f"the config has no {' or '.join(repr(key) for key in keys)}")


def integer(config: Mapping[str, Any], *keys: str, default: int | None = None) -> int:
    """The first of `keys` that the config has, or `default`: a positive whole number. Raises CheckpointError."""
    return _checked(config, keys, default, int, "a positive whole number")


def number(config: Mapping[str, Any], *keys: str, default: float | None = None) -> float:
    """The first of `keys` that the config has, or `default`: a positive finite number. Raises CheckpointError."""
    return float(_checked(config, keys, default, (int, float), "a positive number"))


def flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    """Whether the config says so; null is `default`. Raises CheckpointError for what is neither true nor false."""
    value = config.get(key)
    if value not in (None, True, False):
        raise CheckpointError(f"the config has {key} = {value!r}, which is neither true nor false")
    return default if value is None else bool(value)


def section(config: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """The first of `keys` that the config has: an object; empty without any. Raises CheckpointError."""
    key = next((key for key in keys if config.get(key) is not None), None)
    if key is None:
        return {}
    if not isinstance(config[key], dict):
        raise CheckpointError(f"the config has {key} = {config[key]!r}, which is no object")
    return config[key]


def check_heads(heads: int, kv_heads: int, head_dim: int) -> None:
    """Raises CheckpointError unless every KV head serves as many query heads, and halves of a head can be rotated."""
    if heads % kv_heads or head_dim % 2:
        raise CheckpointError(
            f"the config has {heads} query heads and {kv_heads} KV heads of {head_dim} numbers; query heads must be a multiple "
            "of KV heads, and the numbers even"
        )


def _checked(config: Mapping[str, Any], keys: Sequence[str], default: Any, kind: Any, expected: str) -> Any:
    key = next((key for key in keys if config.get(key) is not None), None)
    if key is None and default is not None:
        return default
    value = required(config, *keys)
    if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value < math.inf:
        raise CheckpointError(f"the config has {key} = {value!r}, which is not {expected}")
    return value


def config_dtype(config: Mapping[str, Any], dtype: Any = None, default: str = "bfloat16") -> Any:
    """The dtype to compute in: the one asked for, or the config's (`dtype`, in older files `torch_dtype`)."""
    name = dtype or config.get("dtype") or config.get("torch_dtype") or default
    try:
        result = jnp.dtype(name)
    except TypeError:
        result = None
    if result not in (jnp.dtype("float32"), jnp.dtype("bfloat16"), jnp.dtype("float16")):
        raise CheckpointError(f"cannot compute in {name}; use float32, bfloat16 or float16")
    return result


def digest_of(*parts: Any) -> str:
    """A short digest of JSON-able values, the same in every process."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def read_json(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object. Raises CheckpointError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return value


def read_text(path: Path) -> str:
    """A text file. Raises CheckpointError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as UTF-8 text: {error}") from error
