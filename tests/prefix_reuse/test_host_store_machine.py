"""Index, store, leases and groups against a naive model, and a soak."""

from __future__ import annotations

import gc
import resource
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pallas_kernels.layout import LayerGroup
from prefix_reuse.errors import HostPagesExhausted
from prefix_reuse.geometry import StoreGeometry
from prefix_reuse.host_archive import StoredPrefix
from prefix_reuse.host_store import HostPageStore, PrefixRequest
from prefix_reuse.index import PrefixIndex


class NaiveHost:
    """The host cache as dictionaries, with no cleverness: every figure is recomputed when it is asked for.

    Entries are filed by (namespace, tokens of the whole prefix).
    """

    def __init__(self, page_size: int, max_entries: int | None) -> None:
        self.page_size = page_size
        self.max_entries = max_entries
        self.page: dict[tuple[bytes, tuple[int, ...]], int] = {}
        self.used: dict[tuple[bytes, tuple[int, ...]], int] = {}
        self.rows: dict[object, list[int]] = {}
        self.holds: dict[object, list[int]] = {}
        self.copies: set[int] = set()
        self.landed: set[int] = set()
        self.now = 0

    def chain(self, ns: bytes, tokens: np.ndarray) -> list[tuple[bytes, tuple[int, ...]]]:
        size = self.page_size
        return [(ns, tuple(tokens[: (i + 1) * size].tolist())) for i in range(len(tokens) // size)]

    def match(self, ns: bytes, tokens: np.ndarray) -> list[int]:
        pages = []
        for key in self.chain(ns, tokens):
            if key not in self.page:
                break
            pages.append(self.page[key])
        return pages

    def touch(self, ns: bytes, tokens: np.ndarray) -> None:
        self.now += 1
        for key in self.chain(ns, tokens)[: len(self.match(ns, tokens))]:
            self.used[key] = self.now

    def refs(self, num_pages: int) -> list[int]:
        counts = [0] * num_pages
        for pages in (*self.rows.values(), *self.holds.values()):
            for page in pages:
                counts[page] += 1
        return counts

    def pins(self, num_pages: int) -> list[int]:
        return np.bincount(list(self.page.values()), minlength=num_pages).tolist()

    def evict(self, n: int, keep: tuple[bytes, tuple[int, ...]] | None = None) -> list[int]:
        """Coldest leaf first, deepest first among equals; pages in use stay."""
        held = {page for pages in (*self.rows.values(), *self.holds.values()) for page in pages} | self.copies
        out = []
        while len(out) < n:
            parents = {(ns, tokens[: -self.page_size]) for ns, tokens in self.page}
            leaves = [k for k in self.page if k not in parents and k != keep and self.page[k] not in held]
            if not leaves:
                break
            coldest = min(leaves, key=lambda k: (self.used[k], -len(k[1])))
            out.append(self.page.pop(coldest))
            del self.used[coldest]
        return out

    def commit(self, ns: bytes, tokens: np.ndarray, pages: list[int]) -> None:
        """Full, landed, not yet indexed pages of `pages` become entries."""
        chain = self.chain(ns, tokens)[: len(pages)]
        if not chain:
            return
        known = len(self.match(ns, tokens[: len(chain) * self.page_size]))
        self.touch(ns, tokens[: len(chain) * self.page_size])
        indexed = set(self.page.values())
        new = []
        for key, page in list(zip(chain, pages, strict=False))[known:]:
            if page in indexed or page in self.copies or page not in self.landed:
                break
            new.append((key, page))
        if self.max_entries is not None and len(self.page) + len(new) > self.max_entries and new:
            self.evict(len(self.page) + len(new) - self.max_entries, chain[known - 1] if known else None)
            new = new[: self.max_entries - len(self.page)]
        for key, page in new:
            self.page[key], self.used[key] = page, self.now

    def drop(self, page: int) -> None:
        bad = next((k for k, p in self.page.items() if p == page), None)
        if bad is None:
            return
        for key in [k for k in self.page if k[0] == bad[0] and k[1][: len(bad[1])] == bad[1]]:
            del self.page[key], self.used[key]


NAMESPACES = [b"a", b"b"]
PROMPTS = st.builds(
    # A few trunks with a few tails, so that prompts share beginnings of every length.
    lambda trunk, cut, tail: np.concatenate([np.arange(cut) % (trunk + 2), np.array(tail, np.int64)]).astype(np.int32),
    st.integers(0, 2),
    st.integers(0, 14),
    st.lists(st.integers(0, 1), min_size=1, max_size=4),
)


class HostMachine(RuleBasedStateMachine):
    """Random operations on a small store; after each, all counts equal those of `NaiveHost`."""

    num_pages, page_size = 24, 2

    @initialize(max_entries=st.sampled_from([None, 6, 12]))
    def start(self, max_entries):
        self.freed: list[int] = []
        index = PrefixIndex(self.page_size, max_entries=max_entries)
        self.store = HostPageStore(self.num_pages, self.page_size, index=index, on_free=self.on_free)
        self.store.bind(StoreGeometry.of((LayerGroup((0,), 1, 1, np.float32),), self.page_size))
        self.naive = NaiveHost(self.page_size, max_entries)
        self.tokens: dict[object, tuple[bytes, np.ndarray]] = {}
        self.leases: list = []
        self.groups: list = []
        self.ids = 0

    def on_free(self, pages: np.ndarray) -> None:
        self.freed += pages.tolist()

    def admission(self, prompt, ns, extra, n=1, lease=None) -> tuple[list[PrefixRequest], list[int], int]:
        """Requests, the hit that the model expects, and private pages needed by each."""
        requests = [PrefixRequest(self.ids + i, prompt, len(prompt) + extra, ns, lease=lease) for i in range(n)]
        self.ids += n
        hit = self.naive.match(ns, prompt) if lease is None else lease.page_ids.tolist()
        return requests, hit, max(0, -(-(len(prompt) + extra) // self.page_size) - len(hit))

    def model_admits(self, hit: list[int], need: int) -> bool:
        """Evicts in the model as the store must; False if it cannot be enough."""
        self.naive.holds["admission"] = hit
        free = self.free_pages()
        saved = dict(self.naive.page), dict(self.naive.used)
        ok = True
        if need > free:
            gone = self.naive.evict(need - free)
            ok = len(gone) == need - free
        if not ok:
            self.naive.page, self.naive.used = saved
        del self.naive.holds["admission"]
        return ok

    def free_pages(self) -> int:
        refs, pins = self.naive.refs(self.num_pages), self.naive.pins(self.num_pages)
        return sum(1 for p in range(self.num_pages) if not refs[p] and not pins[p] and p not in self.naive.copies)

    @rule(prompt=PROMPTS, ns=st.sampled_from(NAMESPACES), extra=st.integers(0, 5))
    def allocate(self, prompt, ns, extra):
        requests, hit, need = self.admission(prompt, ns, extra)
        estimate = self.store.estimate(requests)[0]
        assert (estimate.hit_pages, estimate.new_pages) == (len(hit), need)
        if not self.model_admits(hit, need):
            with pytest.raises(HostPagesExhausted):
                self.store.allocate_pages_for_sequences_with_prefix(requests)
            return
        got = self.store.allocate_pages_for_sequences_with_prefix(requests)[0]
        assert got.shared_pages.tolist() == hit
        assert got.newly_allocated == need
        self.added(requests[0], got)
        if hit:
            self.naive.touch(ns, prompt)

    @rule(prompt=PROMPTS, ns=st.sampled_from(NAMESPACES))
    def serve(self, prompt, ns):
        """A whole life in one step, so that the index is seldom empty."""
        row = self.ids
        self.allocate(prompt, ns, 0)
        if row in self.naive.rows:
            self.start_copies(row)
            self.land(sorted(self.naive.copies))
            self.publish_row(row)
            self.store.release(row)
            del self.naive.rows[row]

    def added(self, request, got) -> None:
        self.naive.rows[request.sequence_id] = got.logical_pages.tolist()
        self.naive.landed -= set(got.private_pages.tolist())
        self.tokens[request.sequence_id] = request.namespace, request.tokens

    @rule(prompt=PROMPTS, ns=st.sampled_from(NAMESPACES))
    def acquire(self, prompt, ns):
        hit = self.naive.match(ns, prompt)
        lease = self.store.acquire(prompt, ns)
        assert lease.page_ids.tolist() == hit
        if hit:
            self.naive.touch(ns, prompt)
        self.naive.holds[lease] = hit
        self.leases.append((lease, prompt, ns))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), admit=st.booleans(), extra=st.integers(0, 5))
    def end_lease(self, data, admit, extra):
        lease, prompt, ns = data.draw(st.sampled_from(self.leases))
        if admit:
            requests, hit, need = self.admission(prompt, ns, extra, lease=lease)
            if not self.model_admits([], need):
                with pytest.raises(HostPagesExhausted):
                    self.store.allocate_pages_for_sequences_with_prefix(requests)
                return
            got = self.store.allocate_pages_for_sequences_with_prefix(requests)[0]
            assert got.shared_pages.tolist() == hit
            self.added(requests[0], got)
        else:
            lease.abort()
        del self.naive.holds[lease]
        self.leases.remove((lease, prompt, ns))

    @rule(prompt=PROMPTS, ns=st.sampled_from(NAMESPACES), n=st.integers(2, 3))
    def prepare(self, prompt, ns, n):
        requests, hit, need = self.admission(prompt, ns, 1, n=n)
        if not self.model_admits(hit, n * need):
            with pytest.raises(HostPagesExhausted):
                self.store.prepare_group(requests, "owner")
            return
        group = self.store.prepare_group(requests, "owner")
        for i in range(n):
            self.naive.holds[group, i] = [*hit, *group.private_pages[i].tolist()]
            if hit:
                self.naive.touch(ns, prompt)
        self.naive.landed -= {int(p) for pages in group.private_pages for p in pages}
        self.groups.append(group)

    @rule(prompt=PROMPTS, ns=st.sampled_from(NAMESPACES), n=st.integers(2, 3))
    def prepare_samples(self, prompt, ns, n):
        """Followers share every full page of the prompt with the first request."""
        requests, hit, need = self.admission(prompt, ns, 1, n=n)
        first, *rest = requests
        requests = [first, *(replace(r, follows=first.sequence_id, counted=False) for r in rest)]
        full = len(prompt) // self.page_size
        needs = [need] + [need + len(hit) - full] * (n - 1)
        assert [e.new_pages for e in self.store.estimate(requests)] == needs
        if not self.model_admits(hit, sum(needs)):
            with pytest.raises(HostPagesExhausted):
                self.store.prepare_group(requests, "owner")
            return
        group = self.store.prepare_group(requests, "owner")
        computed = group.private_pages[0][: full - len(hit)].tolist()
        for i in range(n):
            shared = [*hit, *computed] if i else hit
            self.naive.holds[group, i] = [*shared, *group.private_pages[i].tolist()]
        if hit:
            self.naive.touch(ns, prompt)
        self.naive.landed -= {int(p) for pages in group.private_pages for p in pages}
        self.groups.append(group)

    @rule(prompt=PROMPTS, ns=st.sampled_from(NAMESPACES), may_evict=st.booleans())
    def insert(self, prompt, ns, may_evict):
        """A prefix with its bytes from outside, as a snapshot brings them."""
        tokens = prompt[: len(prompt) // self.page_size * self.page_size]
        hit = self.naive.match(ns, tokens)
        need = len(tokens) // self.page_size - len(hit)
        page = (np.zeros(self.store.bound_geometry().parts[0].shape, np.float32),)
        prefix = StoredPrefix(ns, tokens, [page] * (need + len(hit)))
        fits = self.model_admits(hit, need) if may_evict else need <= self.free_pages()
        if not fits:
            with pytest.raises(HostPagesExhausted):
                self.store.insert([prefix], may_evict=may_evict)
            return
        inserted = self.store.insert([prefix], may_evict=may_evict)
        assert self.store.index is not None
        new = self.store.index.peek(tokens, ns).page_ids.tolist()[len(hit) :]
        assert len(new) == inserted
        new += [-1] * (need - inserted)  # what `max_entries` kept out
        self.naive.holds["insert"] = [*hit, *(p for p in new if p >= 0)]
        self.naive.landed |= set(new)
        self.naive.commit(ns, tokens, [*hit, *new])
        self.naive.landed.discard(-1)
        del self.naive.holds["insert"]

    @precondition(lambda self: self.groups)
    @rule(data=st.data(), commit=st.booleans())
    def end_group(self, data, commit):
        group = data.draw(st.sampled_from(self.groups))
        for i in range(len(group.requests)):
            del self.naive.holds[group, i]
        if commit:
            for request, got in zip(group.requests, self.store.commit_group(group, "owner"), strict=True):
                self.added(request, got)
        else:
            self.store.abort_group(group, "owner")
        self.groups.remove(group)

    @precondition(lambda self: self.naive.rows)
    @rule(data=st.data())
    def begin_copy(self, data):
        self.start_copies(data.draw(st.sampled_from(list(self.naive.rows))))

    def start_copies(self, row):
        refs, pins = self.naive.refs(self.num_pages), self.naive.pins(self.num_pages)
        pages = [p for p in self.naive.rows[row] if not pins[p] and p not in self.naive.copies]
        pages = [p for p in pages if refs[p] == 1 or p not in self.naive.landed]
        self.store.begin_copy(np.array(pages, np.int32))
        self.naive.copies |= set(pages)
        self.naive.landed -= set(pages)

    @precondition(lambda self: self.naive.copies)
    @rule(data=st.data(), ok=st.booleans())
    def end_copy(self, data, ok):
        pages = data.draw(st.lists(st.sampled_from(sorted(self.naive.copies)), unique=True, min_size=1))
        if ok:
            self.land(pages)
        else:
            self.store.fail_copy(pages)
            self.naive.copies -= set(pages)

    def land(self, pages):
        self.store.finish_copy(pages, None)
        refs = self.naive.refs(self.num_pages)
        self.naive.landed |= {p for p in pages if refs[p]}
        self.naive.copies -= set(pages)

    @precondition(lambda self: self.naive.rows)
    @rule(data=st.data())
    def publish(self, data):
        self.publish_row(data.draw(st.sampled_from(list(self.naive.rows))))

    def publish_row(self, row):
        ns, tokens = self.tokens[row]
        pages = self.naive.rows[row]
        published = self.store.publish(row, tokens, ns).tolist()
        self.naive.commit(ns, tokens, pages)
        entries = [self.naive.page.get(key) for key in self.naive.chain(ns, tokens)]
        assert published == [p for p, e in zip(pages, entries, strict=False) if p == e]

    @precondition(lambda self: self.naive.rows)
    @rule(data=st.data())
    def release(self, data):
        row = data.draw(st.sampled_from(list(self.naive.rows)))
        self.store.release(row)
        self.store.release(row)
        del self.naive.rows[row]

    @precondition(lambda self: self.naive.rows)
    @rule(data=st.data(), more=st.integers(1, 6))
    def grow(self, data, more):
        row = data.draw(st.sampled_from(list(self.naive.rows)))
        pages = self.naive.rows[row]
        if not self.model_admits([], more):
            with pytest.raises(HostPagesExhausted):
                self.store.grow(row, (len(pages) + more) * self.page_size)
            return
        new = self.store.grow(row, (len(pages) + more) * self.page_size).tolist()
        assert len(new) == more
        self.naive.rows[row] = pages + new
        self.naive.landed -= set(new)

    @rule(n=st.integers(1, 8))
    def evict(self, n):
        assert sorted(self.store.evict_entries(n).tolist()) == sorted(self.naive.evict(n))

    @rule(page=st.integers(0, 23))
    def drop(self, page):
        self.store.drop_entry(page)
        self.naive.drop(page)
        self.naive.landed.discard(page)

    @rule(ns=st.sampled_from([None, *NAMESPACES]))
    def clear(self, ns):
        self.store.clear(ns)
        for key in [k for k in self.naive.page if ns is None or k[0] == ns]:
            del self.naive.page[key], self.naive.used[key]

    @invariant()
    def equals_the_model(self):
        if not hasattr(self, "store"):
            return
        self.store.check_integrity()
        assert self.store.accounts.refs.tolist() == self.naive.refs(self.num_pages)
        assert self.store.accounts.pins.tolist() == self.naive.pins(self.num_pages)
        assert self.store.num_free == self.free_pages()
        assert self.store.open_leases == len(self.leases) + sum(len(g.requests) for g in self.groups)
        assert self.store.index is not None
        entries = {}
        for ns, tokens, pages in self.store.index.prefixes():
            entries.update(zip(self.naive.chain(ns, tokens), pages.tolist(), strict=True))
        assert entries == self.naive.page
        free = set(self.store.accounts.free_ids().tolist())
        assert not free & set(self.naive.page.values())

    def teardown(self):
        """I6: everything given back, nothing is left."""
        if not hasattr(self, "store"):
            return
        for lease, *_ in self.leases:
            lease.abort()
        for group in self.groups:
            self.store.abort_group(group, "owner")
        for row in list(self.naive.rows):
            self.store.release(row)
        self.store.fail_copy(sorted(self.naive.copies))
        self.store.clear()
        self.store.check_integrity()
        assert (self.store.num_free, self.store.open_leases, self.store.rows()) == (self.num_pages, 0, ())


QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck)}


def test_random_operations_equal_a_naive_model():
    """A8, A10-A14, B2, B6, B7, B19, B22, B28: index, store, leases and groups against dictionaries, 1,000 steps."""
    run_state_machine_as_test(HostMachine, settings=settings(max_examples=25, stateful_step_count=40, **QUIET))


@pytest.mark.slow
def test_ten_thousand_random_operations_equal_a_naive_model():
    """A8, A10-A14, B2, B6, B7, B19, B22, B28: the same, 10,000 steps."""
    run_state_machine_as_test(HostMachine, settings=settings(max_examples=200, stateful_step_count=50, **QUIET))


def soak(operations: int) -> None:
    """Admissions, copies, publications and releases at random on a store under pressure; ends as it began."""
    rng = np.random.default_rng(0)
    store = HostPageStore(512, 16, index=PrefixIndex(16))
    trunks = [rng.integers(0, 1000, 256).astype(np.int32) for _ in range(8)]
    live: list[tuple[int, np.ndarray]] = []
    done = peak = 0
    while done < operations:
        done += 4
        tokens = np.concatenate(
            [trunks[int(rng.integers(8))][: int(rng.integers(257))], rng.integers(0, 1000, rng.integers(1, 200))]
        ).astype(np.int32)
        try:
            got = store.allocate_pages_for_sequences_with_prefix([PrefixRequest(done, tokens, len(tokens) + 32, b"")])
        except HostPagesExhausted:
            store.release(live.pop(0)[0])
            continue
        live.append((done, tokens))
        private = got[0].private_pages
        store.begin_copy(private)
        if rng.random() < 0.05:
            store.fail_copy(private)
        else:
            store.finish_copy(private, None)
            store.publish(done, tokens, b"")
        if len(live) > 4:
            store.release(live.pop(int(rng.integers(len(live))))[0])
        if done == operations // 10 // 4 * 4:
            gc.collect()
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, _ in live:
        store.release(name)
    assert store.stats().lookup_hits > 0
    assert store.stats().evictions > 0
    store.check_integrity()
    store.clear()
    store.check_integrity()
    assert store.num_free == 512
    assert store.accounts.free_ids().size == len(set(store.accounts.free_ids().tolist())) == 512
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 20_000  # KiB; memory is flat


def test_a_soak_ends_with_exactly_the_pages_it_began_with():
    """H11: no page, reference or record is lost in 8,000 operations."""
    soak(8_000)


@pytest.mark.slow
def test_a_soak_of_a_million_operations_is_flat():
    """H11: the same after 1,000,000 operations, with flat memory."""
    soak(1_000_000)
