"""HostPageStore: counts, transactions, copies and publication, without a device."""

from __future__ import annotations

import numpy as np
import pytest

from prefix_reuse.errors import (
    ConfigError,
    HostPagesExhausted,
    InvalidRequestError,
    RefcountError,
    SharedPageWriteError,
    TransferError,
    UnknownRequestError,
)
from prefix_reuse.host_store import HostPageStore, PrefixRequest
from prefix_reuse.index import PrefixIndex
from prefix_reuse.lease import MissReason

NS = b"ns"


def seq(first: int, last: int) -> np.ndarray:
    return np.arange(first, last + 1, dtype=np.int32)


def make(num_pages: int = 16, page_size: int = 4, **options) -> HostPageStore:
    index = options.pop("index", PrefixIndex(page_size, max_entries=options.pop("max_entries", None)))
    return HostPageStore(num_pages, page_size, index=index, **options)


def admit(store: HostPageStore, name, tokens, capacity: int | None = None, namespace: bytes = NS, **options):
    request = PrefixRequest(name, tokens, len(tokens) if capacity is None else capacity, namespace, **options)
    return store.allocate_pages_for_sequences_with_prefix([request])[0]


def land(store: HostPageStore, name, payload=None) -> None:
    pages = store.row(name).private_pages
    pages = pages[~store.has_payload(pages)]
    store.begin_copy(pages)
    store.finish_copy(pages, None if payload is None else [payload(int(p)) for p in pages])


def complete(store: HostPageStore, name, tokens, namespace: bytes = NS, payload=None) -> list[int]:
    """One whole life: admitted, computed, published, released. Returns the pages that were published."""
    admit(store, name, tokens, namespace=namespace)
    land(store, name, payload)
    published = store.publish(name, tokens, namespace).tolist()
    store.release(name)
    store.check_integrity()
    return published


def test_rows_sharing_published_pages_have_the_worked_counts():
    """A14, A8: N rows, P shared, q private: logical N(P+q), physical P+Nq, saved (N-1)P; N refs and 1 pin."""
    n, p, q = 3, 2, 2
    store = make(32)
    complete(store, "first", seq(0, 7))
    for i in range(n):
        admit(store, i, np.concatenate([seq(0, 7), [100 + i]]), capacity=16)
    stats = store.stats()
    assert stats.logical_pages == n * (p + q)
    assert stats.physical_pages == p + n * q
    assert stats.pages_saved == (n - 1) * p
    assert (stats.shared_pages, stats.private_pages) == (p, n * q)
    assert store.accounts.refs[store.pages(0)[:p]].tolist() == [n] * p
    assert store.accounts.pins[store.pages(0)[:p]].tolist() == [1] * p
    assert (stats.lookup_hits, stats.lookup_misses, stats.index_only_pages) == (n, 1, 0)
    assert stats.free_pages == 32 - p - n * q
    for i in range(n):
        store.release(i)
    after = store.stats()
    assert (after.logical_pages, after.index_only_pages, after.free_pages) == (0, p, 30)
    assert after.ref_increments == after.ref_decrements
    assert "pages saved" in str(after)
    store.check_integrity()


def test_two_and_a_half_pages_share_two():
    """A2, A9, A10, A11: only suffix and runway pages are allocated; the row records what is shared."""
    store = make()
    complete(store, "a", seq(0, 11))
    got = admit(store, "b", [*range(10), 77, 78], capacity=20)
    assert (len(got.shared_pages), got.shared_tokens, got.private_start, got.newly_allocated) == (2, 8, 8, 3)
    assert got.miss_reason == MissReason.DIFFERENT
    assert got.logical_pages.tolist() == [*got.shared_pages, *got.private_pages] == store.pages("b").tolist()
    row = store.row("b")
    assert (row.shared_prefix_tokens, row.private_start, row.context_length, row.capacity_tokens) == (8, 8, 12, 20)
    assert row.shared_pages.tolist() == got.shared_pages.tolist()
    assert row.private_pages.tolist() == got.private_pages.tolist()


def test_estimate_is_right_and_has_no_side_effect():
    """A10: the estimate equals the allocation that follows; counters and recency stay."""
    store = make()
    complete(store, "a", seq(0, 11))
    request = PrefixRequest("b", seq(0, 9), 24, NS)
    before = store.snapshot_counters()
    estimate = store.estimate([request])[0]
    assert store.snapshot_counters() == before
    got = store.allocate_pages_for_sequences_with_prefix([request])[0]
    assert (estimate.hit_pages, estimate.new_pages) == (len(got.shared_pages), got.newly_allocated) == (2, 4)


@pytest.mark.parametrize("n", range(1, 14))
def test_a_prompt_run_three_times_hits_its_full_pages(n):
    """H06, A21: second and third run attach floor(n / page) pages; a full hit may leave no private page."""
    store = make()
    for run in range(3):
        got = admit(store, run, seq(1, n))
        assert len(got.shared_pages) == (n // 4 if run else 0)
        land(store, run)
        store.publish(run, n, NS)
        store.release(run)
        store.check_integrity()


def test_salt_separates_requests_in_flight_and_over_time():
    """H04, X9: equal tokens under another namespace share nothing; the control hits."""
    store = make(32)
    complete(store, 1, seq(1, 17), b"t1")
    assert admit(store, 2, seq(1, 17), namespace=b"t2").shared_tokens == 0
    assert admit(store, 3, seq(1, 17), namespace=b"t1").shared_tokens == 16


def test_an_empty_prompt_is_refused_and_takes_nothing():
    """H07: a good request in the same call is not half admitted."""
    store = make()
    before = store.snapshot_counters()
    with pytest.raises(InvalidRequestError):
        store.allocate_pages_for_sequences_with_prefix([PrefixRequest(1, [1, 2], 4, NS), PrefixRequest(2, [], 4, NS)])
    assert store.snapshot_counters() == before
    admit(store, 1, [1, 2])


def test_release_is_idempotent_and_underflow_raises():
    """A8, A13, H12: a second release is a no-op; a count below zero is an error, never clamped."""
    store = make(8)
    pages = admit(store, 1, seq(1, 8)).private_pages
    assert sorted(store.release(1).tolist()) == sorted(pages.tolist())
    assert store.release(1).tolist() == []
    for lower in (store.accounts.release, store.accounts.unpin, store.accounts.end_copy):
        with pytest.raises(RefcountError):
            lower(pages)
    store.check_integrity()
    taken = [int(p) for i in range(4) for p in admit(store, i, seq(1, 8)).private_pages]
    assert sorted(taken) == list(range(8))
    with pytest.raises(UnknownRequestError):
        store.pages("gone")


@pytest.mark.parametrize("bad", [[3, 5, 3], [-1], [99]])
def test_page_lists_with_repeats_or_foreign_ids_are_refused(bad):
    """H12: a page twice in one list, -1 and ids beyond the pool never reach the counts."""
    store = make(8)
    admit(store, 1, seq(1, 32))
    with pytest.raises(InvalidRequestError):
        store.begin_copy(bad)
    store.check_integrity()


def test_a_shared_page_is_never_written():
    """A13, B15: a write aimed at an indexed, shared or unowned page raises; its bytes stay."""
    store = make()
    published = complete(store, 1, seq(1, 9), payload=lambda p: (np.full(3, p),))
    got = admit(store, 2, seq(1, 9))
    before = [store.read(p)[0].tolist() for p in published]
    for page in published:
        with pytest.raises(SharedPageWriteError):
            store.begin_copy([page, *got.private_pages.tolist()])
    with pytest.raises(SharedPageWriteError):
        store.begin_copy([15])
    assert store.accounts.copies.sum() == 0
    for i in range(20):
        admit(store, ("hit", i), seq(1, 8))
        store.release(("hit", i))
    assert [store.read(p)[0].tolist() for p in published] == before


def test_only_complete_pages_of_the_committed_range_are_published():
    """B22, A7, H08, H15: full pages only, only after their bytes landed, idempotently."""
    store = make()
    admit(store, 1, seq(1, 14), capacity=20)
    pages = store.pages(1)
    assert store.publish(1, 14, NS).tolist() == []
    store.begin_copy(pages[:3])
    assert store.publish(1, 14, NS).tolist() == []
    store.finish_copy(pages[[0, 2]], None)
    assert store.publish(1, 14, NS).tolist() == pages[:1].tolist()
    store.finish_copy(pages[1:2], None)
    assert store.publish(1, 11, NS).tolist() == pages[:2].tolist()
    before = store.snapshot_counters()
    assert store.publish(1, 11, NS).tolist() == pages[:2].tolist()
    after = store.snapshot_counters()
    assert (after["pins"], after["refs"]) == (before["pins"], before["refs"])
    assert store.publish(1, 14, NS).tolist() == pages[:3].tolist()
    assert store.is_indexed(pages).tolist() == [True, True, True, False, False]
    assert store.publish(1, [*range(1, 15), 90, 91, 92], NS).tolist() == pages[:3].tolist()
    store.check_integrity()


def test_a_partly_filled_page_is_not_published():
    """H08, H25: bytes of an unfinished tail do not count as a page."""
    store = make()
    admit(store, 1, seq(1, 6), capacity=8)
    pages = store.pages(1)
    store.begin_copy(pages)
    store.finish_copy(pages, None, slots=[4, 2])
    assert store.publish(1, [1, 2, 3, 4, 5, 6, 7, 8], NS).tolist() == pages[:1].tolist()
    store.begin_copy(pages[1:])
    store.finish_copy(pages[1:], None)
    assert store.publish(1, [1, 2, 3, 4, 5, 6, 7, 8], NS).tolist() == pages.tolist()


def test_publishing_generated_tokens_needs_their_ids():
    """B22, H10: a number counts prompt tokens only; another namespace than the row's is refused."""
    store = make()
    admit(store, 1, seq(1, 6), capacity=8)
    land(store, 1)
    with pytest.raises(InvalidRequestError):
        store.publish(1, 8, NS)
    with pytest.raises(InvalidRequestError):
        store.publish(1, 6, b"other")


def test_a_page_is_not_freed_while_its_copy_is_in_flight():
    """A8, A13: release, then the copy ends, then the page is free; a failed copy loses only its page."""
    freed = []
    store = make(4, on_free=lambda pages: freed.extend(pages.tolist()))
    pages = admit(store, 1, seq(1, 16)).private_pages
    store.begin_copy(pages[:2])
    store.release(1)
    assert sorted(freed) == sorted(pages[2:].tolist())
    with pytest.raises(HostPagesExhausted):
        admit(store, 2, seq(1, 12))
    store.finish_copy(pages[:1], [("late",)])
    store.fail_copy(pages[1:2])
    assert sorted(freed) == sorted(pages.tolist())
    assert store.payloads.tolist() == [None] * 4
    assert store.stats().copies_failed == 1
    store.check_integrity()


def test_a_failed_copy_is_never_published_and_can_be_repeated():
    """B22, H29: the entry becomes matchable only after its bytes arrived."""
    store = make()
    pages = admit(store, 1, seq(1, 8)).private_pages
    store.begin_copy(pages)
    with pytest.raises(TransferError):
        store.begin_copy(pages[:1])
    with pytest.raises(TransferError):
        store.read(pages[0])
    store.finish_copy(pages[:1], [("a",)])
    store.fail_copy(pages[1:])
    assert store.publish(1, 8, NS).tolist() == pages[:1].tolist()
    store.begin_copy(pages[1:])
    store.finish_copy(pages[1:], [("b",)])
    assert store.publish(1, 8, NS).tolist() == pages.tolist()
    assert store.read(int(pages[1])) == ("b",)


def test_two_cold_rows_with_equal_pages_keep_their_own():
    """H14: the second publisher's duplicates stay private and go with their row."""
    store = make()
    a = admit(store, "a", [*range(1, 9), 50])
    b = admit(store, "b", [*range(1, 9), 60, 61, 62, 63])
    land(store, "a")
    land(store, "b")
    assert store.publish("a", 9, NS).tolist() == a.private_pages[:2].tolist()
    assert store.publish("b", 12, NS).tolist() == b.private_pages[2:].tolist()
    assert store.publish("b", 12, NS).tolist() == b.private_pages[2:].tolist()
    assert store.pages("b").tolist() == b.logical_pages.tolist()
    store.check_integrity()
    assert sorted(store.release("b").tolist()) == sorted(b.private_pages[:2].tolist())
    store.release("a")
    got = admit(store, "c", [*range(1, 9), 60, 61, 62, 63])
    assert got.shared_pages.tolist() == [*a.private_pages[:2], b.private_pages[2]]
    store.check_integrity()


def test_hits_are_held_before_anything_is_evicted():
    """B7, S5, A11: the entry that the batch hits is the coldest, and still survives its eviction."""
    store = make(6)
    hot = complete(store, 1, seq(1, 8))
    complete(store, 2, seq(101, 108))
    got = store.allocate_pages_for_sequences_with_prefix(
        [PrefixRequest(3, seq(201, 212), 12, NS), PrefixRequest(4, [*range(1, 9), 9], 12, NS)]
    )
    assert got[1].shared_pages.tolist() == hot
    assert store.stats().evictions == 2
    store.check_integrity()


def test_reclaimable_pages_count_as_room_and_a_request_that_never_fits_takes_nothing():
    """H16: nine cached pages admit five new ones; ten pages of nine are refused at once."""
    store = make(9)
    for i in range(3):
        complete(store, i, seq(100 * i, 100 * i + 11))
    assert store.num_free == 0
    admit(store, "five", seq(1000, 1019))
    store.release("five")
    before = store.snapshot_counters()
    with pytest.raises(HostPagesExhausted, match="10 new host pages needed"):
        admit(store, "ten", seq(2000, 2039))
    assert store.snapshot_counters() == before
    assert store.stats().rollbacks == 1


def test_a_refused_request_leaves_no_reference():
    """H11: 100 refusals, then everything fits that fitted before."""
    store = make(6)
    complete(store, "a", seq(1, 12))
    held = admit(store, "held", seq(100, 107))
    for _ in range(100):
        with pytest.raises(HostPagesExhausted):
            admit(store, "b", [*range(1, 9), *range(200, 211)], capacity=28)
    store.check_integrity()
    store.release("held")
    assert len(held.private_pages) == 2
    assert admit(store, "c", seq(300, 322)).newly_allocated == 6


def test_a_bad_page_leaves_the_index_with_its_subtree():
    """H31, H09: the next request hits what is before it; the page cannot come back until it is rewritten."""
    store = make()
    published = complete(store, 1, seq(1, 12), payload=lambda p: (np.full(2, p),))
    got = admit(store, 2, seq(1, 13))
    assert store.drop_entry(published[1]).tolist() == published[1:]
    with pytest.raises(TransferError):
        store.read(published[1])
    assert admit(store, 3, seq(1, 13)).shared_tokens == 4
    assert store.publish(2, 12, NS).tolist() == published[:1]
    assert store.stats().dropped_entries == 2
    assert store.stats().free_pages == 16 - 3 - 1 - 3
    store.release(2)
    store.release(3)
    store.check_integrity()
    assert got.shared_tokens == 12


def test_clear_frees_unused_pages_at_once_and_used_ones_with_their_row():
    """B25, B28, H05: one invalidation; what a live row holds survives until the row ends."""
    freed = []
    store = make(on_free=lambda pages: freed.extend(pages.tolist()))
    one, two = complete(store, 1, seq(1, 8)), complete(store, 2, seq(101, 108))
    admit(store, 3, seq(1, 8))
    freed.clear()
    assert sorted(store.clear().tolist()) == sorted(one + two)
    assert sorted(freed) == two
    store.release(3)
    assert sorted(freed) == sorted(one + two)
    assert store.stats().invalidations == 1
    store.check_integrity()


def test_grow_adds_private_pages_or_changes_nothing():
    """A25, S2: growth is private, evicts entries under pressure, and fails whole."""
    store = make(6)
    complete(store, "old", seq(101, 108))
    admit(store, 1, seq(1, 8))
    assert len(store.grow(1, 20)) == 3
    assert store.stats().evictions == 1
    before = store.snapshot_counters()
    with pytest.raises(HostPagesExhausted):
        store.grow(1, 40)
    assert store.snapshot_counters() == before
    assert len(store.grow(1, 8)) == 0
    store.check_integrity()


def test_without_index_nothing_is_shared_or_pinned():
    """A1, B30: off means no lookups, no pins, no reference above 1."""
    store = make(index=None)
    for i in range(2):
        got = admit(store, i, seq(1, 8))
        assert (got.shared_tokens, got.miss_reason) == (0, MissReason.REUSE_OFF)
        land(store, i)
        assert store.publish(i, 8, NS).tolist() == []
    assert store.accounts.refs.max() == 1
    assert store.accounts.pins.max() == 0
    stats = store.stats()
    assert (stats.lookup_hits, stats.lookup_misses, stats.enabled, stats.active) == (0, 0, False, False)
    assert store.evict_entries(3).tolist() == []
    fork = store.fork(0, "fork")
    assert not set(fork.logical_pages.tolist()) & set(store.pages(0).tolist())
    store.check_integrity()


def test_reuse_false_neither_looks_up_nor_publishes():
    """A1, H27: a request may stay outside the cache."""
    store = make()
    complete(store, 1, seq(1, 8))
    assert admit(store, 2, seq(1, 8), reuse=False).shared_tokens == 0
    land(store, 2)
    assert store.publish(2, 8, NS).tolist() == []


FAULTS = ["plan", "lease", "evict", "allocate", "prepared", "row", "commit"]


class Bomb:
    """Raises at the n-th step from now on."""

    def __init__(self) -> None:
        self.left = -1
        self.seen: list[str] = []

    def __call__(self, name: str) -> None:
        self.seen.append(name)
        self.left -= 1
        if self.left == 0:
            raise RuntimeError(f"injected at {name}")


def loaded_store(bomb: Bomb, **options) -> HostPageStore:
    """Ten pages: two prompts cached, one row live, so that the next batch must hit, evict and allocate."""
    store = make(10, fault=bomb, **options)
    complete(store, 1, seq(1, 8), payload=lambda p: (p,))
    complete(store, 2, seq(101, 112), payload=lambda p: (p,))
    admit(store, 3, seq(201, 204))
    return store


def every_step(action, **options) -> set[str]:
    """Run `action(store)` with a fault at each of its steps; everything must be as before. Returns the steps seen."""
    n = 0
    while True:
        n += 1
        bomb = Bomb()
        store = loaded_store(bomb, **options)
        prepared = action(store, None)
        before = store.snapshot_counters()
        bomb.left, bomb.seen = n, []
        try:
            action(store, prepared)
        except RuntimeError:
            after = store.snapshot_counters()
            assert after == before, {k: (before[k], after[k]) for k in before if before[k] != after[k]}
            assert store.stats().rollbacks == 1
            bomb.left = -1
            store.check_integrity()
            action(store, prepared)
            store.check_integrity()
        else:
            return set(bomb.seen)


BATCH = [
    PrefixRequest("hit", [*range(1, 9), 9, 10], 16, NS),
    PrefixRequest("part", [101, 102, 103, 104, 7, 7, 7, 7], 8, NS),
    PrefixRequest("miss", seq(301, 308), 8, NS),
]


def test_a_fault_at_any_step_of_an_allocation_leaves_everything_as_it_was():
    """A12, B7, H11: refs, pins, free list, rows, index entries, recency and order of eviction."""

    def action(store, prepared):
        if prepared is None:
            return True
        return store.allocate_pages_for_sequences_with_prefix(BATCH)

    assert every_step(action) == set(FAULTS)


def test_a_fault_at_any_step_of_prepare_commit_and_abort_leaves_everything_as_it_was():
    """B19, A12: each of the three group calls is all or nothing."""

    def prepare(store, prepared):
        return True if prepared is None else store.prepare_group(BATCH, "owner")

    def commit(store, prepared):
        return store.prepare_group(BATCH, "owner") if prepared is None else store.commit_group(prepared, "owner")

    def abort(store, prepared):
        return store.prepare_group(BATCH, "owner") if prepared is None else store.abort_group(prepared, "owner")

    assert every_step(prepare) == set(FAULTS) - {"row", "commit"}
    assert every_step(commit) == {"row", "commit"}
    assert every_step(abort) == {"abort"}


def test_a_fault_at_any_step_of_growth_publication_fork_and_truncation_leaves_everything_as_it_was():
    """A12, B17, B22: also with max_entries, where publication evicts."""

    def grow(store, prepared):
        return True if prepared is None else store.grow(3, 36)

    def ready(store):
        admit(store, 4, [*range(1, 9), *range(401, 406)], capacity=16)
        land(store, 4, payload=lambda p: (p,))
        return True

    def publish(store, prepared):
        return ready(store) if prepared is None else store.publish(4, 13, NS)

    def fork(store, prepared):
        return ready(store) if prepared is None else store.fork(4, 5)

    def truncate(store, prepared):
        return ready(store) if prepared is None else store.truncate(4, 6)

    assert every_step(grow) == {"evict", "allocate", "grow"}
    assert every_step(publish, max_entries=5) == {"publish", "pin"}
    assert every_step(fork) == {"evict", "allocate", "copy", "fork"}
    assert every_step(truncate) == {"evict", "allocate", "copy", "truncate"}


def test_a_fault_at_any_step_of_an_offload_leaves_everything_as_it_was():
    """A12, A13: begin, end and failure of a copy; a row that ended meanwhile included."""

    def begun(store):
        admit(store, 4, seq(401, 408))
        store.begin_copy(store.pages(4))
        return store.pages(4)

    def begin(store, prepared):
        return admit(store, 4, seq(401, 408)).private_pages if prepared is None else store.begin_copy(prepared)

    def finish(store, prepared):
        return begun(store) if prepared is None else store.finish_copy(prepared, [(1,), (2,)])

    def fail(store, prepared):
        return begun(store) if prepared is None else store.fail_copy(prepared)

    def orphaned(store, prepared):
        if prepared is None:
            pages = begun(store)
            store.release(4)
            return pages
        return store.finish_copy(prepared, [(1,), (2,)])

    assert every_step(begin) == {"begin_copy"}
    assert every_step(finish) == every_step(orphaned) == {"finish_copy"}
    assert every_step(fail) == {"fail_copy"}


def test_a_fork_shares_full_pages_and_copies_the_partial_tail():
    """B15, B17, H25: after a fork neither row can write what both see; each writes its own tail."""
    store = make()
    admit(store, "a", seq(1, 6), capacity=12)
    land(store, "a", payload=lambda p: (np.full(2, p),))
    fork = store.fork("a", "b")
    a, b = store.pages("a"), store.pages("b")
    assert a[0] == b[0]
    assert not set(a[1:].tolist()) & set(b[1:].tolist())
    assert store.read(b[1])[0].tolist() == store.read(a[1])[0].tolist()
    assert store.read(b[1])[0] is not store.read(a[1])[0]
    assert fork.shared_prefix_tokens == 4
    with pytest.raises(SharedPageWriteError):
        store.begin_copy(a[:1])
    store.begin_copy([a[1], b[1]])
    store.finish_copy([a[1], b[1]], None)
    assert store.stats().copies_on_write == 1
    store.release("a")
    store.check_integrity()
    assert store.accounts.refs[b[0]] == 1


def test_truncation_into_a_shared_page_copies_it_first():
    """B17, H26: the shared page keeps its bytes; a border frees the extra pages once."""
    store = make()
    published = complete(store, 1, seq(1, 8), payload=lambda p: (np.full(2, p),))
    admit(store, 2, seq(1, 8), capacity=16)
    store.truncate(2, 6)
    pages = store.pages(2)
    assert pages[0] == published[0]
    assert pages[1] != published[1]
    store.begin_copy(pages[1:])
    store.finish_copy(pages[1:], [(np.zeros(2),)])
    assert store.read(published[1])[0].tolist() == [published[1]] * 2
    assert sorted(store.truncate(2, 4).tolist()) == [pages[1]]
    assert store.row(2).capacity_tokens == 4
    assert store.release(2).tolist() == []
    store.check_integrity()


def test_a_truncated_tail_is_no_whole_page_until_it_is_written_again():
    """H26: no entry ever holds bytes of dropped tokens."""
    store = make()
    admit(store, 1, seq(1, 8))
    land(store, 1)
    store.truncate(1, 6)
    assert store.publish(1, [1, 2, 3, 4, 5, 6, 70, 80], NS).tolist() == store.pages(1)[:1].tolist()


def test_poison_fills_what_is_freed():
    """Poison mode: a freed payload is overwritten and unreadable."""
    store = make(poison=lambda payload: tuple(np.full_like(a, np.nan) for a in payload))
    kept = []
    admit(store, 1, seq(1, 8))
    land(store, 1, payload=lambda p: kept.append(p) or (np.ones(2),))
    store.release(1)
    for page in kept:
        assert np.isnan(store.payloads[page][0]).all()
        with pytest.raises(TransferError):
            store.read(page)
    store.check_integrity()


def test_a_byte_cap_lowers_the_number_of_pages():
    """Sizes: a cap in bytes is known before anything is allocated."""
    store = make(100, max_bytes=1000, page_bytes=64)
    assert (store.num_pages, store.memory_bytes) == (15, 960)
    with pytest.raises(ConfigError):
        make(10, max_bytes=1000)
    with pytest.raises(ConfigError):
        make(10, max_bytes=10, page_bytes=64)


def test_bad_requests_say_what_is_wrong():
    """A12: repeated or live ids and capacities below the prompt are refused before anything is touched."""
    store = make()
    admit(store, 1, seq(1, 4))
    before = store.snapshot_counters()
    for bad in (
        [PrefixRequest(1, [1], 4, NS)],
        [PrefixRequest(2, [1], 4, NS), PrefixRequest(2, [2], 4, NS)],
        [PrefixRequest(2, seq(1, 9), 8, NS)],
    ):
        with pytest.raises(InvalidRequestError):
            store.allocate_pages_for_sequences_with_prefix(bad)
    assert store.snapshot_counters() == before
