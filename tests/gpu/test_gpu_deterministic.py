"""Deterministic mode on a GPU: equal bits cold, warm, full hit, reloaded, mixed and decoded, in the kernels' dtypes (N4)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_data import TINY

import models
from models.params import Source
from models.qwen3 import Qwen3, Qwen3Config
from models.qwen3 import plan as qwen3_plan
from models.rope import RopeConfig
from models.testing import tiny_hybrid, tiny_llama
from pallas_kernels.row_invariant_matmul import proof
from prefix_reuse import Engine, EngineConfig, SamplingParams
from prefix_reuse.deterministic import ROW_INVARIANT, deterministic_means
from prefix_reuse.verify import run_verify

pytestmark = pytest.mark.gpu

WIDE: dict[str, Any] = {"hidden": 512, "heads": 8, "kv_heads": 2, "head_dim": 64, "max_context": 512}


def verify(model: Any, page_size: int = 16) -> None:
    assert deterministic_means(model, EngineConfig(deterministic=True), jax.devices()[0]) == ROW_INVARIANT
    report = run_verify(model, deterministic=True, page_size=page_size)
    print(report)
    assert report.violations == ()
    for run in report.runs:
        assert run.same_bits
        assert run.tokens_sha256 == run.cold_tokens_sha256
        assert run.cached_tokens > 0 or run.run in ("cold", "disabled")


@pytest.mark.parametrize(
    ("tiny", "dtype", "page_size"),
    [
        (tiny_hybrid, "bfloat16", 16),
        (tiny_hybrid, "float32", 16),
        (tiny_llama, "bfloat16", 64),
        pytest.param(tiny_llama, "float32", 64, marks=pytest.mark.slow),
        pytest.param(tiny_llama, "bfloat16", 16, marks=pytest.mark.slow),
        pytest.param(tiny_hybrid, "bfloat16", 64, marks=pytest.mark.slow),
    ],
)
def test_wide_tiny_models(tiny: Any, dtype: str, page_size: int) -> None:
    verify(tiny(dtype=jnp.dtype(dtype), **WIDE), page_size)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("qwen3", "bfloat16"),
        ("gpt_oss_fp32", "bfloat16"),
        pytest.param("qwen3_moe", "bfloat16", marks=pytest.mark.slow),
        pytest.param("gpt_oss_fp32", "float32", marks=pytest.mark.slow),
    ],
)
def test_tiny_checkpoints_of_the_other_families(name: str, dtype: str) -> None:
    verify(models.load(TINY / name, dtype=dtype))


def qwen3_30b_a3b(layers: int) -> Qwen3:
    """The layers' shapes of Qwen3-30B-A3B, random bf16 weights made on the device, a small vocabulary."""
    config = Qwen3Config(
        vocab_size=4096,
        hidden_size=2048,
        intermediate_size=6144,
        num_layers=layers,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        rope=RopeConfig(128, theta=1e6),
        num_experts=128,
        experts_per_token=8,
        expert_size=768,
        sparse_layers=tuple(range(layers)),
    )
    keys = iter(jax.random.split(jax.random.key(0), 1000))

    def random(source: Source) -> jax.Array:
        if source.fan_in is None:
            return jnp.ones(source.shape, jnp.bfloat16)
        return jax.random.normal(next(keys), source.shape, jnp.bfloat16) * source.fan_in**-0.5

    return Qwen3("qwen3-30b-a3b layers", config, jax.tree.map(random, qwen3_plan(config)))


def test_8_tokens_over_64_cached_ones_on_the_shapes_of_qwen3_30b_a3b() -> None:
    """At page 16: `first` of 72 tokens is query 8, context 64, kv 72 after a hit."""
    verify(qwen3_30b_a3b(layers=2))


def test_two_engines_of_two_models_interleaved() -> None:
    config = EngineConfig(
        page_size=16, num_device_pages=64, num_host_pages=128, max_rows=4, max_context=256, max_prefill_tokens=128,
        decode_steps=4, deterministic=True, enable_prefix_reuse=True,
    )  # fmt: skip
    kinds = {"llama": tiny_llama(dtype=jnp.bfloat16, **WIDE), "hybrid": tiny_hybrid(dtype=jnp.bfloat16, **WIDE)}
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    tokens = np.random.default_rng(0).integers(2, 128, 90).astype(np.int32)
    alone = {kind: Engine(model, config) for kind, model in kinds.items()}
    for e in alone.values():
        assert e.stats().numerics.means == ROW_INVARIANT
    cold = {kind: e.score(tokens) for kind, e in alone.items()}
    answers = {kind: e.generate(tokens, params, reuse=False)[0].token_ids for kind, e in alone.items()}
    both = {kind: Engine(model, config, programs=alone[kind].programs) for kind, model in kinds.items()}
    for _ in range(2):
        requests = {kind: e.submit(tokens, params) for kind, e in both.items()}
        done: dict[str, Any] = {}
        while len(done) < 2:
            for kind, e in both.items():
                done.update((kind, o.token_ids) for o in e.step() if o.request_id == requests[kind])
        assert done == answers
    for kind, e in both.items():
        assert e.stats().prefill.hits == 1
        logits, first = e.score(tokens, reuse=True)
        assert first == 80
        assert np.array_equal(logits, cold[kind][80:])


def test_the_second_engine_of_a_process_compares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was seen of matmuls and tiles serves other engines, and is the same for them."""
    model = tiny_llama(dtype=jnp.bfloat16, **WIDE)
    config = EngineConfig(page_size=16, num_device_pages=32, max_context=256, max_rows=4, deterministic=True)
    first = Engine(model, config).stats().numerics
    compiled: list[Any] = []
    real = proof._compiled
    monkeypatch.setattr(proof, "_compiled", lambda lowered: real(compiled.extend(some := list(lowered)) or some))
    assert Engine(model, config).stats().numerics == first
    assert compiled == []
    assert first.xla_matmuls > 0
    assert not first.fixed_tile
