"""Samples, penalties, stops and streams: B17, B28."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engine_helpers import GREEDY, check, cold, drained, engine, fail_call, index_of, prompt, run_all

from models.testing import toy_tokenizer
from prefix_reuse import (
    EngineConfig,
    SamplingParams,
)
from prefix_reuse.errors import (
    ConfigError,
    InvalidRequestError,
)
from prefix_reuse.outputs import find_stop
from prefix_reuse.sequence import SequenceState

ONE = SamplingParams(max_tokens=1, ignore_eos=True)


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


@pytest.mark.parametrize("kind", ["llama", pytest.param("hybrid", marks=pytest.mark.slow)])
def test_rows_of_every_kind_draw_beside_each_other_what_they_draw_alone(kind: str):
    """Greedy, random, penalised, several samples; prefilled in a batch in which rows have other places than in the table."""
    base = prompt(8, seed=1)
    kinds: list[tuple[int, dict[str, Any]]] = [
        (13, {"max_tokens": 3}),
        (10, {"max_tokens": 5, "temperature": 1.0, "seed": 7}),
        (11, {"max_tokens": 9, "repetition_penalty": 5.0}),
        (17, {"max_tokens": 7, "temperature": 1.5, "seed": 8, "frequency_penalty": 2.0}),
        (15, {"max_tokens": 4, "temperature": 1.0, "seed": 9, "n": 2}),
        (12, {"max_tokens": 4, "presence_penalty": 9.0}),
    ]
    asked = [(prompt(n, seed=n, start=base), SamplingParams(ignore_eos=True, **some)) for n, some in kinds]
    want = [engine(kind, on=False).generate(*one)[0].samples for one in asked]
    e, moved = engine(kind), 0
    real = e.runner.prefill

    def watched(chunks: Any, rows: Any) -> Any:
        nonlocal moved
        moved += sum(row.row_index != i and row.params.temperature > 0 for i, row in enumerate(rows))
        return real(chunks, rows)

    e.runner.prefill = watched  # type: ignore[method-assign]
    e.generate(base, ONE)
    e.submit(prompt(9, seed=30), SamplingParams(max_tokens=40, ignore_eos=True))
    e.step()
    ids = [e.submit(*one) for one in asked]
    done = run_all(e)
    assert [[s.token_ids for s in done[i].samples] for i in ids] == [[s.token_ids for s in some] for some in want]
    assert moved >= 3
    assert e.stats().prefill.hits > 3
    drained(e)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("call", [1, 2])
def test_a_draw_that_fails_or_is_interrupted_loses_nothing(
    call: int, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
):
    """First the draw of a prefill batch, whose pages are written by then; second that of its further samples."""
    e = engine()
    base = prompt(8, seed=1)
    params = SamplingParams(max_tokens=5, temperature=1.0, seed=7, n=2, repetition_penalty=1.3, ignore_eos=True)
    asked = [prompt(11, seed=2, start=base), prompt(14, seed=3)]
    want = [[s.token_ids for s in engine(on=False).generate(one, params)[0].samples] for one in asked]
    e.generate(base, ONE)
    ids = [e.submit(one, params) for one in asked]
    fail_call(monkeypatch, e.programs, "sample", call, error)
    with pytest.raises(error, match="injected"):
        e.step()
    check(e)
    assert e.stats().requests.prefill_failures == 1
    done = run_all(e)
    assert [[s.token_ids for s in done[i].samples] for i in ids] == want
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
