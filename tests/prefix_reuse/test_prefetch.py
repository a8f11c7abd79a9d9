"""Host pages on their way to the device before their rows are let in: order, bounds, faults, and the same answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from engine_helpers import GREEDY, check, drained, engine, prompt, run_all

from prefix_reuse import EngineConfig, SamplingParams
from prefix_reuse.errors import ConfigError
from prefix_reuse.memory import plan_memory, staging_bytes_of
from prefix_reuse.sequence import SequenceState

ONE = SamplingParams(max_tokens=1, ignore_eos=True)
LONG = SamplingParams(max_tokens=20, ignore_eos=True)
KINDS = ["llama", "hybrid"]


def on_host_only(e: Any, n: int = 16, seed: int = 1) -> np.ndarray:
    """Tokens whose pages lie on the host and no longer on the device."""
    base = prompt(n, seed=seed)
    e.generate(base, ONE)
    e.drop_device_pages()
    return base


def want(kind: str, tokens: np.ndarray, params: SamplingParams = GREEDY) -> tuple[int, ...]:
    return engine(kind, on=False).generate(tokens, params)[0].token_ids


def fill_rows(e: Any) -> dict[int, np.ndarray]:
    """Requests that decode for a while, one in every row."""
    ids = {e.submit(text, LONG): text for text in (prompt(6, seed=30 + i) for i in range(e.config.max_rows))}
    assert not e.step()
    assert not e.runner.accounts[0].free_rows
    return ids


def right(kind: str, outputs: dict[int, Any], running: dict[int, np.ndarray]) -> bool:
    return all(outputs[i].token_ids == want(kind, text, LONG) for i, text in running.items())


class Record:
    """What an engine dispatches, in order."""

    def __init__(self, e: Any, patch: pytest.MonkeyPatch):
        self.calls: list[str] = []
        staged = e.runner.staging
        self._wrap(patch, staged, "_copy", "stage")
        self._wrap(patch, e.runner, "prefill", "prefill")
        self._wrap(patch, e.runner, "decode", "decode")
        self._wrap(patch, jax, "device_get", "wait")
        load_whole = e.runner.transfer._load_whole

        def load(pool: Any, whole: Any) -> Any:
            early = [array for some in whole.values() for array, _ in some]
            ours = [any(array is a for a in staged.arrays.values()) for array in early]
            self.calls += ["scatter" if mine else "load" for mine in ours]
            return load_whole(pool, whole)

        patch.setattr(e.runner.transfer, "_load_whole", load)

    def _wrap(self, patch: pytest.MonkeyPatch, owner: Any, name: str, label: str) -> None:
        function = getattr(owner, name)

        def call(*args: Any, **keywords: Any) -> Any:
            self.calls.append(label)
            return function(*args, **keywords)

        patch.setattr(owner, name, call)


@pytest.mark.parametrize("kind", KINDS)
def test_copies_start_at_submit_and_nothing_waits_until_the_prefill_is_dispatched(
    kind: str, monkeypatch: pytest.MonkeyPatch
):
    """stage (submit) -> scatter -> prefill -> the first wait; the answer of a cold run, though unwritten pages are NaN."""
    e = engine(kind)
    base = on_host_only(e)
    tokens = prompt(21, seed=2, start=base)
    record = Record(e, monkeypatch)
    request = e.submit(tokens, GREEDY)
    copies = len(record.calls)
    assert record.calls == ["stage"] * copies
    assert copies >= 1
    assert e.runner.staging.num_bytes == sum(b.array.nbytes for b in e.runner.staging.arrays)
    loaded = sum(e.stats().decode.host_bytes_loaded)
    outputs = {o.request_id: o for o in e.step()}
    first = record.calls.index("prefill")
    assert record.calls[copies:first].count("scatter") == copies
    assert "wait" not in record.calls[:first]
    assert "stage" not in record.calls[copies:]
    assert not e.runner.staging.arrays  # it is in now, nobody else wants them
    outputs |= run_all(e)
    assert outputs[request].token_ids == want(kind, tokens)
    assert outputs[request].cached_tokens == 16
    stats = e.stats().decode
    assert 0 < stats.host_bytes_prefetched <= sum(stats.host_bytes_loaded) - loaded
    drained(e)


@pytest.mark.parametrize("kind", KINDS)
def test_copies_for_the_line_are_started_before_the_steps_of_rows_that_run(kind: str, monkeypatch: pytest.MonkeyPatch):
    """No row is free: the copies go beside decode, before anybody waits for its tokens; later they need no link."""
    e = engine(kind)
    base = on_host_only(e)
    running = fill_rows(e)
    tokens = prompt(21, seed=2, start=base)
    monkeypatch.setattr(e.prefetcher, "look_at", lambda row: None)
    request = e.submit(tokens, GREEDY)
    record = Record(e, monkeypatch)
    e.step()
    copies = record.calls.count("stage")
    assert copies >= 1
    assert record.calls[:copies] == ["stage"] * copies
    assert record.calls[copies:][:2] == ["decode", "wait"]
    record.calls.clear()
    outputs = run_all(e)
    assert record.calls.count("scatter") == copies
    assert "stage" not in record.calls
    assert outputs[request].token_ids == want(kind, tokens)
    assert right(kind, outputs, running)
    drained(e)


def test_a_row_that_could_not_be_computed_in_this_turn_waits_while_its_pages_come(monkeypatch: pytest.MonkeyPatch):
    """The prefill call is full with rows that need no load: they go first, and nobody passes the row that waits."""
    e = engine()
    base = on_host_only(e)
    texts = [prompt(36, seed=3), prompt(20, seed=2, start=base), prompt(5, seed=4)]
    record = Record(e, monkeypatch)
    ids = [e.submit(text, GREEDY) for text in texts]
    e.step()
    assert [row.request_id for row in e.scheduler.running] == ids[:1]
    assert [row.request_id for row in e.scheduler.waiting] == ids[1:]
    assert "scatter" not in record.calls
    assert record.calls.index("stage") < record.calls.index("prefill")
    e.step()  # four tokens of the first are left: there is room in the call
    assert "scatter" in record.calls
    outputs = run_all(e)
    assert [outputs[i].token_ids for i in ids] == [want("llama", text) for text in texts]
    assert outputs[ids[1]].cached_tokens == 16
    drained(e)


def test_rows_whose_pages_are_on_the_device_come_in_although_the_prefill_call_is_full():
    e = engine()
    base = prompt(16, seed=1)
    e.generate(base, ONE)
    for text in (prompt(36, seed=3), prompt(20, seed=2, start=base), prompt(5, seed=4)):
        e.submit(text, GREEDY)
    e.step()
    assert len(e.scheduler.running) == 3
    run_all(e)
    drained(e)


def test_staging_never_holds_more_than_it_may():
    """Room for two of five bundles: two are staged, the others are loaded with the row; the memory plan says how much."""
    e = engine(staging_bytes=1)
    base = on_host_only(e, 20)
    part = e.memory.page_bytes
    tokens = prompt(23, seed=2, start=base)
    assert e.memory.staging_bytes == 1
    request = e.submit(tokens, GREEDY)
    assert not e.runner.staging.arrays
    assert run_all(e)[request].token_ids == want("llama", tokens)
    for room, count in ((part - 1, 0), (2 * part, 2), (3 * part - 1, 2)):
        e = engine(staging_bytes=room)  # so few pages are bundles of one each
        base = on_host_only(e, 20)
        request = e.submit(tokens, GREEDY)
        assert len(e.runner.staging.arrays) == count
        assert e.runner.staging.num_bytes <= e.memory.staging_bytes == room
        assert run_all(e)[request].token_ids == want("llama", tokens)
        assert e.stats().decode.host_bytes_prefetched == count * part
        drained(e)


def test_the_memory_plan_counts_staging_only_where_it_is_used():
    model = engine().model
    on = {"page_size": 4, "num_host_pages": 8, "enable_prefix_reuse": True}
    plan = plan_memory(model, EngineConfig(staging_bytes=1 << 30, **on))  # type: ignore[arg-type]
    assert plan.staging_bytes == 8 * plan.page_bytes  # never more than there is to stage
    assert plan_memory(model, EngineConfig(staging_bytes=100, **on)).staging_bytes == 100  # type: ignore[arg-type]
    assert plan_memory(model, EngineConfig(page_size=4, staging_bytes=1 << 30)).staging_bytes == 0
    assert staging_bytes_of(EngineConfig(), jax.devices("cpu")[0]) == 0  # copies would not run beside anything
    assert staging_bytes_of(EngineConfig(), SimpleNamespace(device_set=[SimpleNamespace(platform="gpu")])) == 512 << 20
    with pytest.raises(ConfigError, match="staging_bytes"):
        EngineConfig(staging_bytes=-1)


@pytest.mark.parametrize("off", [{"on": False}, {"staging_bytes": 0}, {"suffix_prefill": False}])
def test_nothing_is_staged_where_the_feature_or_its_memory_is_off(off: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    """A1: not even a lookup happens."""
    e = engine(**off)
    base = on_host_only(e)
    record = Record(e, monkeypatch)
    tokens = prompt(21, seed=2, start=base)
    request = e.submit(tokens, GREEDY)
    assert run_all(e)[request].token_ids == want("llama", tokens)
    assert "stage" not in record.calls
    assert e.stats().decode.host_bytes_prefetched == 0
    e.drop_device_pages()
    for text in (prompt(36, seed=3), prompt(21, seed=4, start=base)):
        e.submit(text, GREEDY)
    e.step()
    assert len(e.scheduler.running) == 2  # rows come in as soon as they fit
    run_all(e)
    drained(e)


def test_what_nobody_in_line_wants_is_dropped():
    e = engine()
    base, other = on_host_only(e), on_host_only(e, 12, seed=5)
    fill_rows(e)
    requests = [e.submit(prompt(21, seed=2, start=start), GREEDY) for start in (base, other, base)]
    assert len(e.runner.staging.arrays) == 4 + 3
    e.cancel(requests[0])
    assert len(e.runner.staging.arrays) == 4 + 3
    e.cancel(requests[1])
    assert len(e.runner.staging.arrays) == 4
    e.cancel(requests[2])
    assert not e.runner.staging.arrays
    run_all(e)
    drained(e)


@pytest.mark.parametrize("kind", KINDS)
def test_host_pages_that_were_freed_and_filled_again_are_not_taken_from_staging(kind: str):
    """The same host page ids, other bytes: what was staged of the old ones is never read."""
    e = engine(kind)
    base = on_host_only(e)
    old = e.cache.lookup(base).page_ids.tolist()
    stale = e.submit(prompt(21, seed=2, start=base), GREEDY)
    staged = dict.fromkeys(e.runner.staging.arrays)
    assert staged
    e.cancel(stale)
    e.step()
    e.clear_cache()
    other = prompt(16, seed=7)
    e.generate(other, ONE)
    e.drop_device_pages()
    assert set(old) & set(e.cache.lookup(other).page_ids.tolist())
    nan = {bundle: jax.numpy.full(bundle.array.shape, jax.numpy.nan) for bundle in staged}
    e.runner.staging.arrays.update(nan)  # as if they had been kept
    more = prompt(21, seed=9, start=other)
    request = e.submit(more, GREEDY)
    assert staged.keys() < e.runner.staging.arrays.keys()
    out = run_all(e)[request]
    assert (out.token_ids, out.cached_tokens) == (want(kind, more), 16)
    drained(e)


@pytest.mark.parametrize("place", ["look up", "payloads", "first copy", "second copy"])
@pytest.mark.parametrize("when", ["submit", "turn"])
def test_a_fault_of_a_prefetch_costs_nothing_but_the_early_start(
    place: str, when: str, monkeypatch: pytest.MonkeyPatch
):
    """Counted, nothing stays staged, and the row is served as if there had been none."""
    e = engine()
    base = on_host_only(e)
    running = fill_rows(e)
    tokens = prompt(21, seed=2, start=base)
    copy, left = e.runner.staging._copy, {"first copy": 0, "second copy": 1}.get(place, 99)

    def fails(*_: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0 or place in ("look up", "payloads"):
            raise RuntimeError("injected")
        return copy(*_)

    targets: dict[str, tuple[Any, str]] = {
        "look up": (e.scheduler, "demands"),
        "payloads": (e.store, "peek_payloads"),
        "first copy": (e.runner.staging, "_copy"),
        "second copy": (e.runner.staging, "_copy"),
    }
    with monkeypatch.context() as patch:
        if when == "submit":
            patch.setattr(*targets[place], fails)
        second = e.submit(tokens, GREEDY)
        e.runner.staging.clear()
        patch.setattr(*targets[place], fails)
        if when == "turn":
            e.step()
    assert e.stats().faults.failed_prefetches == 1
    assert "injected" in e.stats().faults.last_error
    assert not e.runner.staging.arrays
    outputs = run_all(e)
    assert right("llama", outputs, running)
    assert (outputs[second].token_ids, outputs[second].cached_tokens) == (want("llama", tokens), 16)
    drained(e)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("takes_pools", [False, True])
def test_a_fault_of_the_scatter_gives_everything_back(kind: str, takes_pools: bool, monkeypatch: pytest.MonkeyPatch):
    """A12: nothing is held, nothing is resident, nothing stays staged; the next turn copies anew and is right."""
    e = engine(kind)
    base = on_host_only(e)
    tokens = prompt(21, seed=2, start=base)
    request = e.submit(tokens, GREEDY)
    assert e.runner.staging.arrays
    before = e.store.stats(), [dict(a.resident) for a in e.runner.accounts]

    def fails(pool: jax.Array, *_: Any) -> Any:
        if takes_pools:
            pool.delete()
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(e.runner.transfer, "_load", fails)
        with pytest.raises(RuntimeError, match="injected"):
            e.step()
    check(e)
    assert not e.runner.staging.arrays
    after = e.store.stats(), [dict(a.resident) for a in e.runner.accounts]
    for name in ("logical_pages", "physical_pages", "free_pages"):
        assert getattr(before[0], name) == getattr(after[0], name)
    assert before[1] == after[1]
    assert e.stats().faults.device_resets == takes_pools
    assert [row.state for row in e.scheduler.waiting] == [SequenceState.QUEUEING]
    outputs = run_all(e)
    assert (outputs[request].token_ids, outputs[request].cached_tokens) == (want(kind, tokens), 16)
    drained(e)


def test_a_page_that_is_damaged_is_recomputed_although_it_was_staged_before():
    """B28, N6: what is staged is used only after its host page was read, and verified where that is asked for."""
    e = engine(integrity=True)
    base = on_host_only(e)
    tokens = prompt(21, seed=2, start=base)
    request = e.submit(tokens, GREEDY)
    page = int(e.cache.lookup(base).page_ids[1])
    part = np.array(e.store.payloads[page][0])
    part.flat[3] += 1
    e.store.payloads[page] = e.runner.transfer.adopt((part,))
    outputs = run_all(e)
    assert outputs[request].token_ids == want("llama", tokens)
    assert outputs[request].cached_tokens == 4
    assert e.stats().faults.failed_loads == 1
    drained(e)


def test_a_row_that_resumes_is_staged_while_it_waits(monkeypatch: pytest.MonkeyPatch):
    """A26: its pages come over the link beside the decode of the rows that took its place."""
    e = engine()
    twelve = SamplingParams(max_tokens=12, ignore_eos=True)
    held = e.submit(prompt(13, seed=1), twelve)
    e.step()
    e.hold(held)
    e.drop_device_pages()
    running = fill_rows(e)
    e.resume(held)
    record = Record(e, monkeypatch)
    e.step()
    assert record.calls[0] == "stage"
    assert "decode" in record.calls
    outputs = run_all(e)
    assert "scatter" in record.calls
    assert outputs[held].token_ids == want("llama", prompt(13, seed=1), twelve)
    assert right("llama", outputs, running)
    drained(e)
