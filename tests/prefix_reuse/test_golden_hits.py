"""Every family through the engine against transformers' goldens, at every hit length and page size, in mixed batches."""

from __future__ import annotations

import numpy as np
import pytest
from engine_helpers import check, drained
from model_data import GOLDEN_OF, TINY, TOLERANCE, golden

import models
from prefix_reuse import Engine, EngineConfig, SamplingParams

ALL = [(name, page) for name in GOLDEN_OF for page in (4, 8, 16)]


def engine(name: str, page_size: int) -> Engine:
    config = EngineConfig(
        page_size=page_size, num_device_pages=2048 // page_size, num_host_pages=32768 // page_size, max_rows=4,
        max_context=128, min_prefill_tokens=64, max_prefill_tokens=64, decode_steps=8, poison=True, compilation_cache=False,
        enable_prefix_reuse=True,
    )  # fmt: skip
    return Engine(models.load(TINY / name, dtype="float32"), config)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "page_size"), ALL)
def test_every_hit_length_has_the_golden_logits_and_tokens(name: str, page_size: int) -> None:
    """A22, N2: one salt for each hit length; a hit, a miss and a shorter row in one batch, cold = the first turn."""
    data = golden(GOLDEN_OF[name])
    first, second = (ids.astype(np.int32) for ids in data["ids"])
    e = engine(name, page_size)
    short = len(first) // 2 + 3
    answers = [tuple(row.tolist()) for row in data["gen"]]
    params = [SamplingParams(max_tokens=len(answers[0]), ignore_eos=True)] * 2 + [
        SamplingParams(max_tokens=3, ignore_eos=True)
    ]
    short_answer = None
    lengths = range(0, len(first) + 1, page_size)
    for hit in lengths:
        salt = f"hit {hit}"
        if hit:
            e.generate(first[:hit], SamplingParams(max_tokens=1, ignore_eos=True), salt=salt)
        requests = [
            e.submit(tokens, p, salt=salt) for tokens, p in zip((first, second, first[:short]), params, strict=True)
        ]
        outputs = {}
        while e.has_work:
            outputs.update((o.request_id, o) for o in e.step())
        check(e)
        warm, miss, part = (outputs[r] for r in requests)
        assert warm.token_ids == answers[0]
        assert miss.token_ids == answers[1]
        short_answer = short_answer or part.token_ids
        assert part.token_ids == short_answer
        assert warm.cached_tokens >= min(hit, len(first) - 1)
        assert warm.full_hit == (hit == len(first))
        assert miss.cached_tokens == 0
    for hit in lengths:
        salt = f"logits {hit}"
        if hit:
            e.generate(first[:hit], SamplingParams(max_tokens=1, ignore_eos=True), salt=salt)
        logits, start = e.score(first, reuse=True, salt=salt)
        assert start == min(hit, len(first) - 1)
        np.testing.assert_allclose(logits, data["logits"][0, start:], rtol=0, atol=TOLERANCE)
    drained(e)
