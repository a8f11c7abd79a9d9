"""What every implementation of grouped_matmul must do."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul.api import grouped_matmul
from pallas_kernels.grouped_matmul.mxfp4 import Mxfp4

# Of the value itself (its rounding) and of the root mean square (sums in float32).
BARS = {"float32": (2e-6, 2e-6), "bfloat16": (2**-8, 1e-3), "float16": (2**-11, 1e-4)}
CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
SIZES = {
    "mixed": [0, 1, 16, 17, 0, 3],
    "edges of tiles": [64, 65, 0, 63, 128, 1],
    "all in one": [0, 0, 0, 321, 0, 0],
    "one row": [0, 0, 0, 0, 0, 1],
    "no rows": [0, 0, 0, 0, 0, 0],
}


_jitted = jax.jit(grouped_matmul, static_argnames=("activation", "fixed_tile", "implementation"))


def _product_of_halves(x: jax.Array) -> jax.Array:
    gate, up = jnp.split(x, 2, axis=-1)
    return gate * up


def random_mxfp4(rng: np.random.Generator, shape: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(blocks, scales) as in a checkpoint, and the weights as float64, by the format's definition."""
    groups, out, columns = shape
    blocks = rng.integers(0, 256, (groups, out, columns // 32, 16), dtype=np.uint8)
    scales = rng.integers(110, 129, (groups, out, columns // 32), dtype=np.uint8)
    codes = np.stack([CODES[blocks & 15], CODES[blocks >> 4]], -1).reshape(*blocks.shape[:3], 32)
    return blocks, scales, (codes * 2.0 ** (scales[..., None].astype(int) - 127)).reshape(shape)


class GroupedMatmulTests:
    """Properties of grouped_matmul."""

    implementation: str = "reference"

    def run(self, x: Any, weight: Any, sizes: Any, **options: Any) -> np.ndarray:
        try:
            y = _jitted(
                jnp.asarray(x),
                jax.tree.map(jnp.asarray, weight),
                jnp.asarray(sizes, jnp.int32),
                implementation=self.implementation,
                **options,
            )
        except NotImplementedError as error:
            pytest.skip(f"{self.implementation}: {error}")
        assert y.dtype == x.dtype
        return np.asarray(y)

    def check(self, y: np.ndarray, x: Any, weight: np.ndarray, sizes: Any, dtype: str, bias: Any = None) -> None:
        """Rows against float64; rows past the groups are zero."""
        group = np.repeat(np.arange(len(sizes)), sizes)
        want = np.zeros(y.shape)
        for g in range(len(sizes)):
            want[np.flatnonzero(group == g)] = np.asarray(x, np.float64)[np.flatnonzero(group == g)] @ weight[g].T
        if bias is not None:
            want[: group.size] += np.asarray(bias, np.float64)[group]
        own, mean = BARS[dtype]
        root = np.sqrt(np.mean(want[: group.size] ** 2)) if group.size else 0.0
        assert np.all(np.abs(y.astype(np.float64) - want) <= own * np.abs(want) + mean * root)
        assert not np.any(y[group.size :])

    @pytest.mark.parametrize(
        ("name", "dtype"),
        [
            *((name, "float32") for name in SIZES if name != "all in one"),
            ("mixed", "bfloat16"),
            pytest.param("mixed", "float16", marks=pytest.mark.slow),
            pytest.param("all in one", "float32", marks=pytest.mark.slow),
        ],
    )
    def test_every_row_is_multiplied_by_its_groups_weight(self, name: str, dtype: str) -> None:
        """Against float64; NaN in padding rows and in weights of groups without rows does not leak."""
        rng, sizes = np.random.default_rng(0), SIZES[name]
        columns, out = 72, 40
        x = rng.standard_normal((sum(sizes) + 3, columns)).astype(np.float32).astype(jnp.dtype(dtype))
        weight = rng.standard_normal((6, out, columns)).astype(np.float32).astype(jnp.dtype(dtype))
        true = weight.astype(np.float64)
        x[sum(sizes) :] = np.nan
        weight[np.asarray(sizes) == 0] = np.nan
        self.check(self.run(x, weight, sizes), x, true, sizes, dtype)

    @pytest.mark.parametrize(
        ("columns", "out", "dtype"), [(96, 72, "float32"), (288, 130, "bfloat16"), (96, 40, "float16")]
    )
    def test_mxfp4_weights_stand_for_their_numbers(self, columns: int, out: int, dtype: str) -> None:
        rng, sizes = np.random.default_rng(1), SIZES["mixed"]
        blocks, scales, true = random_mxfp4(rng, (6, out, columns))
        x = rng.standard_normal((sum(sizes) + 5, columns)).astype(np.float32).astype(jnp.dtype(dtype))
        bias = rng.standard_normal((6, out)).astype(np.float32)
        y = self.run(x, Mxfp4.pack(blocks, scales), sizes, bias=jnp.asarray(bias))
        self.check(y, x, true, sizes, dtype, bias)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    @pytest.mark.parametrize(("columns", "out"), [(96, 40), (320, 13), (1056, 5)])
    @pytest.mark.parametrize("sizes", [[0, 1, 0, 0], [1, 2, 0, 3], [0, 0, 0, 0]])
    def test_a_few_rows_of_mxfp4_weights(self, sizes: list[int], columns: int, out: int, dtype: str) -> None:
        """Decoding of a row or two: rows in order or picked, padding rows, NaN (a scale too large) where no row may look."""
        rng = np.random.default_rng(5)
        blocks, scales, true = random_mxfp4(rng, (4, out, columns))
        scales[np.asarray(sizes) == 0] = 129
        weight, bias = Mxfp4.pack(blocks, scales), rng.standard_normal((4, out)).astype(np.float32)
        x = rng.standard_normal((sum(sizes) + 2, columns)).astype(np.float32).astype(jnp.dtype(dtype))
        x[sum(sizes) :] = np.nan
        y = self.run(x, weight, sizes, bias=jnp.asarray(bias))
        self.check(y, x, true, sizes, dtype, bias)
        rows = rng.permutation(len(x)).astype(np.int32)
        picked = self.run(x[np.argsort(rows)], weight, sizes, rows=jnp.asarray(rows), bias=jnp.asarray(bias))
        np.testing.assert_array_equal(picked.view(np.uint8), y.view(np.uint8))

    @pytest.mark.parametrize("fixed_tile", [False, pytest.param(True, marks=pytest.mark.slow)])
    def test_an_activation_is_what_x_goes_through_first(self, fixed_tile: bool) -> None:
        """By itself and where rows are picked; it may change the number of columns."""
        rng, sizes = np.random.default_rng(7), SIZES["mixed"]
        blocks, scales, _ = random_mxfp4(rng, (6, 40, 96))
        weight, bias = Mxfp4.pack(blocks, scales), jnp.asarray(rng.standard_normal((6, 40)))
        x = rng.standard_normal((sum(sizes) + 5, 192)).astype(np.float32)
        options = {"bias": bias, "fixed_tile": fixed_tile}
        for rows in (None, jnp.asarray(rng.permutation(len(x)).astype(np.int32))):
            got = self.run(x, weight, sizes, rows=rows, activation=_product_of_halves, **options)
            want = self.run(np.asarray(_product_of_halves(jnp.asarray(x))), weight, sizes, rows=rows, **options)
            np.testing.assert_array_equal(got, want)

    @pytest.mark.parametrize(
        ("packed", "dtype"),
        [
            pytest.param(False, "float32", marks=pytest.mark.slow),
            pytest.param(False, "bfloat16", marks=pytest.mark.slow),
            (True, "bfloat16"),
        ],
    )
    def test_a_rows_bits_do_not_depend_on_its_company(self, packed: bool, dtype: str) -> None:
        """Alone, among other rows of its group, at any place of a tile, in a call of another size."""
        rng = np.random.default_rng(2)
        blocks, scales, true = random_mxfp4(rng, (3, 32, 96))
        weight = Mxfp4.pack(blocks, scales) if packed else jnp.asarray(true, dtype)
        x = rng.standard_normal((96, 96)).astype(np.float32).astype(jnp.dtype(dtype))
        together = self.run(x, weight, [3, 70, 20], fixed_tile=True)
        for row, group in ((2, 0), (3, 1), (69, 1), (92, 2)):
            alone = self.run(x[row : row + 1], weight, np.eye(3, dtype=int)[group], fixed_tile=True)
            np.testing.assert_array_equal(alone[0].view(np.uint8), together[row].view(np.uint8))
        some = self.run(x[[0, 40, 5, 72]], weight, [1, 3, 0], fixed_tile=True)
        np.testing.assert_array_equal(some[1].view(np.uint8), together[40].view(np.uint8))
        np.testing.assert_array_equal(some[3].view(np.uint8), together[72].view(np.uint8))

    def test_group_sizes_past_the_rows_are_cut(self) -> None:
        """A wrong plan must not write or read past the arrays."""
        rng = np.random.default_rng(3)
        x, weight = (
            rng.standard_normal((20, 32)).astype(np.float32),
            rng.standard_normal((3, 16, 32)).astype(np.float32),
        )
        y = self.run(x, weight, [15, 30, 2])
        self.check(y, x, weight.astype(np.float64), [15, 5, 0], "float32")
