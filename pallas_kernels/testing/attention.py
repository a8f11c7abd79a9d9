"""What every implementation of the two attention ops must do."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_decode_attention.api import paged_decode_attention
from pallas_kernels.ragged_paged_attention.api import ragged_paged_attention
from pallas_kernels.testing.cases import (
    DECODE_CASES,
    RAGGED_CASES,
    PagedCase,
    PagedInputs,
    fill_freed_memory,
    make_inputs,
)
from pallas_kernels.testing.oracle import attention_oracle_and_bar

LSE_BARS = {"float32": 1e-5, "bfloat16": 1e-4, "float16": 1e-4}


def assert_same_bits(a: Any, b: Any) -> None:
    """Equal bytes, so that NaN, -0.0 and the last bit all count."""
    a, b = np.asarray(a), np.asarray(b)
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    assert a.tobytes() == b.tobytes(), f"{np.sum(a != b)} of {a.size} numbers differ"


def _assert_within(got: np.ndarray, want: np.ndarray, bar: np.ndarray) -> None:
    """No number, NaN included, is further from the oracle's than its own bar."""
    part = np.abs(got.astype(np.float64) - want) / bar
    assert (part <= 1).all(), f"an error of {part.max()} times its bar; {(~(part <= 1)).sum()} of {part.size} are above"


class _AttentionTests:
    """Common part; a subclass sets `implementation`."""

    implementation: str = "reference"
    fields: Mapping[str, Any] = {}
    """Fields of the cases that no list names, for an implementation that lacks the usual heads or dtype."""

    def run(self, inputs: PagedInputs, *, pool: np.ndarray | None = None) -> Any:
        """`(out, lse)` as numpy arrays."""
        raise NotImplementedError

    def attempt(self, inputs: PagedInputs, **kwargs: Any) -> Any:
        """`run`, or skip with the sentence of an implementation that does not support the case."""
        try:
            return self.run(inputs, **kwargs)
        except NotImplementedError as error:
            pytest.skip(f"{self.implementation}: {error}")

    def check_against_oracle(self, case: PagedCase, seed: int) -> None:
        inputs = make_inputs(case, seed)
        fill_freed_memory(inputs.q.shape, case.dtype)
        out, lse = self.attempt(inputs)
        want, want_lse, bar = attention_oracle_and_bar(inputs)
        _assert_within(out, want, bar)
        empty = np.isneginf(want_lse)
        np.testing.assert_array_equal(np.isneginf(lse), empty)
        assert not np.any(out[empty])
        lse_error = np.abs(lse[~empty] - want_lse[~empty]) / np.maximum(1.0, np.abs(want_lse[~empty]))
        assert lse_error.max(initial=0.0) <= LSE_BARS[jnp.dtype(case.dtype).name]

    def check_poison(self, case: PagedCase) -> None:
        inputs = make_inputs(case, 5)
        want = self.attempt(inputs, pool=inputs.poisoned(0.0))
        for value in (np.nan, np.inf, -np.inf, 3e38):
            got = self.run(inputs, pool=inputs.poisoned(value))
            assert_same_bits(got[0], want[0])
            assert_same_bits(got[1], want[1])


class RaggedPagedAttentionTests(_AttentionTests):
    """Properties of ragged_paged_attention."""

    def run(
        self,
        inputs: PagedInputs,
        *,
        pool: np.ndarray | None = None,
        fixed_tile: bool = False,
    ) -> Any:
        out, lse = jax.jit(ragged_paged_attention, static_argnames=(*_STATIC, "fixed_tile"))(
            jnp.asarray(inputs.q),
            jnp.asarray(inputs.pool if pool is None else pool),
            jnp.asarray(inputs.page_table),
            jnp.asarray(inputs.q_offsets),
            jnp.asarray(inputs.kv_lens),
            layer=jnp.int32(inputs.case.layer),
            return_lse=True,
            fixed_tile=fixed_tile,
            implementation=self.implementation,
            **inputs.options,
        )
        return np.asarray(out), np.asarray(lse)

    @pytest.mark.parametrize("case", RAGGED_CASES, ids=str)
    def test_matches_float64_with_nan_in_everything_unowned(self, case: PagedCase) -> None:
        self.check_against_oracle(case, seed=RAGGED_CASES.index(case))

    def test_padding_tokens_are_zero_and_empty(self) -> None:
        inputs = make_inputs(PagedCase("padding", ((3, 20),), padding=13, **self.fields), 1)
        out, lse = self.attempt(inputs)
        assert not np.any(out[3:])
        assert np.all(np.isneginf(lse[3:]))

    @pytest.mark.parametrize("window", [None, 20])
    def test_unowned_memory_changes_no_bit(self, window: int | None) -> None:
        rows = ((20, 270), (3, 5), (0, 0))
        self.check_poison(PagedCase("poison", rows, window=window, padding=9, sinks=True, **self.fields))

    def test_row_has_the_same_bits_in_any_batch(self) -> None:
        """Alone, or packed behind others with a wider table and more padding: the same program shape is not needed."""
        rows = ((30, 100), (40, 300), (1, 290))
        case = PagedCase("batch", rows, padding=10, extra_columns=9, **self.fields)
        inputs = make_inputs(case, 2)
        together = self.attempt(inputs)
        for row, (queries, _) in enumerate(case.rows):
            first = inputs.q_offsets[row]
            alone = self.run(
                dataclasses.replace(
                    inputs,
                    q=np.pad(inputs.q[first : first + queries], ((0, 81 - queries), (0, 0), (0, 0))),
                    page_table=inputs.page_table[row : row + 1, :-9],  # 19 columns, which is no whole chunk
                    q_offsets=np.array([0, queries], np.int32),
                    kv_lens=inputs.kv_lens[row : row + 1],
                )
            )
            for got, want in zip(alone, together, strict=True):
                assert_same_bits(got[:queries], want[first : first + queries])

    @pytest.mark.parametrize("window", [None, 40])
    def test_chunks_split_at_page_edges_have_the_same_bits(self, window: int | None) -> None:
        """One call of 96 queries, or calls of 16, 48 and 32 whose keys grow: one row, keys 208..303."""
        case = PagedCase("split", ((96, 304),), window=window, sinks=True, **self.fields)
        inputs = make_inputs(case, 3)
        whole = self.attempt(inputs)
        start = 0
        for queries in (16, 48, 32):
            stop = start + queries
            part = self.run(
                dataclasses.replace(
                    inputs,
                    q=np.pad(inputs.q[start:stop], ((0, 96 - queries), (0, 0), (0, 0))),
                    q_offsets=np.array([0, queries], np.int32),
                    kv_lens=np.array([304 - 96 + stop], np.int32),
                )
            )
            for got, want in zip(part, whole, strict=True):
                assert_same_bits(got[:queries], want[start:stop])
            start = stop

    def test_with_a_fixed_tile_calls_of_any_size_have_the_same_bits(self) -> None:
        self.check_fixed_tile("float32")

    def check_fixed_tile(self, dtype: str) -> None:
        """A row of 40 queries in one call, and its last three with one query a row, as in decode, beside a longer row."""
        fields = {**self.fields, "dtype": dtype}
        inputs = make_inputs(PagedCase("fixed tile", ((40, 300), (1, 330)), window=70, sinks=True, **fields), 5)
        out, lse = self.attempt(inputs, fixed_tile=True)
        want, _, bar = attention_oracle_and_bar(inputs)
        _assert_within(out, want, bar)
        for back in range(3):
            at = 39 - back
            single = dataclasses.replace(
                inputs,
                q=inputs.q[[at, 40]],
                q_offsets=np.array([0, 1, 2], np.int32),
                kv_lens=np.array([300 - back, 330], np.int32),
            )
            for got, want in zip(self.run(single, fixed_tile=True), (out, lse), strict=True):
                assert_same_bits(got, want[[at, 40]])

    def test_static_and_traced_layer_have_the_same_bits(self) -> None:
        inputs = make_inputs(PagedCase("layer", ((5, 20),), **self.fields), 4)
        traced = self.attempt(inputs)
        out = ragged_paged_attention(
            jnp.asarray(inputs.q),
            jnp.asarray(inputs.pool),
            jnp.asarray(inputs.page_table),
            jnp.asarray(inputs.q_offsets),
            jnp.asarray(inputs.kv_lens),
            layer=1,
            implementation=self.implementation,
        )
        assert_same_bits(out, traced[0])


class PagedDecodeAttentionTests(_AttentionTests):
    """Properties of paged_decode_attention."""

    def run(self, inputs: PagedInputs, *, pool: np.ndarray | None = None) -> Any:
        out, lse = jax.jit(paged_decode_attention, static_argnames=_STATIC)(
            jnp.asarray(inputs.q),
            jnp.asarray(inputs.pool if pool is None else pool),
            jnp.asarray(inputs.page_table),
            jnp.asarray(inputs.kv_lens),
            layer=jnp.int32(inputs.case.layer),
            return_lse=True,
            implementation=self.implementation,
            **inputs.options,
        )
        return np.asarray(out), np.asarray(lse)

    @pytest.mark.parametrize("case", DECODE_CASES, ids=str)
    def test_matches_float64_with_nan_in_everything_unowned(self, case: PagedCase) -> None:
        self.check_against_oracle(case, seed=DECODE_CASES.index(case))

    @pytest.mark.parametrize("window", [None, 20])
    def test_unowned_memory_changes_no_bit(self, window: int | None) -> None:
        self.check_poison(PagedCase("poison", ((1, 270), (1, 5), (1, 0)), window=window, sinks=True, **self.fields))

    @pytest.mark.parametrize("window", [None, 20])
    def test_row_has_the_same_bits_in_any_batch(self, window: int | None) -> None:
        rows = ((1, 100), (1, 600), (1, 0), (1, 290))
        case = PagedCase("batch", rows, window=window, extra_columns=9, **self.fields)
        inputs = make_inputs(case, 2)
        together = self.attempt(inputs)
        for row in range(len(case.rows)):
            alone = self.run(
                dataclasses.replace(
                    inputs,
                    q=inputs.q[row : row + 1],
                    page_table=inputs.page_table[row : row + 1, :-9],
                    kv_lens=inputs.kv_lens[row : row + 1],
                )
            )
            for got, want in zip(alone, together, strict=True):
                assert_same_bits(got[0], want[row])

    def test_rows_that_share_pages_read_the_same_keys(self) -> None:
        inputs = make_inputs(PagedCase("shared", ((1, 40), (1, 40)), **self.fields), 6)
        shared = dataclasses.replace(
            inputs, q=inputs.q[[0, 0]], page_table=inputs.page_table[[0, 0]], kv_lens=np.array([40, 40], np.int32)
        )
        out, lse = self.attempt(shared)
        assert_same_bits(out[0], out[1])
        assert_same_bits(lse[0], lse[1])


_STATIC = ("scale", "window", "soft_cap", "return_lse", "implementation")
