"""Prefixes as values: held, forked, pinned, saved, let go, and no page lost on any way (X5, X6, B28)."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_helpers import GREEDY, check, drained, engine, prompt
from store_helpers import contents, fill, make_cache, make_store, seq

from prefix_reuse import SamplingParams
from prefix_reuse.errors import HostPagesExhausted, LeaseError, SnapshotError
from prefix_reuse.host_store import PrefixRequest


def test_a_prefix_is_its_whole_pages():
    """X6, A2: length and tokens of what is held; 2.5 pages hold 2."""
    cache = make_cache()
    pages = fill(cache.store, seq(1, 12))
    prefix = cache.hold(seq(1, 10))
    assert (len(prefix), prefix.tokens.tolist(), prefix.page_ids.tolist()) == (8, list(range(1, 9)), pages[:2])
    assert prefix.is_complete
    with pytest.raises(ValueError, match="read-only"):
        prefix.tokens[0] = 5
    assert "every full page" in repr(prefix)
    assert "<td>8 of 10</td>" in prefix._repr_html_()


@pytest.mark.parametrize(
    ("tokens", "held", "reason"),
    [
        (np.append(seq(1, 8), seq(70, 90)), 8, "different-token"),
        (seq(1, 20), 12, "not-cached"),
        (seq(500, 520), 0, "different-token"),
        (seq(1, 3), 0, "shorter-than-a-page"),
    ],
)
def test_holding_what_is_only_partly_cached_holds_that_part_and_says_so(tokens: np.ndarray, held: int, reason: str):
    cache = make_cache()
    fill(cache.store, seq(1, 12))
    prefix = cache.hold(tokens)
    assert (len(prefix), prefix.is_complete, prefix.reason) == (held, False, reason)
    assert f"{held // 4} of {len(tokens) // 4} full pages ({reason})" in repr(prefix)
    prefix.release()
    assert "released" in repr(prefix)


def test_held_pages_are_not_evicted_and_live_on_after_the_release():
    """B2, B6, B28: exactly the references of the hold go; the entries stay until their turn."""
    cache = make_cache(make_store(8))
    fill(cache.store, seq(1, 8))
    before = cache.store.snapshot_counters()
    with cache.hold(seq(1, 8)) as prefix:
        assert cache.stats().open_leases == 1
        assert cache.evict(8) == 0
        fill(cache.store, seq(101, 124))
        fill(cache.store, seq(201, 224))
        with pytest.raises(HostPagesExhausted):
            fill(cache.store, seq(301, 328))
        assert cache.lookup(seq(1, 8)).page_ids.tolist() == prefix.page_ids.tolist()
    assert cache.stats().open_leases == 0
    assert cache.store.accounts.refs.tolist() == before["refs"]
    fill(cache.store, seq(301, 328))
    assert cache.lookup(seq(1, 8)).num_pages < 2
    cache.check_integrity()


def test_a_fork_is_a_hold_of_its_own():
    """X6, B28: each handle owns one reference; releasing is idempotent and none is released twice."""
    cache = make_cache()
    pages = fill(cache.store, seq(1, 8))
    one = cache.hold(seq(1, 9))
    two, three = one.fork(), one.fork()
    assert cache.store.accounts.refs[pages].tolist() == [3, 3]
    one.release()
    one.release()
    with one:
        pass
    assert cache.store.accounts.refs[pages].tolist() == [2, 2]
    for use in (one.fork, lambda: one.page_ids, lambda: one.save("nowhere")):
        with pytest.raises(LeaseError):
            use()
    assert two.fork().tokens.tolist() == two.tokens.tolist() == three.tokens.tolist()
    del three
    two.release()
    cache.check_integrity()
    assert cache.stats().open_leases == 0
    assert cache.stats().ref_increments == cache.stats().ref_decrements


def test_garbage_collection_gives_a_hold_back():
    """X6: also in a cycle, and never twice after an explicit release."""
    cache = make_cache()
    pages = fill(cache.store, seq(1, 8))

    def cycle() -> None:
        holder: dict[str, Any] = {"prefix": cache.hold(seq(1, 8))}
        holder["self"] = holder

    cycle()
    gc.collect()
    prefix = cache.hold(seq(1, 8))
    prefix.release()
    del prefix
    gc.collect()
    cache.check_integrity()
    assert cache.store.accounts.refs[pages].tolist() == [0, 0]
    assert cache.stats().open_leases == 0


def test_a_collection_in_the_middle_of_an_operation_changes_nothing_until_it_is_over():
    """A12: the last reference to a prefix goes at each step of an allocation that then fails: as before, but for the hold."""
    for step in ("plan", "lease", "evict", "allocate", "prepared", "row", "commit"):
        store = make_store(8)
        cache = make_cache(store)
        fill(store, seq(1, 8))
        fill(store, seq(101, 112))
        held = [cache.hold(seq(1, 8))]
        before = store.snapshot_counters()

        def drop(name: str, at: str = step, held: list[Any] = held) -> None:
            if name == at:
                held.clear()
                gc.collect()
                raise RuntimeError(name)

        store._fault = drop
        request = PrefixRequest("row", seq(201, 216), 16, b"ns")
        with pytest.raises(RuntimeError, match=step):
            store.allocate_pages_for_sequences_with_prefix([request])
        assert store.snapshot_counters() == before
        store._fault = None
        cache.check_integrity()
        assert store.stats().open_leases == 0
        assert store.accounts.refs.sum() == 0
        store.allocate_pages_for_sequences_with_prefix([request])
        cache.check_integrity()


def test_a_hold_is_no_request():
    """B26: hits, misses and matched tokens count requests alone; recency is refreshed."""
    cache = make_cache(make_store(6))
    fill(cache.store, seq(1, 8))
    fill(cache.store, seq(101, 108))
    before = cache.stats()
    cache.hold(seq(1, 8)).release()
    cache.hold(seq(900, 908)).release()
    after = cache.stats()
    for name in ("hits", "misses", "matched_tokens"):
        assert getattr(after, name) == getattr(before, name)
    fill(cache.store, seq(201, 216))
    assert (cache.lookup(seq(1, 8)).num_pages, cache.lookup(seq(101, 108)).num_pages) == (2, 0)


def test_pinned_pages_go_last_and_wedge_nothing():
    """X6: a pin outlives its handle, is soft, and comes off again; overlapping pins keep what is theirs."""
    cache = make_cache(make_store(8))
    fill(cache.store, seq(1, 12))
    long, short = cache.hold(seq(1, 12)).pin(), cache.hold(seq(1, 4)).pin()
    assert [len(t) for t in cache.pinned] == [12, 4]
    assert long.is_pinned
    for prefix in (long, short):
        prefix.release()
    for first in (101, 201, 301):
        fill(cache.store, seq(first, first + 15))
    assert cache.lookup(seq(1, 12)).num_pages == 3
    fill(cache.store, seq(401, 432))  # needs all eight pages: a pin keeps nobody out
    assert cache.lookup(seq(1, 12)).num_pages == 0
    cache.unpin_all()
    fill(cache.store, seq(1, 12))
    long, short = cache.hold(seq(1, 12)).pin(), cache.hold(seq(1, 4)).pin()
    for prefix in (long, short):
        prefix.release()
    long.unpin()
    assert (long.is_pinned, short.is_pinned) == (False, True)
    fill(cache.store, seq(501, 524))
    assert cache.lookup(seq(1, 12)).num_pages >= 1
    short.unpin()
    assert cache.index is not None
    assert cache.index.stats().soft_pinned == 0
    cache.check_integrity()


def test_a_cleared_cache_keeps_what_is_held():
    """B25: entries go at once; pages of a hold are freed with it."""
    cache = make_cache()
    fill(cache.store, seq(1, 8))
    fill(cache.store, seq(1, 8), cache._intake.namespace("t"))
    prefix = cache.hold(seq(1, 8))
    assert cache.clear(salt="t") == 2
    assert (cache.clear(), len(cache), cache.store.num_free) == (2, 0, 22)
    fork = prefix.fork()
    prefix.release()
    assert cache.store.num_free == 22
    fork.release()
    assert cache.store.num_free == 24
    cache.check_integrity()


def test_a_saved_prefix_comes_back_held(tmp_path: Path):
    """X6, X7, B8: tokens and bytes of all layer groups, in another store, under the same namespace only."""
    cache = make_cache()
    fill(cache.store, seq(1, 20))
    fill(cache.store, seq(101, 120))
    prefix = cache.hold(seq(1, 12))
    assert prefix.save(tmp_path / "p") == 3
    fresh = make_cache(make_store(6))
    fill(fresh.store, seq(900, 923))  # the store is full: colder entries make room
    loaded = fresh.load(tmp_path / "p")
    assert (loaded.tokens.tolist(), loaded.is_complete) == (list(range(1, 13)), True)
    assert fresh.stats().open_leases == 1
    assert {k: v for k, v in contents(fresh.store).items() if k[1].startswith(seq(1, 4).tobytes())}.items() <= (
        contents(cache.store).items()
    )
    with pytest.raises(SnapshotError, match="other-namespace"):
        make_cache(model=cache._intake.model.replace(revision="2")).load(tmp_path / "p")  # type: ignore[attr-defined]
    cache.save_snapshot(tmp_path / "all")
    with pytest.raises(SnapshotError, match="load_snapshot"):
        make_cache().load(tmp_path / "all")
    del prefix, loaded
    fresh.check_integrity()


def test_a_damaged_saved_prefix_says_that_it_is_not_complete(tmp_path: Path):
    """H32: what is sound is held."""
    cache = make_cache()
    fill(cache.store, seq(1, 12))
    cache.hold(seq(1, 12)).save(tmp_path)
    file = next(tmp_path.glob("*/pages-*/page00000001.*/0*"))
    data = bytearray(file.read_bytes())
    data[3] ^= 1
    file.write_bytes(data)
    loaded = make_cache().load(tmp_path)
    assert (len(loaded), loaded.is_complete, loaded.requested_tokens) == (4, False, 12)


def test_loading_into_a_store_in_use_takes_nothing(tmp_path: Path):
    """A12, H16."""
    cache = make_cache()
    fill(cache.store, seq(1, 16))
    cache.hold(seq(1, 16)).save(tmp_path)
    small = make_cache(make_store(4))
    fill(small.store, seq(201, 208))
    keep = small.hold(seq(201, 208))
    before = small.store.snapshot_counters()
    with pytest.raises(HostPagesExhausted):
        small.load(tmp_path)
    assert small.store.snapshot_counters() == before
    keep.release()
    assert len(small.load(tmp_path)) == 16


def test_what_one_may_ask_of_the_cache():
    """X5: lookup, explain, iteration and figures have no side effect."""
    cache = make_cache()
    fill(cache.store, seq(1, 12))
    fill(cache.store, np.append(seq(1, 8), seq(50, 57)))
    before = cache.store.snapshot_counters()
    assert cache.lookup(seq(1, 30)).num_pages == 3
    assert cache.explain(np.append(seq(1, 9), 99)).hit_pages == 2
    assert cache.explain(seq(1, 12), salt="t").reason == "other-namespace"
    assert len(cache) == 5
    assert sum(len(run.page_ids) for run in cache) == 5
    assert cache.stats().entries == 5
    assert "5 indexed of 24" in repr(cache)
    assert "<caption>PrefixCache</caption>" in cache._repr_html_()
    assert cache.plot().axes
    assert cache.store.snapshot_counters() == before


def test_thousands_of_holds_lose_no_page():
    """H11: random holds, forks, releases, dropped handles, requests and evictions; counts end where they began."""
    random.seed(3)
    cache = make_cache(make_store(20))
    held: list[Any] = []
    for step in range(3_000):
        tokens = np.append(seq(1, 4 * random.randint(0, 3)), seq(50, 50 + random.randint(0, 6)))
        match random.randrange(6):
            case 0 | 1 if len(held) < 6:
                held.append(cache.hold(tokens, salt=random.choice(["", "t"])))
            case 2 if held:
                held.append(random.choice(held).fork())
                held.pop(0)
            case 3 if held:
                held.pop(random.randrange(len(held))).release()
            case 4:
                cache.evict(random.randint(1, 4))
            case _:
                fill(cache.store, tokens, cache._intake.namespace(random.choice(["", "t"])))
        if step % 50 == 0:
            cache.check_integrity()
    del held
    gc.collect()
    cache.clear()
    cache.check_integrity()
    stats = cache.stats()
    assert (stats.free_pages, stats.open_leases, stats.rows) == (20, 0, 0)
    assert (stats.ref_increments, stats.pin_increments) == (stats.ref_decrements, stats.pin_decrements)


def test_a_held_document_serves_questions_under_pressure():
    """X6 on an engine: other prompts push everything else out; the held pages are hit, the answer is the cold one."""
    e = engine(num_host_pages=20)
    document = prompt(16, seed=1)
    e.generate(document, GREEDY)
    with e.cache.hold(document) as prefix:
        for seed in range(2, 8):
            e.generate(prompt(20, seed=seed), SamplingParams(max_tokens=4, ignore_eos=True))
            check(e)
        question = np.append(prefix.tokens, prompt(3, seed=9))
        out = e.generate(question, GREEDY)[0]
        assert out.cached_tokens == 16
        assert out.token_ids == engine(on=False).generate(question, GREEDY)[0].token_ids
    drained(e)


def test_without_reuse_a_hold_holds_nothing():
    """A1, B30: no leases' pages, no snapshot, the reason is in the answer."""
    e = engine(on=False)
    tokens = prompt(16, seed=1)
    e.generate(tokens, GREEDY)
    with e.cache.hold(tokens) as prefix:
        assert (len(prefix), prefix.reason) == (0, "reuse-off")
    assert "reuse is off (disabled)" in e.cache.explain(tokens).detail
    assert (len(e.cache), list(e.cache), e.cache.evict(3), e.cache.clear()) == (0, [], 0, 0)
    assert "off (disabled)" in repr(e.cache)
    drained(e)
