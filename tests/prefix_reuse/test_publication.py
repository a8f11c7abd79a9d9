"""Publication walks new pages only, whatever happened to the index in between (B22, B3)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engine_helpers import GREEDY, check, drained, engine, index_of, prompt
from hypothesis import given, settings
from hypothesis import strategies as st
from store_helpers import MODEL, PAGE, fill, make_store, payload, seq

from prefix_reuse import SamplingParams
from prefix_reuse import index_commit as index_module
from prefix_reuse.host_store import HostPageStore, PrefixRequest
from prefix_reuse.index import PrefixIndex
from prefix_reuse.index_resume import Cursor

NS = MODEL.digest


@pytest.fixture
def walked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pages that each walk was asked to compare."""
    pages: list[int] = []
    real = index_module.walk

    def counted(root: Any, tokens: Any, full_pages: int, step: int) -> Any:
        pages.append(full_pages)
        return real(root, tokens, full_pages, step)

    monkeypatch.setattr(index_module, "walk", counted)
    return pages


def admit(store: HostPageStore, name: Any, tokens: np.ndarray) -> np.ndarray:
    (got,) = store.allocate_pages_for_sequences_with_prefix([PrefixRequest(name, tokens, len(tokens), NS)])
    store.begin_copy(got.private_pages)
    store.finish_copy(got.private_pages, [payload(int(p)) for p in got.private_pages])
    return got.logical_pages


def test_a_prompt_published_in_pieces_is_walked_once(walked: list[int]):
    """B22: 64 pages in 16 boundaries: 64 pages compared, not 4 + 8 + ... + 64 = 544."""
    store = make_store(80)
    pages = admit(store, "row", seq(1, 256))
    walked.clear()
    for end in range(16, 257, 16):
        assert store.publish("row", seq(1, end), NS).tolist() == pages[: end // PAGE].tolist()
        store.check_integrity()
    assert sum(walked) == 64
    assert store.num_published("row") == 64
    walked.clear()
    store.publish("row", seq(1, 256), NS)
    assert sum(walked) == 0


def test_a_second_publisher_follows_its_own_end(walked: list[int]):
    """H14: duplicates stay private; their tokens are not compared again either."""
    store = make_store(80)
    fill(store, seq(1, 64))
    store.clear()
    a, b = admit(store, "a", seq(1, 128)), admit(store, "b", np.append(seq(1, 64), seq(500, 563)))
    store.publish("a", seq(1, 128), NS)
    walked.clear()
    for end in range(32, 129, 32):
        store.publish("b", np.append(seq(1, 64), seq(500, 563))[:end], NS)
        store.check_integrity()
    assert sum(walked) <= 32 + 16  # the run of a is split once, where b leaves it
    assert store.is_indexed(b).tolist() == [False] * 16 + [True] * 16
    assert store.is_indexed(a).all()


def test_an_engine_publishes_each_page_at_one_boundary(walked: list[int]):
    """B22: chunked prefill, then decode with and without publication of generated pages."""
    for generated in (False, True):
        e = engine(publish_generated=generated, max_context=128)
        tokens = prompt(64, seed=1)
        publishes: list[int] = []
        real = e.store.publish

        def publish(name: Any, committed: Any, namespace: bytes, real: Any = real, log: list[int] = publishes) -> Any:
            walked.clear()
            done = real(name, committed, namespace)
            log.append(sum(walked))
            return done

        e.store.publish = publish  # type: ignore[method-assign]
        e.generate(tokens, SamplingParams(max_tokens=33, ignore_eos=True))
        assert len(index_of(e)) == 16 + 8 * generated
        assert sum(publishes) == len(index_of(e))
        assert len(publishes) <= 2 + 8 * generated
        drained(e)


def test_a_cleared_index_is_published_anew():
    """B25: the row still holds its pages; the cursor is void and the walk begins at the root."""
    store = make_store()
    pages = admit(store, "row", seq(1, 24))
    store.publish("row", seq(1, 16), NS)
    store.clear()
    assert store.publish("row", seq(1, 24), NS).tolist() == pages.tolist()
    store.drop_entry(int(pages[2]))
    assert store.publish("row", seq(1, 24), NS).tolist() == pages[:2].tolist()
    store.check_integrity()


def test_a_prompt_that_changed_is_not_taken_for_the_old_one():
    """B3: a cursor is a hint, tokens decide."""
    index = PrefixIndex(2)
    first = index.commit([1, 2, 3, 4], np.array([0, 1]), b"n")
    index.commit([1, 2, 9, 9, 5, 6], np.array([0, 2, 3]), b"n", after=Cursor(first.run, 2, 0))
    assert index.peek([1, 2, 9, 9, 5, 6], b"n").page_ids.tolist() == [0, 2, 3]
    assert index.peek([1, 2, 3, 4, 5, 6], b"n").page_ids.tolist() == [0, 1]
    index.check_integrity()


@pytest.mark.parametrize("split", [None, 1, 3])
def test_a_run_that_was_shortened_and_lengthened_by_another_prompt_is_compared_again(split: int | None):
    """B3: the last page may be the same again although the one before it is not."""
    index = PrefixIndex(2)
    mine, other = [1, 1, 2, 2, 3, 3, 4, 4], [1, 1, 2, 2, 9, 9, 4, 4]
    first = index.commit(mine, np.array([0, 1, 2, 3]), b"n")
    cursor = Cursor(first.run, 4, first.run.cuts)
    assert index.evict(2).tolist() == [2, 3]
    index.commit(other, np.array([0, 1, 7, 8]), b"n")
    if split is not None:
        index.lookup(other[: 2 * split], b"n")
    index.commit([*mine, 5, 5], np.array([10, 11, 12, 13, 14]), b"n", after=cursor)
    assert index.peek([*other, 5, 5], b"n").page_ids.tolist() == [0, 1, 7, 8]
    assert index.peek([*mine, 5, 5], b"n").page_ids.tolist() == [0, 1, 12, 13, 14]
    index.check_integrity()


PROMPT = st.lists(st.integers(0, 1), min_size=2, max_size=12)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), PROMPT, st.integers(0, 9)), min_size=1, max_size=25))
def test_a_resumed_commit_does_what_a_whole_one_does(steps: list[tuple[int, list[int], int]]):
    """Two indexes, one told the cursors: the same entries, recency and order of eviction after every operation."""
    plain, resumed = PrefixIndex(1), PrefixIndex(1)
    rows: dict[int, tuple[list[int], Any]] = {}
    free = iter(range(10_000))
    for row, tokens, action in steps:
        if action == 8:
            assert plain.evict(2).tolist() == resumed.evict(2).tolist()
        elif action == 9:
            pages = [int(run.page_ids[0]) for run in plain]
            if pages:
                page = pages[len(tokens) % len(pages)]
                assert sorted(plain.remove(page).tolist()) == sorted(resumed.remove(page).tolist())
        else:
            before, cursor = rows.get(row, ([], None))
            grown = [*before, *tokens]
            ids = np.array([next(free) for _ in grown], np.int32)
            one = plain.commit(grown, ids, b"n")
            two = resumed.commit(grown, ids, b"n", after=cursor)
            assert (one.inserted, one.entry_ids.tolist()) == (two.inserted, two.entry_ids.tolist())
            rows[row] = (grown, Cursor(two.run, two.inserted.stop, two.run.cuts))
        plain.check_integrity()
        resumed.check_integrity()
        assert plain.recency() == resumed.recency()
        assert plain.eviction_order() == resumed.eviction_order()


def test_device_pages_are_shared_from_the_first_unshared_column_on(monkeypatch: pytest.MonkeyPatch):
    """A24: at a boundary the account is asked about new columns only."""
    e = engine(publish_generated=True, max_context=128)
    columns: list[int] = []
    account = e.runner.accounts[0]
    real = account.share

    def share(row: int, host_pages: Any, first: int = 0) -> int:
        columns.append(len(host_pages))
        return real(row, host_pages, first)

    monkeypatch.setattr(account, "share", share)
    e.submit(prompt(64, seed=1), SamplingParams(max_tokens=33, ignore_eos=True))
    while e.has_work:
        e.step()
        check(e)
    assert sum(columns) <= 24
    assert e.generate(prompt(64, seed=1), GREEDY)[0].full_hit
    drained(e)
