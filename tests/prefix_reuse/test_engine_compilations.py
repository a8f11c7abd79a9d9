"""What is compiled, and that pools are updated in place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from engine_helpers import GREEDY, drained, engine, prompt, run_all

from prefix_reuse import (
    SamplingParams,
    transfer,
)

ONE = SamplingParams(max_tokens=1, ignore_eos=True)


def heard_compilations() -> list[str]:
    """A list that every compilation from now on adds to."""
    compiled: list[str] = []

    def listener(event: str, duration_secs: float, **kwargs: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listener)
    return compiled


def test_nothing_compiles_after_warmup(tmp_path: Path):
    """H36: hits of 0, 1, 3, 7 pages, suffixes 1..4, batches 1..4, offload and reload of 1..9 pages; samples; a snapshot."""
    e = engine(max_prefill_tokens=64, poison=False)
    e.warmup()
    before = dict(e.stats().compilations)
    compiled = heard_compilations()
    base = prompt(40, seed=1)
    for pages in (0, 1, 3, 7):
        e.generate(np.append(base[: 4 * pages], 2), GREEDY)
        for suffix in range(1, 5):
            for batch in range(1, 5):
                tokens = [prompt(4 * pages + suffix, seed=100 + i, start=base[: 4 * pages]) for i in range(batch)]
                e.generate(tokens, ONE)
    for pages in range(1, 10):
        e.clear_cache()
        e.generate(base[: 4 * pages], ONE)
        e.drop_device_pages()
        e.generate(base[: 4 * pages], ONE)
    for n in (2, 3, 4):
        for length in (3, 8, 10):
            e.generate(base[:length], SamplingParams(max_tokens=3, n=n, temperature=1.0, ignore_eos=True))
    e.cache.save_snapshot(tmp_path)
    e.clear_cache()
    assert e.cache.load_snapshot(tmp_path).pages >= 9
    assert e.generate(base[:36], ONE)[0].full_hit
    e.score(base)
    assert e.stats().compilations == before
    assert not compiled
    jax.jit(lambda x: x * 7 + 1)(1.0)
    assert compiled  # the listener does hear compilations
    drained(e)


@pytest.mark.parametrize("pinned", [True, False])
def test_warmup_reserves_the_free_host_pages_where_memory_is_pinned(pinned: bool, monkeypatch: pytest.MonkeyPatch):
    e, asked, names = engine(max_prefill_tokens=8, max_rows=1, num_host_pages=40), [], []
    e.generate(prompt(12, seed=1), ONE)  # two of its pages stay
    monkeypatch.setattr(e.runner.transfer, "pins_memory", pinned)
    monkeypatch.setattr(e.runner.transfer, "reserve", asked.append)
    monkeypatch.setattr(e.runner, "_page_moves", list)  # much to compile, and not looked at
    e.warmup(names.append, pin_host_pages=False)
    assert not asked
    e.warmup(names.append)
    assert asked == ([e.store.num_free * e.memory.page_bytes] if pinned else [])
    assert e.store.num_free == 37
    assert any("host pages" in name for name in names) == pinned
    assert len(names) == e.runner.warmup_steps() + e.runner.warmup_steps(sum(asked))  # what a bar counts up to
    off = engine(on=False, max_prefill_tokens=8, max_rows=1)
    monkeypatch.setattr(off.runner.transfer, "pins_memory", pinned)
    monkeypatch.setattr(off.runner.transfer, "reserve", asked.append)
    monkeypatch.setattr(off.runner, "_page_moves", list)
    off.warmup()
    assert len(asked) == pinned


def test_a_prefill_asks_no_question_for_whose_answer_the_host_would_wait():
    """A condition is read by the host on a GPU without graphs: behind one, nothing could start while the device computes."""
    e, programs = engine(), []
    real = e.programs.prefill

    def traced(*args: Any) -> Any:
        programs.append(str(real.lower(*args).as_text()))
        return real(*args)

    e.programs.prefill = traced  # type: ignore[assignment]
    e.generate(prompt(9, seed=1), ONE)
    (text,) = programs
    assert "stablehlo.dot_general" in text
    assert "stablehlo.case" not in text
    assert "stablehlo.if" not in text


@pytest.mark.parametrize("kind", ["llama", pytest.param("hybrid", marks=pytest.mark.slow)])
def test_nothing_compiles_when_rows_of_every_kind_share_a_batch(kind: str, monkeypatch: pytest.MonkeyPatch):
    """Greedy, random and penalised rows, one sample and several; scores; pages that windows have passed; copies again."""
    monkeypatch.setattr(transfer, "LARGEST_COPY", 8)  # less to compile
    monkeypatch.setattr(transfer, "SMALL_BUNDLE", 4)
    e = engine(kind, prefill_calls=3, staging_bytes=0)
    e.warmup()
    before, compiled = dict(e.stats().compilations), heard_compilations()
    greedy = SamplingParams(max_tokens=9, ignore_eos=True)
    mixed = [
        replace(greedy, **some)
        for some in ({}, {"temperature": 1.0}, {"repetition_penalty": 1.5}, {"presence_penalty": 1.0, "n": 2})
    ]
    for size in (1, 2, 4):
        for i in range(size):
            for length in (3, 17, 40):
                e.submit(prompt(length + i, seed=i), mixed[i - size])
        run_all(e)
        e.drop_device_pages()
    e.score(prompt(50, seed=9), reuse=True)
    assert e.stats().prefill.hits > 0
    assert e.stats().compilations == before
    assert not compiled
    drained(e)


def test_steps_update_donated_pools_in_place():
    """The compiled steps alias the pools and hold no copy of them (`memory_analysis`)."""
    e = engine("hybrid", num_device_pages=4096, num_window_pages=4096)
    pool_bytes = min(p.kv_pages.nbytes for p in e.runner.pools)
    seen = {}

    def spy(name: str, jitted: Any) -> Any:
        def call(params: Any, pools: Any, batch: Any) -> Any:
            seen[name] = jitted.lower(params, pools, batch).compile().memory_analysis()
            return jitted(params, pools, batch)

        return call

    e.runner.programs.prefill, e.runner.programs.decode = (
        spy("prefill", e.runner.programs.prefill),
        spy("decode", e.runner.programs.decode),
    )
    e.generate(prompt(9), GREEDY)
    for name in ("prefill", "decode"):
        assert seen[name].alias_size_in_bytes >= 2 * pool_bytes, name
        assert seen[name].temp_size_in_bytes < pool_bytes / 2, (name, seen[name].temp_size_in_bytes / pool_bytes)


def test_a_prefill_brings_the_tables_of_all_rows_along(monkeypatch: pytest.MonkeyPatch):
    """The decoding behind it sends none; rows that are gone have no context any more."""
    e = engine(decode_page_sharing=False)
    calls: list[Any] = []
    e.submit(prompt(9, seed=1), SamplingParams(max_tokens=20, ignore_eos=True))
    gone = e.submit(prompt(11, seed=2), SamplingParams(max_tokens=20, ignore_eos=True))
    e.step()
    e.cancel(gone)
    e.submit(prompt(3, seed=3), SamplingParams(max_tokens=20, ignore_eos=True))
    e.submit(prompt(2, seed=4), SamplingParams(max_tokens=20, ignore_eos=True))
    real = e.programs._tables
    monkeypatch.setattr(e.programs, "_tables", lambda *args: calls.append(args) or real(*args))
    e.step()
    assert not calls
    want = np.zeros(e.config.max_rows, np.int32)
    for row in e.scheduler.running:
        want[row.row_index] = row.committed_kv_tokens
    assert np.array_equal(np.asarray(e.runner.pools[0].context_lens), want)
    e.cancel(e.scheduler.running[0].request_id)
    e.step()
    assert len(calls) == 1
    want[:] = 0
    for row in e.scheduler.running:
        want[row.row_index] = row.committed_kv_tokens
    assert np.array_equal(np.asarray(e.runner.pools[0].context_lens), want)
    run_all(e)
    drained(e)
