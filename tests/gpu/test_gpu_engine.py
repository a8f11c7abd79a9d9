"""The engine on a GPU: warm against cold, in fp32 on tiny models and in bf16 on real weights (N1, N3, A22, A26, A27)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_helpers import GREEDY, check, drained, engine, prompt

import models
from prefix_reuse import Engine, EngineConfig, SamplingParams
from prefix_reuse.programs import Programs

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", ["llama", "hybrid"])
def test_warm_equals_cold_in_fp32_for_every_kind_of_hit(kind: str):
    """A6, A21-A23, A26: hit, full hit, reloaded from the host, held and resumed, mixed with misses."""
    base = prompt(16, seed=1)
    rows = [prompt(5, seed=2), prompt(19, seed=3, start=base), base, prompt(13, seed=4, start=base[:4])]
    with jax.default_matmul_precision("highest"):
        off, e = engine(kind, on=False), engine(kind)
        expected = [o.token_ids for o in off.generate(rows, GREEDY)]
        e.generate(base, GREEDY)
        for drop in (False, True):
            if drop:
                e.drop_device_pages()
            outs = e.generate(rows, GREEDY)
            assert [o.token_ids for o in outs] == expected
            assert outs[1].cached_tokens >= 16
            assert outs[2].full_hit
        for tokens in rows:
            logits, first = e.score(tokens, reuse=True)
            np.testing.assert_allclose(logits, off.score(tokens)[first:], atol=1e-3)
        request = e.submit(rows[1], SamplingParams(max_tokens=12, ignore_eos=True))
        e.step()
        e.hold(request)
        e.resume(request)
        check(e)
        outputs: dict[int, Any] = {}
        while e.has_work:
            outputs.update((o.request_id, o) for o in e.step())
        want = off.generate(rows[1], SamplingParams(max_tokens=12, ignore_eos=True))[0].token_ids
        assert outputs[request].token_ids == want
        drained(e)


@pytest.mark.parametrize("kind", ["llama", "hybrid"])
def test_samples_share_their_prompt_and_a_snapshot_comes_back(kind: str, tmp_path: Path):
    """B17, B20, X7: n = 3 with a copied tail; pages through the disk; the samples of engines without reuse."""
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=3, n=3, ignore_eos=True)
    tokens = prompt(18, seed=1)
    with jax.default_matmul_precision("highest"):
        want = [s.token_ids for s in engine(kind, on=False).generate(tokens, params)[0].samples]
        e = engine(kind)
        out = e.generate(tokens, params)[0]
        assert [s.token_ids for s in out.samples] == want
        assert e.stats().prefill.computed_tokens == 18
        assert e.cache.save_snapshot(tmp_path).pages == 4
        fresh = engine(kind, snapshot_dir=str(tmp_path))
        again = fresh.generate(tokens, params)[0]
        assert again.cached_tokens == 16
        assert [s.token_ids for s in again.samples] == want
        for used in (e, fresh):
            drained(used)


def test_off_is_bitwise_on_with_an_empty_cache():
    """N1."""
    prompts = [prompt(n, seed=n) for n in (5, 17, 40)]
    off, on = engine(on=False), engine()
    for tokens in prompts:
        assert np.array_equal(off.score(tokens), on.score(tokens, reuse=True)[0])


def smollm2() -> Any:
    return models.load(os.environ.get("PREFIX_REUSE_SMOLLM2", "smollm2"), dtype=jnp.bfloat16)


def test_real_weights_in_bf16_stay_within_twice_the_schedule_noise_and_compile_nothing_when_warm():
    """N3 and H33: noise is cold against cold with another prefill chunk; H36: the second warm request compiles nothing."""
    model = smollm2()
    text = "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs. " * 20
    ids = np.asarray(model.tokenizer.encode(text), np.int32)[:400]
    config: dict[str, Any] = {"page_size": 64, "num_device_pages": 64, "num_host_pages": 128, "max_context": 1024}
    programs = Programs(model, EngineConfig(), jax.devices()[0])
    cold = Engine(model, EngineConfig(**config, max_prefill_tokens=512), programs=programs)
    other = Engine(model, EngineConfig(**config, max_prefill_tokens=128), programs=programs)
    warm = Engine(model, EngineConfig(**config, enable_prefix_reuse=True), programs=programs)
    reference = cold.score(ids)
    noise = np.abs(other.score(ids) - reference).max()
    warm.generate(ids[:330], SamplingParams(max_tokens=1))
    logits, first = warm.score(ids, reuse=True)
    assert first == 320
    assert np.isfinite(logits).all()
    difference = np.abs(logits - reference[first:]).max()
    print(f"noise {noise:.4f}, warm against cold {difference:.4f}")
    assert difference <= 2 * max(noise, 1e-2)
    warm.generate(ids, GREEDY)
    before = dict(warm.stats().compilations)
    assert warm.generate(ids, GREEDY)[0].cached_tokens == 384
    assert warm.stats().compilations == before
    drained(warm)
