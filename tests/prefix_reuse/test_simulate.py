"""The trace simulator, against figures that are known or counted independently."""

from __future__ import annotations

import json

import numpy as np
import pytest

from prefix_reuse.errors import InvalidRequestError
from prefix_reuse.simulate import simulate
from prefix_reuse.traces import mooncake_prompts


@pytest.fixture
def trace(tmp_path):
    """Sixty requests over a few shared beginnings; the last block of each is partly filled. Some are empty."""
    rng = np.random.default_rng(0)
    lines = [{"input_length": 0, "hash_ids": []}]
    for i in range(60):
        shared = list(range(int(rng.integers(0, 6))))
        own = [100 + 10 * i + k for k in range(int(rng.integers(1, 4)))]
        length = 32 * (len(shared) + len(own)) - int(rng.integers(0, 32))
        lines.append({"timestamp": i, "input_length": length, "output_length": 1, "hash_ids": shared + own})
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def ideal(prompts, page: int) -> tuple[float, float]:
    """Hit rates (pages, tokens) of an unbounded cache, counted with a set."""
    seen, hits, pages, tokens = set(), 0, 0, 0
    for prompt in prompts:
        chain = [prompt[: (i + 1) * page].tobytes() for i in range(len(prompt) // page)]
        hits += sum(key in seen for key in chain)
        seen.update(chain)
        pages += len(chain)
        tokens += len(prompt)
    return hits / pages, hits * page / tokens


@pytest.mark.parametrize("page", [8, 16, 32])
def test_an_unbounded_cache_reaches_the_ideal_hit_rate(trace, page):
    """B6: full pages only, empty requests skipped, nothing evicted."""
    result = simulate(trace, 1_000_000, "lru", page, block=32)
    pages, tokens = ideal(list(mooncake_prompts(trace, 32)), page)
    assert result["hit_rate_pages"] == pytest.approx(pages)
    assert result["hit_rate_tokens"] == pytest.approx(tokens)
    assert (result["requests"], result["evicted_pages"]) == (60, 0)
    assert 0.2 < pages < 1


@pytest.mark.parametrize("policy", ["lru", "lfu", "priority-ttl"])
def test_a_smaller_cache_evicts_and_hits_less(trace, policy):
    """B6: every policy runs; a hit rate never exceeds the ideal."""
    large = simulate(trace, 1_000_000, policy, 8, block=32)
    small = simulate(trace, 320, policy, 8, block=32)
    assert small["evicted_pages"] > 0
    assert small["hit_rate_pages"] < large["hit_rate_pages"]
    assert set(small) == {
        "capacity_tokens", "requests", "hit_rate_pages", "hit_rate_tokens", "us_per_request", "evicted_pages",
    }  # fmt: skip


def test_a_token_stream_is_replayed_like_a_trace(trace, tmp_path):
    """The two formats give the same figures for the same prompts."""
    prompts = list(mooncake_prompts(trace, 32))
    path = tmp_path / "tokens.npz"
    offsets = np.cumsum([0, *(len(p) for p in prompts)])
    np.savez(path, tokens=np.concatenate(prompts).astype(np.uint32), offsets=offsets)
    a, b = simulate(path, 320, "lru", 8), simulate(trace, 320, "lru", 8, block=32)
    assert {k: v for k, v in a.items() if k != "us_per_request"} == {
        k: v for k, v in b.items() if k != "us_per_request"
    }


def test_bad_arguments_are_refused(trace):
    """Unknown policies and capacities below a page say so."""
    with pytest.raises(InvalidRequestError, match="choose from lru"):
        simulate(trace, 1000, "random")
    with pytest.raises(InvalidRequestError):
        simulate(trace, 8, "lru", 16)
