"""The host's account of device pages: A8, A13, A24, A25, A28; H12, H13."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from prefix_reuse.device_plan import PageDemand, plan_device_pages
from prefix_reuse.device_pool import DevicePool
from prefix_reuse.errors import DevicePagesExhausted, PrefixReuseError
from prefix_reuse.windows import GroupWindow


def admit(pool: DevicePool, rows: list[int], demands: list[PageDemand]):
    plan = plan_device_pages(demands, pool.resident_page, pool.is_counted, share=True)
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


# ---- sliding windows


def test_a_row_gives_back_what_its_window_has_passed_and_takes_what_comes():
    """X3, A25: page 4, window 8, decode calls of 4 tokens; 40 pages, so that nothing is short."""
    pool, window = DevicePool(40, 4, 2, 16, chunk_pages=4), GroupWindow(8, 4, 16, 4)
    hit = np.arange(100, 110)
    admit(pool, [0], [window.demand(hit, 10, 40, 60, prompt_tokens=43)])
    assert pool.page_table[0, :8].tolist() == [-1] * 8
    assert (pool.pages(0)[8:] >= 0).all()
    assert pool.stats().logical == 2
    assert set(pool.resident) == {108, 109}
    assert pool.slide(0, window.first(40), 11) == 0
    assert pool.stats().logical == 3
    pool.settle(0)
    assert pool.slide(0, window.first(43), 12) == 1  # keys 36.. are read: page 8 has gone
    assert pool.stats().logical == 3
    assert pool.stats().reclaimable == 1
    assert pool.resident_page(108) is not None
    pool.check_integrity()
    assert pool.slide(0, window.first(43), 12) == 0
    pool.release(0)
    assert pool.stats().free == 40
    assert pool.num_available == 40
    pool.check_integrity()


def test_a_row_never_owns_more_than_it_was_promised():
    pool, window = DevicePool(40, 4, 2, 16, chunk_pages=4), GroupWindow(8, 4, 16, 4)
    admit(pool, [0], [window.demand(np.zeros(0, int), 0, 0, 60, prompt_tokens=43)])
    assert pool.num_available == 40 - window.held - 4
    with pytest.raises(DevicePagesExhausted, match="row 0 owns 0 pages and needs 9 more; 4 are its own, 4 more"):
        pool.slide(0, 0, 9)
    pool.slide(0, 0, 8)
    pool.settle(0)
    assert pool.num_available == 40 - window.held


def test_a_page_that_its_owner_goes_on_to_pass_counts_for_those_who_attach_it():
    """Row 1 attaches pages of row 0, which then passes them and takes others: both are in use, and were counted."""
    window = GroupWindow(8, 4, 16, 4)
    pool = DevicePool(16, 4, 2, 16, chunk_pages=0)
    admit(pool, [0], [window.demand(np.zeros(0, int), 0, 0, 64)])
    pool.slide(0, 0, 3)
    pool.share(0, [100, 101, 102])
    assert pool.num_available == 16 - 4
    admit(pool, [1], [window.demand(np.array([100, 101, 102]), 3, 12, 64)])
    assert pool.pages(1).tolist() == [-1, *pool.pages(0)[1:].tolist()]
    assert pool.num_available == 16 - 4 - 2 - 4
    pool.slide(0, 3, 7)
    pool.check_integrity()
    assert pool.stats().physical == 6
    assert pool.stats().reclaimable == 1  # page 0 of the row, which nobody attaches
    pool.release(1)
    assert pool.num_available == 16 - 4
    pool.check_integrity()


def test_rows_that_keep_everything_are_counted_as_they_always_were():
    """Without a window available pages are the free and the reclaimable ones, whoever attaches what."""
    pool = two_sharing_rows()
    assert pool.num_available == pool.stats().free == 10
    pool.release(0)
    assert pool.num_available == pool.stats().free == 12
    pool.release(1)
    assert pool.num_available == pool.stats().free == 16


class Life:
    """A sequence as the pool sees it: family of equal prompts, lengths, and how far it is."""

    def __init__(self, family: int, prompt: int, answer: int, samples: int):
        self.family, self.prompt, self.capacity, self.samples = family, prompt, prompt + answer, samples
        self.context, self.followers, self.held = 0, [], False


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_admitted_rows_are_never_short_of_a_page(data):
    """X3: whatever is admitted, shared, forked, held and resumed, no row waits half way, and every row gets its turn."""
    size = data.draw(st.sampled_from([2, 4]))
    chunk_tokens, steps = size * data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    window = GroupWindow(data.draw(st.integers(1, 14)), size, chunk_tokens, steps)
    longest, num_rows = 30, 3
    columns = -(-longest // size)
    pages = data.draw(st.integers(window.fewest_pages(columns), window.pool_pages(3 * columns, num_rows)))
    pool = DevicePool(pages, size, num_rows, columns, chunk_pages=window.chunk_pages)
    share = data.draw(st.booleans())
    published = {0: 0, 1: 0}
    line = []
    for _ in range(data.draw(st.integers(1, 6))):
        prompt = data.draw(st.integers(1, 20))
        life = Life(data.draw(st.integers(0, 1)), prompt, data.draw(st.integers(1, 10)), data.draw(st.integers(1, 3)))
        most = window.most_samples(prompt, life.capacity, pages, num_rows)
        life.followers = [
            Life(life.family, prompt, life.capacity - prompt, 1) for _ in range(min(life.samples, most) - 1)
        ]
        line.append(life)
    rows: dict[int, Life] = {}
    following: set[Life] = set()

    def demands(life: Life) -> list[PageDemand]:
        if life.held:
            used = -(-life.context // size)
            shared = min(used, published[life.family], life.prompt // size)
            return [window.demand(life.family * 100 + np.arange(used), shared, life.context, life.capacity)]
        hit = min(published[life.family], life.prompt // size)
        host = life.family * 100 + np.arange(hit)
        query = min(hit * size, life.prompt - 1)
        own = window.demand(
            host, hit, query, life.capacity, prompt_tokens=life.prompt, has_followers=bool(life.followers)
        )
        return [own, *[window.follower_demand(life.prompt, life.capacity)] * len(life.followers)]

    for _ in range(400):
        for row, life in rows.items():
            if life not in following:
                pool.slide(row, window.first(life.context - (life.context == life.prompt)))
        pool.check_integrity()
        while line:
            wanted = demands(line[0])
            free = pool.free_rows
            plan = plan_device_pages(wanted, pool.resident_page, pool.is_counted, share)
            if len(wanted) > len(free) or not pool.fits(plan):
                break
            life = line.pop(0)
            pool.carry_out(plan, free[: len(wanted)])
            for row, one in zip(free, [life, *life.followers], strict=False):
                rows[row] = one
            following.update(life.followers)
            if not life.held:
                life.context = min(published[life.family], life.prompt // size) * size
            life.held = False
            pool.check_integrity()
        left = chunk_tokens
        for row, life in list(rows.items()):
            if life in following:
                continue
            if life.context < life.prompt and left:
                end = min(life.prompt, life.context + left)
                end -= end % size if end < life.prompt else 0
                if end <= life.context:
                    continue
                left -= end - life.context
                pool.slide(row, window.first(life.context), -(-end // size))
                pool.check_integrity()
                life.context = end
            if life.context >= life.prompt and life.followers:
                for other in life.followers:
                    target = next(r for r, one in rows.items() if one is other)
                    full = life.prompt // size
                    pool.fork(row, target, full, min(window.first(life.prompt), full))
                    pool.check_integrity()
                    other.context = life.prompt
                    following.discard(other)
                life.followers = []
        for row, life in list(rows.items()):
            if life in following or life.context < life.prompt:
                continue
            if data.draw(st.integers(0, 3)) and share:
                full = life.prompt // size
                published[life.family] = max(published[life.family], full)
                pool.share(row, life.family * 100 + np.arange(full))
                pool.check_integrity()
            grown = min(steps, life.capacity - life.context)
            pool.slide(row, window.first(life.context), -(-(life.context + grown) // size))
            pool.settle(row)
            pool.check_integrity()
            life.context += grown
            if life.context >= life.capacity:
                pool.release(row)
                del rows[row]
            elif not data.draw(st.integers(0, 5)):
                pool.release(row)
                del rows[row]
                life.held = True
                line.append(life)
            pool.check_integrity()
        if not line and not rows:
            break
    assert not line
    assert not rows
    assert pool.num_available == pool.num_pages
