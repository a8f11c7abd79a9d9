"""Leases and groups: every reference has one owner and ends exactly once."""

from __future__ import annotations

import numpy as np
import pytest

from prefix_reuse.errors import HostPagesExhausted, InvalidRequestError, LeaseError
from prefix_reuse.host_store import HostPageStore, PrefixRequest
from prefix_reuse.index import PrefixIndex
from prefix_reuse.lease import LeaseState, PrefixLeaseProvider

NS = b"ns"


def seq(first: int, last: int) -> np.ndarray:
    return np.arange(first, last + 1, dtype=np.int32)


@pytest.fixture
def store() -> HostPageStore:
    """Eight pages of four tokens; two pages of [1..8] are cached."""
    store = HostPageStore(8, 4, index=PrefixIndex(4))
    store.allocate_pages_for_sequences_with_prefix([PrefixRequest("first", seq(1, 8), 8, NS)])
    store.begin_copy(store.pages("first"))
    store.finish_copy(store.pages("first"), None)
    store.publish("first", 8, NS)
    store.release("first")
    return store


def test_a_lease_hands_its_references_to_the_sequence_without_another_retain(store):
    """B2, A8: open, prepared, committed; one reference a page all the way, open leases end at 0."""
    provider: PrefixLeaseProvider = store
    lease = provider.acquire(seq(1, 9), NS)
    assert (lease.state, lease.num_pages, store.open_leases) == (LeaseState.OPEN, 2, 1)
    increments = store.stats().ref_increments
    assert store.accounts.refs[lease.page_ids].tolist() == [1, 1]
    store.check_integrity()
    got = store.allocate_pages_for_sequences_with_prefix([PrefixRequest(1, seq(1, 9), 12, NS, lease=lease)])[0]
    assert got.shared_pages.tolist() == lease.page_ids.tolist()
    assert store.accounts.refs[lease.page_ids].tolist() == [1, 1]
    assert store.stats().ref_increments == increments + got.newly_allocated
    assert (lease.state, store.open_leases) == (LeaseState.COMMITTED, 0)
    store.check_integrity()
    store.release(1)
    assert store.accounts.refs.sum() == 0


def test_every_second_terminal_call_and_every_wrong_owner_raises(store):
    """B2: exactly once, by the owner; a refused call changes nothing."""
    lease = store.acquire(seq(1, 8), NS)
    with pytest.raises(LeaseError):
        lease.commit("a")
    with pytest.raises(LeaseError):
        lease.prepare(None)
    lease.prepare("a")
    for call in (lambda: lease.prepare("a"), lambda: lease.commit("b"), lambda: lease.abort("b"), lease.abort):
        with pytest.raises(LeaseError):
            call()
    assert lease.is_live
    lease.abort("a")
    assert (store.open_leases, store.accounts.refs.sum()) == (0, 0)
    for call in (lambda: lease.abort("a"), lambda: lease.commit("a"), lambda: lease.prepare("a")):
        with pytest.raises(LeaseError):
            call()
    with pytest.raises(LeaseError):
        store.allocate_pages_for_sequences_with_prefix([PrefixRequest(1, seq(1, 8), 8, NS, lease=lease)])
    store.check_integrity()


def test_a_lease_protects_its_pages_from_eviction(store):
    """B6, H23: what a waiting request has matched is still there when it is admitted."""
    with store.acquire(seq(1, 8), NS) as lease:
        assert store.evict_entries(8).tolist() == []
        with pytest.raises(HostPagesExhausted):
            store.allocate_pages_for_sequences_with_prefix([PrefixRequest(1, seq(100, 127), 28, NS)])
        assert store.acquire(seq(1, 8), NS).num_pages == lease.num_pages == 2
    assert store.open_leases == 1
    store.check_integrity()


def test_a_lease_outlives_the_entries_that_it_matched(store):
    """B25, A8: after an invalidation the pages belong to the lease alone and are freed with it."""
    lease = store.acquire(seq(1, 8), NS)
    store.clear()
    assert store.num_free == 6
    lease.abort()
    assert store.num_free == 8
    store.check_integrity()


def test_a_failed_admission_leaves_the_lease_open(store):
    """H11, B19: the caller may wait and try again with the same hold."""
    lease = store.acquire(seq(1, 8), NS)
    with pytest.raises(HostPagesExhausted):
        store.allocate_pages_for_sequences_with_prefix([PrefixRequest(1, seq(1, 8), 80, NS, lease=lease)])
    assert (lease.state, lease.owner, store.open_leases) == (LeaseState.OPEN, None, 1)
    store.check_integrity()
    store.allocate_pages_for_sequences_with_prefix([PrefixRequest(1, seq(1, 8), 8, NS, lease=lease)])


def group_requests(n: int, capacity: int = 12) -> list[PrefixRequest]:
    return [PrefixRequest(i, seq(1, 9), capacity, NS) for i in range(n)]


def test_a_warm_group_of_three_has_three_references_and_one_pin(store):
    """B20: the same leading pages in all rows."""
    group = store.prepare_group(group_requests(3), "request 7")
    assert (store.open_leases, store.rows(), store.stats().reserved_pages) == (3, (), 5)
    store.check_integrity()
    got = store.commit_group(group, "request 7")
    shared = got[0].shared_pages
    assert all(g.shared_pages.tolist() == shared.tolist() for g in got)
    assert store.accounts.refs[shared].tolist() == [3, 3]
    assert store.accounts.pins[shared].tolist() == [1, 1]
    assert len({int(p) for g in got for p in g.private_pages}) == 3
    assert store.open_leases == 0
    store.check_integrity()


def test_a_group_that_does_not_fit_takes_nothing(store):
    """B19: free count, refs, rows and open leases as before."""
    before = store.snapshot_counters()
    with pytest.raises(HostPagesExhausted):
        store.prepare_group(group_requests(3, capacity=24), "owner")
    assert store.snapshot_counters() == before


def test_an_aborted_group_returns_everything_it_owns_and_ends_once(store):
    """B19, B28, B2: abort, then every further call raises."""
    before = store.accounts.refs.tolist(), store.num_free
    group = store.prepare_group(group_requests(3), "owner")
    for call in (store.commit_group, store.abort_group):
        with pytest.raises(LeaseError):
            call(group, "thief")
    store.abort_group(group, "owner")
    assert (store.accounts.refs.tolist(), store.num_free) == before
    assert (store.open_leases, store.rows()) == (0, ())
    for call in (store.commit_group, store.abort_group):
        with pytest.raises(LeaseError):
            call(group, "owner")
    with pytest.raises(LeaseError):
        store.prepare_group(group_requests(1), None)
    store.check_integrity()


def test_a_group_whose_id_went_live_meanwhile_stays_prepared(store):
    """B19: commit is all or nothing."""
    group = store.prepare_group(group_requests(2), "owner")
    store.allocate_pages_for_sequences_with_prefix([PrefixRequest(1, [5], 4, NS)])
    before = store.snapshot_counters()
    with pytest.raises(InvalidRequestError):
        store.commit_group(group, "owner")
    assert store.snapshot_counters() == before
    store.release(1)
    store.commit_group(group, "owner")
    store.check_integrity()
