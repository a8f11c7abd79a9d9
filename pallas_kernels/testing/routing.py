"""What every implementation of route_experts must do."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul.plan import plan_tiles
from pallas_kernels.route_experts.api import Routing, route_experts

HOW: dict[str, dict[str, bool]] = {
    "largest first": {"softmax_first": False},
    "softmax first": {"softmax_first": True},
    "normalised": {"softmax_first": True, "normalise": True},
}
CASES = [
    ("largest first", 1, 32, 4),
    ("largest first", 130, 16, 16),
    ("softmax first", 7, 5, 2),
    ("softmax first", 2, 1, 1),
    ("normalised", 1, 128, 8),
    ("normalised", 130, 128, 8),
]


class RouteExpertsTests:
    """Properties of route_experts."""

    implementation: str = "reference"
    same_bits: bool = True
    """False where kernels are interpreted: XLA's exponentials on a CPU follow the shape of the array."""

    def run(self, logits: Any, k: int, **options: Any) -> Routing:
        return route_experts(jnp.asarray(logits, jnp.float32), k, implementation=self.implementation, **options)

    @pytest.mark.parametrize(("how", "tokens", "experts", "k"), CASES)
    def test_against_a_loop_over_tokens(self, how: str, tokens: int, experts: int, k: int) -> None:
        """Few different logits, so that many are equal."""
        rng = np.random.default_rng(0)
        logits = (np.round(rng.normal(size=(tokens, experts)) * 4) / 4 + 0.0).astype(np.float32)  # no -0
        bias = np.round(rng.normal(size=experts) * 4) / 4 if tokens % 2 else None
        got = self.run(logits, k, bias=None if bias is None else jnp.asarray(bias, jnp.bfloat16), **HOW[how])
        true = logits.astype(np.float64) + (0 if bias is None else bias)
        chosen = np.argsort(-true, axis=1, kind="stable")[:, :k]
        kept = np.exp(np.take_along_axis(true, chosen, 1))
        every = np.exp(true).sum(1, keepdims=True)
        sums = every if how == "softmax first" else kept.sum(1, keepdims=True)
        np.testing.assert_array_equal(got.experts, chosen)
        np.testing.assert_allclose(got.weights, kept / sums, rtol=1e-5)
        self.check_places(got, experts)

    @pytest.mark.parametrize(("parts", "tokens"), [(1, 3), (15, 16), (4, 130)])
    def test_parts_of_logits_are_added_up(self, parts: int, tokens: int) -> None:
        rng = np.random.default_rng(4)
        logits = rng.integers(-64, 64, (parts, tokens, 9)).astype(np.float32) / 16 + np.arange(9) / 512  # exact sums
        bias = jnp.asarray(rng.integers(-4, 4, 9), jnp.float32)
        got, want = (self.run(some, 3, bias=bias, softmax_first=False) for some in (logits, logits.sum(0)))
        np.testing.assert_array_equal(got.experts, want.experts)
        np.testing.assert_array_equal(got.weights, want.weights)
        self.check_places(got, 9)

    def check_places(self, got: Routing, experts: int) -> None:
        """Pairs are sorted by expert, stably; what is said of the tiles is true."""
        chosen = np.asarray(got.experts)
        tokens, k = chosen.shape
        order = np.argsort(chosen.reshape(-1), kind="stable")
        np.testing.assert_array_equal(got.tokens, order // k)
        np.testing.assert_array_equal(np.asarray(got.place).reshape(-1)[order], np.arange(tokens * k))
        np.testing.assert_array_equal(got.group_sizes, np.bincount(chosen.reshape(-1), minlength=experts))
        if got.tiles is not None:
            want = plan_tiles(got.group_sizes, tokens * k, got.tiles.block)
            used = int(want.used)
            assert used == int(got.tiles.used)
            for mine, other in (
                (got.tiles.begin, want.begin),
                (got.tiles.end, want.end),
                (got.tiles.group, want.group),
            ):
                np.testing.assert_array_equal(mine[:used], other[:used])
            assert np.all(np.asarray(got.tiles.end)[used:] <= np.asarray(got.tiles.begin)[used:])

    @pytest.mark.parametrize("how", ["largest first", "normalised"])
    def test_a_tokens_weights_do_not_depend_on_its_company(self, how: str) -> None:
        logits = np.random.default_rng(1).normal(size=(290, 48))
        whole = self.run(logits, 3, fixed_tile=True, **HOW[how])
        for rows in (slice(0, 1), slice(40, 47)):
            some = self.run(logits[rows], 3, fixed_tile=True, **HOW[how])
            np.testing.assert_allclose(some.weights, whole.weights[rows], rtol=0 if self.same_bits else 1e-6)
            np.testing.assert_array_equal(some.experts, whole.experts[rows])

    @pytest.mark.parametrize(("tokens", "how"), [(9, "softmax first"), (200, "normalised"), (200, "largest first")])
    def test_numbers_that_are_none_do_no_harm_to_others(self, tokens: int, how: str) -> None:
        """A place that two pairs share leaves another one unwritten, and the matmul reads a row that is not there."""
        logits = np.random.default_rng(2).normal(size=(tokens, 8)).astype(np.float32)
        want = self.run(logits, 2, **HOW[how])
        logits[1, 3] = np.nan
        logits[2, 5] = np.array(0xFFC00000, np.uint32).view(np.float32)  # the sign bit set, as 0 / 0 is on x86
        logits[3], logits[4], logits[5] = np.nan, -np.inf, np.inf
        logits[6, [0, 7]] = np.inf
        logits[7, 2:] = -np.inf
        got = self.run(logits, 2, **HOW[how])
        assert np.all(np.isnan(got.weights[1:7]))
        assert np.all(np.sort(got.experts[7]) == [0, 1])
        others = np.delete(np.arange(tokens), np.arange(1, 8))
        np.testing.assert_array_equal(got.weights[others], want.weights[others])
        chosen = np.asarray(got.experts)
        assert np.all((chosen >= 0) & (chosen < 8))
        assert np.all(chosen[:, 0] != chosen[:, 1])
        self.check_places(got, 8)

    def test_zeros_are_equal_whatever_their_sign(self) -> None:
        got = self.run([[-1.0, -0.0, 0.0, -0.0, -2.0]], 3, softmax_first=False)
        np.testing.assert_array_equal(got.experts, [[1, 2, 3]])
