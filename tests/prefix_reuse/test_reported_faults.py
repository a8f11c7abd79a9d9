"""Faults that others reported, restated for this host cache, where no other file has them already (bug cases H09 to H36)."""

from __future__ import annotations

import math
import time
from typing import Any

import jax
import numpy as np
import pytest
from engine_helpers import GREEDY, check, cold, drained, engine, prompt
from store_helpers import MODEL, PAGE, fill, make_cache, make_store, payload, seq

from pallas_kernels import chunks
from pallas_kernels.copy_pages import reference
from pallas_kernels.layout import pool_shape
from prefix_reuse import SamplingParams
from prefix_reuse.errors import HostPagesExhausted
from prefix_reuse.host_store import HostPageStore, PrefixRequest
from prefix_reuse.index import PrefixIndex
from prefix_reuse.lease import MissReason

NS = MODEL.digest
ONE = SamplingParams(max_tokens=1, ignore_eos=True)


def test_a_store_of_three_pages_loses_leaves_first_and_orphans_nothing():
    """H09: an unrelated page evicts k3; when k1 is forced out, the hit is 0 and k2 is free at once."""
    store = make_store(3)
    k1, k2, k3 = fill(store, seq(1, 12))
    assert fill(store, seq(101, 104)) == [k3]
    assert store.index is not None
    assert store.index.peek(seq(1, 13), NS).page_ids.tolist() == [k1, k2]
    assert sorted(store.drop_entry(k1).tolist()) == sorted([k1, k2])
    assert store.index.peek(seq(1, 13), NS).num_pages == 0
    assert sorted(store.accounts.free_ids().tolist()) == sorted([k1, k2])
    store.check_integrity()


def test_the_pin_is_on_the_page_that_the_index_names():
    """H13: not on "the i-th page of the row that finishes": a duplicate's own page never gets one."""
    store = make_store()
    rows = {}
    for name in ("a", "b"):
        (got,) = store.allocate_pages_for_sequences_with_prefix([PrefixRequest(name, seq(1, 8), 8, NS)])
        store.begin_copy(got.private_pages)
        store.finish_copy(got.private_pages, [payload(int(p)) for p in got.private_pages])
        rows[name] = got.private_pages
    store.publish("a", 8, NS)
    store.publish("b", 8, NS)
    store.release("b")
    store.release("a")
    assert store.accounts.pins[rows["a"]].tolist() == [1, 1]
    assert store.accounts.pins[rows["b"]].tolist() == [0, 0]
    assert set(rows["b"].tolist()) <= set(store.accounts.free_ids().tolist())
    store.check_integrity()


def test_an_emptied_cache_takes_an_empty_lookup():
    """H07: fresh, full, and after everything was evicted."""
    cache = make_cache()
    for prepare in (lambda: None, lambda: fill(cache.store, seq(1, 8)), lambda: cache.evict(99)):
        prepare()
        match = cache.lookup(np.zeros(0, np.int32))
        assert (match.num_pages, match.miss_reason) == (0, MissReason.EMPTY)
        assert len(cache.hold([])) == 0
    assert len(cache) == 0


def test_rolled_back_tokens_are_in_no_key():
    """H26: [1..6] d1 d2 d3 d4, of which only d1 is kept, then x: page 2 is published under its final tokens."""
    store = make_store()
    d1, d2, x = 71, 72, 90
    (got,) = store.allocate_pages_for_sequences_with_prefix([PrefixRequest("row", seq(1, 6), 16, NS)])
    pages = got.private_pages
    store.begin_copy(pages[:1])
    store.finish_copy(pages[:1], [payload(1)])
    store.publish("row", seq(1, 6), NS)
    store.set_context("row", 10)  # the draft crosses a page border
    free = store.num_free
    assert store.truncate("row", 7).tolist() == pages[2:].tolist()
    assert store.num_free == free + 2
    store.grow("row", 12)
    store.set_context("row", 8)
    store.begin_copy(pages[1:2])
    store.finish_copy(pages[1:2], [payload(2)])
    assert store.publish("row", [*seq(1, 6).tolist(), d1, x], NS).tolist() == pages[:2].tolist()
    assert store.index is not None
    assert store.index.peek([*seq(1, 6).tolist(), d1, d2, 9], NS).num_pages == 1
    assert all(d2 not in run.tokens for run in store.index)
    store.check_integrity()


def test_scores_of_a_cached_prompt_are_all_there():
    """H27a: prompt logits bypass the cache: n rows, equal to the cold ones, whatever is cached."""
    e = engine()
    for length in (5, 8):
        tokens = prompt(length, seed=length)
        for _ in range(2):
            logits = e.score(tokens)
            assert logits.shape[0] == length
            np.testing.assert_allclose(logits, cold(tokens), atol=1e-4)
            e.generate(tokens, ONE)
        assert e.cache.lookup(tokens).num_pages == length // PAGE
    drained(e)


def test_preempted_requests_are_no_cache_hits():
    """H24: twenty prompts without a common beginning, thrown out again and again: 0 hits, each prompt counted once."""
    e = engine(num_host_pages=40)
    prompts = [prompt(5 + i % 7, seed=50 + i) for i in range(20)]
    for i, tokens in enumerate(prompts):
        tokens[0] = 2 + i
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    want = [o.token_ids for o in engine(on=False).generate(prompts, params)]
    ids = [e.submit(tokens, params) for tokens in prompts]
    outputs: dict[int, Any] = {}
    for _ in range(200):
        outputs.update((o.request_id, o) for o in e.step())
        check(e)
        e.offloader.land()
        if e.scheduler.running and e.stats().requests.reentries < 12:
            row = e.scheduler.running[-1]
            e.offloader.detach(row)
            e.scheduler.evict(row)
        if not e.has_work:
            break
    assert [outputs[i].token_ids for i in ids] == want
    assert [outputs[i].cached_tokens for i in ids] == [0] * 20
    stats = e.stats()
    assert stats.requests.reentries > 3
    assert (stats.prefill.hits, stats.prefill.cached_tokens, stats.host.lookup_hits) == (0, 0, 0)
    assert stats.prefill.prompt_tokens == sum(len(p) for p in prompts)
    assert stats.prefill.misses == stats.host.lookup_misses == 20
    assert stats.prefill.resumed_tokens > 0
    drained(e)


def soak(requests: int, **sizes: Any) -> None:
    """H11: lengths 1..40, a quarter share a prefix, a tenth is cancelled, four at a time, a small pool."""
    rng = np.random.default_rng(1)
    e = engine(num_host_pages=48, **sizes)
    base = prompt(20, seed=1)
    live: set[int] = set()
    submitted = done = 0
    while submitted < requests or e.has_work:
        while len(live) < 4 and submitted < requests:
            length = int(rng.integers(1, 41))
            start = base[: min(length, 20)] if rng.random() < 0.25 else ()
            live.add(e.submit(prompt(length, seed=int(rng.integers(1 << 30)), start=start), GREEDY))
            submitted += 1
        if live and rng.random() < 0.05:
            e.cancel(int(rng.choice(sorted(live))))
        finished = {o.request_id for o in e.step()}
        live -= finished
        done += len(finished)
        if submitted % 50 == 0:
            check(e)
    assert done == requests
    assert e.stats().prefill.hits > requests // 20
    assert e.stats().requests.cancelled > 0
    assert len(e.cache) <= 48
    assert not e.offloader.busy
    drained(e)


def test_a_short_soak_ends_with_the_pages_it_began_with():
    soak(120)


@pytest.mark.slow
def test_a_soak_of_two_thousand_requests_ends_with_the_pages_it_began_with():
    soak(2_000, num_device_pages=32)


def test_a_prompt_of_131072_tokens_gets_its_pages():
    """H35b, H35c: page ids beyond 16 bits, no recursion, bounded time."""
    n = 131_072
    store = HostPageStore(2 * n, 1, index=PrefixIndex(1))
    tokens = np.random.default_rng(0).integers(0, 50_000, n).astype(np.int32)
    began = time.perf_counter()
    (first,) = store.allocate_pages_for_sequences_with_prefix([PrefixRequest("a", tokens, n, NS)])
    store.begin_copy(first.private_pages)
    store.finish_copy(first.private_pages, None)
    store.publish("a", n, NS)
    store.release("a")
    (second,) = store.allocate_pages_for_sequences_with_prefix(
        [PrefixRequest("b", np.append(tokens, 7).astype(np.int32), n + 1, NS)]
    )
    assert time.perf_counter() - began < 5
    assert np.array_equal(second.shared_pages, first.private_pages)
    assert int(second.shared_pages.max()) == n - 1
    assert int(second.private_pages[0]) == n
    store.check_integrity()


def test_numbers_of_a_pool_beyond_32_bits_are_reached():
    """H35b: page 70,000 of 16 slots, 8 heads of 128 lies 2.3e9 numbers into its layer; page 4,464 is 2**16 before it."""
    shape = pool_shape(1, 70_001, 16, 8, 128)
    assert math.prod(shape) > 2**31
    # Aligned, so that JAX takes it as it is: of memory that nobody touches nothing is really there.
    memory = np.zeros(math.prod(shape) + 64, np.int8)
    pool = memory[-memory.ctypes.data % 64 :][: math.prod(shape)].reshape(shape)
    for page in (0, 4_464, 70_000):
        pool[0, page] = np.random.default_rng(page).integers(-128, 128, shape[2:])
    ids = np.array([70_000, 0, 4_464], np.int32)
    kv_pages = jax.device_put(pool, may_alias=True)
    assert np.array_equal(reference.gather_pages(kv_pages, ids), pool[:, ids].swapaxes(0, 1))
    k, v = jax.jit(chunks.gather)(kv_pages, np.int32(0), ids)
    for got, part in ((k, 0), (v, 1)):
        assert np.array_equal(got, pool[0, ids, :, part].swapaxes(0, 1).reshape(8, 48, 128))


def test_waiting_costs_no_lookup_counts_and_no_recency():
    """H36: a request that waits a hundred passes is counted once, when it gets in."""
    e = engine(max_rows=1)
    base = prompt(12, seed=1)
    e.generate(base, ONE)
    running = e.submit(prompt(6, seed=2), SamplingParams(max_tokens=20, ignore_eos=True))
    e.step()
    before = e.store.snapshot_counters()
    waiting = e.submit(np.append(base, 5), GREEDY)
    for _ in range(100):
        e.scheduler.admit()
    after = e.store.snapshot_counters()
    for name in ("refs", "pins", "counters", "index", "recency", "eviction_order"):
        assert after[name] == before[name]
    outputs = {o.request_id: o for _ in range(20) for o in e.step()}
    assert (outputs[waiting].cached_tokens, running in outputs) == (12, True)
    assert e.store.stats().lookup_hits == 1
    drained(e)


def test_an_admission_that_cannot_be_met_is_the_callers_error_and_takes_nothing():
    """H16: every page is held by prefixes; the message says what is needed, and the next try after a release works."""
    cache = make_cache(make_store(4))
    fill(cache.store, seq(1, 16))
    held = cache.hold(seq(1, 16))
    request = PrefixRequest("row", seq(101, 108), 8, NS)
    before = cache.store.snapshot_counters()
    with pytest.raises(HostPagesExhausted, match="2 new host pages needed, 0 are free and 0 can be evicted"):
        cache.store.allocate_pages_for_sequences_with_prefix([request])
    assert cache.store.snapshot_counters() == before
    held.release()
    cache.store.allocate_pages_for_sequences_with_prefix([request])
    cache.check_integrity()
