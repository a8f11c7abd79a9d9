"""The host's account of device pages: A8, A13, A24, A25, A28; H12, H13."""

from __future__ import annotations

import numpy as np
import pytest

from prefix_reuse.device_pool import DevicePool
from prefix_reuse.errors import DevicePagesExhausted, PrefixReuseError
from prefix_reuse.plan import PageDemand, plan_device_pages


def admit(pool: DevicePool, rows: list[int], demands: list[PageDemand]):
    plan = plan_device_pages(demands, pool.resident_page, lambda page: bool(pool.refs[page]), share=True)
    pool.carry_out(plan, rows)
    pool.check_integrity()
    return plan


def two_sharing_rows() -> DevicePool:
    pool = DevicePool(num_pages=16, page_size=4, max_rows=4, max_columns=8)
    admit(pool, [0, 1], [PageDemand(np.array([10, 11]), 2, 2)] * 2)
    return pool


def test_two_rows_that_share_two_pages_have_the_worked_counts():
    """A24: 16 pages of 4 tokens, rows of 16 tokens, host pages {10, 11} shared."""
    pool = two_sharing_rows()
    stats = pool.stats()
    assert (stats.used, stats.shared, stats.shared_refs, stats.reused) == (6, 2, 4, 2)
    table = pool.page_table
    assert (table[0, :2] == table[1, :2]).all()
    assert not set(table[0, 2:4]) & set(table[1, 2:4])
    pool.release(0)
    stats = pool.stats()
    assert (stats.used, stats.shared, stats.shared_refs) == (4, 2, 2)
    pool.release(1)
    stats = pool.stats()
    assert (stats.free, stats.shared) == (16, 0)
    pool.check_integrity()


def test_a_released_mirror_stays_resident_and_is_reclaimed_in_lru_order():
    """A24: reclaimable pages are taken last, least recently used first; the tail of a chain goes before its head."""
    pool = two_sharing_rows()
    pool.release(0)
    pool.release(1)
    head, tail = pool.resident[10], pool.resident[11]
    assert pool.stats().reclaimable == 2
    taken = pool.allocate(15)
    assert tail in taken
    assert head not in taken
    assert pool.resident == {10: head}


def test_pages_a_plan_attaches_are_not_reclaimed_for_its_own_allocations():
    pool = two_sharing_rows()
    pool.release(0)
    pool.release(1)
    head = pool.resident[10]
    admit(pool, [2], [PageDemand(np.array([10, 11]), 2, 6)])
    assert pool.page_table[2, 0] == head
    with pytest.raises(DevicePagesExhausted):
        admit(pool, [0], [PageDemand(np.array([10, 11]), 2, 9)])
    pool.check_integrity()


def test_an_allocation_that_cannot_be_met_changes_nothing():
    """A12."""
    pool = two_sharing_rows()
    before = pool.page_table.tolist(), pool.refs.tolist(), dict(pool.resident), pool.stats()
    with pytest.raises(DevicePagesExhausted):
        admit(pool, [2], [PageDemand(np.array([12]), 1, 10)])
    assert before == (pool.page_table.tolist(), pool.refs.tolist(), pool.resident, pool.stats())


def test_a_page_twice_in_one_row_is_refused():
    """H12: bind [3, 5, 3]."""
    pool = DevicePool(8, 4, 2, 4)
    with pytest.raises(PrefixReuseError, match="distinct"):
        pool.bind(0, [3, 5, 3], shared=0)
    pool.check_integrity()


def test_release_is_idempotent_and_allocation_yields_distinct_ids():
    """H12: refs {3: 2, 5: 1}; -1 never enters the free list."""
    pool = DevicePool(8, 4, 3, 4)
    plan = plan_device_pages(
        [PageDemand(np.array([1]), 1, 1), PageDemand(np.array([1]), 1, 0)], pool.resident_page, bool, True
    )
    pool.carry_out(plan, [0, 1])
    shared = pool.page_table[0, 0]
    assert pool.refs[shared] == 2
    pool.release(0)
    pool.release(0)
    assert pool.refs[shared] == 1
    pool.release(1)
    assert sorted(pool.allocate(8)) == list(range(8))


def test_a_page_in_use_is_forgotten_but_not_handed_out():
    """H13: eviction of the host entry must not free a page under a running row."""
    pool = two_sharing_rows()
    in_use = set(pool.page_table[0, :4].tolist())
    pool.forget([10, 11])
    assert pool.stats().shared == 0
    assert not in_use & set(pool.allocate(pool.num_available))


def test_sharing_replaces_private_copies_by_the_resident_page_and_frees_them():
    """A3: M3 without M2 drops the private copy; H14: the table follows before the page is freed."""
    pool = DevicePool(8, 4, 2, 4)
    admit(pool, [0, 1], [PageDemand(np.array([], int), 0, 3)] * 2)
    assert pool.share(0, [7, 8]) == 0
    old = pool.page_table[1, :2].copy()
    assert pool.share(1, [7, 8]) == 2
    pool.check_integrity()
    assert (pool.page_table[1, :2] == pool.page_table[0, :2]).all()
    assert (pool.refs[old] == 0).all()
    assert pool.share(1, [7, 8]) == 0
    stats = pool.stats()
    assert (stats.shared, stats.shared_refs, stats.free) == (2, 4, 4)


def test_dropping_reclaimable_pages_frees_exactly_the_unused_mirrors():
    pool = two_sharing_rows()
    assert pool.drop_reclaimable() == 0
    pool.release(0)
    pool.release(1)
    assert pool.drop_reclaimable() == 2
    assert pool.resident == {}
    pool.check_integrity()
