"""Sliding windows on the host (X3, A7): what a hit may be when pages lack a layer group's bytes, and who knows about it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from store_helpers import GROUPS, MODEL, PAGE, fill, geometry, make_cache, make_store, payload, seq

from pallas_kernels.layout import LayerGroup
from prefix_reuse.device_plan import plan_device_pages
from prefix_reuse.errors import IntegrityError, InvalidRequestError, TransferError
from prefix_reuse.geometry import StoreGeometry
from prefix_reuse.host_archive import PageExport, StoredPrefix
from prefix_reuse.host_store import HostPageStore, PrefixRequest
from prefix_reuse.lease import MissReason
from prefix_reuse.windows import GroupWindow, first_page, most_pages, usable_pages

NS = MODEL.digest
SLIDING = 1  # of `store_helpers.GROUPS`: window 8, two pages of 4


def naive_usable(lacks: np.ndarray, windows: list[int | None], num_tokens: int, size: int) -> int:
    """By definition: at each boundary, every cached token that some group's first query sees must be there."""
    best = 0
    for end in range(1, lacks.shape[1] + 1):
        cached = end * size
        query = cached - 1 if cached == num_tokens else cached
        seen = {
            (group, key // size)
            for group, window in enumerate(windows)
            for key in range(cached)
            if window is None or key > query - window
        }
        if not any(lacks[group, page] for group, page in seen):
            best = end
    return best


def lacks_of(*groups: str) -> np.ndarray:
    """`.` = the page has the group's bytes, `x` = it lacks them."""
    return np.array([[mark == "x" for mark in group] for group in groups])


@pytest.mark.parametrize(
    ("sliding", "window", "tokens", "hit"),
    [
        ("......", 8, 99, 6),  # nothing is missing
        ("xxxx..", 8, 99, 6),  # a hole before the window is in nobody's way
        ("xxxxx.", 8, 99, 0),  # one inside is: 2 pages are needed, and no shorter boundary has them
        ("..xx..", 8, 99, 6),  # a longer boundary may be usable ...
        ("..xx..", 8, 20, 2),  # ... where a shorter one is not: this prompt ends after page 5, whose window has a hole
        (".....x", 8, 99, 5),
        ("...x..", 8, 99, 6),
        ("xxxxx.", 5, 99, 6),  # window 5: the 4 cached tokens are one page ...
        ("xxxxx.", 5, 24, 0),  # ... but 5 tokens, for the full hit's replayed query, are two
        ("xxxx..", 5, 24, 6),
        ("xxxxxx", 1, 99, 6),  # a window of 1 sees no cached token at all
        ("xxxxxx", 1, 24, 5),  # but the query that is replayed needs its own key
        ("xxxxx.", 1, 24, 6),
        ("x.....", 99, 99, 0),  # a window longer than the chain needs all of it
    ],
)
def test_hit_lengths_with_holes(sliding: str, window: int, tokens: int, hit: int):
    """X3, table-driven: 6 pages of 4 tokens are cached in the full group, `sliding` in the other."""
    num_pages = min(6, tokens // 4)
    lacks = lacks_of("." * num_pages, sliding[:num_pages])
    assert usable_pages(lacks, [None, window], tokens, 4) == hit
    assert naive_usable(lacks, [None, window], tokens, 4) == hit


def test_the_hit_is_no_minimum_over_groups():
    """X3: by themselves the groups could hit 6, 5 and 6 pages; five pages are no hit of the third, nor four: three are."""
    lacks = lacks_of("......", ".....x", "xx.xx.")
    windows = [None, 4, 4]
    assert [usable_pages(lacks[[g]], [windows[g]], 99, 4) for g in range(3)] == [6, 5, 6]
    assert usable_pages(lacks, windows, 99, 4) == 3


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_hit_lengths_equal_the_definition(data: Any):
    size, num_pages, num_groups = (data.draw(st.integers(1, n)) for n in (5, 8, 3))
    shape = (num_groups, num_pages)
    marks = data.draw(st.lists(st.booleans(), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]))
    windows = data.draw(st.lists(st.none() | st.integers(1, 20), min_size=num_groups, max_size=num_groups))
    tokens = num_pages * size + data.draw(st.integers(0, size))
    lacks = np.array(marks).reshape(shape)
    assert usable_pages(lacks, windows, tokens, size) == naive_usable(lacks, windows, tokens, size)


@settings(max_examples=200, deadline=None)
@given(size=st.integers(1, 8), tokens=st.integers(1, 40), start=st.integers(0, 40))
def test_no_run_of_tokens_touches_more_pages_than_most_pages(size: int, tokens: int, start: int):
    touched = (start + tokens - 1) // size - start // size + 1
    assert touched <= most_pages(tokens, size)
    assert most_pages(tokens, size) in {(first + tokens - 1) // size - first // size + 1 for first in range(size)}
    assert first_page(start, tokens, size) == max(0, start - tokens + 1) // size


@pytest.mark.parametrize(("cached", "prompt", "pages"), [(32768, 32896, 2), (32768, 32768, 2), (32704, 32896, 2)])
def test_a_32k_host_hit_of_gpt_oss_loads_half_of_the_bytes(cached: int, prompt: int, pages: int):
    """X3: 24 layers, every other one with a window of 128; 8 KV heads of 64 in bf16, page 64."""
    layers = tuple(range(24))
    groups = (
        LayerGroup(layers[1::2], 8, 64, "bfloat16"),
        LayerGroup(layers[0::2], 8, 64, "bfloat16", window=128),
    )
    parts = StoreGeometry.of(groups, 64).parts
    loaded = []
    for group, part in zip(groups, parts, strict=True):
        window = GroupWindow(group.window, 64, 512, 8)
        query = min(cached, prompt - 1)
        demand = window.demand(np.arange(cached // 64), cached // 64, query, prompt + 128, prompt_tokens=prompt)
        plan = plan_device_pages([demand], {}.get, lambda page: False, share=True)
        loaded.append(len(plan.loads) * part.num_bytes)
    whole = cached // 64 * sum(part.num_bytes for part in parts)
    assert loaded[1] == pages * parts[1].num_bytes
    assert 0.5 < sum(loaded) / whole < 0.503


# ---- the store


def dropped(store: HostPageStore, pages: list[int], *places: int) -> None:
    ids = [pages[i] for i in places]
    assert store.drop_group(ids, SLIDING).tolist() == ids
    store.check_integrity()


def test_a_lookup_walks_over_pages_that_lack_a_group():
    """A7, X3: entries stay, and what is a hit depends on where it would end."""
    store = make_store()
    pages = fill(store, seq(1, 24))
    dropped(store, pages, 1, 2)
    assert store.lacking(pages).tolist() == [[False] * 6, [False, True, True, False, False, False]]
    assert store.stats().entries == 6
    assert store.stats().partial_pages == 2
    for tokens, hit in ((28, 6), (24, 6), (20, 5), (19, 1), (16, 1), (12, 1), (8, 1), (4, 1), (3, 0)):
        match = store.peek(seq(1, tokens), NS)
        assert (match.num_pages, match.page_ids.tolist()) == (hit, pages[:hit])
        walk = min(tokens // 4, 6)
        assert (match.miss_reason == MissReason.WINDOW) == (hit < walk)
        (estimate,) = store.estimate([PrefixRequest("x", seq(1, tokens), tokens, NS)])
        assert estimate.hit_pages == hit


def test_admission_attaches_and_counts_what_is_usable():
    """A8, A14: references on exactly the pages of the hit; recency and counters of the hit, not of the walk."""
    store = make_store()
    pages = fill(store, seq(1, 24))
    dropped(store, pages, 1, 2)
    before = store.stats()
    (got,) = store.allocate_pages_for_sequences_with_prefix([PrefixRequest(0, seq(1, 16), 16, NS)])
    assert got.shared_pages.tolist() == pages[:1]
    assert got.miss_reason == MissReason.WINDOW
    assert len(got.private_pages) == 3
    assert store.stats().matched_tokens - before.matched_tokens == 4
    assert store.accounts.refs[pages].tolist() == [1, 0, 0, 0, 0, 0]
    store.check_integrity()
    with store.acquire(seq(1, 19), NS) as lease:
        assert lease.page_ids.tolist() == pages[:1]
    store.release(0)
    store.check_integrity()


def test_a_match_cut_short_stays_short_when_runs_have_moved():
    """The index is told of a shortened match, also after another commit has split its runs."""
    store = make_store()
    pages = fill(store, seq(1, 24))
    dropped(store, pages, 1, 2)
    match = store.peek(seq(1, 16), NS)
    fill(store, np.concatenate([seq(1, 20), seq(50, 53)]))
    before = store.stats().matched_tokens
    assert store.index is not None
    store.index.touch(match, seq(1, 16), NS)
    assert store.stats().matched_tokens - before == 4
    store.check_integrity()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_order_of_operations_hits_by_the_definition(data: Any):
    """X3, A7, A8: prompts that share beginnings come and go while pages give up bytes; rows keep theirs."""
    store = make_store(30, integrity=True)
    heads = [seq(1, 16), np.concatenate([seq(1, 8), seq(40, 47)])]
    live: list[int] = []

    def draw_prompt() -> np.ndarray:
        head = data.draw(st.sampled_from(heads))[: data.draw(st.integers(1, 16))]
        return np.concatenate([head, seq(60, 60 + data.draw(st.integers(0, 12)))])

    for step in range(data.draw(st.integers(1, 10))):
        op = data.draw(st.sampled_from(["fill", "fill", "drop", "admit", "release", "evict", "trim"]))
        if op == "fill":
            fill(store, draw_prompt())
        elif op == "drop":
            entries = np.flatnonzero(store.accounts.pins)
            some = data.draw(st.sets(st.sampled_from(entries.tolist()))) if len(entries) else set()
            store.drop_group(sorted(some), SLIDING)
        elif op == "admit" and len(live) < 2:
            tokens = draw_prompt()
            expected = store.peek(tokens, NS).page_ids.tolist()
            (got,) = store.allocate_pages_for_sequences_with_prefix([PrefixRequest(step, tokens, len(tokens), NS)])
            assert got.shared_pages.tolist() == expected
            live.append(step)
        elif op == "release" and live:
            store.release(live.pop())
        elif op == "evict":
            store.evict_entries(data.draw(st.integers(1, 4)))
        elif op == "trim":
            store.trim_windows(data.draw(st.none() | st.integers(1, 3)))
        store.check_integrity()
        tokens = draw_prompt()
        assert store.index is not None
        walk = store.index.peek(tokens, NS).page_ids
        hit = naive_usable(store.lacking(walk), [None, 8], len(tokens), PAGE)
        assert store.peek(tokens, NS).page_ids.tolist() == walk[:hit].tolist()
        assert store.explain(tokens, NS).hit_pages == hit
        for page in walk.tolist():
            store.read(page)


def test_explain_names_the_group_and_the_hole():
    """X5."""
    cache = make_cache()
    store = cache.store
    pages = fill(store, seq(1, 24))
    dropped(store, pages, 1, 2)
    told = cache.explain(seq(1, 16))
    assert (told.hit_pages, told.hit_tokens, told.full_pages, told.reason) == (1, 4, 4, MissReason.WINDOW)
    assert told.detail == (
        "4 pages are cached, but layer group 1 (window 8) lacks the bytes of 2: a hit can end after page 1"
    )
    assert cache.explain(seq(1, 24)).reason == ""
    assert cache.lookup(seq(1, 16)).num_pages == 1
    held = cache.hold(seq(1, 16))
    assert (len(held), held.reason) == (4, MissReason.WINDOW)


def test_only_idle_pages_of_sliding_groups_give_up_bytes():
    store = make_store()
    pages = fill(store, seq(1, 24))
    for group in (0, 2, -1):
        with pytest.raises(InvalidRequestError, match="no sliding window"):
            store.drop_group(pages, group)
    with pytest.raises(InvalidRequestError, match="no sliding window"):
        make_store(bound=False).drop_group([0], 0)
    with store.acquire(seq(1, 12), NS):
        assert store.drop_group(pages, SLIDING).tolist() == pages[3:]  # the others are held
    assert store.drop_group(pages[3:], SLIDING).tolist() == []  # nothing left to give up
    assert store.stats().dropped_parts == 3
    free = int(store.accounts.free_ids()[-1])
    assert store.drop_group([free], SLIDING).tolist() == []
    store.check_integrity()


def test_a_page_computed_again_gives_the_entry_its_bytes_back():
    """A row that publishes tokens whose entry lacks bytes fills it; nothing else of the entry changes."""
    store = make_store(integrity=True)
    pages = fill(store, seq(1, 24))
    dropped(store, pages, 1, 2)
    full = [store.payloads[page][0] for page in pages]
    assert fill(store, seq(1, 16))[0] == pages[0]  # hit 1 page, computed 3
    assert store.stats().partial_pages == 0
    assert store.stats().filled_parts == 2
    assert all(store.payloads[page][0] is part for page, part in zip(pages, full, strict=True))
    assert store.peek(seq(1, 16), NS).page_ids.tolist() == pages[:4]
    for page in pages:
        store.read(page)
    store.check_integrity()


def test_a_freed_page_lacks_nothing_any_more():
    store = make_store(poison=lambda parts: tuple(None if p is None else np.full_like(p, np.nan) for p in parts))
    pages = fill(store, seq(1, 24))
    dropped(store, pages, *range(6))
    store.evict_entries(6)
    assert store.stats().partial_pages == 0
    assert not store.lacks.any()
    store.check_integrity()
    assert len(fill(store, seq(1, 24))) == 6
    store.check_integrity()


def test_checksums_cover_which_groups_a_page_has():
    """N6: absent is a state of its own; bytes that vanish, or come from nowhere, are reported."""
    store = make_store(integrity=True)
    pages = fill(store, seq(1, 8))
    dropped(store, pages, 0)
    assert store.read(pages[0])[SLIDING] is None
    whole = store.payloads[pages[1]]
    store.payloads[pages[1]] = (whole[0], None)
    with pytest.raises(IntegrityError, match=rf"page {pages[1]}, group 1: its bytes are gone"):
        store.read(pages[1])
    with pytest.raises(IntegrityError, match="lacks other layer groups"):
        store.check_integrity()
    store.payloads[pages[1]] = whole
    kept = store.payloads[pages[0]]
    store.payloads[pages[0]] = (kept[0], np.zeros_like(whole[1]))
    with pytest.raises(IntegrityError, match="come from nowhere"):
        store.read(pages[0])
    store.payloads[pages[0]] = kept
    store.check_integrity()


def test_integrity_check_sees_a_full_group_that_is_absent():
    store = make_store()
    page = fill(store, seq(1, 4))[0]
    store._put(page, (None, store.payloads[page][1]))
    with pytest.raises(IntegrityError, match="must not lack bytes of layer group 0"):
        store.check_integrity()


def test_trimming_keeps_what_hits_need_where_prompts_end_and_part():
    """Two prompts part after 3 pages and end after 8 and 5; window 8 is two pages, of a full hit too."""
    store = make_store()
    long = fill(store, seq(1, 32))
    fill(store, np.concatenate([seq(1, 12), seq(101, 108)]))
    hits = {n: store.peek(seq(1, n), NS).num_pages for n in range(1, 36)}
    cache = make_cache(store)
    assert cache.trim_windows() == 4
    assert np.flatnonzero(store.lacking(long)[SLIDING]).tolist() == [0, 3, 4, 5]
    for tokens, before in hits.items():
        assert store.peek(seq(1, tokens), NS).num_pages == max((h for h in (0, 3, 8) if h <= before), default=0)
    assert store.peek(np.concatenate([seq(1, 12), seq(101, 108)]), NS).num_pages == 5
    assert store.trim_windows() == 0
    store.check_integrity()
    with pytest.raises(InvalidRequestError, match="at least 1 page"):
        store.trim_windows(0)


def test_trimming_can_keep_every_nth_boundary():
    store = make_store()
    pages = fill(store, seq(1, 40))
    with store.acquire(seq(1, 8), NS):
        assert store.trim_windows(5) == 3 + 3 - 2  # the first two are held, and there a hit has ended now
    assert np.flatnonzero(store.lacking(pages)[SLIDING]).tolist() == [2, 5, 6, 7]
    assert [store.peek(seq(1, 4 * n + 1), NS).num_pages for n in range(1, 11)] == [1, 2, 2, 2, 5, 5, 5, 5, 5, 10]
    store.check_integrity()


# ---- out of the store and back


def test_exports_say_what_is_absent():
    """B8: None and nothing else; a silent zero page there is not."""
    store = make_store()
    pages = fill(store, seq(1, 24))
    dropped(store, pages, 1)
    exported = store.export(pages)
    assert [page[SLIDING] is None for page in exported.payloads] == [False, True, False, False, False, False]
    other = make_store()
    (got,) = other.allocate_pages_for_sequences_with_prefix([PrefixRequest("row", seq(1, 24), 24, NS)])
    other.import_pages(got.private_pages, exported)
    assert other.lacking(got.private_pages)[SLIDING].tolist() == [False, True, False, False, False, False]
    other.publish("row", 24, NS)
    other.release("row")
    assert other.peek(seq(1, 12), NS).num_pages == 1
    assert other.peek(seq(1, 24), NS).num_pages == 6
    other.check_integrity()
    whole = payload(1)
    for bad in ((None, whole[1]), (whole[0],), (whole[0], False)):
        with pytest.raises(TransferError):
            other._check_export(PageExport(geometry(), (bad,), (PAGE,)))


def test_a_row_is_restored_only_with_the_bytes_that_its_window_reaches():
    """B8, B18: 22 tokens with a window of 8 read the keys from 15 on, so page 3 and what follows."""
    store = make_store()
    (got,) = store.allocate_pages_for_sequences_with_prefix([PrefixRequest("row", seq(1, 22), 28, NS)])
    store.begin_copy(got.private_pages[:6])
    parts = [payload(i) for i in range(6)]
    for absent, works in ((2, True), (3, False)):
        some = [(part[0], None) if i <= absent else part for i, part in enumerate(parts)]
        if store.accounts.copies.any():
            store.finish_copy(got.private_pages[:6], some, [4, 4, 4, 4, 4, 2])
        else:
            store.import_pages(got.private_pages[:6], PageExport(geometry(), tuple(some), (4, 4, 4, 4, 4, 2)))
        store.check_integrity()
        if works:
            saved = store.checkpoint("row")
            other = make_store()
            assert other.restore(saved, "back").context_length == 22
            assert other.lacking(other.pages("back")[:6])[SLIDING].tolist() == [True] * 3 + [False] * 3
            other.check_integrity()
        else:
            with pytest.raises(TransferError, match=r"reads page 3 of layer group 1 \(window 8\)"):
                store.checkpoint("row")


def test_a_checkpoint_that_lacks_what_its_window_reads_is_not_restored():
    """B8, B18: it may come from elsewhere; nothing is taken for it."""
    store = make_store()
    (got,) = store.allocate_pages_for_sequences_with_prefix([PrefixRequest("row", seq(1, 22), 28, NS)])
    store.begin_copy(got.private_pages[:6])
    store.finish_copy(got.private_pages[:6], [payload(i) for i in range(6)], [4, 4, 4, 4, 4, 2])
    saved = store.checkpoint("row")
    pages = saved.pages
    for absent, works in ((2, True), (3, False), (5, False)):
        parts = tuple((part[0], None) if i == absent else part for i, part in enumerate(pages.payloads))
        torn = replace(saved, pages=PageExport(pages.geometry, parts, pages.slots))
        other = make_store()
        before = other.snapshot_counters()
        if works:
            assert other.restore(torn, "back").context_length == 22
            continue
        with pytest.raises(TransferError, match=rf"reads page {absent} of layer group 1 \(window 8\)"):
            other.restore(torn, "back")
        assert other.snapshot_counters() == before


def test_inserted_prefixes_may_lack_parts_and_may_fill_them():
    store = make_store()
    parts = [payload(i) for i in range(6)]
    partial = [(part[0], None) if i in (1, 2) else part for i, part in enumerate(parts)]
    assert store.insert([StoredPrefix(NS, seq(1, 24), partial)]) == 6
    assert store.peek(seq(1, 16), NS).num_pages == 1
    store.check_integrity()
    assert store.insert([StoredPrefix(NS, seq(1, 24), parts)]) == 0
    assert store.peek(seq(1, 16), NS).num_pages == 4
    assert store.stats().filled_parts == 2
    store.check_integrity()


@pytest.mark.parametrize("first_whole", [True, False])
def test_prefixes_that_are_inserted_together_never_rewrite_each_others_pages(first_whole: bool):
    """B15, N6: of a shared beginning the bytes that come first stay; a later prefix only adds what they lack."""
    store = make_store(integrity=True)
    parts, others = [payload(i) for i in range(4)], [payload(10 + i) for i in range(4)]
    partial = [(part[0], None) for part in parts]
    first, second = (parts, [(part[0], None) for part in others]) if first_whole else (partial, others)
    branches = [StoredPrefix(NS, seq(1, 16), first), StoredPrefix(NS, np.append(seq(1, 12), seq(50, 53)), second)]
    assert store.insert(branches) == 5
    store.check_integrity()
    shared = store.export(store.peek(np.append(seq(1, 12), 99), NS).page_ids)
    assert len(shared) == 3
    for i, page in enumerate(shared.payloads):
        assert np.array_equal(page[0], parts[i][0])
        assert np.array_equal(page[SLIDING], (parts if first_whole else others)[i][SLIDING])
    assert store.stats().filled_parts == (0 if first_whole else 3)


def test_truncating_a_row_keeps_what_it_lacks():
    """A copied tail page lacks what its source lacks (copy on write)."""
    store = make_store()
    pages = fill(store, seq(1, 24))
    dropped(store, pages, 0)
    (got,) = store.allocate_pages_for_sequences_with_prefix([PrefixRequest("row", seq(1, 24), 24, NS)])
    assert got.shared_pages.tolist() == pages
    store.truncate("row", 2)
    own = store.pages("row")
    assert own[0] != pages[0]
    assert store.lacking(own)[SLIDING].tolist() == [True]
    store.check_integrity()


def test_stores_of_one_geometry_agree_on_windows():
    store = make_store()
    assert store.windows == (None, 8)
    store.bind(geometry())
    assert store.lacks.shape == (len(GROUPS), store.num_pages)
