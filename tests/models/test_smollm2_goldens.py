"""SmolLM2 against transformers in float32: ids, logits, greedy tokens, K and V after RoPE, hidden states."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from model_data import DATA, require_smollm2

import models
from models.llama import decoder_layer
from models.params import LoadProgress
from models.registry import resolve
from models.rope import rope_table
from models.testing import dense_attend, dense_kv, dense_step
from pallas_kernels.add_rms_norm.reference import rms_norm

PROMPTS = {p["name"]: p for p in json.loads((DATA / "smollm2_prompts.json").read_text())["prompts"]}
TOLERANCE = 1e-3
LONGEST, CAPACITY = 240, 320  # one size for all prompts, so that each step is compiled once


@pytest.fixture(scope="module")
def goldens() -> Iterator[dict[str, np.ndarray]]:
    with np.load(DATA / "smollm2.npz") as file:
        yield dict(file)


@pytest.fixture(scope="module")
def reports() -> list[LoadProgress]:
    return []


@pytest.fixture(scope="module")
def model(reports: list[LoadProgress]) -> models.Model:
    require_smollm2()
    return models.load("smollm2", dtype="float32", progress=reports.append)


def test_load_tells_the_memory_before_it_reads(model: models.Model, reports: list[LoadProgress]) -> None:
    assert (reports[0].done, reports[0].bytes_done) == (0, 0)
    assert reports[0].bytes_total == reports[-1].bytes_done == models.checkpoint_memory("smollm2", "float32")
    assert reports[0].bytes_total == 134_515_008 * 4
    assert [report.done for report in reports] == list(range(reports[0].total + 1))


def test_model_describes_itself(model: models.Model) -> None:
    (group,) = model.kv_groups
    assert (group.layers, group.num_kv_heads, group.head_dim, group.window) == (tuple(range(30)), 3, 64, None)
    assert (model.vocab_size, model.max_context, model.eos_token_ids) == (49152, 8192, (2,))
    assert set(model.identity) == {"model_id", "revision", "tokenizer", "config", "dtype"}


@pytest.mark.parametrize("kept_bytes", [100_000, 20_000_000])
def test_a_truncated_copy_is_refused(kept_bytes: int, tmp_path: Path) -> None:
    require_smollm2()
    path = tmp_path / "part.gguf"
    with resolve("smollm2").open("rb") as whole:
        path.write_bytes(whole.read(kept_bytes))
    with pytest.raises(models.CheckpointError, match="not a whole GGUF file"):
        models.load(path)


@pytest.mark.parametrize("name", PROMPTS)
def test_ids_of_prompts_are_the_goldens(model: models.Model, goldens: dict[str, np.ndarray], name: str) -> None:
    assert model.tokenizer is not None
    assert model.tokenizer.encode(PROMPTS[name]["prompt"]) == goldens[f"{name}/ids"].tolist()
    assert model.tokenizer.decode(goldens[f"{name}/gen"].tolist(), skip_special_tokens=False) == PROMPTS[name]["text"]


def test_text_streams_without_broken_characters(model: models.Model) -> None:
    assert model.tokenizer is not None
    text = "naïve 数字 2026 𒀀 <|im_end|>"
    ids = model.tokenizer.encode(text)
    stream = model.tokenizer.stream(skip_special_tokens=False)
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) == text
    assert ids[-1] == 2, "special tokens in a text are parsed"
    assert "" in pieces, "half a character is held back"


@pytest.mark.parametrize("name", PROMPTS)
def test_logits_and_greedy_tokens_are_the_goldens(
    model: models.Model, goldens: dict[str, np.ndarray], name: str
) -> None:
    expected = goldens[f"{name}/gen"].tolist()
    ids = goldens[f"{name}/ids"]
    padded = jnp.asarray(np.pad(ids, (0, LONGEST - len(ids))))  # what follows a token does not reach it
    logits, kv = dense_step(model, model.params, padded, dense_kv(model, CAPACITY))
    last, kv = logits[len(ids) - 1], replace(kv, length=jnp.int32(len(ids)))
    assert float(jnp.abs(last - goldens[f"{name}/last_logits"]).max()) < TOLERANCE
    answer = [int(jnp.argmax(last))]
    while len(answer) < len(expected):
        logits, kv = dense_step(model, model.params, jnp.asarray(answer[-1:], jnp.int32), kv)
        answer.append(int(jnp.argmax(logits[-1])))
    assert answer == expected


def test_keys_values_and_hidden_states_are_the_goldens(model: models.Model, goldens: dict[str, np.ndarray]) -> None:
    ids, config, params = goldens["chat_capital/ids"], model.config, model.params
    kv, rotation = dense_kv(model, len(ids)), rope_table(config.rope, jnp.arange(len(ids)))
    x, delta, hidden = params["embed"][jnp.asarray(ids)], None, {}
    for i, layer in enumerate(params["layers"]):
        x, delta, kv = decoder_layer(config, layer, i, x, delta, rotation, kv, dense_attend())
        hidden[i + 1] = x + delta
    x = hidden[len(params["layers"])]
    hidden[30] = rms_norm(x, params["norm"], config.rms_norm_eps)  # the reference keeps the last one after the norm
    for i in (0, 15, 29):
        np.testing.assert_allclose(kv.keys[i].swapaxes(0, 1), goldens[f"chat_capital/k_layer{i}"], atol=TOLERANCE)
        np.testing.assert_allclose(kv.values[i].swapaxes(0, 1), goldens[f"chat_capital/v_layer{i}"], atol=TOLERANCE)
    for number, i in enumerate(goldens["chat_capital/hidden_layers"].tolist()):
        # The residual stream of one token reaches thousands, so this one is relative.
        np.testing.assert_allclose(hidden[i], goldens["chat_capital/hidden"][number], rtol=1e-4, atol=TOLERANCE)
