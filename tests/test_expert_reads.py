"""How many experts decode steps read: against choices that are known, and against a forward without pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_data import TINY

import models
from benchmarks.expert_reads import ExpertReads, decoded, mean_distinct, recorded_routings
from benchmarks.model_costs import TINY_MOE
from models.testing import dense_attend, dense_kv
from prefix_reuse import Engine, EngineConfig, SamplingParams

STEPS = 4
LONG = SamplingParams(max_tokens=6 * STEPS, ignore_eos=True)


def engine_of(model: Any, *, reuse: bool = False, programs: Any = None) -> Engine:
    """Of four rows, with NaN wherever no token's K and V are."""
    sizes: dict[str, Any] = {"page_size": 4, "num_device_pages": 64, "num_host_pages": 64, "max_rows": 4}
    return Engine(
        model,
        EngineConfig(
            **sizes,
            max_context=96,
            max_prefill_tokens=64,
            min_prefill_tokens=64,
            decode_steps=STEPS,
            min_decode_rows=4,
            enable_prefix_reuse=reuse,
            poison=True,
            compilation_cache=False,
        ),
        programs=programs,
    )


def decoding(engine: Engine, prompts: list[list[int]], turns: int = 3) -> list[Any]:
    """The rows of these prompts, which have decoded together for so many turns."""
    for prompt in prompts:
        engine.submit(prompt, LONG)
    for _ in range(turns):
        engine.step()
    assert len(engine.scheduler.running) == len(prompts)
    return engine.scheduler.running


@pytest.fixture(scope="module")
def by_parity() -> ExpertReads:
    """Eight experts, two a token. Layer 0: 0 and 1 of an even token, 2 and 3 of an odd one; layer 1: 4 and 5 of every token.

    Attention and experts add nothing, and of an even token the next one is even, too.
    """
    model = models.from_config(TINY_MOE)
    even, odd, both = np.eye(TINY_MOE["hidden_size"], dtype=np.float32)[:3]
    vocab = np.arange(TINY_MOE["vocab_size"])[:, None]
    embed = np.where(vocab % 2, odd, even) + both
    routers = np.zeros((2, TINY_MOE["num_experts"], TINY_MOE["hidden_size"]), np.float32)
    routers[0, :4] = 2 * even, even, 2 * odd, odd
    routers[1, 4:6] = 2 * both, both
    nothing = [{name: jnp.zeros_like(layer[name]) for name in ("out", "down")} for layer in model.params["layers"]]
    layers = [
        layer | zeros | {"router": jnp.asarray(router)}
        for layer, zeros, router in zip(model.params["layers"], nothing, routers, strict=True)
    ]
    unembed = np.where(vocab == 2, even, 0) + np.where(vocab == 3, odd, 0)
    params = model.params | {
        "embed": jnp.asarray(embed),
        "layers": layers,
        "unembed": jnp.asarray(unembed, jnp.float32),
    }
    return ExpertReads(engine_of(replace(model, params=params)))


@pytest.mark.parametrize(
    ("last", "read", "tokens"),
    [
        ([6, 8, 10], 2, 1),  # all choose alike: exactly k
        ([7, 9], 2, 1),  # rows of padding, whose token is even, are not counted
        ([6, 8, 9], 3, 2),  # four experts in layer 0, two in layer 1
        ([7], 2, 1),
    ],
)
def test_rows_that_choose_the_same_experts_are_counted_once(
    by_parity: ExpertReads, last: list[int], read: float, tokens: float
):
    engine = by_parity.engine
    rows = decoding(engine, [[20 + i, 31, token] for i, token in enumerate(last)])
    try:
        assert by_parity.mean(rows, STEPS) == read
        taken, _ = decoded(rows, STEPS)
        assert mean_distinct(taken) == tokens
        assert set(taken.ravel()) <= {2, 3}
        assert engine.stats().compilations["chosen_experts"] == 1  # for any number of rows
    finally:
        for row in rows[:]:
            engine.cancel(row.request_id)
        while engine.has_work:
            engine.step()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss_mxfp4"])
def test_the_experts_of_decoded_steps_are_those_of_a_forward_without_pages(name: str):
    model = models.load(TINY / name, dtype="float32")
    engine = engine_of(model, reuse=True)
    reads = ExpertReads(engine)
    shared = list(range(2, 14))
    prompts = [[*shared, 40, 41, 42], [*shared, 50], [60, 61]]
    rows = decoding(engine, prompts)
    chosen = reads.chosen(rows, STEPS)
    _, positions = decoded(rows, STEPS)
    for i, expected in enumerate(dense_experts(model, [row.tokens for row in rows])):
        assert np.array_equal(chosen[:, :, i], expected[positions[:, i]])
    assert len(np.unique(chosen)) > chosen.shape[-1]  # not all alike
    # Nothing was changed: the rows go on as those of an engine that nobody looked into.
    other = engine_of(model, reuse=True, programs=engine.programs)
    assert finished(engine) == [output.token_ids for output in other.generate(prompts, LONG)]


def dense_experts(model: Any, texts: list[np.ndarray]) -> list[np.ndarray]:
    """Of each token, in one forward without pages a text: int32 [T, L, k]."""
    length = max(map(len, texts))  # of every one, so that one program does: a token does not see what follows

    @jax.jit
    def experts(params: Any, tokens: jax.Array) -> jax.Array:
        with recorded_routings() as routings:
            model.forward(params, tokens, jnp.arange(length), dense_kv(model, length), dense_attend())
        return jnp.stack([routing.experts for routing in routings], axis=1)

    return [np.asarray(experts(model.params, np.pad(text, (0, length - len(text))))) for text in texts]


def finished(engine: Engine) -> list[Any]:
    """Token ids of what runs, in the order of submission."""
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    return [output.token_ids for output in sorted(outputs, key=lambda output: output.request_id)]


def test_steps_that_were_not_decoded_are_refused(by_parity: ExpertReads):
    rows = decoding(by_parity.engine, [[2, 4]], turns=1)
    with pytest.raises(ValueError, match="has decoded 4 steps, fewer than 5"):
        by_parity.chosen(rows, STEPS + 1)
    by_parity.engine.cancel(rows[0].request_id)
    by_parity.engine.step()


def test_distinct_numbers_are_counted_along_the_last_axis():
    assert mean_distinct(np.array([[7, 7, 7], [1, 2, 1], [3, 2, 1]])) == 2
