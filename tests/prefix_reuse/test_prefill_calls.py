"""Several prefill calls in a turn: the same tokens from fewer decode steps; faults and streams as with one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engine_helpers import check, cold, drained, engine, prompt, run_all

from prefix_reuse import EngineConfig, SamplingParams
from prefix_reuse.errors import ConfigError

LONG = SamplingParams(max_tokens=9, ignore_eos=True)


def prompts() -> list[np.ndarray]:
    """Four of 29 tokens, one call each; two pairs share 16."""
    heads = [prompt(16, seed=s) for s in (1, 2)]
    return [prompt(29, seed=s, start=heads[s % 2]) for s in range(3, 7)]


@pytest.mark.parametrize("kind", ["llama", "hybrid"])
def test_rows_decode_together_and_get_the_same_tokens(kind: str) -> None:
    off = engine(kind, on=False).generate(prompts(), LONG)
    figures = {}
    for calls in (1, 4):
        e = engine(kind, prefill_calls=calls)
        outputs = e.generate(prompts(), LONG)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in off]
        assert e.stats().prefill.cached_tokens == 2 * 16  # the second of each pair
        figures[calls] = e.stats().decode.steps, e.stats().prefill.batches
        drained(e)
    assert figures[4][0] == 8  # nine tokens, the first of them by the prefill
    assert figures[1][0] > figures[4][0]
    assert figures[1][1] == figures[4][1]


def test_a_turn_goes_on_only_while_somebody_waits() -> None:
    e = engine(prefill_calls=4)
    for tokens in prompts()[:3]:
        e.submit(tokens, LONG)
    e.step()
    assert e.stats().prefill.batches == 3
    assert e.stats().decode.steps == e.config.decode_steps
    e.step()
    assert e.stats().prefill.batches == 3
    check(e)
    run_all(e)
    drained(e)


@pytest.mark.parametrize(("num", "rows", "calls"), [(3, 4, [3, 1]), (3, 2, [2, 1]), (1, 4, [1, 1])])
def test_a_turn_looks_again_only_where_somebody_may_be_let_in(
    num: int, rows: int, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking may wait for copies, while rows could decode."""
    e = engine(prefill_calls=8, max_rows=rows)
    real, looks = e.scheduler.admit, []
    monkeypatch.setattr(e.scheduler, "admit", lambda: (looks.append(None), real()))
    for seed in range(num):
        e.submit(prompt(29, seed=seed), LONG)
    for count in calls:
        looks.clear()
        e.step()
        assert len(looks) == count
    run_all(e)
    drained(e)


def test_who_waits_for_a_common_beginning_follows_in_the_same_turn() -> None:
    e = engine(prefill_calls=2)
    for seed in (3, 5):  # one beginning
        e.submit(prompts()[seed - 3], LONG)
    e.step()
    assert (e.stats().prefill.batches, e.stats().prefill.hits) == (2, 1)
    assert [len(row.generated) for row in e.scheduler.running] == [5, 5]
    run_all(e)
    drained(e)


def test_more_requests_than_rows_are_let_in_as_rows_are_given_back() -> None:
    """Requests for one token end with their prefill: the next ones follow in the same turn."""
    e = engine(prefill_calls=8, max_rows=2)
    e.generate(prompts(), SamplingParams(max_tokens=1, ignore_eos=True))
    waiting = [e.submit(prompt(29, seed=s), SamplingParams(max_tokens=1, ignore_eos=True)) for s in range(20, 24)]
    done = {output.request_id for output in e.step()}
    assert done == set(waiting)
    run_all(e)
    drained(e)


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_call_that_fails_stops_no_row_that_is_ahead(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    want = [o.token_ids for o in engine(on=False).generate(prompts(), LONG)]
    e = engine(prefill_calls=4)
    real, calls = e.runner.prefill, []

    def prefill(*args: Any) -> Any:
        calls.append(None)
        if len(calls) == failing:
            raise RuntimeError("injected")
        return real(*args)

    monkeypatch.setattr(e.runner, "prefill", prefill)
    requests = [e.submit(tokens, LONG) for tokens in prompts()]
    with pytest.raises(RuntimeError, match="injected"):
        e.step()
    check(e)
    assert e.stats().prefill.batches == failing - 1
    assert (e.stats().decode.steps > 0) == (failing > 1)
    outputs = run_all(e)
    assert [outputs[request].token_ids for request in requests] == want
    drained(e)


def test_a_stream_has_its_first_token_after_the_calls_of_one_turn() -> None:
    e = engine(prefill_calls=4)
    for tokens in prompts()[1:]:
        e.submit(tokens, LONG)
    with e.stream(prompts()[0], LONG) as stream:
        tokens = [token for event in stream for token in event.token_ids]
    assert tuple(tokens) == engine(on=False).generate(prompts()[0], LONG)[0].token_ids
    run_all(e)
    drained(e)


@pytest.mark.parametrize("calls", [1, 3])
def test_scores_are_a_rows_own_whoever_shares_its_calls(calls: int) -> None:
    e = engine(prefill_calls=calls)
    waiting = [e.submit(prompt(n, seed=n), LONG) for n in (7, 10)]
    tokens = prompt(45, seed=1)
    np.testing.assert_allclose(e.score(tokens), cold(tokens), atol=1e-4)
    outputs = run_all(e)
    assert all(len(outputs[i].token_ids) == LONG.max_tokens for i in waiting)
    drained(e)


def test_no_call_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="prefill_calls must be at least 1"):
        EngineConfig(prefill_calls=0)
