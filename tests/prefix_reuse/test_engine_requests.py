"""Cancellation, capacity, and what requests publish: A12, B22; H05-H36."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engine_helpers import GREEDY, check, drained, engine, index_of, model, prompt

from prefix_reuse import (
    Engine,
    PrefixReuseError,
    SamplingParams,
)
from prefix_reuse.errors import (
    ConfigError,
    InvalidRequestError,
)

ONE = SamplingParams(max_tokens=1, ignore_eos=True)


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
