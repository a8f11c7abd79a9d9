"""A model as a folder of its own, ready to be loaded again: parameters as they lie in device memory, through orbax-checkpoint.

    <folder>/prefix_reuse_model.json   version, family, config, parameters, files; sealed by a sha256; written last
    <folder>/params/                   orbax: one array per leaf, an MXFP4 weight as its blocks and its scales
    <folder>/tokenizer.json, chat_template.jinja

Everything is written to `<folder>.partial-*` beside it, which becomes the folder by one rename: a torn save leaves no folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import xxhash

from models.errors import CheckpointError
from models.model import Model
from models.params import Source, check_memory
from models.rope import RopeConfig
from models.tokenizer import Tokenizer
from pallas_kernels.grouped_matmul.mxfp4 import CODES, Mxfp4, padded_scales

MANIFEST, FORMAT, VERSION = "prefix_reuse_model.json", "prefix-reuse model", 2
"""Version 1 had another order of codes in MXFP4 words (`Mxfp4`); its other models are read."""
TOKENIZER, TEMPLATE, PARAMS = "tokenizer.json", "chat_template.jinja", "params"


def is_export(folder: Path) -> bool:
    """Whether `write` made the folder, whole or damaged."""
    return (folder / MANIFEST).is_file()


def check_folder(folder: Path) -> None:
    """Raises CheckpointError unless `write` may make, or replace, this folder."""
    if folder.exists() and not (folder.is_dir() and (is_export(folder) or not any(folder.iterdir()))):
        raise CheckpointError(f"{folder} holds something else; give a new folder, or one that an export may replace")
    above = next((path for path in folder.absolute().parents if path.exists()), folder)
    if not above.is_dir():
        raise CheckpointError(f"{folder} cannot be a folder: {above} is a file")


def write(model: Model, plan: Any, folder: Path) -> None:
    """Writes a model whose params are those of `plan`; an older export at `folder` is replaced in the end.

    Raises:
        CheckpointError: `folder` holds something else, or the params are not those of the config.
        OSError: a write failed; `folder` is as it was.
    """
    check_folder(folder)
    leaves = _named(model.params)
    _compare(folder, _described(leaves), _described(_named(shapes_of(plan, model.config.dtype))))
    folder.absolute().parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.partial-", dir=folder.absolute().parent))
    try:
        _save_arrays(partial / PARAMS, leaves)
        if model.tokenizer is not None:
            model.tokenizer.backend.save(str(partial / TOKENIZER))
            if model.tokenizer.chat_template is not None:
                (partial / TEMPLATE).write_text(model.tokenizer.chat_template, encoding="utf-8")
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "family": type(model).__name__,
            "name": model.name,
            "config": encode_config(model.config),
            "eos_token_ids": list(model.eos_token_ids),
            "identity": dict(model.identity),
            "parameters": _described(leaves),
            "files": {name: [size, _digest(partial / name)] for name, size in _sizes(partial).items()},
        }
        with (partial / MANIFEST).open("w", encoding="utf-8") as file:
            json.dump(manifest | {"sha256": _seal(manifest)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        partial.chmod(0o755)  # mkdtemp keeps others out
        _put_in_place(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def read_manifest(folder: Path) -> Mapping[str, Any]:
    """What a folder says about itself; every file is there in its full size. Raises CheckpointError."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path} does not describe an exported model")
    if not isinstance(manifest.get("version"), int) or manifest["version"] > VERSION:
        raise CheckpointError(
            f"{folder} was written in format {manifest.get('version')!r}, this version reads up to {VERSION}: "
            "update prefix-reuse, or export the model again"
        )
    if manifest.pop("sha256", None) != _seal(manifest):
        raise CheckpointError(f"{path} is damaged: its content does not fit its checksum")
    if manifest["version"] < 2 and any(name.endswith(".blocks") for name in manifest["parameters"]):
        raise CheckpointError(f"{folder} has MXFP4 weights in the order of format 1: export the model again")
    found = _sizes(folder)
    torn = [name for name, (size, _) in manifest["files"].items() if found.get(name) != size]
    if torn:
        raise CheckpointError(f"{folder} is damaged: {', '.join(torn[:5])} missing or cut; export the model again")
    return manifest


def check_files(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Reads every file and compares its digest: neither orbax nor zarr notices a changed bit. Raises CheckpointError."""
    changed = [name for name, (_, digest) in manifest["files"].items() if _digest(folder / name) != digest]
    if changed:
        raise CheckpointError(f"{folder} is damaged: {', '.join(changed[:5])} changed; export the model again")


def read_params(folder: Path, manifest: Mapping[str, Any], plan: Any, dtype: Any) -> Any:
    """The params of `plan`, on the default device. Raises CheckpointError."""
    wanted = shapes_of(plan, dtype)
    names = _named(wanted)
    _compare(folder, manifest["parameters"], _described(names))
    check_memory(folder, sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in names.values()))
    try:
        arrays = _load_arrays(folder / PARAMS, names)
    except Exception as error:  # what orbax and tensorstore raise has no common type
        raise CheckpointError(f"{folder} cannot be read: {error}") from error
    return jax.tree.unflatten(jax.tree.structure(wanted), [arrays[name] for name in names])


def read_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer, if the model had one."""
    if not (folder / TOKENIZER).is_file():
        return None
    tokenizer = Tokenizer.from_file(folder / TOKENIZER)
    if (folder / TEMPLATE).is_file():
        tokenizer.chat_template = (folder / TEMPLATE).read_text(encoding="utf-8")
    return tokenizer


def shapes_of(plan: Any, dtype: Any) -> Any:
    """The params of a plan as `jax.ShapeDtypeStruct`s."""

    def leaf(source: Source) -> Any:
        if not source.packed:
            return jax.ShapeDtypeStruct(source.shape, jnp.dtype(dtype))
        *rows, columns = source.shape
        blocks: Any = jax.ShapeDtypeStruct((*rows, columns // CODES), jnp.uint16)
        scales: Any = jax.ShapeDtypeStruct((*rows, padded_scales(columns)), jnp.uint8)
        return Mxfp4(blocks, scales)

    return jax.tree.map(leaf, plan)


def encode_config(config: Any) -> dict[str, Any]:
    """A family's config as JSON."""
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    rope = {field.name: getattr(config.rope, field.name) for field in fields(config.rope)}
    return values | {"rope": rope, "dtype": jnp.dtype(config.dtype).name}


def decode_config(kind: type, values: Mapping[str, Any]) -> Any:
    """The opposite of `encode_config`. Raises CheckpointError for fields that `kind` does not have."""
    plain = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    try:
        return kind(**{**plain, "rope": RopeConfig(**values["rope"]), "dtype": jnp.dtype(values["dtype"])})
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"the exported config is not one of a {kind.__name__}: {error}") from error


def _named(params: Any) -> dict[str, Any]:
    """Leaves by path, such as `layers.0.down.blocks`."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _described(leaves: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {name: [list(leaf.shape), jnp.dtype(leaf.dtype).name] for name, leaf in leaves.items()}


def _compare(folder: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    odd = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
    if odd:
        some = "; ".join(f"{name} is {found.get(name)}, expected {wanted.get(name)}" for name in odd[:3])
        raise CheckpointError(f"{folder}: {len(odd)} parameters are not those of the config: {some}")


def _seal(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _sizes(folder: Path) -> dict[str, int]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MANIFEST)
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def _digest(path: Path) -> str:
    """xxh3 of a file, as fast as memory is read."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            digest.update(block)
    return digest.hexdigest()


def _put_in_place(partial: Path, folder: Path) -> None:
    """One rename; an older export is moved aside first, and back if the rename fails."""
    if not folder.exists():
        partial.rename(folder)
        return
    old = Path(tempfile.mkdtemp(prefix=f"{folder.name}.old-", dir=folder.absolute().parent))
    folder.rename(old / "export")
    try:
        partial.rename(folder)
    except BaseException:
        (old / "export").rename(folder)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def _save_arrays(path: Path, leaves: Mapping[str, Any]) -> None:
    import orbax.checkpoint as ocp

    with _quiet(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(path.absolute(), args=ocp.args.PyTreeSave(dict(leaves)))


def _load_arrays(path: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> Mapping[str, jax.Array]:
    import orbax.checkpoint as ocp

    sharding = jax.sharding.SingleDeviceSharding(jnp.zeros(()).devices().pop())
    arguments = {name: ocp.ArrayRestoreArgs(sharding=sharding) for name in wanted}
    with _quiet(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        return checkpointer.restore(
            path.absolute(), args=ocp.args.PyTreeRestore(item=dict(wanted), restore_args=arguments)
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps orbax from warnings that concern clusters only."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
