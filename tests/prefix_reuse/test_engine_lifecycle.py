"""Bad input, faults while pages move, page tables on their way to the device: A12, A13, A29; H05-H36."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from engine_helpers import GREEDY, check, drained, engine, index_of, prompt

from prefix_reuse import (
    Engine,
    EngineConfig,
    SamplingParams,
    UnsupportedAttentionError,
    device_pages,
)
from prefix_reuse.errors import (
    CapacityError,
    ConfigError,
    InvalidRequestError,
    StateTransitionError,
    TransferError,
    UnknownRequestError,
)
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
