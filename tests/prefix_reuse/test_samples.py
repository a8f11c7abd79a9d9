"""n > 1: samples are admitted together or not at all, the prompt is computed once, full pages are shared (B17, B19, B20)."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from engine_helpers import GREEDY, check, drained, engine, index_of, prompt
from store_helpers import MODEL, PAGE, fill, make_store, payload, seq

from prefix_reuse import Engine, SamplingParams
from prefix_reuse.errors import InvalidRequestError, SharedPageWriteError
from prefix_reuse.host_store import PrefixRequest
from prefix_reuse.samples import form_groups, members
from prefix_reuse.sequence import Sequence, SequenceState

NS = MODEL.digest
THREE = SamplingParams(max_tokens=8, temperature=1.0, seed=3, n=3, ignore_eos=True)


def group(store: Any, n: int, tokens: np.ndarray, capacity: int) -> list[PrefixRequest]:
    return [PrefixRequest(i, tokens, capacity, NS, follows=0 if i else None, counted=not i) for i in range(n)]


# ---- the host store


def test_followers_take_pages_for_their_own_tails_only():
    """B19, B20: cold n = 3 of 10 tokens with room for 15: 4 + 2 + 2 pages; the two full ones have three references."""
    store = make_store()
    requests = group(store, 3, seq(1, 10), 15)
    assert [e.new_pages for e in store.estimate(requests)] == [4, 2, 2]
    prepared = store.prepare_group(requests, "owner")
    store.check_integrity()
    got = store.commit_group(prepared, "owner")
    assert [a.newly_allocated for a in got] == [4, 2, 2]
    shared = got[0].logical_pages[:2].tolist()
    for allocation in got[1:]:
        assert allocation.shared_pages.tolist() == shared == store.pages(allocation.sequence_id)[:2].tolist()
        assert (allocation.shared_tokens, allocation.private_start) == (8, 8)
    assert store.accounts.refs[shared].tolist() == [3, 3]
    stats = store.stats()
    assert (stats.logical_pages, stats.physical_pages, stats.pages_saved) == (12, 8, 4)
    assert (stats.lookup_misses, stats.lookup_hits) == (1, 0)
    store.check_integrity()
    store.begin_copy(shared)  # whoever computes them may write them, once
    store.finish_copy(shared, [payload(p) for p in shared])
    with pytest.raises(SharedPageWriteError):
        store.begin_copy(shared)
    assert store.publish(0, seq(1, 10), NS).tolist() == shared
    assert store.accounts.pins[shared].tolist() == [1, 1]
    for name in (1, 0, 2):
        store.release(name)
        store.check_integrity()
    assert store.num_free == 24 - 2


def test_warm_followers_hold_three_references_and_one_pin():
    """B20: the worked figures."""
    store = make_store()
    pages = fill(store, seq(1, 8))
    got = store.commit_group(store.prepare_group(group(store, 3, seq(1, 10), 12), 1), 1)
    assert [a.logical_pages[:2].tolist() for a in got] == [pages] * 3
    assert (store.accounts.refs[pages].tolist(), store.accounts.pins[pages].tolist()) == ([3, 3], [1, 1])
    assert store.stats().lookup_hits == 1
    store.check_integrity()


@pytest.mark.parametrize("end", ["abort", "commit"])
def test_a_fault_at_any_step_of_a_group_leaves_everything_as_it_was(end: str):
    """B19, A12: free list, references, rows, entries and leases; then the same call works."""
    seen = set()
    for at in range(1, 40):
        store = make_store(12)
        fill(store, seq(1, 8))
        fill(store, seq(101, 120))
        requests = group(store, 3, np.append(seq(1, 8), seq(50, 56)), 20)
        before, left = store.snapshot_counters(), [at]

        def fault(name: str, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise RuntimeError(name)

        store._fault = fault
        prepared = None
        try:
            prepared = store.prepare_group(requests, "me")
            before = store.snapshot_counters()
            getattr(store, f"{end}_group")(prepared, "me")
        except RuntimeError as error:
            seen.add(str(error))
            assert store.snapshot_counters() == before
            store._fault = None
            store.check_integrity()
            prepared = prepared or store.prepare_group(requests, "me")
            getattr(store, f"{end}_group")(prepared, "me")
            store.check_integrity()
            assert store.open_leases == 0
        else:
            break
    assert seen >= {"plan", "lease", "evict", "allocate", "follow", "prepared"}
    assert seen >= ({"row", "commit"} if end == "commit" else {"abort"})


def test_one_follows_only_an_equal_earlier_request():
    """B3: equality of tokens and namespace decides."""
    store = make_store()
    before = store.snapshot_counters()
    first = PrefixRequest(0, seq(1, 8), 8, NS)
    for bad in (
        [PrefixRequest(1, seq(1, 8), 8, NS, follows=0), first],
        [first, PrefixRequest(1, seq(2, 9), 9, NS, follows=0)],
        [first, PrefixRequest(1, seq(1, 8), 8, b"other", follows=0)],
        [first, PrefixRequest(1, seq(1, 8), 8, NS, reuse=False, follows=0)],
        [first, PrefixRequest(1, seq(1, 8), 8, NS, follows=7)],
    ):
        with pytest.raises(InvalidRequestError, match="follows"):
            store.prepare_group(bad, "me")
    assert store.snapshot_counters() == before


# ---- the engine


def samples(e: Engine, request: int) -> list[Any]:
    return e._requests[request].samples


def apart(kind: str, tokens: Any, params: SamplingParams, **config: Any) -> list[tuple[int, ...]]:
    """The samples as an engine without reuse gives them: each computed for itself."""
    e = engine(kind, on=False, **config)
    return [s.token_ids for s in e.generate(tokens, params)[0].samples]


@pytest.mark.parametrize(("kind", "length"), [("llama", 3), ("llama", 8), ("llama", 10), ("hybrid", 10)])
def test_samples_share_the_prompt_and_copy_its_tail(kind: str, length: int):
    """B17, B20, H25: cold, then warm: leading pages equal on host and device, tails apart, every sample as if alone."""
    tokens = prompt(length, seed=length)
    want = apart(kind, tokens, THREE)
    e = engine(kind)
    full = length // PAGE
    for warm in (False, True):
        before = e.stats().prefill
        request = e.submit(tokens, THREE)
        e.step()
        check(e)
        rows = samples(e, request)
        assert [r.state for r in rows] == [SequenceState.IN_DECODE] * 3
        host = [e.store.pages(r.id) for r in rows]
        assert all((h[:full] == host[0][:full]).all() for h in host)
        assert len({int(h[full]) for h in host}) == 3
        assert (e.store.accounts.refs[host[0][:full]] == 3).all()
        for account in e.runner.accounts:
            tables = [account.pages(r.row_index) for r in rows]
            assert all((t[:full] == tables[0][:full]).all() for t in tables)
            assert len({int(t[full]) for t in tables}) == 3
            assert (account.refs[tables[0][:full]] == 3).all()
        outputs = {o.request_id: o for _ in range(6) for o in e.step()}
        assert [s.token_ids for s in outputs[request].samples] == want
        after = e.stats().prefill
        computed = max(length - full * PAGE, 1) if warm else length
        assert after.prompt_tokens - before.prompt_tokens == length
        assert after.computed_tokens - before.computed_tokens == computed
        assert outputs[request].cached_tokens == length - computed
        assert after.hits + after.misses == 1 + warm
        check(e)
        if full:
            assert (e.store.accounts.pins[host[0][:full]] == 1).all()
    drained(e)


def test_the_first_tokens_come_from_the_same_logits():
    """B20: greedy samples are all the greedy continuation."""
    e = engine()
    tokens = prompt(10, seed=1)
    out = e.generate(tokens, SamplingParams(max_tokens=5, n=4, ignore_eos=True))[0]
    want = engine(on=False).generate(tokens, SamplingParams(max_tokens=5, ignore_eos=True))[0].token_ids
    assert [s.token_ids for s in out.samples] == [want] * 4
    drained(e)


@pytest.mark.parametrize("penalty", [{"repetition_penalty": 1.7}, {"presence_penalty": 2.0, "frequency_penalty": 0.7}])
def test_penalties_count_for_every_sample(penalty: dict[str, Any]):
    """H27b."""
    params = SamplingParams(max_tokens=8, n=3, temperature=0.7, seed=5, ignore_eos=True, **penalty)
    tokens = prompt(10, seed=1)
    e = engine()
    assert [s.token_ids for s in e.generate(tokens, params)[0].samples] == apart("llama", tokens, params)
    drained(e)


def test_a_group_is_admitted_whole_or_not_at_all():
    """B19: one page short, the group waits and holds nothing; then it runs."""
    e = engine(num_host_pages=11)
    blocker = e.submit(prompt(10, seed=9), SamplingParams(max_tokens=6, ignore_eos=True))  # 4 pages
    e.step()
    tokens = prompt(10, seed=1)
    before = e.store.snapshot_counters()
    request = e.submit(tokens, THREE)  # 5 + 3 + 3 pages of a pool of 11
    e.scheduler.admit()
    assert [r.state for r in samples(e, request)] == [SequenceState.QUEUEING] * 3
    assert e.store.snapshot_counters() == before
    outputs = {o.request_id: o for _ in range(12) for o in e.step()}
    assert [s.token_ids for s in outputs[request].samples] == apart("llama", tokens, THREE)
    assert blocker in outputs
    drained(e)


def test_more_samples_than_fit_run_in_groups_that_fit():
    """S1, H16: n above the rows, and n above the pages."""
    params = SamplingParams(max_tokens=4, temperature=1.0, seed=3, n=7, ignore_eos=True)
    tokens = prompt(10, seed=1)
    want = apart("llama", tokens, params)
    for num_host_pages in (64, 9):  # four rows a group, then three
        e = engine(num_host_pages=num_host_pages)
        out = e.generate(tokens, params)[0]
        assert [s.token_ids for s in out.samples] == want
        drained(e)


@pytest.mark.parametrize(
    ("rows", "pages", "sizes"), [(8, 64, [7]), (4, 64, [4, 3]), (8, 8, [3, 3, 1]), (8, 4, [1] * 7), (1, 64, [1] * 7)]
)
def test_groups_are_as_large_as_an_empty_engine_admits(rows: int, pages: int, sizes: list[int]):
    """B19: 10 tokens with room for 14 are 4 pages, and 2 more for each follower."""
    line = [
        Sequence(i, 0, prompt(10), THREE, NS, stream=i, capacity_tokens=14)  # 10 + 4
        for i in range(7)
    ]
    form_groups(line, PAGE, rows, pages)
    leaders = [s for s in line if s.leader is None]
    assert [len(members(s)) for s in leaders] == sizes
    assert [m.id for s in leaders for m in members(s)] == list(range(7))


@pytest.mark.parametrize("place", ["prefill", "copy_tails", "sample_again", "carry_out", "commit_group", "follow"])
def test_a_failing_group_goes_back_to_the_line_whole(place: str, monkeypatch: pytest.MonkeyPatch):
    """B19, A12: host and device as before once copies have landed, nothing published; the second try gives the same samples."""
    e = engine("hybrid")
    base = prompt(8, seed=4)
    e.generate(base, GREEDY)
    e.drop_device_pages()
    tokens = prompt(14, seed=1, start=base)
    want = apart("hybrid", tokens, THREE)
    before = [a.stats() for a in e.runner.accounts], e.store.stats()
    request = e.submit(tokens, THREE)

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("injected")

    def fault(name: str) -> None:
        if name == place:
            fails()

    targets: dict[str, tuple[Any, str]] = {
        "prefill": (e.runner, "prefill"),
        "copy_tails": (e.runner, "copy_tails"),
        "sample_again": (e.runner, "sample_again"),
        "carry_out": (e.runner.accounts[1], "carry_out"),
        "commit_group": (e.store, "commit_group"),
        "follow": (e.store, "_follow"),
    }
    with monkeypatch.context() as patch:
        patch.setattr(*targets[place], fails)
        with pytest.raises(RuntimeError, match="injected"):
            e.step()
    check(e)
    assert [r.state for r in e.scheduler.waiting] == [SequenceState.QUEUEING] * 3
    e.offloader.land()  # pages that had left already stay taken until their bytes have landed (A13)
    after = [a.stats() for a in e.runner.accounts], e.store.stats()
    for name in ("physical_pages", "logical_pages", "free_pages", "open_leases", "rows", "entries"):
        assert getattr(before[1], name) == getattr(after[1], name)
    assert [a.physical for a in before[0]] == [a.physical for a in after[0]]
    outputs = {o.request_id: o for _ in range(8) for o in e.step()}
    assert [s.token_ids for s in outputs[request].samples] == want
    drained(e)


def test_a_lost_device_sends_the_group_back(monkeypatch: pytest.MonkeyPatch):
    """A29: the pools go with the copy of the tails; everything is computed again."""
    e = engine()
    tokens = prompt(10, seed=1)
    request = e.submit(tokens, THREE)

    def takes_the_pools(*_: Any) -> Any:
        for leaf in jax.tree.leaves(e.runner.pools):
            leaf.delete()
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(e.programs, "copy_pages", takes_the_pools)
        with pytest.raises(RuntimeError, match="injected"):
            e.step()
    check(e)
    outputs = {o.request_id: o for _ in range(8) for o in e.step()}
    assert [s.token_ids for s in outputs[request].samples] == apart("llama", tokens, THREE)
    drained(e)


def test_chunked_groups_can_be_cancelled_anywhere():
    """B28, B21: in the line, between chunks, decoding; nothing is left."""
    for steps in range(5):
        e = engine(max_prefill_tokens=8, min_prefill_tokens=8)
        other = e.submit(prompt(6, seed=8), GREEDY)
        request = e.submit(prompt(22, seed=1), THREE)
        outputs: dict[int, Any] = {}
        for _ in range(steps):
            outputs.update((o.request_id, o) for o in e.step())
            check(e)
        e.cancel(request)
        check(e)
        for _ in range(6):
            outputs.update((o.request_id, o) for o in e.step())
            check(e)
        assert {s.finish_reason for s in outputs[request].samples} == {"cancelled"}
        assert outputs[other].token_ids == engine(on=False).generate(prompt(6, seed=8), GREEDY)[0].token_ids
        drained(e)


def test_a_sample_that_ends_at_once_leaves_the_others_what_they_share():
    """A13: the leader's pages outlive it; also max_tokens = 1."""
    tokens = prompt(10, seed=1)
    first = apart("llama", tokens, THREE)
    stop = SamplingParams(max_tokens=8, temperature=1.0, seed=3, n=3, ignore_eos=True, stop_token_ids=(first[0][0],))
    for params in (stop, SamplingParams(max_tokens=1, temperature=1.0, seed=3, n=3, ignore_eos=True)):
        e = engine()
        out = e.generate(tokens, params)[0]
        assert [s.token_ids for s in out.samples] == apart("llama", tokens, params)
        assert len(out.samples[0].token_ids) == 1
        assert len(index_of(e)) == 2
        drained(e)


def test_held_samples_come_back_with_their_own_tails():
    """B18, A29: hold copies each partial tail to the host, resume loads it."""
    e = engine()
    tokens = prompt(10, seed=1)
    request = e.submit(tokens, THREE)
    e.step()
    e.hold(request)
    check(e)
    assert [r.state for r in samples(e, request)] == [SequenceState.ON_HOLD] * 3
    assert e.generate(prompt(9, seed=5), GREEDY)
    e.resume(request)
    outputs = {o.request_id: o for _ in range(10) for o in e.step()}
    assert [s.token_ids for s in outputs[request].samples] == apart("llama", tokens, THREE)
    drained(e)


def test_generated_pages_of_every_sample_are_published():
    """B22: by option; each sample's own branch hangs below the shared prompt."""
    e = engine(publish_generated=True)
    tokens = prompt(10, seed=1)
    out = e.generate(tokens, THREE)[0]
    assert len(index_of(e)) == 2 + 3 * 2
    for sample in out.samples:
        follow_up = np.concatenate([tokens, sample.token_ids[:-1], [7]]).astype(np.int32)
        again = e.generate(follow_up, GREEDY)[0]
        assert again.cached_tokens == 16
        assert again.token_ids == engine(on=False).generate(follow_up, GREEDY)[0].token_ids
    drained(e)


def test_other_requests_with_the_same_prompt_share_no_half_filled_tail():
    """H25: A = [1..6] decodes; B = [1..6] and C = [1..6, 7] come in; and a request of two samples beside them."""
    e = engine()
    base = prompt(6, seed=1)
    long = SamplingParams(max_tokens=20, ignore_eos=True)
    two = SamplingParams(max_tokens=9, temperature=1.0, seed=4, n=2, ignore_eos=True)
    a = e.submit(base, long)
    e.step()
    b, c, d = e.submit(base, long), e.submit(np.append(base, 7), long), e.submit(base, two)
    outputs: dict[int, Any] = {}
    for _ in range(20):
        outputs.update((o.request_id, o) for o in e.step())
        check(e)
    for request, tokens in ((a, base), (b, base), (c, np.append(base, 7))):
        assert outputs[request].token_ids == engine(on=False).generate(tokens, long)[0].token_ids
    assert [s.token_ids for s in outputs[d].samples] == apart("llama", base, two)
    assert len({s.token_ids[0] for s in outputs[d].samples}) == 2
    drained(e)


def test_stages_without_shared_pages_compute_every_sample_for_itself():
    """A3: without M2 or M3 there is nothing to share; the samples are the same."""
    tokens = prompt(10, seed=1)
    want = apart("llama", tokens, THREE)
    choices: list[dict[str, Any]] = [
        {"suffix_prefill": False},
        {"decode_page_sharing": False},
        {"share_in_wave": False},
    ]
    for stages in choices:
        e = engine(**stages)
        out = e.generate(tokens, THREE)[0]
        assert [s.token_ids for s in out.samples] == want
        check(e)
        drained(e)
