"""PrefixIndex: exactness, order of eviction, and what it says about a miss."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from prefix_reuse.errors import InvalidRequestError
from prefix_reuse.eviction import LFU, LRU, PriorityTTL
from prefix_reuse.index import PrefixIndex
from prefix_reuse.lease import MissReason

NS, OTHER = b"ns", b"other"


def seq(first: int, last: int) -> np.ndarray:
    return np.arange(first, last + 1, dtype=np.int32)


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, np.int32)


def hit(index: PrefixIndex, tokens, namespace: bytes = NS) -> list[int]:
    return index.lookup(tokens, namespace).page_ids.tolist()


@pytest.mark.parametrize("digest", [None, lambda message: b"\0" * 16])
def test_with_every_digest_equal_each_prompt_gets_its_own_pages(digest):
    """H01, B3: a digest never decides a match; tokens, parent and namespace do."""
    index = PrefixIndex(4, digest=digest)
    index.commit(seq(1, 8), ids(0, 1), NS)
    assert hit(index, [*range(101, 109), 9]) == []
    index.commit(seq(101, 108), ids(2, 3), NS)
    c = [1, 2, 3, 4, 50, 60, 70, 80]
    assert hit(index, [*c, 9]) == [0]
    result = index.commit(c, ids(0, 4), NS)
    assert result.inserted == slice(1, 2)
    if digest:
        assert result.digests == [b"\0" * 16]
    assert hit(index, [9, 9, 9, 9, 5, 6, 7, 8, 1]) == []
    assert hit(index, [*range(1, 9), 9]) == [0, 1]
    assert hit(index, seq(101, 108)) == [2, 3]
    assert hit(index, c) == [0, 4]
    assert index.stats().collision_checks > 0
    index.check_integrity()


def test_equal_tokens_under_another_history_or_namespace_never_match():
    """A7, H04: history and namespace are part of the key."""
    index = PrefixIndex(4)
    index.commit([1, 2, 3, 4, 5, 6, 7, 8], ids(0, 1), NS)
    assert hit(index, [5, 6, 7, 8]) == []
    assert hit(index, [1, 2, 3, 4, 5, 6, 7, 8], OTHER) == []
    assert hit(index, [1, 2, 3, 4, 5, 6, 7, 8]) == [0, 1]


def test_two_and_a_half_equal_pages_share_exactly_two():
    """A2: only whole pages match."""
    index = PrefixIndex(4)
    index.commit(seq(0, 11), ids(0, 1, 2), NS)
    match = index.lookup([*range(10), 77, 78], NS)
    assert match.num_pages == 2
    assert match.miss_reason == MissReason.DIFFERENT
    assert index.explain([*range(10), 77, 78], NS).first_different_token == 10


@pytest.mark.parametrize("n", range(1, 14))
def test_second_and_third_run_hit_all_full_pages(n):
    """H06, A21: lengths around page borders; a whole prompt may hit."""
    index = PrefixIndex(4)
    tokens = seq(1, n)
    full = n // 4
    assert hit(index, tokens) == []
    index.commit(tokens, np.arange(full, dtype=np.int32), NS)
    for _ in range(2):
        match = index.lookup(tokens, NS)
        assert match.num_pages == full
        if full:
            assert match.miss_reason == MissReason.NONE
    assert len(index) == full
    index.check_integrity()


def test_prompts_below_a_page_and_empty_prompts_are_plain_misses():
    """H07: no entry, no exception, on a fresh, a full and an emptied index."""
    index = PrefixIndex(4)
    for _ in range(2):
        for n in range(4):
            assert hit(index, seq(1, n)) == []
            assert index.commit(seq(1, n), ids(), NS).inserted == slice(0, 0)
    assert len(index) == 0
    assert index.lookup([], NS).miss_reason == MissReason.EMPTY
    assert index.lookup([1], NS).miss_reason == MissReason.TOO_SHORT
    index.commit(seq(1, 5), ids(0), NS)
    assert len(index) == 1
    assert index.lookup([], NS).num_pages == 0
    assert index.evict(9).tolist() == [0]
    assert index.lookup([], NS).num_pages == 0
    assert index.lookup(seq(1, 5), NS).num_pages == 0
    assert index.stats().namespaces == 0
    index.check_integrity()


def test_leaves_go_first_and_a_removed_parent_takes_its_subtree():
    """H09, B6: no unreachable child is left."""
    index = PrefixIndex(4, max_entries=3)
    index.commit(seq(1, 12), ids(0, 1, 2), NS)
    assert index.commit(seq(101, 104), ids(3), NS).evicted.tolist() == [2]
    assert index.remove(0).tolist() == [0, 1]
    assert hit(index, seq(1, 13)) == []
    assert len(index) == 1
    index.check_integrity()


def test_a_shared_parent_outlives_its_leaves_and_a_hot_root_cold_tails():
    """B6, H09: the prompt that is used stays, the shared page above both stays."""
    index = PrefixIndex(4)
    index.commit(seq(1, 8), ids(0, 1), NS)
    index.commit([1, 2, 3, 4, 50, 51, 52, 53], ids(0, 2), NS)
    hit(index, seq(1, 8))
    assert index.evict(1).tolist() == [2]
    assert index.evict(1).tolist() == [1]
    assert index.evict(1).tolist() == [0]
    assert index.evict(1).tolist() == []


def test_a_chain_longer_than_the_limit_leaves_a_usable_prefix():
    """B6: max_entries counts pages; the beginning is kept."""
    index = PrefixIndex(4, max_entries=3)
    result = index.commit(seq(1, 20), ids(0, 1, 2, 3, 4), NS)
    assert result.new_ids.tolist() == [0, 1, 2]
    assert hit(index, seq(1, 20)) == [0, 1, 2]
    again = index.commit(seq(1, 20), ids(0, 1, 2, 3, 4), NS)
    assert again.new_ids.tolist() == []
    assert again.evicted.tolist() == []
    index.check_integrity()


def test_a_commit_may_evict_all_that_its_namespace_held():
    """B6: found by the state machine: the root of the namespace survives its last entry."""
    index = PrefixIndex(4, max_entries=2)
    index.commit(seq(1, 8), ids(0, 1), NS)
    undo = []
    assert sorted(index.commit(seq(101, 108), ids(2, 3), NS, undo=undo).evicted.tolist()) == [0, 1]
    index.check_integrity()
    assert index.peek(seq(101, 108), NS).page_ids.tolist() == [2, 3]
    for step in reversed(undo):
        step()
    index.check_integrity()
    assert hit(index, seq(1, 8)) == [0, 1]


def test_only_what_matched_is_refreshed():
    """B6: a partial match of a run leaves the rest of the run as cold as it was."""
    index = PrefixIndex(4)
    index.commit(seq(1, 16), ids(0, 1, 2, 3), NS)
    index.commit(seq(101, 108), ids(4, 5), NS)
    hit(index, seq(1, 8))
    assert index.evict(4).tolist() == [2, 3, 4, 5]
    assert hit(index, seq(1, 16)) == [0, 1]


def test_peek_has_no_side_effect():
    """A10: an estimate leaves recency, counters and tree alone."""
    index = PrefixIndex(4)
    index.commit(seq(1, 16), ids(0, 1, 2, 3), NS)
    before = index.recency(), index.stats(), index.eviction_order()
    assert index.peek(seq(1, 8), NS).num_pages == 2
    assert (index.recency(), index.stats(), index.eviction_order()) == before


def test_pages_in_use_are_passed_over():
    """B6: eviction is lease-aware; pages behind the last used one may go, those before it stay."""
    index = PrefixIndex(4)
    used = np.zeros(8, bool)
    index.bind_busy(lambda pages: used[pages])
    index.commit(seq(1, 16), ids(0, 1, 2, 3), NS)
    index.commit(seq(101, 104), ids(4), NS)
    used[1] = True
    assert index.evict(9).tolist() == [2, 3, 4]
    assert hit(index, seq(1, 16)) == [0, 1]
    used[1] = False
    assert sorted(index.evict(9).tolist()) == [0, 1]
    with pytest.raises(InvalidRequestError):
        index.bind_busy(lambda pages: used[pages])


def test_commit_refreshes_older_entries_and_keeps_their_pages():
    """A8, H14: a duplicate stays private; what follows it hangs below the older entry."""
    index = PrefixIndex(4)
    index.commit(seq(1, 8), ids(0, 1), NS)
    index.commit(seq(101, 104), ids(9), NS)
    result = index.commit([*range(1, 9), 20, 21, 22, 23], ids(5, 6, 7), NS)
    assert result.entry_ids.tolist() == [0, 1]
    assert result.new_ids.tolist() == [7]
    assert result.inserted == slice(2, 3)
    assert hit(index, [*range(1, 9), 20, 21, 22, 23]) == [0, 1, 7]
    assert index.evict(1).tolist() == [9]


def test_lfu_keeps_what_is_used_often():
    """B6: policies are one method that returns a sortable key."""
    index = PrefixIndex(4, policy=LFU())
    index.commit(seq(1, 4), ids(0), NS)
    index.commit(seq(101, 104), ids(1), NS)
    for _ in range(3):
        hit(index, seq(1, 4))
    hit(index, seq(101, 104))
    assert index.evict(1).tolist() == [1]


def test_priority_lasts_for_its_time_to_live():
    """B6: priority keeps an entry until its time is over, then it is as cold as its last use."""
    now = [0.0]
    index = PrefixIndex(4, policy=PriorityTTL(ttl=10), clock=lambda: now[0])
    index.commit(seq(1, 4), ids(0), NS, priority=5)
    index.commit(seq(101, 104), ids(1), NS)
    index.commit(seq(201, 204), ids(2), NS)
    assert index.evict(1).tolist() == [1]
    now[0] = 11.0
    assert index.evict(1).tolist() == [0]
    index.check_integrity()


def test_a_use_renews_the_time_to_live():
    """B6: the deadline counts from the last use."""
    now = [0.0]
    index = PrefixIndex(4, policy=PriorityTTL(ttl=10), clock=lambda: now[0])
    index.commit(seq(1, 8), ids(0, 3), NS, priority=5)
    index.commit(seq(101, 104), ids(1), NS)
    now[0] = 9.0
    hit(index, seq(1, 8))
    now[0] = 11.0
    assert index.evict(1).tolist() == [1]
    index.commit(seq(201, 204), ids(2), NS)
    now[0] = 20.0
    assert index.evict(1).tolist() == [3]


def test_soft_pins_go_last_are_capped_and_never_wedge():
    """B6: a soft pin orders eviction, it does not forbid it."""
    index = PrefixIndex(4, max_entries=8)
    index.commit(seq(1, 8), ids(0, 1), NS)
    index.commit(seq(101, 124), ids(2, 3, 4, 5, 6, 7), NS)
    assert index.soft_pin(seq(1, 8), NS) == 2
    assert index.soft_pin(seq(101, 124), NS) == 2
    assert index.stats().soft_pinned == 4
    assert index.evict(4).tolist() == [4, 5, 6, 7]
    index.check_integrity()
    assert index.soft_pin(seq(101, 124), NS, pinned=False) == 2
    assert index.evict(3).tolist() == [2, 3, 1]
    assert index.evict(3).tolist() == [0]
    assert index.stats().soft_pinned == 0


def test_clear_takes_one_namespace_or_all_and_counts_one_invalidation():
    """B25: stale entries go at once."""
    index = PrefixIndex(4)
    index.commit(seq(1, 8), ids(0, 1), NS)
    index.commit(seq(1, 8), ids(2, 3), OTHER)
    assert sorted(index.clear(NS).tolist()) == [0, 1]
    assert hit(index, seq(1, 8)) == []
    assert hit(index, seq(1, 8), OTHER) == [2, 3]
    assert sorted(index.clear().tolist()) == [2, 3]
    assert index.stats().invalidations == 2
    index.check_integrity()


def test_explain_names_the_reason():
    """X5: first different token, evicted, other namespace, too short."""
    index = PrefixIndex(4)
    index.commit(seq(1, 12), ids(0, 1, 2), NS)
    assert index.explain(seq(1, 12), NS).reason == MissReason.NONE
    assert index.explain([1, 2, 3, 4, 5, 6, 77, 8], NS).first_different_token == 6
    assert index.explain([1, 2, 3, 77], NS).first_different_token == 3
    assert index.explain(seq(1, 12), OTHER).reason == MissReason.NAMESPACE
    assert index.explain([1, 2], NS).reason == MissReason.TOO_SHORT
    assert index.explain([], NS).reason == MissReason.EMPTY
    assert index.explain(seq(1, 16), NS).reason == MissReason.NOT_CACHED
    assert index.explain(seq(1, 16), NS).hit_tokens == 12
    index.evict(1)
    explanation = index.explain(seq(1, 12), NS)
    assert explanation.reason == MissReason.EVICTED
    assert "8..11" in str(explanation)
    index.commit([*range(1, 9), 50, 51, 52, 53], ids(0, 1, 3), NS)
    assert index.explain(seq(1, 12), NS).reason == MissReason.EVICTED


def test_matched_pages_are_never_hashed():
    """H36: digests are computed for new pages only, once each."""
    fed = []

    def digest(message: bytes) -> bytes:
        fed.append(len(message))
        return message[:16].ljust(16)

    index = PrefixIndex(16, digest=digest)
    tokens = seq(0, 65_535)
    pages = np.arange(4096, dtype=np.int32)
    for _ in range(100):
        index.lookup(tokens, NS)
    assert fed == []
    index.commit(tokens, pages, NS)
    assert len(fed) == 4096
    for _ in range(100):
        index.lookup(tokens, NS)
        index.commit(tokens, pages, NS)
    assert len(fed) == 4096


def test_digests_of_a_chain_do_not_depend_on_how_it_was_committed():
    """B3, H36: chained digests survive splits, extension and a second branch."""

    def digest(message: bytes) -> bytes:
        import hashlib

        return hashlib.sha256(message).digest()

    whole, parts = PrefixIndex(2, digest=digest), PrefixIndex(2, digest=digest)
    tokens = seq(0, 15)
    expected = whole.commit(tokens, ids(*range(8)), NS).digests
    got = parts.commit(tokens[:6], ids(0, 1, 2), NS).digests
    parts.commit([0, 1, 2, 3, 90, 91], ids(0, 1, 9), NS)
    parts.evict(0)
    got += parts.commit(tokens, ids(*range(8)), NS).digests
    assert got == expected
    parts.check_integrity()


def test_a_chain_of_more_nodes_than_python_may_recurse_is_walked_in_loops():
    """H35: runs of one page, one below the other; everything that visits runs gets to the end."""
    index, length = PrefixIndex(1, policy=LFU()), sys.getrecursionlimit() + 100
    tokens = seq(1, length)
    for n in range(1, length + 1):  # a hit that ends with the run keeps the next one from joining it
        index.commit(tokens[:n], np.arange(n, dtype=np.int32), NS)
        index.lookup(tokens[:n], NS)
    assert len(list(index)) == length
    assert index.lookup(tokens, NS).num_pages == length
    assert index.explain(tokens, NS).hit_pages == length
    ((_, stored, pages),) = index.prefixes()
    assert (len(stored), len(pages)) == (length, length)
    index.check_integrity()
    assert index.evict(10).tolist() == list(range(length - 1, length - 11, -1))
    assert len(index.remove(0)) == length - 10


def test_a_prompt_of_twenty_thousand_pages_is_found_run_by_run():
    """H35: long prompts in twenty steps."""
    index = PrefixIndex(1, policy=LFU())  # LFU extends nothing in place: one node a page
    tokens = seq(1, 20_000)
    for n in range(0, 20_000, 1000):
        index.commit(tokens[: n + 1000], np.arange(n + 1000, dtype=np.int32), NS)
        index.lookup(tokens[: n + 500], NS)
    assert index.lookup(tokens, NS).num_pages == 20_000
    index.check_integrity()
    assert len(list(index)) >= 40
    assert len(index.remove(0)) == 20_000


def test_iteration_and_prefixes_give_back_what_was_committed():
    """B3: stored tokens reproduce the key of every entry."""
    index = PrefixIndex(4)
    index.commit(seq(1, 12), ids(0, 1, 2), NS)
    index.commit([1, 2, 3, 4, 60, 61, 62, 63], ids(0, 3), NS)
    index.commit(seq(1, 4), ids(9), OTHER)
    found = {(ns, tuple(tokens.tolist())): pages.tolist() for ns, tokens, pages in index.prefixes()}
    assert found == {
        (NS, tuple(range(1, 13))): [0, 1, 2],
        (NS, (1, 2, 3, 4, 60, 61, 62, 63)): [0, 3],
        (OTHER, (1, 2, 3, 4)): [9],
    }
    assert sum(len(run.page_ids) for run in index) == len(index) == 5


def naive_lru(prompts: list[np.ndarray], capacity: int, page: int) -> int:
    """Leaf-first LRU by pages with dictionaries: total hits."""
    last: dict[bytes, int] = {}
    children: dict[bytes, int] = {}
    total = 0
    for now, tokens in enumerate(prompts):
        chain = [tokens[: (i + 1) * page].tobytes() for i in range(len(tokens) // page)]
        hits = next((i for i, key in enumerate(chain) if key not in last), len(chain))
        total += hits
        for key in chain[:hits]:
            last[key] = now
        while len(last) + len(chain) - hits > capacity:
            leaf = min((k for k in last if not children.get(k)), key=lambda k: (last[k], -len(k)))
            del last[leaf]
            parent = leaf[: -4 * page]
            children[parent] = children.get(parent, 0) - 1
        for key in chain[hits:]:
            last[key] = now
            children[key[: -4 * page]] = children.get(key[: -4 * page], 0) + 1
    return total


@pytest.mark.parametrize("seed", range(4))
def test_hits_equal_those_of_a_page_by_page_lru(seed):
    """B6: eviction by runs is exactly leaf-first LRU by pages."""
    rng = np.random.default_rng(seed)
    prompts = []
    for _ in range(300):
        base = prompts[int(rng.integers(len(prompts)))] if prompts and rng.random() < 0.7 else seq(0, -1)
        keep = base[: int(rng.integers(len(base) + 1))]
        prompts.append(np.concatenate([keep, rng.integers(0, 3, rng.integers(1, 20)).astype(np.int32)])[:40])
    index = PrefixIndex(2, policy=LRU())
    capacity, free, hits = 60, list(range(60)), 0
    for tokens in prompts:
        match = index.lookup(tokens, NS)
        hits += match.num_pages
        need = len(tokens) // 2 - match.num_pages
        if need > len(free):
            free += index.evict(need - len(free)).tolist()
        new = [free.pop() for _ in range(need)]
        index.commit(tokens, np.array([*match.page_ids.tolist(), *new], np.int32), NS)
        index.check_integrity()
    assert hits == naive_lru(prompts, capacity, 2) > 0
