"""What every implementation of row_invariant_matmul must do."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.row_invariant_matmul import row_invariant_matmul
from pallas_kernels.testing.attention import assert_same_bits

# Relative to the largest result: f32 sums of up to 576 products, and one rounding to the result's dtype.
BARS = {"float32": 2e-6, "bfloat16": 2**-8, "float16": 2**-11}


class RowInvariantMatmulTests:
    """Properties of row_invariant_matmul. A subclass sets `implementation`; None is what this device prefers."""

    implementation: str | None = "reference"
    rows: tuple[int, ...] = (1, 17, 70)
    """Numbers of rows whose bits are compared."""

    def run(self, x: Any, weight: Any, bias: Any = None, **options: Any) -> jax.Array:
        try:
            return row_invariant_matmul(x, weight, bias, implementation=self.implementation, **options)
        except NotImplementedError as error:
            pytest.skip(f"{self.implementation}: {error}")

    @staticmethod
    def operands(rows: int, outputs: int, columns: int, dtype: str, seed: int = 0) -> tuple[jax.Array, ...]:
        """x, weight, bias."""
        rng = np.random.default_rng([seed, rows, outputs, columns])
        shapes = ((rows, columns), (outputs, columns), (outputs,))
        return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)

    @pytest.mark.parametrize(
        ("rows", "outputs", "columns", "dtype"),
        [(5, 96, 576, "float32"), (33, 40, 72, "bfloat16"), (70, 128, 33, "float16"), (1, 1, 1, "float32")],
    )
    def test_matches_float64_whatever_the_tiles_leave_over(
        self, rows: int, outputs: int, columns: int, dtype: str
    ) -> None:
        x, weight, bias = self.operands(rows, outputs, columns, dtype)
        exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
        for own_bias in (None, bias):
            want = exact if own_bias is None else exact + np.asarray(bias, np.float64)
            got = self.run(x, weight, own_bias)
            assert got.dtype == x.dtype
            bar = BARS[dtype] * np.abs(want).max()
            np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0, atol=2 * bar)

    @pytest.mark.parametrize(("outputs", "columns", "dtype"), [(96, 128, "float32"), (40, 200, "bfloat16")])
    def test_rows_have_the_same_bits_in_calls_of_any_size_and_at_any_place(
        self, outputs: int, columns: int, dtype: str
    ) -> None:
        x, weight, bias = self.operands(max(self.rows), outputs, columns, dtype)
        whole = np.asarray(self.run(x, weight, bias))
        for rows in self.rows:
            multiply = jax.jit(lambda x: self.run(x, weight, bias))
            assert_same_bits(multiply(x[:rows]), whole[:rows])
            assert_same_bits(multiply(x[-rows:]), whole[-rows:])

    def test_half_precision_is_summed_in_float32_and_may_be_returned_so(self) -> None:
        x, weight = jnp.ones((2, 4096), jnp.bfloat16), jnp.ones((16, 4096), jnp.bfloat16)
        got = self.run(x.at[:, 0].set(0.5), weight, out_dtype=jnp.float32)
        assert got.dtype == jnp.float32
        np.testing.assert_array_equal(np.asarray(got), 4095.5)

    def test_the_bias_is_added_after_the_sum_was_rounded(self) -> None:
        """257 rounds to 256 in bfloat16; 257 + 1 would not."""
        x, weight = jnp.ones((1, 257), jnp.bfloat16), jnp.ones((16, 257), jnp.bfloat16)
        assert float(self.run(x, weight, jnp.ones(16, jnp.bfloat16))[0, 0]) == 256

    def test_leading_dimensions_stay_and_empty_ones_are_allowed(self) -> None:
        x, weight, bias = self.operands(6, 32, 16, "float32")
        got = self.run(x.reshape(2, 3, 16), weight, bias)
        assert_same_bits(got, np.asarray(self.run(x, weight, bias)).reshape(2, 3, 32))
        assert self.run(x[:0], weight, bias).shape == (0, 32)
        np.testing.assert_array_equal(np.asarray(self.run(x[:, :0], weight[:, :0], bias)), np.tile(bias, (6, 1)))

    def test_numbers_beyond_the_operands_are_never_read(self) -> None:
        """A row of NaN reaches its own results only."""
        x, weight, _ = self.operands(20, 24, 40, "float32")
        clean = np.asarray(self.run(x, weight))
        got = np.asarray(self.run(x.at[7].set(jnp.nan), weight))
        assert np.isnan(got[7]).all()
        assert_same_bits(np.delete(got, 7, 0), np.delete(clean, 7, 0))
