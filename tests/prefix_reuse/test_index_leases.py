"""Leases on the index itself: what is held stays, and a commit under a lease is exact whatever happened since."""

from __future__ import annotations

import numpy as np
import pytest

from prefix_reuse.errors import LeaseError, RefcountError
from prefix_reuse.eviction import LFU, EvictionPolicy, PriorityTTL
from prefix_reuse.index import PrefixIndex
from prefix_reuse.lease import LeaseState, PrefixLeaseProvider

NS, OTHER = b"ns", b"other"


def seq(first: int, last: int) -> np.ndarray:
    return np.arange(first, last + 1, dtype=np.int32)


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, np.int32)


def hit(index: PrefixIndex, tokens, namespace: bytes = NS) -> list[int]:
    return index.peek(tokens, namespace).page_ids.tolist()


@pytest.fixture
def index() -> PrefixIndex:
    """Pages of four tokens; four pages of [1..16] and one of [101..104] are cached."""
    index = PrefixIndex(4)
    index.commit(seq(1, 16), ids(0, 1, 2, 3), NS)
    index.commit(seq(101, 104), ids(4), NS)
    return index


def test_exactly_what_is_held_survives_eviction(index):
    """B1, B6: a lease keeps its match, not what hangs behind it, until the last lease on it has ended."""
    provider: PrefixLeaseProvider = index
    lease, second = provider.acquire(seq(1, 8), NS), index.acquire([1, 2, 3, 4, 5, 6, 7, 8, 9], NS)
    assert (lease.page_ids.tolist(), lease.state, index.open_leases) == ([0, 1], LeaseState.OPEN, 2)
    assert sorted(index.evict(9).tolist()) == [2, 3, 4]
    lease.abort()
    assert index.evict(9).tolist() == []
    index.check_integrity()
    with second:
        assert hit(index, seq(1, 16)) == [0, 1]
    assert index.open_leases == 0
    assert sorted(index.evict(9).tolist()) == [0, 1]
    assert len(index) == 0


def test_a_committed_lease_holds_until_its_owner_releases_the_match(index):
    """B2: commit hands the hold on; only one release ends it."""
    lease = index.acquire(seq(1, 16), NS)
    lease.prepare("row")
    lease.commit("row")
    assert index.open_leases == 0
    assert index.evict(9).tolist() == [4]
    index.release(lease.match)
    with pytest.raises(RefcountError):
        index.release(lease.match)
    with pytest.raises(LeaseError):
        lease.abort("row")
    assert len(index.evict(9)) == 4


def test_a_split_moves_no_hold(index):
    """B6: the run of a lease is cut by a shorter match, from above and from below."""
    lease = index.acquire(seq(1, 12), NS)
    index.lookup(seq(1, 4), NS)
    index.commit([1, 2, 3, 4, 50, 51, 52, 53], ids(0, 9), NS)
    assert sorted(index.evict(9).tolist()) == [3, 4, 9]
    assert hit(index, seq(1, 16)) == [0, 1, 2]
    lease.abort()
    assert sorted(index.evict(9).tolist()) == [0, 1, 2]


def test_an_empty_match_can_be_held_and_committed():
    """B6: the namespace may vanish and come back between the two."""
    index = PrefixIndex(4)
    tokens = seq(1, 8)
    with index.acquire(tokens, NS) as lease:
        index.commit(seq(101, 104), ids(9), NS)
        assert index.evict(1).tolist() == [9]
        assert index.commit(tokens, ids(0, 1), NS, lease=lease).inserted == slice(0, 2)
    assert hit(index, tokens) == [0, 1]
    index.check_integrity()


def test_a_commit_under_a_lease_names_only_the_pages_behind_the_match(index):
    """A11: the prompt is walked once; recency, digests and structure are those of a plain commit."""
    plain = PrefixIndex(4)
    plain.commit(seq(1, 16), ids(0, 1, 2, 3), NS)
    plain.commit(seq(101, 104), ids(4), NS)
    plain.lookup(seq(1, 24), NS)
    plain.commit(seq(1, 24), ids(0, 1, 2, 3, 5, 6), NS)
    tokens = seq(1, 24)
    with index.acquire(tokens, NS) as lease:
        compared = index.stats().collision_checks
        result = index.commit(tokens, ids(5, 6), NS, lease=lease)
        assert index.stats().collision_checks == compared
    assert (result.inserted, result.new_ids.tolist(), result.entry_ids.tolist()) == (slice(0, 2), [5, 6], [])
    assert hit(index, tokens) == hit(plain, tokens) == [0, 1, 2, 3, 5, 6]
    assert index.eviction_order() == plain.eviction_order()


@pytest.mark.parametrize("how", ["continued", "lengthened", "branched", "removed", "cleared", "evicted-behind"])
def test_a_commit_under_a_lease_sees_what_others_did_since(how):
    """B3, H14: nothing is filed twice or behind the wrong page."""
    index = PrefixIndex(4)
    index.commit(seq(1, 16), ids(0, 1, 2, 3), NS)
    tokens = np.concatenate([seq(1, 8), seq(61, 72)])
    lease = index.acquire(tokens, NS)
    assert lease.num_pages == 2
    expected = [0, 1, 10, 11, 12]
    if how == "continued":  # another prompt has stored the same continuation
        index.commit(tokens[:16], ids(0, 1, 20, 21), NS)
        expected = [0, 1, 20, 21, 12]
    elif how == "lengthened":
        index.evict(2)
        index.commit(np.concatenate([seq(1, 8), seq(91, 94)]), ids(0, 1, 20), NS)
    elif how == "branched":
        index.commit(np.concatenate([seq(1, 4), seq(91, 94)]), ids(0, 20), NS)
    elif how == "removed":
        index.remove(1)
        expected = [0]
    elif how == "cleared":
        index.clear(NS)
        expected = []
    else:
        index.evict(2)
    result = index.commit(tokens, ids(10, 11, 12), NS, lease=lease)
    index.check_integrity()
    assert hit(index, tokens) == expected
    assert result.new_ids.tolist() == [page for page in expected if page in (10, 11, 12)]
    lease.abort()
    index.check_integrity()


def test_a_lease_is_good_for_its_own_prompt_and_namespace_only(index):
    """B3, B4: with other tokens, an equal copy or another namespace the prompt is compared again."""
    tokens = np.concatenate([seq(1, 8), seq(61, 64)])
    lease = index.acquire(tokens, NS)
    index.commit(seq(1, 8), ids(30, 31), OTHER)
    assert index.commit(tokens, ids(9), OTHER, lease=lease).new_ids.tolist() == [9]
    assert hit(index, tokens, OTHER) == [30, 31, 9]
    assert hit(index, tokens) == [0, 1]
    assert index.commit([9, 9, 9, 9, *tokens[4:].tolist()], ids(10), NS, lease=lease).new_ids.tolist() == []
    assert index.commit(tokens.copy(), ids(11), NS, lease=lease).new_ids.tolist() == [11]
    assert hit(index, tokens) == [0, 1, 11]
    lease.abort()
    assert lease.tokens is None
    index.check_integrity()


def test_only_the_holder_may_lengthen_a_held_run():
    """B6: a foreign lease holds no more than its own match."""
    index = PrefixIndex(4)
    index.commit(seq(1, 8), ids(0, 1), NS)
    foreign = index.acquire(seq(1, 8), NS)
    index.commit(seq(1, 16), ids(0, 1, 2, 3), NS)
    assert index.evict(9).tolist() == [2, 3]
    foreign.abort()
    tokens = seq(1, 16)
    own = index.acquire(tokens, NS)
    index.commit(tokens, ids(2, 3), NS, lease=own)
    assert index.stats().nodes == 1
    assert index.evict(9).tolist() == []  # what the holder itself stored stays with it
    own.abort()
    assert len(index.evict(9)) == 4


def test_uses_of_a_branch_that_is_gone_count_for_what_is_left():
    """B6: LFU keeps the beginning that many prompts used, although only their ends were marked."""
    index = PrefixIndex(4, policy=LFU())
    index.commit(seq(1, 4), ids(0), NS)
    for i in range(3):
        index.commit(np.concatenate([seq(1, 4), seq(50 + 4 * i, 53 + 4 * i)]), ids(0, 10 + i), NS)
        index.lookup(np.concatenate([seq(1, 4), seq(50 + 4 * i, 53 + 4 * i)]), NS)
    index.commit(seq(101, 104), ids(1), NS)
    for _ in range(2):
        index.lookup(seq(101, 104), NS)
    assert {page: uses for (_, page), (_, uses) in index.recency().items()} == {0: 3, 10: 1, 11: 1, 12: 1, 1: 2}
    assert index.evict(4).tolist() == [10, 11, 12, 1]


def test_taking_back_an_eviction_takes_back_its_marks():
    """A12: counters, recency and order are as before, with every kind of cut."""
    index = PrefixIndex(4, policy=LFU())
    index.commit(seq(1, 8), ids(0, 1), NS)
    index.lookup(seq(1, 4), NS)
    index.commit([1, 2, 3, 4, 60, 61, 62, 63], ids(0, 2), NS)
    index.commit(seq(101, 112), ids(3, 4, 5), OTHER)
    before = index.recency(), index.eviction_order(), index.stats()
    for n in range(1, 7):
        undo = []
        assert len(index.evict(n, undo=undo)) == n
        for step in reversed(undo):
            step()
        assert (index.recency(), index.eviction_order(), index.stats()) == before
        index.check_integrity()


@pytest.mark.parametrize("tokens", [40, 3000, 9000])
@pytest.mark.parametrize("tail", [0, 3])
def test_matches_end_at_the_right_page_in_long_prompts_of_many_runs(tokens, tail):
    """A2, B3: short and long prompts take different ways through the tree, with and without a partial page at the end."""
    index = PrefixIndex(4)
    prompt = np.random.default_rng(0).integers(0, 9, tokens + tail).astype(np.int32)
    pages = np.arange(tokens // 4, dtype=np.int32)
    cuts = sorted({4 * (tokens // 4 * i // 9) for i in range(1, 10)})
    for branch, cut in enumerate(cuts[:-1]):  # nine runs, each with a branch of its own
        other = np.concatenate([prompt[:cut], [99, 99, 99, 99]])
        index.commit(other, np.append(pages[: cut // 4], 10_000 + branch).astype(np.int32), NS)
    index.commit(prompt, pages, NS)
    assert index.stats().nodes >= 2 * len(cuts) - 1
    for end in [*range(0, tokens + tail, max(1, tokens // 97)), *cuts, tokens + tail]:
        assert hit(index, prompt[:end]) == list(range(min(end, tokens) // 4))
        changed = prompt.copy()
        changed[min(end, tokens + tail - 1)] += 100
        assert len(hit(index, changed)) == min(end, tokens + tail - 1) // 4
    index.evict(1)
    index.check_integrity()


class Naive:
    """Leaf-first eviction page by page, with dictionaries; a page is named by all tokens up to its end."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.last: dict[bytes, int] = {}
        self.now = 0

    def chain(self, tokens: np.ndarray) -> list[bytes]:
        return [tokens[: (i + 1) * self.size].tobytes() for i in range(len(tokens) // self.size)]

    def hit(self, tokens: np.ndarray) -> list[bytes]:
        chain = self.chain(tokens)
        return chain[: next((i for i, page in enumerate(chain) if page not in self.last), len(chain))]

    def use(self, pages: list[bytes]) -> None:
        self.now += 1
        self.last.update(dict.fromkeys(pages, self.now))

    def children(self, page: bytes) -> bool:
        return any(other[: -4 * self.size] == page for other in self.last)

    def evict(self, n: int, held: list[bytes]) -> list[bytes]:
        gone = []
        while len(gone) < n:
            parents = {page[: -4 * self.size] for page in self.last}
            leaves = [p for p in self.last if p not in parents and p not in held]
            if not leaves:
                break
            leaf = min(leaves, key=lambda p: self.last[p])
            del self.last[leaf]
            gone.append(leaf)
        return gone


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("policy", [None, PriorityTTL(ttl=1e9)])
def test_leases_commits_and_evictions_in_any_order_equal_a_naive_model(seed: int, policy: EvictionPolicy | None):
    """B1, B3, B6: every hit, every evicted page and every count, over hundreds of random steps."""
    rng = np.random.default_rng(seed)
    index, naive = PrefixIndex(2, policy=policy), Naive(2)
    open_leases: list[tuple] = []  # lease, tokens, last page that it holds
    names: dict[bytes, int] = {}  # page ids
    prompts = [np.zeros(0, np.int32)]
    hits = evicted = taken = 0
    for _ in range(400):
        op = rng.random()
        if op < 0.45:
            base = prompts[int(rng.integers(len(prompts)))]
            keep = base[: int(rng.integers(len(base) + 1))]
            tokens = np.concatenate([keep, rng.integers(0, 3, rng.integers(1, 12)).astype(np.int32)])[:30]
            prompts.append(tokens)
            lease, found = index.acquire(tokens, NS), naive.hit(tokens)
            assert lease.page_ids.tolist() == [names[page] for page in found]
            if found:
                naive.use(found)
            hits += len(found)
            open_leases.append((lease, tokens, found[-1] if found else b""))
        elif op < 0.7 and open_leases:
            at = int(rng.integers(len(open_leases)))
            lease, tokens, end = open_leases[at]
            chain, known = naive.chain(tokens), naive.hit(tokens)
            first = lease.num_pages
            new = [page for page in chain if page not in naive.last]
            fresh = np.arange(taken, taken + len(chain) - first, dtype=np.int32)
            taken += len(fresh)
            alone = end and not naive.children(end) and sum(other[2] == end for other in open_leases) == 1
            result = index.commit(tokens, fresh, NS, lease=lease)
            assert result.new_ids.tolist() == fresh[len(known) - first :].tolist()
            names.update(zip(new, result.new_ids.tolist(), strict=True))
            if len(chain) > first:
                naive.use([*known, *new])
            if new and alone and policy is None:  # the run was lengthened in place: the lease holds its own pages too
                open_leases[at] = (lease, tokens, new[-1])
        elif op < 0.85 and open_leases:
            open_leases.pop(int(rng.integers(len(open_leases))))[0].abort()
        else:
            n = int(rng.integers(1, 8))
            gone = naive.evict(n, [end for _, _, end in open_leases])
            assert sorted(index.evict(n).tolist()) == sorted(names[page] for page in gone)
            evicted += len(gone)
        assert len(index) == len(naive.last)
        assert index.open_leases == len(open_leases)
        index.check_integrity()
    assert hits > 100
    assert evicted > 50
    for lease, *_ in open_leases:
        lease.abort()
    assert len(index.evict(10_000)) == len(naive.last)
    assert len(index) == 0
