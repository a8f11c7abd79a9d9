"""`models.save` and `models.load`: the same model bit for bit, and no folder that is not whole is taken for one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_data import TINY, golden
from typer.testing import CliRunner

import models
from models import export
from models.testing import HybridLlama, dense_kv, dense_step, tiny_hybrid, tiny_llama, toy_tokenizer
from prefix_reuse.cli import app
from prefix_reuse.hashing import weight_fingerprint


def same(a: models.Model, b: models.Model) -> bool:
    """Config, identity and every bit of the parameters."""
    bits: Any = jax.tree.map(lambda x, y: x.dtype == y.dtype and bool(jnp.array_equal(x, y)), a.params, b.params)
    return a.config == b.config and dict(a.identity) == dict(b.identity) and a.name == b.name and jax.tree.all(bits)


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("llama", {"dtype": "bfloat16"}, marks=pytest.mark.slow),
        ("qwen3_moe", {}),
        ("gpt_oss_mxfp4", {"dtype": "bfloat16"}),
        ("gpt_oss_original", {"dequantise": True}),
    ],
)
def test_a_saved_model_is_the_same_model(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = models.load(TINY / name, **options)
    models.save(model, tmp_path / "folder" / "export")
    reports: list[models.LoadProgress] = []
    again = models.load(tmp_path / "folder" / "export", progress=reports.append)
    assert same(model, again)
    assert again.eos_token_ids == model.eos_token_ids
    assert weight_fingerprint(again.params) == weight_fingerprint(model.params)
    assert names_in(tmp_path / "folder") == {"export"}
    filled = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    assert models.checkpoint_memory(tmp_path / "folder" / "export") == filled
    assert reports[0].bytes_total == reports[-1].bytes_done == filled


def test_logits_of_packed_experts_are_equal_to_the_bit(tmp_path: Path) -> None:
    model = models.load(TINY / "gpt_oss_mxfp4", dtype="float32")
    models.save(model, tmp_path / "export")
    ids, kv = jnp.asarray(golden("gpt_oss_mxfp4")["ids"][0][:24]), dense_kv(model, 24)
    again = models.load(tmp_path / "export", dtype="float32")
    assert again.config == model.config
    first, second = (dense_step(model, params, ids, kv)[0] for params in (model.params, again.params))
    np.testing.assert_array_equal(first, second)


def test_tokenizer_and_template_come_along(tmp_path: Path) -> None:
    model = tiny_llama()
    assert model.tokenizer is not None
    model.tokenizer.chat_template = "{{ messages }}"
    models.save(model, tmp_path / "export")
    tokenizer = models.load(tmp_path / "export").tokenizer
    assert tokenizer is not None
    assert tokenizer.digest == toy_tokenizer().digest
    assert tokenizer.chat_template == "{{ messages }}"


def change_manifest(folder: Path, seal: bool = True, **changes: Any) -> None:
    manifest = json.loads((folder / export.MANIFEST).read_text()) | changes
    if seal:
        del manifest["sha256"]
        manifest["sha256"] = export._seal(manifest)
    (folder / export.MANIFEST).write_text(json.dumps(manifest))


def test_what_is_not_a_whole_export_is_refused(tmp_path: Path) -> None:
    model, folder = tiny_llama(), tmp_path / "export"

    def refused(message: str, **options: Any) -> None:
        with pytest.raises(models.CheckpointError, match=message):
            models.load(folder, **options)
        models.save(model, folder)  # a damaged one may be replaced

    models.save(model, folder)
    refused("exported in float32; for bfloat16", dtype="bfloat16")
    change_manifest(folder, version=3)
    refused("format 3, this version reads up to 2")
    change_manifest(folder, format="another")
    refused("does not describe an exported model")
    change_manifest(folder, family="Mamba")
    refused("holds a 'Mamba'; supported: Llama")
    change_manifest(folder, seal=False, name="other")
    refused("does not fit its checksum")
    config = json.loads((folder / export.MANIFEST).read_text())["config"]
    change_manifest(folder, config=config | {"vocab_size": 64})
    refused(r"2 parameters are not those of the config: embed is \[\[128, 32\], 'float32'\]")
    change_manifest(folder, config=config | {"colour": "red"})
    refused("not one of a LlamaConfig")
    (folder / export.MANIFEST).write_text("{")
    refused("is damaged")
    largest = max(
        (path for path in (folder / "params").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )
    whole = largest.read_bytes()
    largest.write_bytes(whole[:-1])
    with pytest.raises(models.CheckpointError, match=f"damaged: .*{largest.name} missing or cut"):
        models.load(folder)
    middle = len(whole) // 2
    largest.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    refused(f"damaged: .*{largest.name} changed")
    assert same(models.load(folder), model)
    assert names_in(tmp_path) == {"export"}


def test_exports_of_format_1_are_read_unless_they_are_packed(tmp_path: Path) -> None:
    for name, model in (("dense", tiny_llama()), ("packed", models.load(TINY / "gpt_oss_mxfp4"))):
        models.save(model, tmp_path / name)
        change_manifest(tmp_path / name, version=1)
    assert same(models.load(tmp_path / "dense"), tiny_llama())
    with pytest.raises(models.CheckpointError, match="in the order of format 1: export the model again"):
        models.load(tmp_path / "packed")


def test_packed_exports_are_not_expanded_silently(tmp_path: Path) -> None:
    models.save(models.load(TINY / "gpt_oss_mxfp4"), tmp_path / "export")
    with pytest.raises(models.CheckpointError, match="exported with MXFP4 weights"):
        models.load(tmp_path / "export", dequantise=True)


def test_other_folders_and_other_models_are_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "a.txt").write_text("mine")
    with pytest.raises(models.CheckpointError, match="holds something else"):
        models.save(tiny_llama(), folder)
    with pytest.raises(models.CheckpointError, match="holds something else"):
        models.save(tiny_llama(), folder / "a.txt")
    assert (folder / "a.txt").read_text() == "mine"
    hybrid = tiny_hybrid()
    assert isinstance(hybrid, HybridLlama)
    with pytest.raises(models.CheckpointError, match="a HybridLlama cannot be saved"):
        models.save(hybrid, tmp_path / "export")
    with pytest.raises(models.CheckpointError, match="1 parameters are not those of the config"):
        models.save(replace(tiny_llama(), params={**tiny_llama().params, "more": jnp.ones(3)}), tmp_path / "x")
    assert names_in(tmp_path) == {"notes"}


@pytest.mark.parametrize("step", ["_save_arrays", "_sizes", "_digest", "_seal", "_put_in_place"])
@pytest.mark.parametrize("replaces", [False, True])
def test_a_torn_save_leaves_what_was_there(
    step: str, replaces: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, old = tmp_path / "export", tiny_llama(1)
    if replaces:
        models.save(old, folder)
    with monkeypatch.context() as patch:

        def fail(*_: Any) -> None:
            raise OSError("no space left")

        patch.setattr(export, step, fail)
        with pytest.raises(OSError, match="no space left"):
            models.save(tiny_llama(2), folder)
    assert names_in(tmp_path) == ({"export"} if replaces else set())
    if replaces:
        assert same(models.load(folder), old)


def test_convert_writes_what_load_reads(tmp_path: Path) -> None:
    arguments = ["convert", str(TINY / "gpt_oss_mxfp4"), str(tmp_path / "export"), "--dtype", "float32"]
    ran = CliRunner().invoke(app, arguments)
    assert ran.exit_code == 0, ran.output
    assert same(models.load(tmp_path / "export"), models.load(TINY / "gpt_oss_mxfp4", dtype="float32"))
    assert CliRunner().invoke(app, ["convert", str(TINY / "llama"), str(TINY)]).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{in}", "{file}"], "holds something else"),
        (["{in}", "{file}/below"], "is a file"),
        (["{in}", "{new}", "--dtype", "floaty"], "cannot compute in floaty"),
        (["{out}", "{new}", "--dtype", "floaty"], "cannot compute in floaty"),
        (["{file}", "{new}"], "neither a checkpoint folder nor"),
    ],
)
def test_convert_says_what_is_wrong_before_it_loads(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2, nothing written, and no parameter read for nothing."""
    (tmp_path / "file").write_text("mine")
    models.save(tiny_llama(), tmp_path / "out")
    before = names_in(tmp_path)
    paths = {"in": TINY / "llama", "file": tmp_path / "file", "new": tmp_path / "new", "out": tmp_path / "out"}

    def load_nothing(*_: Any, **__: Any) -> None:
        raise AssertionError("parameters were read")

    for name in ("load_params", "export.read_params"):
        monkeypatch.setattr(f"models.registry.{name}", load_nothing)
    ran = CliRunner().invoke(app, ["convert", *(argument.format(**paths) for argument in arguments)])
    assert ran.exit_code == 2, ran.output
    assert message in ran.stderr
    assert names_in(tmp_path) == before
