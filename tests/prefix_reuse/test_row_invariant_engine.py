"""Deterministic mode by row-invariant operations, forced on the CPU: prefill and decode keep their own programs (N4).

`Bits` holds every hidden state and logit to every other of the same text, those inside decode programs too, which the
model hands out as a `Tap`.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from determinism_helpers import Bits, Tap
from engine_helpers import drained, prompt
from model_data import TINY

import models
from models.testing import tiny_hybrid, tiny_llama
from prefix_reuse import Engine, EngineConfig, SamplingParams
from prefix_reuse.errors import ConfigError
from prefix_reuse.programs import Programs

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)
CONFIG = EngineConfig(
    page_size=4, num_device_pages=48, num_host_pages=96, max_rows=3, max_context=64, max_prefill_tokens=32,
    min_prefill_tokens=16, min_decode_rows=2, decode_steps=4, poison=True, compilation_cache=False, deterministic=True,
    deterministic_means="row-invariant",
)  # fmt: skip


@cache
def model(name: str, dtype: str = "float32") -> Any:
    tiny = {"llama": tiny_llama, "hybrid": tiny_hybrid}
    return Tap(tiny[name](layers=2, dtype=jnp.dtype(dtype)) if name in tiny else models.load(TINY / name, dtype=dtype))


@cache
def programs(name: str, dtype: str = "float32") -> Programs:
    return Programs(model(name, dtype), CONFIG, jax.devices()[0])


def engine(name: str, *, on: bool = True, dtype: str = "float32", **changes: Any) -> Engine:
    config = dataclasses.replace(CONFIG, enable_prefix_reuse=on, **changes)
    return Engine(model(name, dtype), config, programs=programs(name, dtype))


def check_all_ways(name: str, dtype: str = "float32", **changes: Any) -> None:
    """Cold, hit, full hit, reloaded from the host, in batches of other sizes, decoded, on pages that decoding wrote."""
    bits = Bits()
    base = prompt(16, seed=1)
    texts = [prompt(5, seed=2), prompt(21, seed=3, start=base), base]
    off = bits.watch(engine(name, on=False, dtype=dtype, **changes))
    cold = [off.generate(text, GREEDY)[0].token_ids for text in texts]
    assert bits.decoded == 3 * 5
    for text, answer in zip(texts, cold, strict=True):
        off.score(np.concatenate([text, answer]))
    assert bits.repeats > 50  # what decoding computed in programs of two rows, prefill computed too
    want = off.score(texts[1])

    e = bits.watch(engine(name, dtype=dtype, publish_generated=True, **changes))
    e.generate(base, GREEDY)
    assert [o.token_ids for o in e.generate(texts, GREEDY)] == cold  # a miss, a hit and a full hit decode together
    stats = e.stats()
    assert (stats.prefill.hits, stats.prefill.full_hits) == (2, 1)
    e.drop_device_pages()
    assert [o.token_ids for o in e.generate(texts[::-1], GREEDY)] == cold[::-1]
    assert e.stats().decode.host_pages_loaded > 0
    logits, first = e.score(texts[1], reuse=True)
    assert first == 20
    assert np.array_equal(logits, want[first:])
    logits, first = e.score(np.concatenate([texts[1], cold[1], [2]]), reuse=True)
    assert first == 24  # 21 tokens of the prompt and three that decoding wrote
    assert bits.decoded == 5 * 10
    assert bits.different == []
    assert stats.numerics.means == "row-invariant"
    assert {"prefill_step", "decode_steps"} <= set(stats.compilations)
    drained(e)


@pytest.mark.parametrize("name", ["hybrid", pytest.param("llama", marks=pytest.mark.slow)])
def test_every_token_has_the_same_bits_wherever_it_is_computed(name: str) -> None:
    check_all_ways(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "gpt_oss_mxfp4"])
def test_the_other_families_too(name: str) -> None:
    check_all_ways(name, "bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "hybrid"])
def test_every_token_has_the_same_bits_with_decode_programs_of_one_row_too(name: str, dtype: str) -> None:
    check_all_ways(name, dtype, min_decode_rows=1)


@pytest.mark.slow
def test_every_hit_length_and_batch_size_and_random_draws() -> None:
    bits = Bits()
    tokens = prompt(24, seed=3)
    off = bits.watch(engine("hybrid", on=False, min_decode_rows=1))
    cold = off.score(tokens)
    e = bits.watch(engine("hybrid", min_decode_rows=1))
    for pages in range(7):
        e.clear_cache()
        if pages:
            e.score(np.concatenate([tokens[: 4 * pages], [2]]), reuse=True)
        logits, first = e.score(tokens, reuse=True)
        assert first == min(4 * pages, 23)
        assert np.array_equal(logits, cold[first:])
    params = SamplingParams(max_tokens=9, temperature=0.8, top_p=0.9, top_k=50, seed=5, n=3, ignore_eos=True)
    alone = off.generate(tokens, params)[0].samples
    assert len({sample.token_ids for sample in alone}) == 3
    both = e.generate([tokens, prompt(11, seed=2)], params)[0].samples
    assert [sample.token_ids for sample in both] == [sample.token_ids for sample in alone]
    assert bits.different == []
    drained(e)


class MixesRows(Tap):
    """Layer 1 adds a little of the batch's mean to every query."""

    def forward(self, params: Any, tokens: Any, positions: Any, kv: Any, attend: Any) -> Any:
        def mixed(kv: Any, layer: int, q: Any, k: Any, v: Any, **options: Any) -> Any:
            q = q + 1e-5 * q.mean(0) if layer == 1 else q
            return attend(kv, layer, q, k, v, **options)

        return self._model.forward(params, tokens, positions, kv, mixed)


def test_a_model_that_mixes_rows_is_seen_in_decode_programs() -> None:
    """The recorder sees inside `decode_steps`: prefill of one row at a time is not enough to make all bits equal."""
    bits = Bits()
    config = dataclasses.replace(CONFIG, max_rows=2, max_prefill_tokens=16)
    mixes: Any = MixesRows(tiny_llama())
    e = bits.watch(Engine(mixes, config))
    first, second = prompt(12, seed=1), prompt(9, seed=2)
    e.generate(first, GREEDY)
    e.generate([first, second], GREEDY)
    assert any("position" in text for text in bits.different)
    assert bits.decoded == 3 * 5


def test_pages_of_the_two_means_are_never_shared_and_the_program_shape_does_not_matter() -> None:
    plain = tiny_llama()
    exact = Engine(plain, CONFIG)
    other_shape = Engine(plain, dataclasses.replace(CONFIG, max_rows=2, max_prefill_tokens=16))
    one_program = Engine(plain, dataclasses.replace(CONFIG, deterministic_means=None))
    assert one_program.stats().numerics.means == "one program"
    assert exact.namespace() == other_shape.namespace()
    assert len({e.namespace() for e in (exact, one_program)}) == 2
    assert exact.runner.prefill_buckets == [16, 32]
    assert exact.runner.decode_buckets == [2, 3]
    assert one_program.runner.prefill_buckets == [32]
    with pytest.raises(ConfigError, match="means of deterministic mode"):
        Engine(plain, dataclasses.replace(CONFIG, deterministic_means=None), programs=exact.programs)


def test_a_model_that_does_not_say_so_cannot_be_row_invariant() -> None:
    class Other(Tap):
        row_invariant_matmuls = False

    other: Any = Other(tiny_llama())
    with pytest.raises(ConfigError, match="row_invariant_matmuls"):
        Engine(other, CONFIG)
