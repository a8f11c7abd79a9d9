"""Real weights: SmolLM2-135M against goldens of HF transformers, cold, warm, full hit, in batches (N2, A21, A22, B14).

The goldens are `tests/data/smollm2.npz`: ids, last-token logits and 64 greedy tokens of five prompts, fp32 on CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import models
from prefix_reuse import Engine, EngineConfig, SamplingParams
from prefix_reuse.programs import Programs

DATA = np.load(Path(__file__).parent.parent / "data" / "smollm2.npz")
NAMES = ("chat_capital", "chat_library_loans", "chat_library_sunday", "raw_code", "raw_story")
IDS = {name: DATA[f"{name}/ids"] for name in NAMES}


@pytest.fixture(scope="module")
def model() -> Any:
    return models.load("smollm2")


@pytest.fixture(scope="module")
def programs(model: Any) -> Programs:
    return Programs(model, EngineConfig(decode_steps=16), jax.devices()[0])


def new_engine(model: Any, programs: Programs, page_size: int, *, on: bool = True) -> Engine:
    config = EngineConfig(
        page_size=page_size,
        num_device_pages=2048 // page_size,
        num_host_pages=4096 // page_size,
        max_context=512,
        max_rows=8,
        max_prefill_tokens=256,
        min_prefill_tokens=256 if page_size < 16 else 64,  # fewer programs to compile
        decode_steps=16,
        enable_prefix_reuse=on,
        compilation_cache=False,
    )
    return Engine(model, config, programs=programs)


def golden(name: str, num_tokens: int) -> tuple[int, ...]:
    """The first greedy tokens, of 64."""
    return tuple(DATA[f"{name}/gen"].tolist())[:num_tokens]


def check_last_logits(logits: np.ndarray, name: str) -> None:
    np.testing.assert_allclose(logits[-1], DATA[f"{name}/last_logits"], atol=1e-3)


@pytest.mark.parametrize("num_tokens", [12, pytest.param(64, marks=pytest.mark.slow)])
def test_five_prompts_match_the_goldens_cold_warm_and_in_any_batch(model: Any, programs: Programs, num_tokens: int):
    """N2 and N1's control: off, cold, warm, mixed batches; the two library prompts share 219 tokens."""
    greedy = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    off, e = new_engine(model, programs, 16, on=False), new_engine(model, programs, 16)
    for name in NAMES:
        check_last_logits(off.score(IDS[name]), name)
        out = e.generate(IDS[name], greedy)[0]
        assert out.token_ids == golden(name, num_tokens)
        assert out.cached_tokens == (208 if name == "chat_library_sunday" else 0)
        warm = e.generate(IDS[name], greedy)[0]
        assert warm.token_ids == golden(name, num_tokens)
        assert warm.cached_tokens == len(IDS[name]) // 16 * 16
        logits, first = e.score(IDS[name], reuse=True)
        assert first == warm.cached_tokens
        check_last_logits(logits, name)
    e.clear_cache()
    e.generate(IDS["chat_library_loans"], SamplingParams(max_tokens=1))
    mixed = e.generate([IDS[name] for name in NAMES], greedy)  # hits and misses together
    assert [o.token_ids for o in mixed] == [golden(name, num_tokens) for name in NAMES]
    assert [o.cached_tokens for o in mixed] == [0, 224, 208, 0, 0]
    e.drop_device_pages()
    again = e.generate([IDS[name] for name in reversed(NAMES)], greedy)
    assert [o.token_ids for o in again] == [golden(name, num_tokens) for name in reversed(NAMES)]
    assert sum(o.cached_tokens for o in again) == 16 + 16 + 224 + 224 + 32
    assert e.stats().decode.host_pages_loaded > 0


@pytest.mark.parametrize(
    ("page_size", "names"),
    [
        pytest.param(1, NAMES, marks=pytest.mark.slow),
        pytest.param(2, ("chat_capital", "raw_code", "chat_library_sunday"), marks=pytest.mark.slow),
        pytest.param(8, ("chat_library_sunday",), marks=pytest.mark.slow),
    ],
)
def test_full_hits_on_real_prompts_replay_one_token(
    model: Any, programs: Programs, page_size: int, names: tuple[str, ...]
):
    """A21 and N2: prompts of 42, 239, 232, 18 and 19 tokens that are whole pages."""
    e = new_engine(model, programs, page_size)
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    for name in names:
        assert len(IDS[name]) % page_size == 0
        assert e.generate(IDS[name], params)[0].token_ids == golden(name, 16)
    for name in names:
        out = e.generate(IDS[name], params)[0]
        assert out.full_hit
        assert (out.cached_tokens, out.computed_tokens) == (len(IDS[name]) - 1, 1)
        assert out.token_ids == golden(name, 16)
        logits, first = e.score(IDS[name], reuse=True)
        assert (len(logits), first) == (1, len(IDS[name]) - 1)
        check_last_logits(logits, name)
