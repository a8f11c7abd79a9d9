"""Sliding windows in the engine (X3, A18, A21-A27): partial loads, hits with holes, pages given back, and what that buys.

Freed pages hold NaN (poison mode), so that a result which equals a dense forward has read none of them.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from determinism_helpers import Bits
from engine_helpers import GREEDY, check, drained, engine, index_of, prompt

from models.testing import HybridLlama, reference_logits, tiny_hybrid
from prefix_reuse import Engine, EngineConfig, SamplingParams
from prefix_reuse.errors import CapacityError, ConfigError
from prefix_reuse.host_archive import StoredPrefix
from prefix_reuse.memory import plan_memory
from prefix_reuse.programs import Programs
from prefix_reuse.samples import members
from prefix_reuse.transfer import PendingCopy

SLIDING = 1  # layer group of a hybrid model
WINDOW = 9


@cache
def hybrid(window: int) -> HybridLlama:
    return tiny_hybrid(window=window, layers=2)


@cache
def programs(window: int) -> Programs:
    return Programs(hybrid(window), EngineConfig(decode_steps=4), jax.devices()[0])


def make(window: int = WINDOW, **config: Any) -> Engine:
    """Pools of one size in every test where the size is not the point, so that few programs are compiled."""
    defaults: dict[str, Any] = {
        "page_size": 4,
        "num_device_pages": 32,
        "num_window_pages": 32,
        "num_host_pages": 64,
        "max_rows": 2,
        "max_context": 128,
        "max_prefill_tokens": 16,
        "decode_steps": 4,
        "poison": True,
        "compilation_cache": False,
        "enable_prefix_reuse": True,
    }
    return Engine(hybrid(window), EngineConfig(**(defaults | config)), programs=programs(window))


def forgetful(e: Engine) -> Engine:
    """Makes the engine forget that layer groups have windows: it keeps and loads every page. The layers still know."""
    e.runner.windows = tuple(dataclasses.replace(window, window=None) for window in e.runner.windows)
    return e


@cache
def oracle(window: int, page_size: int = 4) -> Engine:
    """Computes everything anew and keeps every page; `test_engine_reuse` holds such an engine to a dense forward."""
    return forgetful(make(window, page_size=page_size, enable_prefix_reuse=False))


def scores(tokens: np.ndarray) -> np.ndarray:
    return oracle(WINDOW).score(tokens)


def greedy(tokens: np.ndarray, n: int = GREEDY.max_tokens, window: int = WINDOW, page_size: int = 4) -> tuple[int, ...]:
    params = SamplingParams(max_tokens=n, ignore_eos=True)
    return oracle(window, page_size).generate(tokens, params)[0].token_ids


def dense(window: int, tokens: np.ndarray) -> np.ndarray:
    return np.asarray(reference_logits(hybrid(window), tokens.tolist()))


def run(e: Engine) -> list[Any]:
    """Steps to the end, with the whole state checked after each step."""
    done = []
    while e.has_work:
        done += e.step()
        check(e)
    return sorted(done, key=lambda output: output.request_id)


def loaded_pages(e: Engine) -> list[int]:
    """Pages that each layer group loaded so far, from the bytes that are counted."""
    parts = e.store.bound_geometry().parts
    return [n // part.num_bytes for n, part in zip(e.stats().decode.host_bytes_loaded, parts, strict=True)]


# ---- partial loads


@pytest.mark.parametrize(
    ("page", "window", "cached", "suffix", "pages"),
    [
        (4, 9, 40, 3, 2),  # keys 32..39
        (4, 9, 40, 0, 3),  # the replayed token is a query at 39: keys 31..39
        (4, 9, 8, 5, 2),  # inside the first window
        pytest.param(4, 3, 40, 1, 1, marks=pytest.mark.slow),
        pytest.param(8, 9, 40, 3, 1, marks=pytest.mark.slow),
        pytest.param(8, 9, 40, 0, 2, marks=pytest.mark.slow),
        pytest.param(16, 20, 48, 7, 2, marks=pytest.mark.slow),
    ],
)
def test_a_host_hit_loads_the_pages_of_the_last_window_only(
    page: int, window: int, cached: int, suffix: int, pages: int, monkeypatch: pytest.MonkeyPatch
):
    """X3, A22: the columns before are -1 in the sliding group's table; the result is that of a dense forward."""
    e = make(window, page_size=page)
    tokens = prompt(cached + suffix, seed=window)
    e.score(np.concatenate([tokens[:cached], [2]]), reuse=True)
    e.drop_device_pages()
    reads: list[int] = []
    tables: list[np.ndarray] = []
    read, run_packed = e.store.read, e.runner._run_packed

    def reading(page_id: int) -> Any:
        reads.append(page_id)
        return read(page_id)

    def running(*batch: Any) -> Any:
        tables.append(e.runner.accounts[SLIDING].page_table[0].copy())
        return run_packed(*batch)

    monkeypatch.setattr(e.store, "read", reading)
    monkeypatch.setattr(e.runner, "_run_packed", running)
    logits, first = e.score(tokens, reuse=True)
    np.testing.assert_allclose(logits, dense(window, tokens)[first:], atol=1e-4)
    assert first == (cached if suffix else cached - 1)
    assert loaded_pages(e) == [cached // page, pages]
    assert len(reads) == len(set(reads)) == cached // page
    passed = cached // page - pages
    assert (tables[0][:passed] == -1).all()
    assert (tables[0][passed : cached // page] >= 0).all()
    assert e.stats().prefill.hits == 1
    drained(e)


def test_resident_pages_of_a_window_are_not_loaded_again():
    """A23, A28, per group: the full group's pages are dropped, the sliding group's last ones are still on the device."""
    e = make()
    tokens = prompt(40, seed=1)
    e.generate(np.append(tokens, 2), GREEDY)
    e.runner.accounts[0].drop_reclaimable()
    out = e.generate(np.append(tokens, [5, 6]), GREEDY)[0]
    assert out.token_ids == greedy(np.append(tokens, [5, 6]))
    assert out.cached_tokens == 40
    assert loaded_pages(e) == [10, 0]
    drained(e)


@pytest.mark.slow
def test_a_32k_token_hit_on_the_host_loads_half_of_the_bytes():
    """X3, end to end: every other layer has a window of 128, page 64; the 512 pages come from outside."""
    model = tiny_hybrid(window=128, layers=2, kv_heads=1, heads=1, max_context=40_000)
    e = Engine(
        model,
        EngineConfig(
            page_size=64, num_device_pages=520, num_host_pages=520, max_rows=1, max_prefill_tokens=64, decode_steps=2,
            enable_prefix_reuse=True, compilation_cache=False,
        ),
    )  # fmt: skip
    tokens = prompt(32_768 + 5, seed=3)
    parts = e.store.bound_geometry().parts
    rng = np.random.default_rng(0)
    pages = [tuple(rng.standard_normal(p.shape, np.float32) for p in parts) for _ in range(512)]
    adopted = [e.programs.transfer.adopt(page) for page in pages]
    assert e.store.insert([StoredPrefix(e.namespace(), tokens[: 512 * 64], adopted)]) == 512
    logits, first = e.score(tokens, reuse=True)
    assert first == 32_768
    assert np.isfinite(logits).all()
    loaded = e.stats().decode.host_bytes_loaded
    assert loaded == (512 * parts[0].num_bytes, 2 * parts[1].num_bytes)
    assert sum(loaded) / (512 * e.store.bound_geometry().page_bytes) == pytest.approx(0.502, abs=1e-3)
    assert e.memory.device_pages[1] < 10
    e.check_integrity()


# ---- hits with holes


@pytest.mark.parametrize(
    ("lacking", "tokens", "hit"),
    [
        ((0, 1, 2, 3, 4, 5), 41, 10),  # all of them before the window
        ((0, 8), 43, 8),  # inside: shorter
        ((6,), 29, 6),  # this prompt's longest boundary, 7, reads page 6
        ((6,), 41, 10),  # a longer prompt reads nothing of it
        ((9,), 40, 9),
        ((7,), 40, 7),  # the full hit reads 9 tokens, on three pages; boundary 9 reads 8, on two, and page 7 is one
        ((7,), 41, 10),
        ((9, 7, 5, 3, 1), 40, 1),  # two pages are needed: nothing from boundary 2 on
        (tuple(range(10)), 40, 0),
    ],
)
def test_a_hole_shortens_the_hits_that_read_it(lacking: tuple[int, ...], tokens: int, hit: int):
    """X3, A7, A22: hit length by the rule, and the answer of a dense forward all the same."""
    e = make()
    text = prompt(48, seed=4)
    e.generate(text[:41], GREEDY)
    pages = index_of(e).peek(text[:41], e.namespace()).page_ids
    assert len(pages) == 10
    e.drop_device_pages()
    e.store.drop_group(pages[list(lacking)], SLIDING)
    assert e.cache.lookup(text[:tokens]).num_pages == hit
    assert e.cache.explain(text[:tokens]).hit_pages == hit
    logits, first = e.score(text[:tokens], reuse=True)
    assert first == min(4 * hit, tokens - 1)
    np.testing.assert_allclose(logits, scores(text[:tokens])[first:], atol=1e-4)
    check(e)
    # What was computed again has given the entries their bytes back.
    computed = {page for page in range(hit, tokens // 4) if page in lacking}
    assert e.store.stats().filled_parts == len(computed)
    assert e.cache.lookup(text[:tokens]).num_pages == max(hit, tokens // 4)
    assert e.stats().faults.failed_loads == 0
    drained(e)


def test_bytes_that_vanish_between_lookup_and_load_cost_the_hit_and_nothing_else():
    """H31: a page whose part is missing although it was counted on is dropped, and the row computes."""
    e = make()
    text = prompt(41, seed=4)
    e.generate(text, GREEDY)
    page = int(index_of(e).peek(text, e.namespace()).page_ids[9])
    e.drop_device_pages()
    e.store.payloads[page] = (e.store.payloads[page][0], None)
    out = e.generate(text, GREEDY)[0]
    assert out.token_ids == greedy(text)
    assert e.stats().faults.failed_loads == 1
    assert "no bytes of layer group 1" in e.stats().faults.last_error
    drained(e)


def test_trimming_windows_frees_memory_at_once():
    """X3: the parts that stay leave the bundles that they came in, although no request runs any more."""
    e = make(poison=False, max_prefill_tokens=64)  # pages leave in bundles of 8
    e.generate(prompt(64, seed=3), GREEDY)
    arrays = {id(p.bundle): p.bundle.array for page in e.store.payloads if page for p in page if p is not None}
    before = sum(array.nbytes for array in arrays.values())
    parts = e.store.bound_geometry().parts
    assert e.cache.trim_windows() == 13  # of 16 pages; a full hit at the end reads three
    kept = [p for page in e.store.payloads if page for p in page if p is not None]
    held = sum(array.nbytes for array in {id(p.bundle): p.bundle.array for p in kept}.values())
    assert before == 16 * sum(part.num_bytes for part in parts)
    assert held == sum(p.nbytes for p in kept) < before
    assert e.generate(np.append(prompt(64, seed=3), 5), GREEDY)[0].token_ids == greedy(np.append(prompt(64, seed=3), 5))
    drained(e)


# ---- pages given back


SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in [(4, 1), (4, 8), (4, 17), (8, 9), (16, 20), (4, 200)]]


@pytest.mark.parametrize(("kind", "looks"), [("llama", False), ("hybrid", True)])
def test_rows_of_a_model_without_windows_are_not_looked_at(kind: str, looks: bool, monkeypatch: pytest.MonkeyPatch):
    e = engine(kind)
    request = e.submit(prompt(9, seed=1), SamplingParams(max_tokens=9, ignore_eos=True))
    e.step()
    seen: list[int] = []
    monkeypatch.setattr(e.scheduler, "slide", lambda row, *_: seen.append(row.request_id))
    e.offloader.give_back()
    assert seen == [request] * looks


@pytest.mark.parametrize(("page", "window"), [(4, 9), *SLOW])
def test_pages_that_a_window_has_passed_go_back_at_every_boundary(page: int, window: int):
    """X3, A25, A27: chunked prefill and decode of two rows; tables, refcounts and the device are compared after each step."""
    e = make(window, page_size=page)
    texts = [prompt(50, seed=1), prompt(33, seed=2)]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    ids = [e.submit(text, params) for text in texts]
    account = e.runner.accounts[SLIDING]
    most = 0
    done = []
    while e.has_work:
        done += e.step()
        check(e)
        for row in e.scheduler.running:
            if row.row is None or row.leader is not None:
                continue
            # Since the step began: what the step itself passed goes at the next boundary.
            held = account.pages(row.row)[account.fronts[row.row] :]
            assert (held >= 0).all()
            most = max(most, len(held))
            assert len(held) * page <= window + 16 + 2 * page
    outputs = {output.request_id: output.token_ids for output in done}
    assert [outputs[i] for i in ids] == [greedy(text, 24, window, page) for text in texts]
    returned = e.stats().decode.window_pages_returned
    assert (returned > 0) == (window < 70)
    assert most >= 1
    drained(e)


def test_what_is_given_back_was_copied_to_the_host_first():
    """A13, A20: every page of the prompt is published with the bytes of all groups, however small the window."""
    e = make()
    text = prompt(61, seed=7)
    e.generate(text, GREEDY)
    assert e.stats().decode.window_pages_returned > 10
    pages = index_of(e).peek(text, e.namespace()).page_ids
    assert len(pages) == 15
    assert not e.store.lacking(pages).any()
    for cut in (1, 2, 3, 7, 14):  # and any boundary can be hit
        assert e.cache.lookup(text[: 4 * cut + 1]).num_pages == cut
        e.drop_device_pages()
        logits, first = e.score(text[: 4 * cut + 2], reuse=True)
        assert first == 4 * cut
        np.testing.assert_allclose(logits, scores(text[: 4 * cut + 2])[first:], atol=1e-4)
    drained(e)


def test_pages_are_given_back_while_their_copies_are_under_way():
    """A13: as on a GPU, where nobody waits for copies. What lands later is published all the same, with all bytes."""

    class Late(PendingCopy):
        @property
        def ready(self) -> bool:
            return False

    e = make()
    e.copies_in_background = True
    offload = e.runner.offload

    def late(*pages: Any) -> PendingCopy:
        copy = offload(*pages)
        return Late(copy.host_pages, copy.payloads, copy.arrays)

    e.runner.offload = late  # type: ignore[method-assign]
    text = prompt(61, seed=7)
    request = e.submit(text, SamplingParams(max_tokens=20, ignore_eos=True))
    while e.scheduler.waiting or e.scheduler.running[0].remaining > 8:
        e.step()
        check(e)
    assert len(e.offloader.pending) >= 4
    assert e.stats().decode.window_pages_returned > 10
    assert len(index_of(e)) == 0
    assert {output.request_id: output.token_ids for output in run(e)} == {request: greedy(text, 20)}
    pages = index_of(e).peek(text, e.namespace()).page_ids
    assert len(pages) == 15
    assert not e.store.lacking(pages).any()
    e.drop_device_pages()
    logits, first = e.score(np.append(text[:40], 3), reuse=True)
    assert first == 40
    np.testing.assert_allclose(logits, scores(np.append(text[:40], 3))[first:], atol=1e-4)
    drained(e)


def test_nothing_changes_to_the_bit_with_reuse_off():
    """N1: off against on with an empty cache, and both against an engine that knows of no window."""
    text = prompt(53, seed=5)
    want = scores(text)
    for on in (False, True):
        e = make(enable_prefix_reuse=on)
        assert np.array_equal(e.score(text), want)
        assert e.stats().decode.window_pages_returned > 0
        drained(e)
    assert oracle(WINDOW).stats().decode.window_pages_returned == 0


# ---- what fits

GIVES: dict[str, Any] = {"num_device_pages": 52, "num_window_pages": 12, "max_context": 208}
"""As many bytes as 32 pages of each group."""


def tokens_at_once(e: Engine, length: int, budget: int) -> int:
    """Tokens of rows that run together when the device decides alone how many do."""
    params = SamplingParams(max_tokens=budget, ignore_eos=True)
    for seed in range(e.config.max_rows):
        e.submit(prompt(length, seed=seed), params)
    most = 0
    while e.has_work:
        e.step()
        check(e)
        most = max(most, sum(row.capacity_tokens for row in e.scheduler.running if row.row is not None))
    drained(e)
    return most


def test_more_tokens_fit_in_the_same_bytes():
    """X3: every other layer has a window of 9. In the bytes of 32 pages of all layers two rows of 100 tokens run at once where
    only one did, and a prompt fits that is longer than 32 pages.

    An engine that keeps everything has room for 128 tokens. Here the sliding group is given 12 pages, 4 for each row and 4 for
    a chunk, which leaves 52 to the other group: 208 tokens.
    """
    keeps = forgetful(make())
    gives = make(**GIVES)
    assert gives.memory.device_bytes == keeps.memory.device_bytes
    assert tokens_at_once(keeps, 88, 12) == 100
    assert tokens_at_once(gives, 88, 12) == 200
    long = prompt(180, seed=9)
    with pytest.raises(CapacityError):
        keeps.submit(long, GREEDY)
    logits, _ = gives.score(long, reuse=True)
    np.testing.assert_allclose(logits, dense(WINDOW, long), atol=1e-4)
    drained(gives)


def test_gpt_oss_fits_nearly_twice_as_many_tokens():
    """X3: window 128, page 64, 64 rows of 8k to 32k tokens; device bytes per token with and without windows."""
    model = tiny_hybrid(window=128, layers=2, max_context=40_000)
    for tokens, least in ((8192, 1.89), (32768, 1.97)):
        config = EngineConfig(page_size=64, max_rows=64, num_device_pages=64 * tokens // 64, num_host_pages=8)
        plan = plan_memory(model, config)
        part = plan.page_bytes // 2
        assert plan.device_bytes == sum(plan.device_pages) * part
        gain = 2 * config.num_device_pages * part / plan.device_bytes
        assert least < gain < 2


def test_a_window_pool_too_small_for_one_row_is_refused():
    with pytest.raises(ConfigError, match="num_window_pages=5 do not hold one row with a window of 9"):
        make(num_window_pages=5)
    with pytest.raises(ConfigError, match="num_window_pages must be at least 1"):
        make(num_window_pages=0)
    assert make(num_window_pages=20).memory.device_pages == (32, 20)
    assert make(num_window_pages=None).memory.device_pages == (32, 2 * (4 + 3) + 4)


def test_rows_in_the_smallest_pool_never_wait_for_each_other_half_way():
    """Admission counts what a row will own at once, so that no row that runs is ever short of a page."""
    e = make(**GIVES)
    texts = [prompt(n, seed=n % 3) for n in (40, 17, 33, 40, 8, 25)]
    params = SamplingParams(max_tokens=13, ignore_eos=True)
    ids = [e.submit(text, params) for text in texts]
    outputs = {output.request_id: output for output in run(e)}
    assert [outputs[i].token_ids for i in ids] == [greedy(text, 13) for text in texts]
    assert e.stats().requests.reentries == 0
    assert e.stats().requests.prefill_failures == 0
    drained(e)


# ---- life cycle


def test_hold_resume_evict_and_reenter_with_windows():
    """A26, S4, B18: a held row loads the full group and its last window; an evicted one comes back through its own pages."""
    e = make(publish_generated=True)
    text = prompt(37, seed=8)
    want = greedy(text, 30)
    request = e.submit(text, SamplingParams(max_tokens=30, ignore_eos=True))
    for _ in range(4):
        e.step()
        check(e)
    e.hold(request)
    check(e)
    e.drop_device_pages()
    row = e.scheduler.running[0]
    context = row.committed_kv_tokens
    e.resume(request)
    e.step()
    check(e)
    assert loaded_pages(e) == [-(-context // 4), -(-context // 4) - (context - WINDOW + 1) // 4]
    e.scheduler.evict(row)
    e.drop_device_pages()
    check(e)
    assert run(e)[0].token_ids == want
    assert e.stats().prefill.resumed_tokens > 0
    drained(e)


def test_a_failed_copy_of_a_page_that_was_given_back_costs_no_row():
    """The row is held all the same: what its window has passed is absent from the copy that is made again."""
    e = make(publish_generated=True)
    text = prompt(37, seed=8)
    want = greedy(text, 20)
    real, failing = e.runner.offload, True

    def offload(*args: Any) -> Any:
        if failing:
            raise RuntimeError("injected")
        return real(*args)

    e.runner.offload = offload  # type: ignore[method-assign]
    request = e.submit(text, SamplingParams(max_tokens=20, ignore_eos=True))
    for _ in range(4):
        e.step()
        check(e)
    assert e.stats().faults.failed_offloads >= 9
    failing = False
    e.hold(request)
    check(e)
    pages = e.store.pages(e.scheduler.running[0].id)
    lacks = e.store.lacking(pages)
    assert lacks[SLIDING].any()
    assert not lacks[0].any()
    e.drop_device_pages()
    e.resume(request)
    assert run(e)[0].token_ids == want
    # The pages are published with a hole, over which no hit reads.
    warm = e.generate(np.append(text, 3), GREEDY)[0]
    assert warm.token_ids == greedy(np.append(text, 3))
    drained(e)


@pytest.mark.parametrize(("pools", "sizes"), [({}, [2, 2]), (GIVES, [1, 1, 1, 1])])
def test_samples_of_one_prompt_share_the_window_of_its_end(pools: dict[str, Any], sizes: list[int]):
    """B17, B19: followers name the pages that their own window reads, and none before; a small pool makes small groups."""
    e = make(**pools)
    text = prompt(30, seed=6)
    want = greedy(text, 12)
    e.submit(text, SamplingParams(max_tokens=12, ignore_eos=True, n=4))
    assert [len(members(row)) for row in e.scheduler.waiting if row.leader is None] == sizes
    (output,) = run(e)
    assert [sample.token_ids for sample in output.samples] == [want] * 4
    drained(e)


def test_deterministic_mode_keeps_every_bit_with_windows_and_holes():
    """N4: cold, warm, full hit, loaded partly from the host, over a hole, held and resumed, in different batches."""
    bits = Bits()
    config: dict[str, Any] = {"deterministic": True}
    text = prompt(40, seed=11)
    more = [np.concatenate([text, prompt(5, seed=s)]) for s in (1, 2)]
    params = SamplingParams(max_tokens=14, ignore_eos=True)
    cold = bits.watch(make(**config))
    want = [cold.generate(tokens, params, reuse=False)[0].token_ids for tokens in (text, *more)]
    warm = bits.watch(make(**config))
    assert warm.generate(text, params)[0].token_ids == want[0]
    assert warm.generate(text, params)[0].token_ids == want[0]
    warm.drop_device_pages()
    assert [output.token_ids for output in warm.generate(more, params)] == want[1:]
    pages = index_of(warm).peek(text, warm.namespace()).page_ids
    warm.drop_device_pages()
    warm.store.drop_group(pages[[2, 8]], SLIDING)
    request = warm.submit(text, params)
    warm.step()
    warm.step()
    warm.hold(request)
    check(warm)
    warm.resume(request)
    assert run(warm)[0].token_ids == want[0]
    assert warm.stats().prefill.hits >= 4
    assert warm.stats().decode.window_pages_returned > 0
    assert not bits.different
    assert bits.repeats > 200
    drained(warm)
