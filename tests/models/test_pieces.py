"""The small pieces, each against a second way to compute it."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from models.gguf_checkpoint import _unpermute
from models.moe import combine, grouped_linear, route, router_logits
from models.mxfp4 import dequantise, random_mxfp4
from models.rope import RopeConfig, rope_table
from models.testing import TOY_EOS, reference_generate, reference_logits, tiny_hybrid, tiny_llama, toy_tokenizer
from pallas_kernels import Mxfp4, RowInvariance
from pallas_kernels.add_rms_norm.reference import expert_sum
from pallas_kernels.grouped_matmul.mxfp4 import code_of
from pallas_kernels.qkv_rope.reference import rotate
from pallas_kernels.route_experts.reference import MOST_COMPARED, sort_stably

RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, np.float32)


def test_rope_makes_scores_depend_on_distance_only() -> None:
    rope, q, k = RopeConfig(16, theta=100.0), jnp.asarray(normal(1, 1, 16)), jnp.asarray(normal(1, 1, 16))

    def score(at_q: int, at_k: int) -> float:
        tables = [rope_table(rope, jnp.asarray([at])) for at in (at_q, at_k)]
        return float(jnp.sum(rotate(q, *tables[0]) * rotate(k, *tables[1])))

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-4)
    assert score(7, 3) != pytest.approx(score(8, 3), abs=1e-4)


def test_yarn_of_gpt_oss_has_the_published_amplitude_and_no_rounding() -> None:
    rope = RopeConfig(64, 150000.0, "yarn", factor=32.0, original_context=4096, truncate=False)
    assert rope.amplitude == pytest.approx(1.3466, abs=1e-4)
    plain = RopeConfig(64, 150000.0).frequencies()
    ratio = plain / rope.frequencies()
    assert ratio[0] == pytest.approx(1)
    assert ratio[-1] == pytest.approx(32)
    assert np.all(np.diff(ratio) >= -1e-5)


def test_llama3_keeps_fast_frequencies_and_divides_slow_ones() -> None:
    rope = RopeConfig(64, 500000.0, "llama3", factor=32.0, original_context=8192)
    plain = RopeConfig(64, 500000.0).frequencies()
    turns, ratio = 8192 * plain / (2 * math.pi), plain / rope.frequencies()
    np.testing.assert_allclose(ratio[turns > 4], 1, rtol=1e-5)
    np.testing.assert_allclose(ratio[turns < 1], 32, rtol=1e-5)


def test_unpermute_undoes_what_llama_cpp_does() -> None:
    heads, dim, columns = 3, 8, 5
    rows = normal(heads * dim, columns)
    stored = rows.reshape(heads, 2, dim // 2, columns).swapaxes(1, 2).reshape(rows.shape)  # convert_hf_to_gguf.py
    np.testing.assert_array_equal(_unpermute(stored, heads), rows)


def test_mxfp4_low_nibble_first_with_one_scale_a_block() -> None:
    blocks = np.zeros((1, 2, 16), np.uint8)
    blocks[0, 0, 0] = 0x72  # codes 2, 7
    blocks[0, 1, 15] = 0x9F  # codes 15, 9
    values = dequantise(blocks, np.array([[127, 129]], np.uint8))
    assert values.shape == (1, 64)
    assert values[0, :2].tolist() == [1.0, 6.0]
    assert values[0, 62:].tolist() == [-24.0, -2.0]
    assert not values[0, 2:62].any()


def test_mixture_equals_a_loop_over_tokens_and_their_experts() -> None:
    x, weight, bias, logits = normal(7, 8), normal(5, 6, 8), normal(5, 6), normal(7, 5)
    routing = route(jnp.asarray(logits), 2, softmax_first=False)
    out = grouped_linear(jnp.asarray(x), jnp.asarray(weight), routing, jnp.asarray(bias), of_tokens=True)
    expected = []
    for row, scores in zip(x, logits, strict=True):
        best = np.argsort(-scores)[:2]
        shares = np.exp(scores[best]) / np.exp(scores[best]).sum()
        expected.append(sum(w * (weight[e] @ row + bias[e]) for w, e in zip(shares, best, strict=True)))
    np.testing.assert_allclose(expert_sum(combine(out, routing)), np.stack(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("tokens", "columns", "parts"), [(0, 384, 1), (1, 384, 1), (2, 384, 2), (5, 2880, 15), (3, 72, 1), (1025, 384, 1)]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_of_the_router_come_in_parts_where_tokens_are_few(
    tokens: int, columns: int, parts: int, dtype: str
) -> None:
    x, weight = jnp.asarray(normal(tokens, columns), dtype), jnp.asarray(normal(5, columns), dtype)
    want = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    logits = router_logits(x, weight)
    assert logits.dtype == jnp.float32
    assert logits.shape == ((parts, tokens, 5) if parts > 1 else (tokens, 5))
    total = np.asarray(logits, np.float64).reshape(parts, tokens, 5).sum(0)
    np.testing.assert_allclose(total, want, rtol=1e-4, atol=1e-3)
    with RowInvariance().active():
        assert router_logits(x, weight).shape == (tokens, 5)


def mixture(x: jax.Array, logits: jax.Array, weight: jax.Array, **options: Any) -> jax.Array:
    routing = route(logits, 2, softmax_first=True, normalise=True)
    return expert_sum(combine(grouped_linear(x, weight, routing, of_tokens=True, **options), routing))


def test_mixture_of_a_token_does_not_depend_on_its_neighbours() -> None:
    x, weight, logits = jnp.asarray(normal(9, 8)), jnp.asarray(normal(4, 8, 8)), jnp.asarray(normal(9, 4))
    order = jnp.asarray(RNG.permutation(9))
    assert jnp.array_equal(mixture(x, logits, weight)[order], mixture(x[order], logits[order], weight))


@pytest.mark.parametrize("experts", [1, 5, 8, 32, 128])
def test_routing_in_row_invariant_mode_is_the_same_softmax_and_leaves_no_sum_to_the_compiler(experts: int) -> None:
    logits, k = jnp.asarray(normal(6, experts)), min(experts, 4)

    def weights(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return route(x, k, softmax_first=True, normalise=True).weights, route(x, k, softmax_first=False).weights

    def float_sums() -> list[str]:
        lines = str(jax.make_jaxpr(weights)(logits)).splitlines()
        return [line for line in lines if "reduce_sum" in line and "f32" in line]

    assert float_sums()
    want = weights(logits)
    with RowInvariance().active():
        assert not float_sums()
        got = weights(logits)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_a_fixed_tile_a_token_has_the_same_bits_alone_and_among_others(dtype: str) -> None:
    x, weight = jnp.asarray(normal(150, 32), dtype), jnp.asarray(normal(4, 32, 32), dtype)
    logits = jnp.asarray(normal(150, 4))
    mix = jax.jit(partial(mixture, fixed_tile=True))
    whole = mix(x, logits, weight)  # more pairs than are compared with each other: sorted the other way
    for few in (slice(0, 1), slice(40, 47)):
        assert jnp.array_equal(mix(x[few], logits[few], weight), whole[few])


@pytest.mark.parametrize("count", [1, 2, 32, MOST_COMPARED, MOST_COMPARED + 1])
def test_keys_are_sorted_stably(count: int) -> None:
    keys = RNG.integers(0, 5, count).astype(np.int32)
    order, place = map(np.asarray, sort_stably(jnp.asarray(keys)))
    np.testing.assert_array_equal(order, np.argsort(keys, kind="stable"))
    np.testing.assert_array_equal(place[order], np.arange(count))


def test_a_step_of_decoding_sorts_nothing_and_scatters_nothing() -> None:
    """What is around its matmuls is a launch each on a GPU, where the routing is not done by one kernel."""

    def around(x: jax.Array, logits: jax.Array) -> jax.Array:
        routing = route(logits, 2, softmax_first=False)
        return expert_sum(combine(x[routing.tokens] * routing.group_sizes[0], routing))

    text = jax.jit(around).lower(jnp.ones((4, 8)), jnp.ones((4, 5))).as_text()
    assert not any(name in text for name in ("stablehlo.sort", "stablehlo.scatter", "stablehlo.while"))


def test_the_two_routers_differ_as_they_should() -> None:
    logits = jnp.asarray([[0.0, 1.0, 2.0, 3.0]])
    after = route(logits, 2, softmax_first=False)
    kept = route(logits, 2, softmax_first=True)
    assert after.experts.tolist() == [[3, 2]]
    assert float(after.weights.sum()) == pytest.approx(1)
    assert float(kept.weights.sum()) < 0.9
    normalised = route(logits, 2, softmax_first=True, normalise=True)
    np.testing.assert_allclose(normalised.weights, after.weights, rtol=1e-6)


def test_tiny_models_are_functions_of_their_seed() -> None:
    prompt = [3, 4, 5, 6, 7]
    logits = reference_logits(tiny_llama(1), prompt)
    np.testing.assert_array_equal(logits, reference_logits(tiny_llama(1), prompt))
    assert not np.array_equal(logits, reference_logits(tiny_llama(2), prompt))
    assert len(reference_generate(tiny_llama(), prompt, 4)) == 4


def test_tiny_hybrid_forgets_what_its_windows_have_passed() -> None:
    model = tiny_hybrid(layers=1, window=4)  # one sliding layer: the last token sees four
    assert [(g.layers, g.window) for g in tiny_hybrid(window=4).kv_groups] == [((1, 3), None), ((0, 2), 4)]
    far, near = [9, 3, 4, 5, 6, 7], [3, 3, 4, 5, 6, 8]
    logits = reference_logits(model, [3, 3, 4, 5, 6, 7])[-1]
    np.testing.assert_allclose(reference_logits(model, far)[-1], logits, atol=1e-6)
    assert np.abs(reference_logits(model, near)[-1] - logits).max() > 1e-3


def test_toy_tokenizer_round_trips_and_parses_specials() -> None:
    tokenizer = toy_tokenizer()
    text = "Hello, world\n7"
    assert tokenizer.vocab_size == 128
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("a<eos>")[-1] == TOY_EOS


def test_random_models_of_any_family_come_from_a_config() -> None:
    config = {
        "architectures": ["GptOssForCausalLM"],
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4,
        "num_experts_per_tok": 2, "sliding_window": 4, "max_position_embeddings": 4096,
        "quantization_config": {"quant_method": "mxfp4"}, "rope_theta": 150000.0,
    }  # fmt: skip
    model = models.from_config(config, dtype="float32")
    assert isinstance(model.params["layers"][0]["gate_up"], Mxfp4)
    assert np.isfinite(reference_logits(model, range(10))).all()
    assert [group.window for group in model.kv_groups] == [None, 4]


@pytest.mark.parametrize("columns", [96, 2880])
def test_random_packed_weights_have_the_size_of_a_trained_models(columns: int) -> None:
    weight = random_mxfp4(jax.random.key(0), (2, 64, columns), columns)
    values = np.asarray(weight.values())
    assert np.std(values) == pytest.approx(columns**-0.5, rel=0.03)
    assert abs(np.mean(values)) < 0.03 * columns**-0.5
    codes = {int(code) for place in range(4) for code in np.unique(code_of(np.asarray(weight.blocks), place))}
    assert codes == set(range(16))
    assert columns != 2880 or set(np.unique(np.asarray(weight.scales))) == {119, 120}
