"""Deterministic mode: a token has the same bits however it comes to be computed (N4, S4), for every model family.

`Bits` records the final hidden state and the logits of every token of every program call and holds them to each other;
the tests beside it compare whole logits of cold and warm scores, and assert that hits happened.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from determinism_helpers import Bits
from engine_helpers import check, drained, fail_call
from model_data import TINY

import models
from models.testing import tiny_hybrid, tiny_llama
from prefix_reuse import Engine, EngineConfig, SamplingParams
from prefix_reuse.errors import ConfigError, IntegrityError
from prefix_reuse.programs import Programs
from prefix_reuse.sequence import SequenceState

FAMILIES = ("llama", "hybrid", "qwen3", "qwen3_moe", "gpt_oss_fp32")
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)


@cache
def model(name: str, dtype: str = "float32") -> Any:
    tiny = {"llama": tiny_llama, "hybrid": tiny_hybrid}
    return tiny[name](dtype=jnp.dtype(dtype)) if name in tiny else models.load(TINY / name, dtype=dtype)


@cache
def programs(name: str, dtype: str = "float32") -> Programs:
    return Programs(model(name, dtype), EngineConfig(decode_steps=4), jax.devices()[0])


def engine(name: str = "llama", *, on: bool = True, dtype: str = "float32", **changes: Any) -> Engine:
    """A deterministic engine of one program shape: 32 tokens, 4 rows, pages of 4 with NaN wherever nothing was written."""
    defaults: dict[str, Any] = {
        "page_size": 4,
        "num_device_pages": 48,
        "num_host_pages": 96,
        "max_rows": 4,
        "max_context": 64,
        "max_prefill_tokens": 32,
        "decode_steps": 4,
        "poison": True,
        "compilation_cache": False,
        "deterministic": True,
        "enable_prefix_reuse": on,
    }
    return Engine(model(name, dtype), EngineConfig(**{**defaults, **changes}), programs=programs(name, dtype))


def prompt(n: int, seed: int = 0, start: Any = ()) -> np.ndarray:
    """int32 [n] random token ids that begin with `start`."""
    rest = np.random.default_rng(seed).integers(2, 128, n - len(start))
    return np.concatenate([np.asarray(start, np.int64), rest]).astype(np.int32)


def finish(e: Engine) -> dict[int, Any]:
    outputs: dict[int, Any] = {}
    while e.has_work:
        outputs.update((o.request_id, o) for o in e.step())
        check(e)
    return outputs


def row_of(e: Engine, request: int) -> Any:
    (row,) = (r for r in e.scheduler.running if r.request_id == request)
    return row


def evict(e: Engine, request: int) -> None:
    """As when its pages were needed elsewhere: nothing of the row is left but its tokens."""
    row = row_of(e, request)
    e.offloader.detach(row)
    e.scheduler.evict(row)


# ---- the property, for every family


@pytest.mark.parametrize("name", FAMILIES)
def test_every_hit_length_gives_the_cold_logits_to_the_bit(name: str):
    """N4, A21, A22: a prompt of 6 whole pages after hits of 0, 1, ... 6 pages; resident and reloaded from the host."""
    tokens = prompt(24, seed=3)
    off = engine(name, on=False)
    cold = off.score(tokens)
    assert np.array_equal(off.score(tokens), cold)
    e = engine(name)
    for pages in range(7):
        for drop in (False, True):
            e.clear_cache()
            if pages:
                e.score(np.concatenate([tokens[: 4 * pages], [2]]), reuse=True)
            if drop:
                e.drop_device_pages()
            logits, first = e.score(tokens, reuse=True)
            assert first == min(4 * pages, 23)
            assert np.array_equal(logits, cold[first:])
    assert e.stats().prefill.full_hits == 2
    assert e.stats().decode.host_pages_loaded == 21
    drained(e)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_token_has_the_same_bits_wherever_it_is_computed(name: str):
    """N4, S4: cold, hit, full hit, reloaded, batched with misses, chunked by other rows, decoded, resumed, evicted."""
    bits = Bits()
    base = prompt(16, seed=1)
    rows = [prompt(5, seed=2), prompt(19, seed=3, start=base), base, prompt(13, seed=4, start=base[:4])]
    off = bits.watch(engine(name, on=False))
    cold = [off.generate(row, GREEDY)[0].token_ids for row in rows]
    texts = [np.concatenate([row, answer]) for row, answer in zip(rows, cold, strict=True)]
    for text in texts:
        off.score(text)
    assert bits.repeats > 100  # what decoding computed, prefill computed too

    e = bits.watch(engine(name))
    e.generate(base, GREEDY)
    assert [o.token_ids for o in e.generate(rows, GREEDY)] == cold  # 2 hits, 1 full hit, 1 miss in one batch
    assert e.stats().prefill.hits >= 3
    e.drop_device_pages()
    assert [o.token_ids for o in e.generate(rows[::-1], GREEDY)] == cold[::-1]
    assert e.stats().decode.host_pages_loaded > 0

    e.clear_cache()  # 53 prompt tokens of other rows leave other chunks than those of a row alone
    assert [o.token_ids for o in e.generate([rows[3], rows[1], rows[0], rows[2]], GREEDY)] == [
        cold[i] for i in (3, 1, 0, 2)
    ]
    request = e.submit(rows[1], GREEDY)
    e.step()
    e.hold(request)
    e.drop_device_pages()
    e.resume(request)
    assert finish(e)[request].token_ids == cold[1]
    long = dataclasses.replace(GREEDY, max_tokens=20)
    request = e.submit(rows[1], long)
    for _ in range(3):
        e.step()
        evict(e, request)
    assert finish(e)[request].token_ids == off.generate(rows[1], long)[0].token_ids
    assert e.stats().requests.reentries == 3

    assert not bits.different
    assert bits.repeats > 500
    drained(e)


@pytest.mark.parametrize("name", FAMILIES)
def test_pages_of_generated_tokens_are_those_of_a_prefill(name: str):
    """`publish_generated`: the second turn of a chat hits pages that decoding wrote."""
    first = prompt(10, seed=7)
    e = engine(name, publish_generated=True)
    answer = e.generate(first, dataclasses.replace(GREEDY, max_tokens=12))[0].token_ids
    second = np.concatenate([first, answer, prompt(4, seed=8)])
    logits, at = e.score(second, reuse=True)
    assert at == 20  # 10 + 12 tokens, the last one without KV
    assert np.array_equal(logits, engine(name, on=False).score(second)[at:])
    drained(e)


def test_8_tokens_over_64_cached_ones_at_page_16():
    """N4's case (8 | 72): the whole prompt of 72 in one chunk, in two, and after a hit of 64."""
    sizes: dict[str, Any] = {"page_size": 16, "max_context": 128, "max_prefill_tokens": 128}
    tokens = prompt(72, seed=5)
    cold = engine(on=False, **sizes).score(tokens)
    e = engine(**sizes)
    e.generate(tokens[:65], GREEDY)
    logits, first = e.score(tokens, reuse=True)
    lengths = e.runner.last_prefill.lengths  # type: ignore[union-attr]
    assert (first, lengths.query_lengths[0], lengths.kv_seq_lengths[0]) == (64, 8, 72)
    assert np.array_equal(logits, cold[64:])
    e.submit(prompt(60, seed=6), GREEDY)  # takes 60 of the 128 tokens, so 64 of 72 fit beside it
    assert np.array_equal(e.score(tokens), cold)
    lengths = e.runner.last_prefill.lengths  # type: ignore[union-attr]
    assert (lengths.query_lengths[0], lengths.kv_seq_lengths[0]) == (8, 72)
    finish(e)
    drained(e)


# ---- around the property


def test_two_engines_of_two_models_interleaved_do_not_touch_each_other():
    kinds = ("hybrid", "qwen3")
    tokens = prompt(21, seed=1)
    alone = {kind: engine(kind, on=False).generate(tokens, GREEDY)[0].token_ids for kind in kinds}
    cold = {kind: engine(kind, on=False).score(tokens) for kind in kinds}
    both = {kind: engine(kind) for kind in kinds}
    for _ in range(2):
        requests = {kind: e.submit(tokens, GREEDY) for kind, e in both.items()}
        done: dict[str, Any] = {}
        while len(done) < 2:
            for kind, e in both.items():
                done.update((kind, o) for o in e.step() if o.request_id == requests[kind])
        assert {kind: o.token_ids for kind, o in done.items()} == alone
    for kind, e in both.items():
        assert e.stats().prefill.hits == 1
        logits, first = e.score(tokens, reuse=True)
        assert first == 20
        assert np.array_equal(logits, cold[kind][first:])


def test_samples_and_streams_have_the_cold_tokens_and_penalties_count_what_decode_steps_added():
    """n > 1, seeds, penalties and stop ids, cold and warm, in a batch with others."""
    tokens = prompt(17, seed=1)
    params = SamplingParams(
        max_tokens=9,
        temperature=0.8,
        top_p=0.9,
        seed=5,
        n=3,
        ignore_eos=True,
        repetition_penalty=1.3,
        frequency_penalty=0.2,
    )
    cold = engine(on=False).generate(tokens, params)[0].samples
    assert len({s.token_ids for s in cold}) == 3
    e = engine()
    e.generate(tokens, GREEDY)
    before = e.stats().prefill.hits
    warm = e.generate([tokens, prompt(11, seed=2)], params)[0].samples
    assert [s.token_ids for s in warm] == [s.token_ids for s in cold]
    assert e.stats().prefill.hits > before
    one = dataclasses.replace(params, n=1)
    with e.stream(tokens, one) as stream:
        streamed = [token for event in stream for token in event.token_ids]
    assert tuple(streamed) == cold[0].token_ids
    stops = dataclasses.replace(one, stop_token_ids=(streamed[4],))
    assert e.generate(tokens, stops)[0].token_ids == tuple(streamed[: streamed.index(streamed[4]) + 1])
    drained(e)


def test_rows_that_end_at_different_steps_draw_beside_each_other_what_they_draw_alone():
    """A row's place in a step's batch moves up when one before it ends; penalties count its own tokens, wherever it is."""
    base = prompt(8, seed=1)
    kinds: list[tuple[int, dict[str, Any]]] = [
        (13, {"max_tokens": 2}),
        (10, {"max_tokens": 3, "temperature": 1.0, "seed": 7}),
        (11, {"max_tokens": 9, "repetition_penalty": 5.0, "frequency_penalty": 2.0}),
        (17, {"max_tokens": 8, "temperature": 1.5, "seed": 8, "frequency_penalty": 2.0}),
    ]
    asked = [(prompt(n, seed=n, start=base), SamplingParams(ignore_eos=True, **some)) for n, some in kinds]
    # By the decode program of default mode, which counts and draws inside.
    want = [engine(on=False, deterministic=False).generate(*one)[0].token_ids for one in asked]
    e = engine()
    e.generate(base, GREEDY)
    ids = [e.submit(*one) for one in asked]
    done = finish(e)
    assert [done[i].token_ids for i in ids] == want
    assert e.stats().prefill.hits == len(asked)
    drained(e)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("call", range(1, 5))
def test_a_draw_that_fails_or_is_interrupted_loses_nothing(
    call: int, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
):
    """That of the prefill comes first; each decode step has one more."""
    tokens = [prompt(9, seed=1), prompt(6, seed=2)]
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=7, repetition_penalty=1.3, ignore_eos=True)
    want = [o.token_ids for o in engine(on=False).generate(tokens, params)]
    e = engine()
    ids = [e.submit(t, params) for t in tokens]
    fail_call(monkeypatch, e.programs, "sample", call, error)
    with pytest.raises(error, match="injected"):
        e.step()
    check(e)
    done = finish(e)
    assert [done[i].token_ids for i in ids] == want
    drained(e)


def test_one_program_computes_everything_and_warmup_compiles_it():
    e = Engine(
        model("llama"),
        EngineConfig(
            page_size=4, num_device_pages=48, num_host_pages=96, max_rows=3, max_context=64, max_prefill_tokens=16,
            decode_steps=3, compilation_cache=False, deterministic=True, enable_prefix_reuse=True,
        ),
    )  # fmt: skip
    e.warmup()
    compiled = dict(e.stats().compilations)
    assert compiled["prefill_step"] == 1
    assert "decode_steps" not in compiled
    for rows in (1, 3, 2):
        outputs = e.generate([prompt(9 + i, seed=i) for i in range(rows)], GREEDY)
        assert all(len(o.token_ids) == 6 for o in outputs)
    assert dict(e.stats().compilations) == compiled
    assert e.stats().decode.tokens == 6 * 5
    drained(e)


def test_default_mode_keeps_its_buckets_and_its_decode_program():
    e = engine(on=False, deterministic=False)
    assert e.runner.prefill_buckets == [16, 32]
    assert e.runner.decode_buckets == [1, 2, 4]
    assert not e.config.deterministic


class MixesRows:
    """A model whose layer 1 adds a little of the batch's mean to every query: what deterministic mode must not miss."""

    def __init__(self, inner: Any):
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def forward(self, params: Any, tokens: Any, positions: Any, kv: Any, attend: Any) -> Any:
        def mixed(kv: Any, layer: int, q: Any, k: Any, v: Any, **options: Any) -> Any:
            q = q + 1e-5 * q.mean(0) if layer == 1 else q
            return attend(kv, layer, q, k, v, **options)

        return self._inner.forward(params, tokens, positions, kv, mixed)


def test_a_model_that_mixes_rows_is_seen_by_the_recorder():
    config = EngineConfig(
        page_size=4, num_device_pages=48, num_host_pages=96, max_rows=4, max_context=64, max_prefill_tokens=32,
        compilation_cache=False, deterministic=True, enable_prefix_reuse=True,
    )  # fmt: skip
    bits = Bits()
    mixes: Any = MixesRows(model("llama"))
    e = bits.watch(Engine(mixes, config))
    tokens = prompt(12, seed=1)
    e.generate(tokens, GREEDY)
    e.generate([tokens, prompt(9, seed=2)], GREEDY)
    assert bits.different


def test_pages_of_other_numerics_are_never_shared():
    """A default engine, and one of another program shape, have other namespaces; equal shapes have the same."""
    same = engine().namespace()
    assert engine(num_device_pages=50).namespace() == same
    others: list[dict[str, Any]] = [{"deterministic": False}, {"max_prefill_tokens": 16}, {"max_rows": 3}]
    for changes in others:
        assert engine(**changes).namespace() != same
    assert engine(deterministic=False).namespace() == engine(deterministic=False, max_prefill_tokens=16).namespace()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shared_prefix_decode": True}, "shared_prefix_decode"),
        ({"max_rows": 33, "max_prefill_tokens": 32}, "max_rows"),
        ({"deterministic_means": "luck"}, "deterministic_means"),
    ],
)
def test_what_cannot_be_deterministic_is_a_configuration_error(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        Engine(model("llama"), EngineConfig(page_size=4, deterministic=True, **changes))
    if "deterministic_means" not in changes:
        EngineConfig(page_size=4, **changes)


def test_decode_does_not_share_reads_in_deterministic_mode():
    config = EngineConfig(deterministic=True, enable_prefix_reuse=True, max_context=1024, num_device_pages=64)
    assert not any(Engine(model("llama"), config).runner.shared.active)


# ---- faults


@pytest.mark.parametrize("fault", ["raises", "takes the pools", "refuses a write"])
@pytest.mark.parametrize("call", range(6))
def test_a_fault_in_any_packed_call_loses_no_request(fault: str, call: int, monkeypatch: pytest.MonkeyPatch):
    """Prefill is call 0; each decode step is one more. The rows go on with the same tokens, and nothing stays taken."""
    tokens = [prompt(9, seed=1), prompt(6, seed=2)]
    want = [o.token_ids for o in engine(on=False).generate(tokens, GREEDY)]
    e = engine()
    requests = [e.submit(t, GREEDY) for t in tokens]
    calls = 0
    run = e.programs.prefill

    def faulty(params: Any, pools: Any, inputs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls - 1 != call:
            return run(params, pools, inputs)
        if fault == "refuses a write":
            outputs, pools = run(params, pools, inputs)
            return outputs.replace(refused=jnp.int32(1)), pools
        if fault == "takes the pools":
            for leaf in jax.tree.leaves(pools):
                leaf.delete()
        raise RuntimeError("injected")

    monkeypatch.setattr(e.programs, "prefill", faulty)
    outputs: dict[int, Any] = {}
    failures = 0
    while e.has_work:
        try:
            outputs.update((o.request_id, o) for o in e.step())
        except (RuntimeError, IntegrityError):
            failures += 1
        check(e)
    assert failures == 1
    assert [outputs[i].token_ids for i in requests] == want
    assert all(row.state is SequenceState.COMPLETED for row in e.scheduler.running)
    drained(e)


# ---- longer


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("tokens", "rows", "page_size"), [(16, 1, 8), (64, 3, 16), (128, 8, 16), (512, 5, 64)])
@pytest.mark.parametrize("name", FAMILIES)
def test_other_program_shapes_and_dtypes(name: str, tokens: int, rows: int, page_size: int, dtype: str):
    """N4 in odd numbers of rows, several pages a chunk and 16 bits, with many lengths of hits and queries."""
    sizes: dict[str, Any] = {
        "max_prefill_tokens": tokens,
        "max_rows": rows,
        "page_size": page_size,
        "max_context": 128,
        "num_device_pages": 4 * max(rows, 2) * 128 // page_size,
        "num_host_pages": 512,
    }
    bits = Bits()
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    text = prompt(72, seed=1)
    off = bits.watch(engine(name, on=False, dtype=dtype, **sizes))
    off.score(text)
    cold = off.generate(text, params)[0].token_ids
    e = bits.watch(engine(name, dtype=dtype, **sizes))
    prompts = [text[:n] for n in range(page_size, 73, max(page_size // 2, 3))] + [
        prompt(n, seed=n) for n in (5, 17, 33)
    ]
    assert e.generate(text, params)[0].token_ids == cold
    for tokens_ in prompts:
        e.score(tokens_, reuse=True)
    e.drop_device_pages()
    assert e.generate([*prompts, text], params)[-1].token_ids == cold
    assert e.generate([text, *prompts[::-1]], params)[0].token_ids == cold
    stats = e.stats().prefill
    assert stats.hits >= 5
    assert stats.full_hits > 0
    assert not bits.different
    assert bits.repeats > 300
    drained(e)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_pool_size_and_table_width_change_no_bit(name: str):
    """Not promised across programs, but nothing on a CPU breaks it: attention sums keys by absolute position."""
    tokens = prompt(40, seed=1)
    cold = engine(name, on=False).score(tokens)
    assert np.array_equal(engine(name, on=False, num_device_pages=99, max_context=128).score(tokens), cold)
    assert np.array_equal(engine(name, on=False, num_device_pages=17, max_context=43).score(tokens), cold)


@pytest.mark.slow
def test_real_weights_are_the_same_to_the_bit_warm_and_in_batches():
    """SmolLM2-135M in bfloat16: 64 cached tokens and 8 more at page 16, a full hit, reloaded, in a batch."""
    smollm2: Any = models.load("smollm2", dtype="bfloat16")
    config = EngineConfig(
        page_size=16, num_device_pages=64, num_host_pages=128, max_rows=3, max_context=128, max_prefill_tokens=128,
        compilation_cache=False, deterministic=True,
    )  # fmt: skip
    bits = Bits()
    off = bits.watch(Engine(smollm2, config))
    text = np.asarray(smollm2.tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 12), np.int32)[:72]
    cold = off.score(text)
    answer = off.generate(text, GREEDY)[0].token_ids
    e = bits.watch(Engine(smollm2, dataclasses.replace(config, enable_prefix_reuse=True), programs=off.programs))
    e.generate(text[:65], GREEDY)
    logits, first = e.score(text, reuse=True)
    assert first == 64
    assert np.array_equal(logits, cold[64:])
    e.drop_device_pages()
    outputs = e.generate([text, text[:64], text[8:40]], GREEDY)
    assert outputs[0].token_ids == answer
    assert outputs[1].full_hit
    assert not bits.different
    drained(e)
