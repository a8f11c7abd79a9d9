"""Real agent streams through the engine with small pools, so that eviction happens: reuse on = off.

`tests/data/traces` holds the heads of the first requests of LMCache's miniswe agent trace (Apache-2.0), in SmolLM2's
vocabulary. The normal run takes a few of them through a tiny model, the slow run 40 of them through SmolLM2.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from engine_helpers import drained

import models
from models.testing import tiny_llama
from prefix_reuse import Engine, EngineConfig, SamplingParams
from prefix_reuse.programs import Programs

TRACE = Path(__file__).parent.parent / "data" / "traces" / "lmcache_miniswe_head.npz"


def requests(count: int, length: int) -> list[np.ndarray]:
    """The first `length` tokens of the first `count` non-empty requests."""
    data = np.load(TRACE)
    starts, ends = data["offsets"][:-1], data["offsets"][1:]
    prompts = [
        data["tokens"][s : min(e, s + length)].astype(np.int32) for s, e in zip(starts, ends, strict=True) if e > s
    ]
    return prompts[:count]


def replay(model: Any, prompts: list[np.ndarray], config: dict[str, Any]) -> tuple[Engine, int]:
    """Runs the prompts one after another with reuse on and off; asserts equal outputs; returns hit tokens."""
    shared = Programs(model, EngineConfig(decode_steps=4), jax.devices()[0])
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    off = Engine(model, EngineConfig(**config), programs=shared)
    on = Engine(model, EngineConfig(**config, enable_prefix_reuse=True), programs=shared)
    hits = 0
    for prompt in prompts:
        warm = on.generate(prompt, params)[0]
        assert warm.token_ids == off.generate(prompt, params)[0].token_ids
        hits += warm.cached_tokens
    assert hits > 0
    stats = on.stats()
    assert stats.prefill.cached_tokens == hits
    assert stats.prefill.computed_tokens == sum(map(len, prompts)) - hits
    assert stats.host.evicted_pages > 0
    drained(on)
    return on, hits


def test_the_first_requests_give_the_same_tokens_with_small_pools():
    model = tiny_llama(vocab=49152, max_context=512)
    config = {
        "page_size": 16, "num_device_pages": 40, "num_host_pages": 48, "max_context": 512, "max_rows": 2,
        "max_prefill_tokens": 256, "decode_steps": 4, "compilation_cache": False,
    }  # fmt: skip
    heads = requests(40, 500)
    _, hits = replay(model, [heads[i] for i in (0, 1, 13, 14, 26, 27, 31, 32, 39, 2, 15, 28)], config)
    print(f"hit tokens: {hits}")


@pytest.mark.slow
def test_forty_requests_through_smollm2_give_the_same_tokens_with_small_pools():
    config = {
        "page_size": 16, "num_device_pages": 160, "num_host_pages": 256, "max_context": 2048, "max_rows": 2,
        "max_prefill_tokens": 512, "decode_steps": 4, "compilation_cache": False,
    }  # fmt: skip
    prompts = requests(40, 1900)
    _, hits = replay(models.load("smollm2"), prompts, config)
    print(f"hit tokens: {hits} of {sum(map(len, prompts))}")
