"""A fault at every place where the engine holds something: nothing leaks, nothing wrong stays, the rest goes on (A12, A13)."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from engine_helpers import GREEDY, check, cold, drained, engine, index_of, model, prompt, run_all

from prefix_reuse import PrefixReuseError, SamplingParams, transfer
from prefix_reuse.errors import CapacityError, IntegrityError, InvalidRequestError
from prefix_reuse.outputs import find_stop
from prefix_reuse.programs import Programs
from prefix_reuse.sequence import SequenceState

ONE = SamplingParams(max_tokens=1, ignore_eos=True)
LONG = SamplingParams(max_tokens=30, ignore_eos=True)


def fails(*_: Any, **__: Any) -> Any:
    raise RuntimeError("injected")


@pytest.mark.parametrize("place", ["load", "carry_out", "tables", "read", "allocate"])
def test_a_fault_during_admission_gives_everything_back(place: str, monkeypatch: pytest.MonkeyPatch):
    """A12: host pages, device pages, rows and residency are as before; a retry gives the right tokens."""
    e = engine("hybrid")
    base = prompt(8, seed=1)
    e.generate(base, GREEDY)
    e.drop_device_pages()
    tokens = prompt(12, seed=2, start=base)
    want = engine("hybrid", on=False).generate(tokens, GREEDY)[0].token_ids
    before = e.store.stats(), [a.stats() for a in e.runner.accounts], [dict(a.resident) for a in e.runner.accounts]
    request = e.submit(tokens, GREEDY)
    targets: dict[str, tuple[Any, str]] = {
        "load": (e.runner, "load"),
        "carry_out": (e.runner.accounts[1], "carry_out"),
        "tables": (e, "_prepare_step"),
        "read": (e.scheduler, "_read_loads"),
        "allocate": (e.scheduler, "_take_host_pages"),
    }
    with monkeypatch.context() as patch:
        patch.setattr(*targets[place], fails)
        with pytest.raises(RuntimeError, match="injected"):
            e.step()
    check(e)
    after = e.store.stats(), [a.stats() for a in e.runner.accounts], [dict(a.resident) for a in e.runner.accounts]
    for name in ("logical_pages", "physical_pages", "free_pages"):
        assert getattr(before[0], name) == getattr(after[0], name)
    if place != "tables":  # there the pages were loaded properly and may stay resident
        assert before[1:] == after[1:]
        assert e.stats().decode.rollbacks == 1
    assert run_all(e)[request].token_ids == want
    drained(e)


@pytest.mark.parametrize("step", ["begin_copy", "finish_copy", "publish", "pin", "fail_copy"])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_fault_at_any_step_of_an_offload_loses_only_that(step: str, at: int, monkeypatch: pytest.MonkeyPatch):
    """A12, A13, B22: two rows at once, chunks and generated pages; the same tokens, the counts add up, nothing is held."""
    prompts = [prompt(13, seed=1), prompt(18, seed=2)]
    want = [o.token_ids for o in engine(on=False).generate(prompts, LONG)]
    e = engine(max_prefill_tokens=8, min_prefill_tokens=8, publish_generated=True)
    left = at

    def fault(name: str) -> None:
        nonlocal left
        left -= name == step
        if name == step and left == 0:
            raise RuntimeError("injected")

    e.store._fault = fault
    if step == "fail_copy":
        monkeypatch.setattr(e.runner, "offload", fails)
    ids = [e.submit(p, LONG) for p in prompts]
    outputs: dict[int, Any] = {}
    for _ in range(100):
        if not e.has_work:
            break
        with contextlib.suppress(RuntimeError):
            outputs.update((o.request_id, o) for o in e.step())
        check(e)
    assert left <= 0
    assert [outputs[i].token_ids for i in ids] == want
    if step in ("finish_copy", "publish", "pin"):  # tried again: nothing of it is missing
        assert len(index_of(e)) == (13 + 29) // 4 + (18 + 29) // 4
    drained(e)


def test_an_offload_that_cannot_start_only_costs_the_pages(monkeypatch: pytest.MonkeyPatch):
    """The row goes on, nothing of it is published, the reason is visible."""
    for n in (10, 8):
        e = engine()
        tokens = prompt(n, seed=n)
        want = engine(on=False).generate(tokens, GREEDY)[0].token_ids
        with monkeypatch.context() as patch:
            patch.setattr(e.runner, "offload", fails)
            out = e.generate(tokens, GREEDY)[0]
        assert (out.token_ids, out.computed_tokens, out.full_hit) == (want, n, False)
        assert len(index_of(e)) == 0
        assert e.stats().prefill.computed_tokens == n
        assert "injected" in e.stats().faults.last_error
        drained(e)


@pytest.mark.parametrize(
    ("failing", "lengths"),
    [
        (0, (22, 13)),
        (1, (13, 22)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((0, (13, 22)), (1, (22, 13)))),
    ],
)
def test_a_copy_that_fails_costs_the_rows_whose_pages_it_carried(
    lengths: tuple[int, int], failing: int, monkeypatch: pytest.MonkeyPatch
):
    """Two rows leave in one call: 3 + 5 pages in a bundle that both share, or in arrays of their own."""
    for size, hit in ((8, {0, 1}), (32, {failing})):
        monkeypatch.setattr(transfer, "SMALL_BUNDLE", size)
        e = engine(max_prefill_tokens=64)
        e.programs = e.runner.programs = Programs(model("llama"), e.config, jax.devices()[0])
        e.runner.transfer = e.programs.transfer
        prompts = [prompt(n, seed=n) for n in lengths]
        want = [o.token_ids for o in engine(on=False).generate(prompts, LONG)]
        ids = [e.submit(p, ONE) for p in prompts]
        e.step()
        (flight,) = e.offloader.pending
        assert [count for _, _, count in flight.rows] == [n // 4 for n in lengths]
        place = -1 if failing else 0
        part = flight.copy.payloads[place][0]
        assert part is not None
        part.bundle.array.delete()
        run_all(e)
        assert e.stats().faults.failed_offloads == sum(lengths[i] // 4 for i in hit)
        assert "deleted" in e.stats().faults.last_error
        for i, tokens in enumerate(prompts):
            assert index_of(e).peek(tokens, e.namespace()).num_pages == (0 if i in hit else lengths[i] // 4)
        assert len(ids) == 2
        assert [o.token_ids for o in e.generate(prompts, LONG)] == want  # what was lost is computed again
        for i, tokens in enumerate(prompts):
            assert index_of(e).peek(tokens, e.namespace()).num_pages == lengths[i] // 4
        drained(e)


def test_pages_that_left_together_land_for_the_rows_that_still_wait_for_them():
    """One row has gone back to the line meanwhile; what it started before is no copy of its second life."""
    prompts = [prompt(17, seed=1), prompt(18, seed=2)]
    want = [o.token_ids for o in engine(on=False).generate(prompts, LONG)]
    e = engine(max_prefill_tokens=64)
    ids = [e.submit(p, LONG) for p in prompts]
    e.step()
    gone, stays = e.scheduler.running
    for flight in e.offloader.pending:  # of the prefill, and of the decode call
        assert [row for row, _, _ in flight.rows] == [gone, stays]
    assert (gone.pending_copies, stays.pending_copies) == (2, 2)
    e.offloader.detach(gone)
    e.scheduler.evict(gone)
    e.offloader.land()
    assert (gone.pending_copies, stays.pending_copies) == (0, 0)
    assert (gone.published_pages, stays.published_pages) == (0, 4)
    check(e)
    outputs = run_all(e)
    assert [outputs[i].token_ids for i in ids] == want
    drained(e)


def test_the_host_knows_how_much_of_a_held_rows_tail_it_has():
    e = engine()
    request = e.submit(prompt(9, seed=1), LONG)
    e.step()
    e.hold(request)
    row = e.scheduler.running[0]
    assert row.committed_kv_tokens == 13
    assert e.store.accounts.filled[np.asarray(e.store.pages(row.id))[:4]].tolist() == [4, 4, 4, 1]
    e.resume(request)
    run_all(e)
    drained(e)


@pytest.mark.parametrize("place", ["begin_copy", "offload"])
def test_a_row_whose_copy_cannot_start_does_not_stop_the_others_of_its_turn(
    place: str, monkeypatch: pytest.MonkeyPatch
):
    e = engine(max_prefill_tokens=64)
    prompts = [prompt(13, seed=1), prompt(17, seed=2), prompt(9, seed=3)]
    for p in prompts:
        e.submit(p, ONE)
    owner = {"begin_copy": e.store, "offload": e.runner}[place]
    real, bad = getattr(owner, place), -1

    def picky(*args: Any) -> Any:
        if bad in np.asarray(args[0 if place == "begin_copy" else 1]).tolist():
            raise RuntimeError("injected")
        return real(*args)

    monkeypatch.setattr(owner, place, picky)
    e.scheduler.admit()
    bad = int(e.store.pages(e.scheduler.running[1].id)[2])
    run_all(e)
    assert e.stats().faults.failed_offloads == 4
    assert e.stats().prefill.pages_offloaded == 3 + 2
    assert [index_of(e).peek(p, e.namespace()).num_pages for p in prompts] == [3, 0, 2]
    drained(e)


def test_the_rows_of_a_turn_leave_in_one_call_and_a_turn_without_a_full_page_in_none(monkeypatch: pytest.MonkeyPatch):
    e = engine("hybrid", max_prefill_tokens=64)
    calls: list[int] = []
    real = e.runner.transfer.offload

    def counted(*args: Any) -> Any:
        calls.append(len(args[2]))
        return real(*args)

    monkeypatch.setattr(e.runner.transfer, "offload", counted)
    for i in range(4):
        e.submit(prompt(8 + i, seed=i), SamplingParams(max_tokens=9, ignore_eos=True))
    e.step()  # prompts of 2 full pages each, and four tokens more fill a third; the rest of an answer stays where it is
    assert calls == [8, 4]
    calls.clear()
    run_all(e)
    assert calls == []
    drained(e)


def test_a_lost_device_spares_rows_that_had_just_completed(monkeypatch: pytest.MonkeyPatch):
    """The decode of A fails and takes the pools, in the step in which B completed in prefill."""
    e = engine()
    a = e.submit(prompt(6, seed=1), LONG)
    e.step()
    b = e.submit(prompt(9, seed=2), ONE)

    def takes_the_pools(params: Any, pools: Any, batch: Any) -> Any:
        for leaf in jax.tree.leaves(pools):
            leaf.delete()
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(e.programs, "decode", takes_the_pools)
        with pytest.raises(RuntimeError, match="injected"):
            e.step()
    check(e)
    outputs = run_all(e)
    assert outputs[a].token_ids == engine(on=False).generate(prompt(6, seed=1), LONG)[0].token_ids
    assert outputs[b].token_ids == engine(on=False).generate(prompt(9, seed=2), ONE)[0].token_ids
    drained(e)


def test_a_row_whose_prefill_always_fails_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch):
    e = engine()
    good, bad = prompt(9, seed=1), prompt(5, seed=2)
    want = engine(on=False).generate(good, GREEDY)[0].token_ids
    real = e.programs.prefill

    def picky(params: Any, pools: Any, batch: Any) -> Any:
        if any(np.array_equal(np.asarray(batch.tokens)[i : i + 5], bad) for i in range(20)):
            raise RuntimeError("injected")
        return real(params, pools, batch)

    monkeypatch.setattr(e.programs, "prefill", picky)
    failing, fine = e.submit(bad, GREEDY), e.submit(good, GREEDY)
    for _ in range(6):
        with contextlib.suppress(RuntimeError):
            e.step()
    assert not e._requests.keys() - {failing}  # the good one has ended
    e.cancel(failing)
    assert run_all(e)[fine].token_ids == want
    assert e.stats().requests.prefill_failures > 1
    drained(e)


@pytest.mark.parametrize("at", [1, 3, 5])
def test_a_tokenizer_that_fails_costs_no_row_a_token(at: int):
    """At the first token, and at a boundary where other rows go on and end; stop strings are found all the same."""
    prompts = [prompt(9, seed=s) for s in range(3)]
    free = [o.token_ids for o in engine(on=False).generate(prompts, LONG)]
    e = engine(max_prefill_tokens=64)
    real = e.intake.tokenizer()
    stop = real.decode(free[0][5:8])
    end = find_stop(real, free[0], 0, (stop,))
    calls: list[None] = []

    class Flaky:
        def decode(self, token_ids: Any) -> str:
            calls.append(None)
            if len(calls) == at:
                raise RuntimeError("injected")
            return real.decode(token_ids)

    e.intake.tokenizer = Flaky  # type: ignore[method-assign, assignment]
    ends = free[2].index(free[2][3]) + 1
    params = [
        SamplingParams(max_tokens=30, ignore_eos=True, stop=(stop,)),
        ONE if at == 1 else LONG,
        SamplingParams(max_tokens=30, ignore_eos=True, stop_token_ids=(free[2][3],)),
    ]
    ids = [e.submit(p, some) for p, some in zip(prompts, params, strict=True)]
    outputs: dict[int, Any] = {}
    while len(calls) < at:
        with contextlib.suppress(RuntimeError):
            outputs.update((o.request_id, o) for o in e.step())
        check(e)
    outputs |= run_all(e)
    lengths = [end, 1 if at == 1 else 30, ends]
    assert [outputs[i].token_ids for i in ids] == [t[:n] for t, n in zip(free, lengths, strict=True)]
    assert [outputs[i].finish_reason for i in ids] == ["stop", "length", "stop"]
    drained(e)


def test_bad_stop_ids_are_refused_before_they_reach_the_batch():
    e = engine()
    with pytest.raises(InvalidRequestError, match="stop ids"):
        e.submit(prompt(4), SamplingParams(stop_token_ids=(2**31,)))
    with pytest.raises(InvalidRequestError, match="stop ids"):
        e.submit(prompt(4), SamplingParams(stop_token_ids=(128,)))
    drained(e)


def test_nobody_waits_for_a_held_row():
    """X1: a held row publishes nothing until it is resumed; its continuation does not wait for that."""
    e = engine(publish_generated=True)
    request = e.submit(prompt(8, seed=1), LONG)
    for _ in range(2):
        e.step()
    e.hold(request)
    row = e._requests[request].samples[0]
    tokens = np.append(row.tokens, 5)
    assert e.generate(tokens, ONE)[0].token_ids == engine(on=False).generate(tokens, ONE)[0].token_ids
    e.resume(request)
    run_all(e)
    drained(e)


def test_hold_after_resume_keeps_the_row_out():
    e = engine()
    request = e.submit(prompt(8, seed=1), LONG)
    e.step()
    e.hold(request)
    e.resume(request)
    e.hold(request)
    e.step()
    assert e._requests[request].samples[0].state is SequenceState.ON_HOLD
    with pytest.raises(PrefixReuseError, match="on hold"):
        e._step_for(set())
    e.resume(request)
    run_all(e)
    drained(e)


def test_a_held_row_that_lost_a_shared_page_starts_over(monkeypatch: pytest.MonkeyPatch):
    """Two rows share a host page; its entry is dropped and its bytes are gone: hold evicts instead of rewriting it."""
    e = engine(decode_page_sharing=False)
    base = prompt(8, seed=1)
    e.generate(base, GREEDY)
    rows = [prompt(10, seed=2 + i, start=base) for i in range(2)]
    want = [o.token_ids for o in engine(on=False).generate(rows, LONG)]
    ids = [e.submit(r, LONG) for r in rows]
    e.step()
    page = int(e.store.pages(e._requests[ids[0]].samples[0].id)[0])
    e.store.drop_entry(page)
    e.hold(ids[0])
    assert e._requests[ids[0]].samples[0].state is SequenceState.EVICTED
    outputs = run_all(e)
    assert [outputs[i].token_ids for i in ids] == want
    drained(e)


def test_an_interrupt_while_copies_land_loses_no_page(monkeypatch: pytest.MonkeyPatch):
    e = engine()
    e.submit(prompt(9, seed=1), ONE)
    e.step()

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(e.offloader.pending[0][1]), "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            e.step()
    run_all(e)
    assert len(index_of(e)) == 2
    drained(e)


def test_streams_leave_nothing_behind_whoever_steps():
    e = engine()
    tokens = prompt(7, seed=2)
    params = SamplingParams(max_tokens=14, ignore_eos=True)
    unread = e.stream(tokens, params)
    unread.close()
    assert not run_all(e) or e.stats().requests.cancelled == 1
    list(e.stream(tokens, params))
    assert not e.has_work
    stream = e.stream(tokens, params)
    first = next(stream)
    run_all(e)  # somebody else steps to the end
    rest = list(stream)
    want = e.generate(tokens, params)[0].token_ids
    assert sum((ev.token_ids for ev in [first, *rest]), ()) == want
    with e.stream(tokens, params) as stream:
        next(stream)
    run_all(e)
    drained(e)


def test_cold_scoring_touches_no_host_page_and_may_fill_the_context():
    e = engine(num_host_pages=8, max_context=32)
    for seed in (1, 2):
        e.generate(prompt(12, seed=seed), ONE)
    entries, stats = len(index_of(e)), e.store.stats()
    tokens = prompt(32, seed=3)
    np.testing.assert_allclose(e.score(tokens), cold(tokens), atol=1e-4)
    assert len(index_of(e)) == entries
    assert e.store.stats() == stats
    with pytest.raises(CapacityError):
        e.score(prompt(33, seed=3))
    drained(e)


def test_a_row_that_comes_back_is_no_cache_hit_anywhere():
    """H24: lookups of an evicted row's own pages join no hit counter, host or engine."""
    e = engine()
    request = e.submit(prompt(12, seed=1), LONG)
    for _ in range(2):
        e.step()
    row = e._requests[request].samples[0]
    e.offloader.land()
    e.scheduler.evict(row)
    want = engine(on=False).generate(prompt(12, seed=1), LONG)[0].token_ids
    out = run_all(e)[request]
    assert out.token_ids == want
    assert out.cached_tokens == 0
    stats = e.stats()
    assert (stats.prefill.hits, stats.host.lookup_hits) == (0, 0)
    assert stats.prefill.resumed_tokens > 0
    drained(e)


def test_a_request_cancelled_in_the_queue_computed_nothing():
    e = engine()
    request = e.submit(prompt(9), GREEDY)
    e.cancel(request)
    assert run_all(e)[request].computed_tokens == 0
    drained(e)


def test_host_rows_follow_the_context():
    """A9: the context length of a row counts the tokens whose KV is written."""
    e = engine()
    request = e.submit(prompt(9), LONG)
    e.step()
    row = e._requests[request].samples[0]
    assert e.store.row(row.id).context_length == row.committed_kv_tokens == row.num_tokens - 1
    e.cancel(request)
    run_all(e)
    drained(e)


def test_warmup_is_refused_while_rows_run():
    e = engine()
    request = e.submit(prompt(9), LONG)
    e.step()
    with pytest.raises(PrefixReuseError, match="before requests run"):
        e.warmup()
    e.cancel(request)
    run_all(e)
    drained(e)


def test_an_empty_batch_gives_no_outputs():
    assert engine().generate([]) == []


def test_memory_that_cannot_be_freed_is_counted_and_costs_no_turn(monkeypatch: pytest.MonkeyPatch):
    """A bundle with few pages left, and no room for their copies: the pages stay readable, a later turn frees it."""
    monkeypatch.setattr(transfer, "SMALL_BUNDLE", 8)
    e = engine(max_prefill_tokens=64, poison=False)
    tokens = prompt(33, seed=1)
    want = e.generate(tokens, GREEDY)[0].token_ids
    bundles = e.runner.transfer.bundles
    assert e.evict_host_entries(5) == 5
    assert len(bundles.sparse) == 1
    bundle = bundles.sparse[0]()
    with monkeypatch.context() as patch:
        patch.setattr(bundles, "alone", fails)
        assert e.generate(tokens[:5], GREEDY)[0].cached_tokens == 4
    faults = e.stats().faults
    assert faults.failed_dissolves >= 1
    assert "injected" in faults.last_error
    assert "failed_dissolves" in str(e.stats())
    assert bundle is not None
    assert bundle.live == 3
    counted = faults.failed_dissolves
    e.drop_device_pages()
    out = e.generate(tokens, GREEDY)[0]
    assert (out.token_ids, out.cached_tokens) == (want, 12)
    assert bundle.live == 0
    assert e.stats().faults.failed_dissolves == counted
    drained(e)


@pytest.mark.parametrize("fault", ["refused", "raised"])
@pytest.mark.parametrize("kind", ["llama", "hybrid"])
def test_pages_of_a_prefill_that_went_wrong_are_never_published(kind: str, fault: str, monkeypatch: pytest.MonkeyPatch):
    """A13, A27: their copies to the host are under way when it is seen; nobody hits them, and the request starts over."""
    e = engine(kind)
    tokens = prompt(13, seed=4)
    want = engine(kind, on=False).generate(tokens, GREEDY)[0].token_ids
    request = e.submit(tokens, GREEDY)
    real, copies = e.programs.prefill, []

    def wrong(*args: Any) -> Any:
        outputs, pools = real(*args)
        pools = tuple(pool.replace(kv_pages=pool.kv_pages * 0 + 7) for pool in pools)
        return outputs.replace(refused=jax.numpy.int32(3)), pools

    def fetched(arrays: Any) -> Any:
        if copies:  # the pages are on their way
            raise RuntimeError("injected")
        return jax_get(arrays)

    jax_get, dispatch = jax.device_get, e.offloader._dispatch
    with monkeypatch.context() as patch:
        patch.setattr(e.offloader, "_dispatch", lambda due, pages: copies.append(due) or dispatch(due, pages))
        patch.setattr(e.programs, "prefill", wrong)
        if fault == "raised":
            patch.setattr(jax, "device_get", fetched)
        with pytest.raises(RuntimeError if fault == "raised" else IntegrityError, match=r"injected|3 K/V writes"):
            e.step()
    assert copies
    assert [row.pending_copies for row in e.scheduler.waiting] == [0]  # those copies no longer concern it
    check(e)
    assert e.store.stats().entries == 0
    done = run_all(e)[request]
    assert (done.token_ids, done.cached_tokens) == (want, 0)
    assert e.stats().requests.prefill_failures == 1
    again = e.generate(tokens, GREEDY)[0]
    assert (again.token_ids, again.cached_tokens) == (want, 12)
    drained(e)


@pytest.mark.parametrize("ends", ["alone", "together", "cancelled"])
def test_a_tokenizer_that_fails_at_the_end_loses_no_tokens_and_leaves_no_request(ends: str):
    """The error is the turn's; the output has its tokens and no text; nothing stays listed or allocated."""
    e = engine()
    real, broken = e.model.tokenizer, True  # type: ignore[attr-defined]

    class Failing:
        def decode(self, token_ids: Any) -> str:
            if broken:
                raise RuntimeError("injected")
            return real.decode(token_ids)

    e.model = dataclasses.replace(e.model, tokenizer=Failing())  # type: ignore[type-var]
    prompts = [prompt(9, seed=s) for s in range(2 if ends == "together" else 1)]
    want = [o.token_ids for o in engine(on=False).generate(prompts, LONG)]
    ids = [e.submit(some, LONG) for some in prompts]
    outputs: dict[int, Any] = {}
    errors: list[str] = []
    while e.has_work and not errors:
        try:
            outputs.update((o.request_id, o) for o in e.step())
            if ends == "cancelled":
                e.cancel(ids[0])
        except RuntimeError as error:
            errors.append(str(error))
    outputs |= run_all(e)
    assert errors == ["injected"]
    assert not e._requests
    if ends == "cancelled":
        assert outputs[ids[0]].token_ids == want[0][: len(outputs[ids[0]].token_ids)]
        assert e.stats().requests.cancelled == 1
    else:
        assert [outputs[i].token_ids for i in ids] == want
    assert {outputs[i].text for i in ids} == {""}
    drained(e)
    broken = False
    assert e.generate(prompts[0], LONG)[0].text == real.decode(want[0])


@pytest.mark.parametrize("place", ["fetch", "copy", "logits"])
@pytest.mark.parametrize("kind", ["llama", "hybrid"])
def test_a_prefill_that_is_cut_after_it_was_started_starts_over(kind: str, place: str, monkeypatch: pytest.MonkeyPatch):
    """Ctrl-C while the host waits for it, or logits that find no memory: no row is left behind as if it were computed."""
    e = engine(kind, max_prefill_tokens=64)
    tokens, scored = [prompt(n, seed=n) for n in (13, 21)], prompt(9, seed=3)
    want = [o.token_ids for o in engine(kind, on=False).generate(tokens, GREEDY)]
    e.generate(prompt(4, seed=8), GREEDY)
    entries = e.store.stats().entries
    requests = [e.submit(some, GREEDY) for some in tokens]

    def cut(*_: Any) -> Any:
        raise RuntimeError("injected") if place == "logits" else KeyboardInterrupt

    targets: dict[str, tuple[Any, str]] = {
        "fetch": (jax, "device_get"),
        "copy": (e.runner, "offload"),
        "logits": (e.runner, "unembed"),
    }
    with monkeypatch.context() as patch:
        patch.setattr(*targets[place], cut)
        with pytest.raises(RuntimeError if place == "logits" else KeyboardInterrupt):
            e.score(scored)  # a turn of all three
    check(e)
    assert e.store.stats().entries == entries
    done = run_all(e)
    assert [done[request].token_ids for request in requests] == want
    np.testing.assert_allclose(e.score(scored), cold(scored, kind), rtol=1e-4, atol=1e-4)
    drained(e)
