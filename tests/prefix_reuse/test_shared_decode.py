"""Decode over shared pages: when the engine plans it, that it counts it, and that it changes no token (X2)."""

from __future__ import annotations

import numpy as np
import pytest
from engine_helpers import check, drained, model

from pallas_kernels import SPLIT
from prefix_reuse import Engine, EngineConfig, SamplingParams

SIZES = {"page_size": 64, "num_device_pages": 96, "num_host_pages": 128, "max_rows": 4, "max_context": 1408}
GREEDY = SamplingParams(max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def long_model():
    import dataclasses

    tiny = model("llama")
    return dataclasses.replace(tiny, config=dataclasses.replace(tiny.config, max_context=2048))


def engine(model, **config) -> Engine:
    sizes = {**SIZES, "max_prefill_tokens": 512, "decode_steps": 2, "compilation_cache": False}
    return Engine(model, EngineConfig(enable_prefix_reuse=True, **{**sizes, **config}))


def prompts(count: int, shared: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    start = rng.integers(2, 128, shared)
    return [np.concatenate([start, rng.integers(2, 128, 40 + i)]).astype(np.int32) for i in range(count)]


def test_rows_that_share_a_split_read_it_together_and_answer_the_same(long_model):
    batch = prompts(3, SPLIT + 64)
    answers = {}
    for on in (True, False):
        e = engine(long_model, shared_prefix_decode=on)
        answers[on] = [r.token_ids for r in e.generate(batch, GREEDY)]
        decode = e.stats().decode
        assert e.stats().prefill.hits >= 2
        assert (decode.shared_prefix_steps > 0) == on
        assert (decode.shared_prefix_tokens_saved > 0) == on
        check(e)
        drained(e)
    assert answers[True] == answers[False]


def test_the_plan_names_rows_with_the_same_pages_only(long_model):
    e = engine(long_model, shared_prefix_decode=True)
    seen = []
    plan = e.runner.shared.plan

    def spy(accounts, rows, size):
        plans, saved = plan(accounts, rows, size)
        if plans is not None:
            tables = np.stack([accounts[0].page_table[row.row_index] for row in rows])
            seen.append((plans[0], tables.copy(), saved))
        return plans, saved

    e.runner.shared.plan = spy
    e.generate([*prompts(3, SPLIT), *prompts(1, 0)], GREEDY)
    assert seen
    per_split = SPLIT // 64
    for tiles, tables, saved in seen:
        used = tiles.tiles[tiles.tiles[:, 0] >= 0]
        assert saved == sum(end - first - 1 for _, first, end in used) * SPLIT > 0
        for split, first, end in used:
            rows = tiles.order[first:end]
            pages = tables[rows, split * per_split : (split + 1) * per_split]
            assert (pages == pages[0]).all()
            assert (pages >= 0).all()
            assert (tiles.lanes[rows, split] >= 0).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", [{"shared_prefix_decode": False}, {}, {"shared_prefix_decode": True, "decode_page_sharing": False}]
)
def test_no_plan_where_it_is_off_where_nothing_was_measured_or_where_pages_are_private(long_model, config):
    e = engine(long_model, **config)
    e.generate(prompts(2, SPLIT), GREEDY)
    assert e.stats().decode.steps > 0
    assert e.stats().decode.shared_prefix_steps == 0


def test_short_contexts_and_windows_within_a_split_never_share(long_model):
    assert engine(long_model, shared_prefix_decode=True, max_context=SPLIT - 64).runner.shared.active == (False,)
    sizes = EngineConfig(enable_prefix_reuse=True, shared_prefix_decode=True, compilation_cache=False)
    assert Engine(model("hybrid"), sizes).runner.shared.active == (True, False)  # the second group has a window


@pytest.mark.slow
def test_warmup_compiles_both_programs_of_a_bucket(long_model):
    e = engine(long_model, shared_prefix_decode=True, max_rows=2, max_prefill_tokens=64, num_device_pages=64)
    e.warmup()
    before = e.stats().compilations["decode_steps"]
    assert before == 3  # one row; two rows with and without sharing
    e.generate(prompts(2, SPLIT), SamplingParams(max_tokens=24, ignore_eos=True))
    assert e.stats().decode.shared_prefix_steps > 0
    assert e.stats().compilations["decode_steps"] == before
