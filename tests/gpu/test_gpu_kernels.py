"""The kernels that CUDA dispatch picks, against the float64 oracle (N5): what the engine runs on this card."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

import pallas_kernels
from pallas_kernels.layout import pool_shape
from pallas_kernels.testing import (
    AppendKVTests,
    GroupedMatmulTests,
    PagedDecodeAttentionTests,
    RaggedPagedAttentionTests,
    RowInvariantMatmulTests,
)

pytestmark = pytest.mark.gpu


class TestDispatchedPrefill(RaggedPagedAttentionTests):
    implementation = None  # type: ignore[assignment]

    def test_with_a_fixed_tile_half_precision_has_the_same_bits_in_decode(self):
        self.check_fixed_tile("bfloat16")


class TestDispatchedMatmul(RowInvariantMatmulTests):
    implementation = None
    rows = (1, 3, 16, 17, 64, 70, 130, 300)


class TestDispatchedDecode(PagedDecodeAttentionTests):
    implementation = None  # type: ignore[assignment]


class TestDispatchedGroupedMatmul(GroupedMatmulTests):
    implementation = None  # type: ignore[assignment]


class TestDispatchedAppend(AppendKVTests):
    implementation = None  # type: ignore[assignment]


def test_half_precision_attention_runs_a_pallas_kernel():
    """B29: once GPU tests are asked for, a silent fall to the XLA reference is a failure."""
    pallas_kernels.reset_dispatch_report()
    pool = jnp.zeros(pool_shape(1, 8, 16, 2, 64), jnp.bfloat16)
    table = jnp.zeros((1, 2), jnp.int32)
    lens = jnp.array([20], jnp.int32)
    q = jnp.ones((1, 4, 64), jnp.bfloat16)
    pallas_kernels.paged_decode_attention(q, pool, table, lens, layer=0)
    pallas_kernels.ragged_paged_attention(q, pool, table, jnp.array([0, 1], jnp.int32), lens, layer=0)
    report = pallas_kernels.dispatch_report()
    for op in ("paged_decode_attention", "ragged_paged_attention"):
        assert {"triton", "mosaic_gpu"} & report[op].keys(), report
