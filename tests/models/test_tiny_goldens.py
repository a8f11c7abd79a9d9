"""Every family against transformers on random checkpoints, in float32, and that each detail of a family matters."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_data import GOLDEN_OF, TINY, TOLERANCE, copy_checkpoint, golden

import models
from models.model import Model
from models.testing import dense_kv, dense_step, reference_generate, reference_logits
from pallas_kernels import Mxfp4, append_kv, ragged_paged_attention
from pallas_kernels.layout import pool_shape

Change = Callable[[Model], Model]


@cache
def load(name: str, dequantise: bool = False) -> Model:
    return models.load(TINY / name, dtype="float32", dequantise=dequantise)


def error(model: Model, name: str) -> float:
    """Largest distance to the golden logits of the first sequence."""
    data = golden(GOLDEN_OF[name])
    return float(np.abs(reference_logits(model, data["ids"][0]) - data["logits"][0]).max())


@pytest.mark.parametrize("name", GOLDEN_OF)
def test_logits_are_the_goldens(name: str) -> None:
    data = golden(GOLDEN_OF[name])
    for ids, logits in zip(data["ids"], data["logits"], strict=True):
        np.testing.assert_allclose(reference_logits(load(name), ids), logits, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["gpt_oss_mxfp4", "gpt_oss_original"])
def test_mxfp4_experts_stay_packed_and_may_be_expanded(name: str) -> None:
    packed, expanded = load(name), load(name, dequantise=True)
    data = golden(GOLDEN_OF[name])
    assert error(expanded, name) < TOLERANCE
    for layer, wide in zip(packed.params["layers"], expanded.params["layers"], strict=True):
        for weight in ("gate_up", "down"):
            assert isinstance(layer[weight], Mxfp4)
            assert wide[weight].dtype == jnp.float32
            np.testing.assert_array_equal(layer[weight].values(), wide[weight])
    assert packed.identity["config"] != expanded.identity["config"]
    np.testing.assert_allclose(
        reference_logits(packed, data["ids"][1]), reference_logits(expanded, data["ids"][1]), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("name", GOLDEN_OF)
def test_greedy_tokens_are_the_goldens(name: str) -> None:
    data = golden(GOLDEN_OF[name])
    for ids, expected in zip(data["ids"], data["gen"], strict=True):
        assert reference_generate(load(name), ids, len(expected)) == expected.tolist()


# --- mutations: what the goldens would not forgive ---------------------------------------------------------------


def with_config(**changes: Any) -> Change:
    return lambda model: replace(model, config=replace(model.config, **changes))


def with_rope(**changes: Any) -> Change:
    return lambda model: replace(model, config=replace(model.config, rope=replace(model.config.rope, **changes)))


def with_layers(change: Callable[[dict[str, jax.Array]], dict[str, jax.Array]]) -> Change:
    def changed(model: Model) -> Model:
        return replace(
            model, params={**model.params, "layers": [layer | change(layer) for layer in model.params["layers"]]}
        )

    return changed


def shifted_windows(by: int) -> Change:
    def changed(model: Model) -> Model:
        windows = tuple(w and w + by for w in model.config.windows)
        return replace(model, config=replace(model.config, windows=windows))

    return changed


def untransposed(down: jax.Array) -> jax.Array:
    """`down` as it would be if the file's [E, in, out] had been taken for [E, out, in]."""
    return down.swapaxes(1, 2).reshape(down.shape)


MUTATIONS: dict[str, tuple[str, Change]] = {
    "no llama3 scaling": ("llama", with_rope(kind="default")),
    "no q/k norm": ("qwen3", with_layers(lambda p: {k: jnp.ones_like(p[k]) for k in ("q_norm", "k_norm")})),
    "norm_topk_prob ignored": ("qwen3_moe", with_config(normalise_topk=False)),
    "no sinks": ("gpt_oss_fp32", with_layers(lambda p: {"sinks": jnp.full_like(p["sinks"], -jnp.inf)})),
    "window one short": ("gpt_oss_fp32", shifted_windows(-1)),
    "window one long": ("gpt_oss_fp32", shifted_windows(1)),
    "no YaRN factor": ("gpt_oss_fp32", with_rope(attention_factor=1.0)),
    "truncate true": ("gpt_oss_fp32", with_rope(truncate=True)),
    "top-3 of 4": ("gpt_oss_fp32", with_config(experts_per_token=3)),
    "no clamp": ("gpt_oss_fp32", with_config(swiglu_limit=float("inf"))),
    "down_proj not transposed": ("gpt_oss_fp32", with_layers(lambda p: {"down": untransposed(p["down"])})),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutation_is_caught(mutation: str) -> None:
    name, change = MUTATIONS[mutation]
    assert error(change(load(name)), name) > 5 * TOLERANCE


def test_q_and_k_norm_weights_of_the_golden_are_not_all_ones() -> None:
    """Otherwise "no q/k norm" above would prove nothing about the weights; it also drops the norm itself below."""
    model = load("qwen3")
    assert any(float(jnp.abs(layer["q_norm"] - 1).max()) > 1e-2 for layer in model.params["layers"])


# --- over pages, in two parts ------------------------------------------------------------------------------------


def paged_logits(model: Model, ids: np.ndarray, split: int, page_size: int, *, fault: str = "") -> np.ndarray:
    """Logits of `ids[split:]` after `ids[:split]` went through pages first."""
    pages = -(-len(ids) // page_size)
    table = np.random.default_rng(0).permutation(2 * pages)[:pages].astype(np.int32)
    empty = 0.0 if fault else jnp.nan  # NaN would show what is read by mistake; a fault is to be caught without it
    pools = tuple(
        jnp.full(pool_shape(len(g.layers), 2 * pages, page_size, g.num_kv_heads, g.head_dim), empty, g.dtype)
        for g in model.kv_groups
    )
    place = {layer: (g, i) for g, group in enumerate(model.kv_groups) for i, layer in enumerate(group.layers)}

    @partial(jax.jit, static_argnums=(1, 2))
    def part(pools: Any, start: int, end: int, table: jax.Array) -> tuple[jax.Array, Any]:
        at = jnp.arange(start, end, dtype=jnp.int32)

        def attend(kv, layer, q, k, v, **options):
            g, i = place[layer]
            access = jnp.ones(2 * pages, bool), jnp.ones(2 * pages, jnp.int32)  # writable, refcounts
            pool, _ = append_kv(kv[g], k, v, table[at // page_size], at % page_size, *access, layer=i)
            lens = jnp.asarray([0, end - start], jnp.int32), jnp.asarray([end], jnp.int32)
            out = ragged_paged_attention(q, pool, table[None], *lens, layer=i, **options)
            return out, (*kv[:g], pool, *kv[g + 1 :])

        positions = at - start if fault == "suffix RoPE from 0" else at
        return model.forward(model.params, jnp.asarray(ids[start:end]), positions, pools, attend)

    if split:
        _, pools = part(pools, 0, split, jnp.asarray(table))
    if fault == "pages in wrong order":
        # Swapping two pages that every query sees would change nothing: keys carry their position.
        table = table[::-1]
    hidden, _ = part(pools, split, len(ids), jnp.asarray(table))
    return np.asarray(model.unembed(model.params, hidden))


@pytest.mark.parametrize(("split", "page_size"), [(0, 4), (8, 4), (24, 8), (64, 16)])
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe", "gpt_oss_fp32"])
def test_a_suffix_over_pages_has_the_golden_logits(name: str, split: int, page_size: int) -> None:
    data = golden(GOLDEN_OF[name])
    logits = paged_logits(load(name), data["ids"][0], split, page_size)
    np.testing.assert_allclose(logits, data["logits"][0, split:], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("fault", ["suffix RoPE from 0", "pages in wrong order"])
@pytest.mark.parametrize("name", ["llama", "gpt_oss_fp32"])
def test_fault_over_pages_is_caught(name: str, fault: str) -> None:
    data = golden(GOLDEN_OF[name])
    logits = paged_logits(load(name), data["ids"][0], 64, 16, fault=fault)
    assert np.abs(logits - data["logits"][0, 64:]).max() > 5 * TOLERANCE


def test_dense_attend_in_parts_equals_one_pass() -> None:
    model, ids = load("gpt_oss_fp32"), golden("gpt_oss_fp32")["ids"][0]
    kv, parts = dense_kv(model, 100), []  # more room than tokens: what is empty must not be seen
    for start, end in [(0, 30), (30, 31), (31, 80)]:
        logits, kv = dense_step(model, model.params, jnp.asarray(ids[start:end]), kv)
        parts.append(np.asarray(logits))
    np.testing.assert_allclose(np.concatenate(parts), reference_logits(model, ids), rtol=0, atol=TOLERANCE)
    assert int(kv.length) == 80


# --- both dialects of the config ---------------------------------------------------------------------------------


def older_dialect(config: dict[str, Any]) -> dict[str, Any]:
    """The config as transformers 4 wrote it."""
    rope = dict(config["rope_parameters"])
    changes: dict[str, Any] = {"rope_parameters": None, "rope_theta": rope.pop("rope_theta"), "dtype": None}
    changes["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    changes["torch_dtype"] = config["dtype"]
    if config["model_type"] == "qwen3_moe":
        changes |= {"num_local_experts": None, "num_experts": config["num_local_experts"]}
    return changes


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe", "gpt_oss_fp32"])
def test_the_older_dialect_means_the_same(name: str, tmp_path: Path) -> None:
    config = json.loads((TINY / name / "config.json").read_text())
    folder = copy_checkpoint(name, tmp_path, **older_dialect(config))
    old, new = models.load(folder), models.load(TINY / name)
    assert old.config == new.config
    assert old.kv_groups == new.kv_groups


def test_head_dim_may_be_missing_in_older_llama_files(tmp_path: Path) -> None:
    folder = copy_checkpoint("llama", tmp_path, head_dim=None, hidden_size=128)
    with pytest.raises(models.CheckpointError, match="misshapen"):  # 128 / 8 = 16 is right, the width is made up
        models.load(folder)
