"""Bad input, faults, cancellation, capacity, samples, streams and compilations: A12, A13, A29, B22, B28; H05-H36."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from engine_helpers import GREEDY, check, cold, drained, engine, index_of, model, prompt

from models.testing import toy_tokenizer
from prefix_reuse import (
    Engine,
    EngineConfig,
    PrefixReuseError,
    SamplingParams,
    UnsupportedAttentionError,
    device_pages,
    transfer,
)
from prefix_reuse.errors import (
    CapacityError,
    ConfigError,
    InvalidRequestError,
    StateTransitionError,
    TransferError,
    UnknownRequestError,
)
from prefix_reuse.outputs import find_stop
from prefix_reuse.sequence import TRANSITIONS, Sequence, SequenceState
from prefix_reuse.transfer import PageTransfer, PendingCopy

ONE = SamplingParams(max_tokens=1, ignore_eos=True)


# ---- bad input


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "empty"),
        ("", "empty"),
        ([5, 128], "128 is outside"),
        ([5, -1], "-1 is outside"),
        ([1.5, 2.0], "integers"),
        ([[1, 2], [3, 4]], "flat"),
        ([[1, 2], [3]], "flat"),
    ],
)
def test_bad_prompts_are_refused_and_nothing_is_allocated(bad: Any, message: str):
    e = engine()
    good = e.submit(prompt(6), GREEDY)
    with pytest.raises(InvalidRequestError, match=message):
        e.submit(bad, GREEDY)
    outputs = {}
    while e.has_work:
        outputs.update((o.request_id, o) for o in e.step())
    assert outputs[good].token_ids == engine(on=False).generate(prompt(6), GREEDY)[0].token_ids
    assert e.stats().requests.refused == 1
    drained(e)


def test_one_bad_prompt_of_generate_raises_before_anything_runs():
    e = engine()
    with pytest.raises(InvalidRequestError, match="empty"):
        e.generate([[5, 6], []], GREEDY)
    assert not e.has_work
    drained(e)


def test_prompts_over_the_context_or_the_pool_are_refused_at_submit():
    """S8, H16c."""
    e = engine(max_context=64, num_device_pages=8)
    with pytest.raises(CapacityError, match="context of 64"):
        e.submit(prompt(64))
    with pytest.raises(CapacityError, match="pools of 32"):
        e.submit(prompt(32))
    assert e.generate(prompt(31), ONE)[0].finish_reason == "length"
    drained(e)


@pytest.mark.parametrize(
    "bad",
    [
        {"page_size": 3},
        {"page_size": 0},
        {"num_device_pages": 0},
        {"num_host_pages": -1},
        {"max_rows": 0},
        {"max_prefill_tokens": 48},
        {"page_size": 64, "max_prefill_tokens": 32},
        {"decode_steps": 0},
        {"max_context": 0},
        {"attention": "pallas"},
    ],
)
def test_values_that_cannot_work_are_configuration_errors(bad: dict[str, Any]):
    with pytest.raises(ConfigError, match=next(reversed(bad))):
        EngineConfig(**bad)


def test_a_name_in_the_place_of_a_model_is_told_how_it_is_loaded():
    for name in ("smollm2", Path("weights.gguf")):
        with pytest.raises(ConfigError, match="from_checkpoint"):
            Engine(name, EngineConfig())  # type: ignore[arg-type]


def test_pools_too_small_for_one_row_are_a_configuration_error():
    with pytest.raises(ConfigError, match="hold no prompt"):
        engine(page_size=1, num_device_pages=1)


@pytest.mark.parametrize(
    "bad",
    [
        {"max_tokens": 0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"repetition_penalty": 0.0},
        {"n": 0},
        {"stop": ("",)},
        {"seed": -1},
        {"presence_penalty": float("inf")},
        {"presence_penalty": 1e39},
        {"top_k": 2**31},
        {"temperature": 1e-40},
    ],
)
def test_sampling_values_out_of_range_are_refused(bad: dict[str, Any]):
    with pytest.raises(InvalidRequestError):
        SamplingParams(**bad)


def test_latent_attention_is_refused_before_any_matching():
    """A5."""

    class Latent:
        name = "deepseek"
        attention_kind = "mla"

    with pytest.raises(UnsupportedAttentionError, match="MLA"):
        Engine(Latent())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="kv_groups"):
        Engine(object())  # type: ignore[arg-type]


def test_unknown_requests_raise_the_package_error():
    e = engine()
    for call in (e.cancel, e.hold, e.resume):
        with pytest.raises(UnknownRequestError) as caught:
            call(17)
        assert "17" in str(caught.value)
        assert str(caught.value)[0] not in "'\""


def test_only_listed_transitions_are_allowed():
    """A29 and the table of section S."""
    for start in SequenceState:
        for end in SequenceState:
            s = Sequence(0, 0, prompt(3), GREEDY, b"")
            s.state = start
            if end in TRANSITIONS[start]:
                s.move_to(end)
            else:
                with pytest.raises(StateTransitionError):
                    s.move_to(end)


# ---- faults


def test_a_failed_forward_leaves_no_entry_and_a_retry_works(monkeypatch: pytest.MonkeyPatch):
    """H15, A12: the exception is the caller's, rows go back to the queue, references are as before."""
    e = engine()
    base = prompt(8, seed=1)
    e.generate(base, GREEDY)
    refs = e.store.stats()
    request = e.submit(prompt(12, seed=2, start=base), GREEDY)
    real = e.runner.programs.prefill

    def failing(*_: Any) -> Any:
        raise RuntimeError("injected")

    monkeypatch.setattr(e.runner.programs, "prefill", failing)
    with pytest.raises(RuntimeError, match="injected"):
        e.step()
    check(e)
    after = e.store.stats()
    assert (after.logical_pages, after.physical_pages, after.free_pages) == (
        refs.logical_pages,
        refs.physical_pages,
        refs.free_pages,
    )
    assert e.scheduler.waiting[0].state is SequenceState.QUEUEING
    monkeypatch.setattr(e.runner.programs, "prefill", real)
    outputs = {}
    while e.has_work:
        outputs.update((o.request_id, o) for o in e.step())
    alone = engine(on=False).generate(prompt(12, seed=2, start=base), GREEDY)[0]
    assert outputs[request].token_ids == alone.token_ids
    assert e.stats().requests.prefill_failures == 1
    drained(e)


def test_a_step_that_fails_after_taking_the_pools_loses_no_request(monkeypatch: pytest.MonkeyPatch):
    """The donated pools are gone: running rows are evicted and recomputed, and the tokens stay the same (S4)."""
    e = engine()
    tokens = [prompt(9, seed=1), prompt(6, seed=2)]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    expected = [o.token_ids for o in engine(on=False).generate(tokens, params)]
    ids = [e.submit(t, params) for t in tokens]
    e.step()

    def failing(params: Any, pools: Any, batch: Any) -> Any:
        for leaf in jax.tree.leaves(pools):
            leaf.delete()
        raise RuntimeError("injected")

    monkeypatch.setattr(e.runner.programs, "decode", failing)
    with pytest.raises(RuntimeError, match="injected"):
        e.step()
    monkeypatch.undo()
    check(e)
    assert {r.state for r in e.scheduler.waiting} == {SequenceState.EVICTED}
    outputs = {}
    while e.has_work:
        outputs.update((o.request_id, o) for o in e.step())
    assert [outputs[i].token_ids for i in ids] == expected
    stats = e.stats()
    assert stats.faults.device_resets == 1
    assert stats.requests.reentries == 2
    assert (stats.prefill.prompt_tokens, stats.prefill.hits) == (15, 0)  # H24: a resume is no hit
    drained(e)


@pytest.mark.parametrize("fault", ["raises", "short", "missing"])
def test_a_page_that_cannot_be_read_is_dropped_and_recomputed(fault: str, monkeypatch: pytest.MonkeyPatch):
    """H31: fall back to hit 1, both requests as cold, the entry and what hangs below it leave the index, counted."""
    e = engine()
    base = prompt(12, seed=1)
    e.generate(base, GREEDY)
    e.drop_device_pages()
    pages = index_of(e).lookup(base, e.namespace()).page_ids.tolist()
    real = e.store.read

    def read(page: int) -> Any:
        payload = real(page)
        if page != pages[1]:
            return payload
        if fault == "raises":
            raise OSError("disk on fire")
        return tuple(np.asarray(a)[:1] for a in payload) if fault == "short" else None

    monkeypatch.setattr(e.store, "read", read)
    prompts = [prompt(14, seed=5 + i, start=base) for i in range(2)]
    outs = e.generate(prompts, GREEDY)
    monkeypatch.undo()
    assert [o.token_ids for o in outs] == [o.token_ids for o in engine(on=False).generate(prompts, GREEDY)]
    assert outs[0].cached_tokens == 4
    assert e.stats().faults.failed_loads == 1
    assert e.generate(prompts[0], ONE)[0].cached_tokens == 12
    drained(e)


class SlowCopies(PageTransfer):
    """Bytes reach the host late, or never."""

    fail = False

    def offload(self, *pages: Any) -> PendingCopy:
        copy = super().offload(*pages)
        outer = self

        class Late(PendingCopy):
            def wait(self) -> None:
                time.sleep(0.05)
                if outer.fail:
                    raise TransferError("injected")
                super().wait()

        return Late(copy.host_pages, copy.payloads, copy.arrays)


def test_pages_are_matchable_only_after_their_bytes_landed():
    """H29: host bytes = device bytes, though the pool was donated to the next step while the copy was under way."""
    e = engine(share_in_wave=False)
    e.runner.transfer = SlowCopies(e.runner.device, e.programs.counter)
    base = prompt(12, seed=1)
    e.submit(base, ONE)
    e.step()
    assert len(index_of(e)) == 0
    device = np.asarray(e.runner.pools[0].kv_pages)[:, e.runner.accounts[0].pages(0)[:3]]
    e.submit(prompt(13, seed=2, start=base), GREEDY)
    e.step()
    assert len(index_of(e)) == 3
    pages = index_of(e).lookup(base, e.namespace()).page_ids.tolist()
    for i, page in enumerate(pages):
        assert np.array_equal(np.asarray(e.store.read(page)[0]), device[:, i])
    while e.has_work:
        e.step()
    drained(e)


class UnreadyCopies(PageTransfer):
    """Copies that are under way until somebody waits for them."""

    waits = 0

    def offload(self, *pages: Any) -> PendingCopy:
        copy = super().offload(*pages)
        outer = self

        class UnderWay(PendingCopy):
            @property
            def ready(self) -> bool:
                return False

            def wait(self) -> None:
                outer.waits += 1
                super().wait()

        return UnderWay(copy.host_pages, copy.payloads, copy.arrays)


def test_rows_decode_while_copies_are_under_way_and_nobody_needs_them():
    e = engine()
    e.copies_in_background = True
    transfer = e.runner.transfer = UnreadyCopies(e.runner.device, e.programs.counter)
    base = prompt(12, seed=1)
    first = e.submit(base, SamplingParams(max_tokens=30, ignore_eos=True))
    for _ in range(3):
        e.step()
    assert e.stats().decode.tokens > 0
    assert e.offloader.pending
    assert transfer.waits == 0
    assert len(index_of(e)) == 0
    second = e.submit(
        prompt(14, seed=2, start=base), GREEDY
    )  # it can be let in, and hit: now the copies are waited for
    e.step()
    assert transfer.waits > 0
    outputs: dict[int, Any] = {}
    while e.has_work:
        outputs.update((o.request_id, o) for o in e.step())
        check(e)
    assert outputs[second].cached_tokens == 12
    off = engine(on=False)
    assert outputs[first].token_ids == off.generate(base, SamplingParams(max_tokens=30, ignore_eos=True))[0].token_ids
    assert outputs[second].token_ids == off.generate(prompt(14, seed=2, start=base), GREEDY)[0].token_ids
    drained(e)


def test_a_failed_offload_publishes_nothing_and_the_row_goes_on():
    e = engine()
    transfer = SlowCopies(e.runner.device, e.programs.counter)
    transfer.fail = True
    e.runner.transfer = transfer
    tokens = prompt(12, seed=1)
    out = e.generate(tokens, GREEDY)[0]
    assert out.token_ids == engine(on=False).generate(tokens, GREEDY)[0].token_ids
    assert e.stats().faults.failed_offloads >= 3
    assert len(index_of(e)) == 0
    transfer.fail = False
    assert e.generate(tokens, GREEDY)[0].cached_tokens == 0
    assert e.generate(tokens, GREEDY)[0].cached_tokens == 11
    drained(e)


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy at an address at which JAX takes an array for its own on a CPU, and reads it when its turn has come."""
    raw = np.zeros(array.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    out = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    out[:] = array
    return out


def test_page_tables_may_be_overwritten_as_soon_as_they_were_given_to_the_device():
    """H30: the step before is still running when the account's arrays are changed for the next one."""
    e = engine()
    account, pool = e.runner.accounts[0], e.runner.pools[0]
    account.page_table, account.shared_pages = aligned(account.page_table), aligned(account.shared_pages)
    account.page_table[0, :3], account.shared_pages[0] = [5, 6, 7], 2
    context_lens = e.runner.context_lens = aligned(np.array([11, 0, 0, 0], np.int32))
    want = account.page_table.copy()

    @jax.jit
    def busy(refcounts: jax.Array, matrix: jax.Array) -> jax.Array:
        matrix = jax.lax.fori_loop(0, 40, lambda _, m: jax.numpy.tanh(m @ m), matrix)
        return refcounts + (matrix[0, 0] > 2)

    matrix = jax.numpy.full((700, 700), 0.01)
    jax.block_until_ready(busy(pool.refcounts, matrix))
    e.runner.sync_tables()  # compiles
    for _ in range(2):
        pool = e.runner.pools[0]
        e.runner.pools = (pool.replace(refcounts=busy(pool.refcounts, matrix)),)
        account.dirty = True
        e.runner.sync_tables()
        account.page_table[:], account.shared_pages[:], context_lens[:] = 0, 9, 99
        pool = e.runner.pools[0]
        assert np.array_equal(np.asarray(pool.page_table), want)
        assert np.asarray(pool.context_lens).tolist() == [11, 0, 0, 0]
        assert np.asarray(pool.shared_pages).tolist() == [2, 0, 0, 0]
        account.page_table[:], account.shared_pages[:], context_lens[:] = want, [2, 0, 0, 0], [11, 0, 0, 0]


def test_tables_of_all_groups_go_to_the_device_in_one_call_that_takes_no_pages():
    """A call that fails loses nothing, and what comes out is committed and owned by one group each, fit for donation."""
    e = engine("hybrid")
    before = e.runner.pools
    first, second = e.runner.accounts
    first.page_table[0, :2], second.page_table[1, 1:4], second.shared_pages[1] = [5, 6], [7, 8, 9], 2
    first.dirty = True
    calls = []
    real = e.programs._tables
    e.programs._tables = lambda *args: calls.append(args) or real(*args)  # type: ignore[assignment]
    try:
        e.runner.context_lens[:] = [7, 15, 0, 0]
        e.runner.sync_tables()
        e.runner.context_lens[:] = 0
        e.runner.sync_tables()  # nothing has changed
    finally:
        e.programs._tables = real
    assert len(calls) == 1
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(before))
    for old, new, account in zip(before, e.runner.pools, e.runner.accounts, strict=True):
        assert new.kv_pages is old.kv_pages
        want = device_pages.rebuild(old, account.page_table, account.shared_pages, np.array([7, 15, 0, 0], np.int32))
        for got, expected in zip(jax.tree.leaves(new), jax.tree.leaves(want), strict=True):
            assert (got.dtype, got.committed, got.sharding) == (expected.dtype, True, old.kv_pages.sharding)
            assert np.array_equal(got, expected, equal_nan=True)
    leaves = jax.tree.leaves(e.runner.pools)
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


# ---- cancellation and capacity


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_cancel_gives_back_exactly_what_the_request_holds(steps: int):
    """B28, H28: queued, just prefilled, decoding; the neighbour is untouched; one terminal record."""
    e = engine()
    base = prompt(8, seed=1)
    e.generate(base, GREEDY)
    neighbour = e.submit(prompt(9, seed=2), SamplingParams(max_tokens=20, ignore_eos=True))
    victim = e.submit(prompt(12, seed=3, start=base), SamplingParams(max_tokens=50, ignore_eos=True))
    outputs: list[Any] = []
    for _ in range(steps):
        outputs += e.step()
    e.cancel(victim)
    check(e)
    while e.has_work:
        outputs += e.step()
        check(e)
    ended = [o for o in outputs if o.request_id == victim]
    assert [o.finish_reason for o in ended] == ["cancelled"]
    alone = engine(on=False).generate(prompt(9, seed=2), SamplingParams(max_tokens=20, ignore_eos=True))[0]
    assert next(o for o in outputs if o.request_id == neighbour).token_ids == alone.token_ids
    assert e.stats().requests.cancelled == 1
    drained(e)


def test_two_requests_that_do_not_fit_together_run_one_after_the_other():
    """H16a: the whole need is taken at once, so nobody blocks anybody half way."""
    e = engine(num_device_pages=9)
    prompts = [prompt(24, seed=1), prompt(24, seed=2)]
    expected = [o.token_ids for o in engine(on=False).generate(prompts, GREEDY)]
    for p in prompts:
        e.generate(p[:16], ONE)
    assert [o.token_ids for o in e.generate(prompts, GREEDY)] == expected
    drained(e)


def test_reclaimable_pages_count_as_room():
    """H16b."""
    e = engine(num_device_pages=9)
    for seed in range(3):
        e.generate(prompt(12, seed=seed), ONE)
    stats = e.stats().device[0]
    assert (stats.reclaimable, stats.free) == (8, 9)  # a row always has room for one token more than its full pages
    assert len(e.generate(prompt(19, seed=9), ONE)[0].token_ids) == 1
    drained(e)


def test_output_that_outgrows_the_pool_ends_with_capacity():
    """S8."""
    e = engine(num_device_pages=4)
    out = e.generate(prompt(10), SamplingParams(max_tokens=50, ignore_eos=True))[0]
    assert (out.finish_reason, len(out.token_ids)) == ("capacity", 6)
    e = engine(max_context=16)
    out = e.generate(prompt(10), SamplingParams(max_tokens=50, ignore_eos=True))[0]
    assert (out.finish_reason, len(out.token_ids)) == ("length", 6)


def test_a_page_in_use_is_never_handed_out():
    """H13: DEV = 8; B decodes on A's pages while C needs 6 pages and only 5 are free."""
    e = engine(num_device_pages=8)
    a = prompt(9, seed=1)
    e.generate(a, ONE)
    b_tokens, c_tokens = np.append(a[:8], 20).astype(np.int32), prompt(23, seed=3)
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    expected = [engine(on=False).generate(t, params)[0].token_ids for t in (b_tokens, c_tokens[:22])]
    e.submit(b_tokens, SamplingParams(max_tokens=3, ignore_eos=True))
    e.scheduler.admit()
    check(e)
    outs = e.generate([c_tokens[:22]], params)
    assert outs[0].token_ids == expected[1]
    done = {o.request_id: o for o in e.step()}
    assert expected[0] in [o.token_ids for o in done.values()]
    drained(e)


def test_references_do_not_leak_when_requests_are_refused_cancelled_or_fail(monkeypatch: pytest.MonkeyPatch):
    """H11: a hundred times each, then a request that needs every page."""
    e = engine(num_device_pages=6)
    a = prompt(12, seed=1)
    e.generate(a, ONE)
    b = prompt(19, seed=2, start=a[:8])

    def failing(*_: Any) -> Any:
        raise RuntimeError("injected")

    before = e.store.stats()
    for i in range(100):
        request = e.submit(b, ONE)
        if i % 3 == 0:
            e.cancel(request)
        elif i % 3 == 1:
            e.scheduler.admit()
            e.cancel(request)
        else:
            with monkeypatch.context() as patch:
                patch.setattr(e.runner.programs, "prefill", failing)
                with pytest.raises(RuntimeError, match="injected"):
                    e.step()
            e.cancel(request)
        e.step()
        check(e)
    after = e.store.stats()
    assert (after.free_pages, after.physical_pages, after.logical_pages) == (
        before.free_pages,
        before.physical_pages,
        before.logical_pages,
    )
    assert e.generate(prompt(23, seed=3), ONE)[0].computed_tokens == 23
    drained(e)


def test_new_weights_drop_every_page_and_are_refused_while_requests_live():
    """H05."""
    e = engine()
    tokens = prompt(13)
    old = e.generate(tokens, GREEDY)[0].token_ids
    request = e.submit(prompt(5, seed=9), GREEDY)
    with pytest.raises(PrefixReuseError, match="live"):
        e.update_params(model(seed=1).params)
    e.cancel(request)
    e.step()
    e.update_params(model(seed=1).params)
    out = e.generate(tokens, GREEDY)[0]
    assert out.cached_tokens == 0
    assert out.token_ids == engine(on=False, seed=1).generate(tokens, GREEDY)[0].token_ids != old
    with pytest.raises(ConfigError, match="shapes"):
        e.update_params({})
    drained(e)


def test_salt_and_adapter_separate_requests_on_host_and_device():
    """B4, X9, H03, H04."""
    e = engine()
    tokens = prompt(17)
    assert e.generate(tokens, ONE, salt="t1")[0].cached_tokens == 0
    e.drop_device_pages()
    assert e.generate(tokens, ONE, salt="t2")[0].cached_tokens == 0
    assert e.generate(tokens, ONE, salt="t1")[0].cached_tokens == 16
    assert e.generate(tokens, ONE)[0].cached_tokens == 0
    hits = []
    for adapter in ("x", "y", "", "x", "y"):
        request = e.submit(prompt(13, seed=5), ONE, adapter=adapter)
        hits.append(next(o for o in run_all(e) if o.request_id == request).cached_tokens)
        e.drop_device_pages()
    assert hits == [0, 0, 0, 12, 12]
    drained(e)


def run_all(e: Engine) -> list[Any]:
    outputs: list[Any] = []
    while e.has_work:
        outputs += e.step()
    return outputs


def test_queue_time_matches_are_not_remembered():
    """H23: pages that go while a request waits are not counted on."""
    e = engine(num_host_pages=16, max_rows=1)
    a = prompt(12, seed=1)
    e.generate(a, ONE)
    running = e.submit(prompt(6, seed=2), SamplingParams(max_tokens=12, ignore_eos=True))
    e.step()
    waiting = e.submit(np.append(a, 5), GREEDY)
    e.step()
    assert e.evict_host_entries(3) == 3
    e.drop_device_pages()
    outputs = {o.request_id: o for o in run_all(e)}
    assert outputs[waiting].cached_tokens == 0
    assert outputs[waiting].token_ids == engine(on=False).generate(np.append(a, 5), GREEDY)[0].token_ids
    assert running in outputs
    drained(e)


# ---- publication


@pytest.mark.parametrize(("max_tokens", "pages"), [(2, 1), (3, 2)])
def test_the_last_sampled_token_has_no_kv_and_is_not_published(max_tokens: int, pages: int):
    """B22, H08: prompt of 6; KV exists for 7 (8) tokens; by default only the prompt's page is published."""
    tokens = prompt(6, seed=1)
    for publish_generated, expected in ((True, pages), (False, 1)):
        e = engine(publish_generated=publish_generated)
        out = e.generate(tokens, SamplingParams(max_tokens=max_tokens, ignore_eos=True))[0]
        assert len(index_of(e)) == expected
        follow_up = np.concatenate([tokens, out.token_ids, [7]]).astype(np.int32)
        again = e.generate(follow_up, GREEDY)[0]
        assert again.cached_tokens == 4 * expected
        assert again.token_ids == engine(on=False).generate(follow_up, GREEDY)[0].token_ids
        drained(e)


@pytest.mark.parametrize("sharing", [True, False])
def test_a_next_turn_that_was_rendered_differently_hits_up_to_the_difference(sharing: bool):
    """H10: both turns have the tokens of a cold run, so the page of the old rendering was neither read nor written over."""
    e = engine(publish_generated=True, decode_page_sharing=sharing)
    turn = prompt(10, seed=1)
    out = e.generate(turn, GREEDY)[0]
    assert len(index_of(e)) == 3
    other = 9 if out.token_ids[0] != 9 else 10
    next_turn = np.concatenate([turn, [other], prompt(8, seed=3)]).astype(np.int32)
    same = np.concatenate([turn, out.token_ids[:5], [3]]).astype(np.int32)
    for tokens, cached in ((next_turn, 8), (same, 12)):
        again = e.generate(tokens, GREEDY)[0]
        assert again.cached_tokens == cached
        assert again.token_ids == engine(on=False).generate(tokens, GREEDY)[0].token_ids
    drained(e)


def test_short_prompts_publish_nothing():
    """H07."""
    e = engine()
    for tokens in ([5], [5, 6], [5, 6, 7]):
        for _ in range(2):
            assert e.generate(tokens, ONE)[0].cached_tokens == 0
    assert len(index_of(e)) == 0
    e.generate([5, 6, 7, 8, 9], ONE)
    assert len(index_of(e)) == 1
    drained(e)


def test_an_empty_prompt_next_to_a_good_one_takes_nothing_and_the_good_one_completes():
    """H07: a client error before anything is queued or held."""
    e = engine()
    good = e.submit([5, 6, 7, 8, 9], ONE)
    before = e.store.snapshot_counters()
    for empty in ([], np.zeros(0, np.int32)):
        with pytest.raises(InvalidRequestError, match="empty"):
            e.submit(empty, ONE)
    assert e.store.snapshot_counters() == before
    assert len(e.scheduler.waiting) == 1
    (out,) = run_all(e)
    assert (out.request_id, len(out.token_ids)) == (good, 1)
    drained(e)


# ---- samples, penalties, stops


def test_samples_of_one_request_differ_and_repeat_with_the_seed_in_any_batch():
    """n > 1, H25: half-filled tails are never shared; a row's stream does not depend on the batch."""
    tokens = prompt(6, seed=1)
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=3, n=3, ignore_eos=True)
    e = engine()
    first = e.generate(tokens, params)[0]
    texts = [s.token_ids for s in first.samples]
    assert len(set(texts)) == 3
    again = engine().generate([prompt(9, seed=8), tokens], params)[1]
    assert [s.token_ids for s in again.samples] == texts
    warm = e.generate(tokens, params)[0]
    assert warm.cached_tokens == 4
    assert [s.token_ids for s in warm.samples] == texts
    other = e.generate(tokens, SamplingParams(max_tokens=8, temperature=1.0, seed=4, n=3, ignore_eos=True))[0]
    assert [s.token_ids for s in other.samples] != texts
    drained(e)


@pytest.mark.parametrize("penalty", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_penalties_count_the_cached_part_of_the_prompt(penalty: str):
    """H27b: the penalised token occurs only in the cached part; warm = cold, and the penalty does something."""
    tokens = prompt(9, seed=1)
    plain = engine().generate(tokens, SamplingParams(max_tokens=1, ignore_eos=True))[0].token_ids[0]
    tokens[:3] = plain
    favourite = engine().generate(tokens, SamplingParams(max_tokens=1, ignore_eos=True))[0].token_ids[0]
    tokens[0] = favourite
    kwargs: dict[str, Any] = {penalty: 50.0}
    params = SamplingParams(max_tokens=10, ignore_eos=True, **kwargs)
    e = engine()
    results = [e.generate(tokens, params)[0] for _ in range(3)]
    assert [r.cached_tokens for r in results] == [0, 8, 8]
    assert results[0].token_ids == results[1].token_ids
    assert not set(results[0].token_ids) & set(tokens.tolist())
    drained(e)


def test_top_k_1_is_greedy_and_stop_ids_end_the_output():
    e = engine()
    tokens = prompt(7, seed=2)
    greedy = e.generate(tokens, GREEDY)[0].token_ids
    one = e.generate(tokens, SamplingParams(max_tokens=6, temperature=1.0, top_k=1, ignore_eos=True))[0].token_ids
    assert one == greedy
    tiny_p = e.generate(tokens, SamplingParams(max_tokens=6, temperature=1.0, top_p=1e-6, ignore_eos=True))[0]
    assert tiny_p.token_ids == greedy
    stop = greedy[2]
    out = e.generate(tokens, SamplingParams(max_tokens=6, stop_token_ids=(stop,), ignore_eos=True))[0]
    assert out.token_ids == greedy[: greedy.index(stop) + 1]
    assert out.finish_reason == "stop"
    with pytest.raises(InvalidRequestError, match="max_stop_ids"):
        e.submit(tokens, SamplingParams(stop_token_ids=tuple(range(2, 40))))
    drained(e)


@pytest.mark.parametrize("old", range(6))
def test_a_stop_string_is_found_wherever_a_boundary_falls_in_it(old: int):
    """Tokens without text, as special ones are, may stand between its letters; the boundary must not decide what is found."""
    tokenizer: Any = toy_tokenizer()
    a, b, special = tokenizer.encode("a")[0], tokenizer.encode("b")[0], tokenizer.encode("<eos>")[0]
    generated = [b, a, special, special, special, b, b]
    assert tokenizer.decode(generated) == "babb"
    found = find_stop(tokenizer, generated, old, ("ab",))
    assert found == 6


def test_text_with_tokens_that_the_model_does_not_know_is_refused():
    """A tokenizer may have more tokens than the model has rows; no neighbour's row is taken in their place."""

    class Wide:
        def encode(self, text: str) -> list[int]:
            return [5, 128] if text.strip() else []

    e = engine()
    e.intake.tokenizer = Wide  # type: ignore[method-assign]
    with pytest.raises(InvalidRequestError, match="128 is outside"):
        e.submit("text", GREEDY)
    with pytest.raises(InvalidRequestError, match="no tokens"):
        e.submit(" ", GREEDY)
    drained(e)


def test_stop_strings_end_the_text_and_publish_only_what_was_kept():
    e = engine(publish_generated=True)
    tokens = prompt(7, seed=2)
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=1, ignore_eos=True)
    free = e.generate(tokens, params)[0]
    stop = free.text[5:7]
    e = engine(publish_generated=True)
    out = e.generate(tokens, SamplingParams(**{**vars(params), "stop": (stop,)}))[0]
    assert out.finish_reason == "stop"
    assert out.text == free.text[: free.text.index(stop)]
    assert len(index_of(e)) == (len(tokens) + len(out.token_ids) - 1) // 4
    drained(e)


def test_a_stream_gives_the_same_tokens_and_text_in_pieces_and_closing_it_cancels():
    e = engine()
    tokens = prompt(7, seed=2)
    params = SamplingParams(max_tokens=14, ignore_eos=True)
    whole = e.generate(tokens, params)[0]
    events = list(e.stream(tokens, params))
    assert len(events) > 2
    assert sum((ev.token_ids for ev in events), ()) == whole.token_ids
    assert "".join(ev.text for ev in events) == whole.text
    assert [ev.finished for ev in events] == [False] * (len(events) - 1) + [True]
    stream = e.stream(tokens, params)
    next(stream)
    stream.close()
    assert e.stats().requests.cancelled == 1
    drained(e)


def test_a_stream_has_its_first_token_before_anything_is_decoded_and_others_do_not_wait_for_that():
    e = engine()
    tokens, params = prompt(7, seed=2), SamplingParams(max_tokens=14, ignore_eos=True)
    whole = e.generate(tokens, params)[0].token_ids
    steps = e.stats().decode.steps
    stream = e.stream(tokens, params)
    assert next(stream).token_ids == whole[:1]
    assert e.stats().decode.steps == steps
    (row,) = e.scheduler.running
    e.hold(row.request_id)  # it is a decoding row like any other
    assert row.state is SequenceState.ON_HOLD
    e.resume(row.request_id)
    assert next(stream).token_ids == whole[1:5]
    stream.close()
    e.submit(prompt(9, seed=3), params)
    e.step()
    steps = e.stats().decode.steps
    with e.stream(tokens, params) as stream:
        assert next(stream).token_ids == whole[:5]
    assert e.stats().decode.steps == steps + 4
    while e.has_work:
        e.step()
    drained(e)


def test_few_rows_are_padded_to_the_smallest_decode_program():
    wanted = engine().generate([prompt(7, seed=2), prompt(9, seed=3)], GREEDY)
    e = engine(min_decode_rows=4)
    assert e.runner.decode_buckets == [4]
    before = e.stats().compilations.get("decode_steps", 0)
    alone = e.generate(prompt(7, seed=2), GREEDY)[0]
    both = e.generate([prompt(7, seed=2), prompt(9, seed=3)], GREEDY)
    assert e.stats().compilations["decode_steps"] <= before + 1
    assert [o.token_ids for o in both] == [o.token_ids for o in wanted]
    assert alone.token_ids == wanted[0].token_ids
    assert engine(min_decode_rows=8).runner.decode_buckets == [4]  # no larger than max_rows
    with pytest.raises(ConfigError, match="min_decode_rows must be a power of two"):
        EngineConfig(min_decode_rows=3)
    drained(e)


def test_scoring_without_reuse_reads_and_changes_nothing_of_the_cache():
    e = engine()
    tokens = prompt(12, seed=1)
    e.generate(tokens, ONE)
    before = e.store.stats()
    logits = e.score(tokens)
    assert logits.shape == (12, 128)
    np.testing.assert_allclose(logits, cold(tokens), atol=1e-4)
    assert len(index_of(e)) == 3
    assert e.store.stats().free_pages == before.free_pages
    drained(e)


# ---- compilations and in-place updates


def heard_compilations() -> list[str]:
    """A list that every compilation from now on adds to."""
    compiled: list[str] = []

    def listener(event: str, duration_secs: float, **kwargs: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listener)
    return compiled


def test_nothing_compiles_after_warmup(tmp_path: Path):
    """H36: hits of 0, 1, 3, 7 pages, suffixes 1..4, batches 1..4, offload and reload of 1..9 pages; samples; a snapshot."""
    e = engine(max_prefill_tokens=64, poison=False)
    e.warmup()
    before = dict(e.stats().compilations)
    compiled = heard_compilations()
    base = prompt(40, seed=1)
    for pages in (0, 1, 3, 7):
        e.generate(np.append(base[: 4 * pages], 2), GREEDY)
        for suffix in range(1, 5):
            for batch in range(1, 5):
                tokens = [prompt(4 * pages + suffix, seed=100 + i, start=base[: 4 * pages]) for i in range(batch)]
                e.generate(tokens, ONE)
    for pages in range(1, 10):
        e.clear_cache()
        e.generate(base[: 4 * pages], ONE)
        e.drop_device_pages()
        e.generate(base[: 4 * pages], ONE)
    for n in (2, 3, 4):
        for length in (3, 8, 10):
            e.generate(base[:length], SamplingParams(max_tokens=3, n=n, temperature=1.0, ignore_eos=True))
    e.cache.save_snapshot(tmp_path)
    e.clear_cache()
    assert e.cache.load_snapshot(tmp_path).pages >= 9
    assert e.generate(base[:36], ONE)[0].full_hit
    e.score(base)
    assert e.stats().compilations == before
    assert not compiled
    jax.jit(lambda x: x * 7 + 1)(1.0)
    assert compiled  # the listener does hear compilations
    drained(e)


@pytest.mark.parametrize("kind", ["llama", pytest.param("hybrid", marks=pytest.mark.slow)])
def test_nothing_compiles_when_rows_of_every_kind_share_a_batch(kind: str, monkeypatch: pytest.MonkeyPatch):
    """Greedy, random and penalised rows, one sample and several; scores; pages that windows have passed; copies again."""
    monkeypatch.setattr(transfer, "LARGEST_COPY", 8)  # less to compile
    monkeypatch.setattr(transfer, "SMALL_BUNDLE", 4)
    e = engine(kind, prefill_calls=3, staging_bytes=0)
    e.warmup()
    before, compiled = dict(e.stats().compilations), heard_compilations()
    greedy = SamplingParams(max_tokens=9, ignore_eos=True)
    mixed = [
        replace(greedy, **some)
        for some in ({}, {"temperature": 1.0}, {"repetition_penalty": 1.5}, {"presence_penalty": 1.0, "n": 2})
    ]
    for size in (1, 2, 4):
        for i in range(size):
            for length in (3, 17, 40):
                e.submit(prompt(length + i, seed=i), mixed[i - size])
        run_all(e)
        e.drop_device_pages()
    e.score(prompt(50, seed=9), reuse=True)
    assert e.stats().prefill.hits > 0
    assert e.stats().compilations == before
    assert not compiled
    drained(e)


def test_steps_update_donated_pools_in_place():
    """The compiled steps alias the pools and hold no copy of them (`memory_analysis`)."""
    e = engine("hybrid", num_device_pages=4096, num_window_pages=4096)
    pool_bytes = min(p.kv_pages.nbytes for p in e.runner.pools)
    seen = {}

    def spy(name: str, jitted: Any) -> Any:
        def call(params: Any, pools: Any, batch: Any) -> Any:
            seen[name] = jitted.lower(params, pools, batch).compile().memory_analysis()
            return jitted(params, pools, batch)

        return call

    e.runner.programs.prefill, e.runner.programs.decode = (
        spy("prefill", e.runner.programs.prefill),
        spy("decode", e.runner.programs.decode),
    )
    e.generate(prompt(9), GREEDY)
    for name in ("prefill", "decode"):
        assert seen[name].alias_size_in_bytes >= 2 * pool_bytes, name
        assert seen[name].temp_size_in_bytes < pool_bytes / 2, (name, seen[name].temp_size_in_bytes / pool_bytes)


def test_a_prefill_brings_the_tables_of_all_rows_along(monkeypatch: pytest.MonkeyPatch):
    """The decoding behind it sends none; rows that are gone have no context any more."""
    e = engine(decode_page_sharing=False)
    calls: list[Any] = []
    e.submit(prompt(9, seed=1), SamplingParams(max_tokens=20, ignore_eos=True))
    gone = e.submit(prompt(11, seed=2), SamplingParams(max_tokens=20, ignore_eos=True))
    e.step()
    e.cancel(gone)
    e.submit(prompt(3, seed=3), SamplingParams(max_tokens=20, ignore_eos=True))
    e.submit(prompt(2, seed=4), SamplingParams(max_tokens=20, ignore_eos=True))
    real = e.programs._tables
    monkeypatch.setattr(e.programs, "_tables", lambda *args: calls.append(args) or real(*args))
    e.step()
    assert not calls
    want = np.zeros(e.config.max_rows, np.int32)
    for row in e.scheduler.running:
        want[row.row_index] = row.committed_kv_tokens
    assert np.array_equal(np.asarray(e.runner.pools[0].context_lens), want)
    e.cancel(e.scheduler.running[0].request_id)
    e.step()
    assert len(calls) == 1
    want[:] = 0
    for row in e.scheduler.running:
        want[row.row_index] = row.committed_kv_tokens
    assert np.array_equal(np.asarray(e.runner.pools[0].context_lens), want)
    run_all(e)
    drained(e)
