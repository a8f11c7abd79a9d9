"""The kernels that CUDA dispatch picks, against the float64 oracle (N5): what the engine runs on this card."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from models.mxfp4 import dequantise
from pallas_kernels import grouped_matmul
from pallas_kernels.layout import pool_shape
from pallas_kernels.ragged_paged_attention import mosaic_gpu
from pallas_kernels.testing import (
    AppendKVTests,
    CopyPagesTests,
    GroupedMatmulTests,
    PagedCase,
    PagedDecodeAttentionTests,
    RaggedPagedAttentionTests,
    RouteExpertsTests,
    RowInvariantMatmulTests,
    make_inputs,
    random_mxfp4,
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


class _NeverRefused:
    """Every case has to run."""

    implementation = "mosaic_gpu"

    def attempt(self, inputs, **kwargs):
        return self.run(inputs, **kwargs)  # type: ignore[attr-defined]

    def use_heads_of(self, head_dim: int) -> None:
        self.fields = {"heads": 8, "kv_heads": 2, "head_dim": head_dim, "dtype": "bfloat16"}


MOSAIC_OPTIONS = pytest.mark.parametrize(
    ("page", "options"),
    [
        (16, {}),
        (32, {"window": 40, "sinks": True}),
        (64, {"window": 1, "heads": 16, "kv_heads": 1}),
        (128, {"soft_cap": 5.0, "dtype": "float16", "heads": 4, "kv_heads": 1}),
    ],
    ids=["plain", "window_sinks", "window_of_one_group16", "soft_cap_f16_group4"],
)


class TestMosaicDecode(_NeverRefused, PagedDecodeAttentionTests):  # type: ignore[misc]
    @pytest.fixture(autouse=True, params=[64, 80, 96, 128, 256])
    def _heads(self, request: pytest.FixtureRequest) -> None:
        self.use_heads_of(request.param)

    @MOSAIC_OPTIONS
    def test_matches_float64_with_nan_in_everything_unowned(self, page, options):
        rows = tuple((1, keys) for keys in (1, 0, 16, 150, 2500, 1024, 1025, 300))
        self.check_against_oracle(PagedCase("mosaic", rows, page_size=page, **{**self.fields, **options}), 8)


# Tiles that are one row's alone, and tiles of several, whose tokens leave one by one; rows of more than a chunk of 2048 keys.
SPLIT = ((70, 600), (0, 20), (1, 1), (130, 2300), (3, 33), (17, 17), (200, 4200))
WHOLE = (*SPLIT, *((1, keys) for keys in range(1, 61)))  # so many tiles that one block adds up all chunks of its tile
PLAIN = {"heads": 8, "kv_heads": 2, "dtype": "bfloat16", "padding": 5}
WINDOW = {**PLAIN, "window": 40, "sinks": True}
GROUP16 = {**PLAIN, "heads": 16, "kv_heads": 1, "window": 1}
CAPPED = {**PLAIN, "dtype": "float16", "soft_cap": 5.0}
MOSAIC_PREFILL = (
    PagedCase("64_split_group16_window_of_one", SPLIT, head_dim=64, page_size=64, **GROUP16),
    PagedCase("64_whole_soft_cap_f16", WHOLE, head_dim=64, page_size=128, **CAPPED),
    PagedCase("64_whole_window_sinks", WHOLE, head_dim=64, page_size=32, **WINDOW),
    PagedCase("80_split", SPLIT, head_dim=80, page_size=16, **PLAIN),
    PagedCase("80_whole_window_sinks", WHOLE, head_dim=80, page_size=32, **WINDOW),
    PagedCase("96_split_soft_cap_f16", SPLIT, head_dim=96, page_size=128, **CAPPED),
    PagedCase("96_whole", WHOLE, head_dim=96, page_size=16, **PLAIN),
    PagedCase("128_split_window_sinks", SPLIT, head_dim=128, page_size=32, **WINDOW),
    PagedCase("128_whole", WHOLE, head_dim=128, page_size=64, **PLAIN),
)


class _MosaicPrefill(_NeverRefused, RaggedPagedAttentionTests):  # type: ignore[misc]
    """Not collected as it is: every program compiles for seconds, and `TestMosaicPrefill` picks the fewest."""

    def __init__(self, head_dim: int = 64) -> None:
        self.use_heads_of(head_dim)


class TestMosaicPrefill:
    """Every head size against float64; bits of heads whose results fill 128 bytes of shared memory and of heads with a gap."""

    @pytest.mark.parametrize("case", MOSAIC_PREFILL, ids=str)
    def test_matches_float64_with_nan_in_everything_unowned(self, case):
        inputs = make_inputs(case, 9)
        assert mosaic_gpu.sizes(inputs.q, inputs.pool, inputs.page_table).split == (case.rows is SPLIT)  # type: ignore[arg-type]
        _MosaicPrefill().check_against_oracle(case, 9)

    @pytest.mark.parametrize("head_dim", [64, 80])
    def test_row_has_the_same_bits_in_any_batch(self, head_dim):
        _MosaicPrefill(head_dim).test_row_has_the_same_bits_in_any_batch()

    @pytest.mark.parametrize("head_dim", [64, 80])
    def test_with_a_fixed_tile_calls_of_any_size_have_the_same_bits(self, head_dim):
        _MosaicPrefill(head_dim).check_fixed_tile("bfloat16")

    def test_chunks_split_at_page_edges_have_the_same_bits(self):
        _MosaicPrefill().test_chunks_split_at_page_edges_have_the_same_bits(40)

    def test_unowned_memory_changes_no_bit(self):
        _MosaicPrefill().test_unowned_memory_changes_no_bit(20)


class TestDispatchedGroupedMatmul(GroupedMatmulTests):
    implementation = None  # type: ignore[assignment]


class TestMosaicGroupedMatmul:
    """MXFP4 weights, unpacked in registers: against float64, in every tile; nothing is skipped."""

    def packed(self, seed: int, sizes: list[int], outputs: int = 320, columns: int = 704) -> tuple[Any, ...]:
        """x with NaN in rows of no group, weights (their scales too large where no row may look), true weights, bias."""
        rng = np.random.default_rng(seed)
        blocks, scales, true = random_mxfp4(rng, (len(sizes), outputs, columns))
        scales[np.asarray(sizes) == 0] = 129
        x = rng.standard_normal((sum(sizes) + 3, columns)).astype(jnp.bfloat16)
        x[sum(sizes) :] = np.nan
        bias = rng.standard_normal((len(sizes), outputs)).astype(jnp.bfloat16)
        return jnp.asarray(x), pallas_kernels.Mxfp4.pack(blocks, scales), true, jnp.asarray(bias)

    @pytest.mark.parametrize(
        "sizes", [[0, 1, 16, 17, 0, 3], [40, 0, 33, 1, 9, 7], [64, 65, 0, 63, 1, 40], [0, 300, 1, 200, 0, 130]]
    )
    @pytest.mark.parametrize(("outputs", "columns"), [(320, 704), (64, 64), (192, 128), (576, 2880)])
    def test_mxfp4_of_every_tile_and_shape(self, sizes: list[int], outputs: int, columns: int) -> None:
        """Tiles of 16, 32, 64 and 128 rows, a last tile of outputs that is not full, a last stage that is not."""
        x, weight, true, bias = self.packed(1, sizes, outputs, columns)
        y = np.asarray(grouped_matmul(x, weight, jnp.asarray(sizes, jnp.int32), bias=bias, implementation="mosaic_gpu"))
        GroupedMatmulTests().check(y, x, true, sizes, "bfloat16", bias)

    def test_rows_are_picked_and_have_bits_of_their_own(self) -> None:
        """In another order and beside other rows of its group, in tiles of the same size."""
        sizes = [40, 0, 33, 1, 9, 7]
        x, weight, _, bias = self.packed(2, sizes)
        options = {"bias": bias, "implementation": "mosaic_gpu"}
        y = np.asarray(grouped_matmul(x, weight, jnp.asarray(sizes, jnp.int32), **options))
        rng = np.random.default_rng(3)
        order = rng.permutation(len(x)).astype(np.int32)
        picked = grouped_matmul(
            x[np.argsort(order)], weight, jnp.asarray(sizes, jnp.int32), rows=jnp.asarray(order), **options
        )
        np.testing.assert_array_equal(np.asarray(picked).view(np.uint16), y.view(np.uint16))
        turned = np.concatenate([np.roll(np.arange(40), 7), np.arange(40, len(x))])
        again = np.asarray(grouped_matmul(x[turned], weight, jnp.asarray(sizes, jnp.int32), **options))
        np.testing.assert_array_equal(again.view(np.uint16), y[turned].view(np.uint16))

    def test_an_activation_is_what_x_goes_through_first(self) -> None:
        sizes = [40, 0, 33, 1, 9, 7]
        x, weight, _, bias = self.packed(6, sizes)
        wide = jnp.concatenate([x, x[:, ::-1]], axis=1)

        def activation(x: jax.Array) -> jax.Array:
            return (x[:, :704].astype(jnp.float32) + x[:, 704:].astype(jnp.float32)).astype(x.dtype)

        options = {"bias": bias, "implementation": "mosaic_gpu"}
        got = grouped_matmul(wide, weight, jnp.asarray(sizes, jnp.int32), activation=activation, **options)
        want = grouped_matmul(activation(wide), weight, jnp.asarray(sizes, jnp.int32), **options)
        np.testing.assert_array_equal(np.asarray(got).view(np.uint16), np.asarray(want).view(np.uint16))

    @pytest.mark.parametrize("rows", [16, 64, 128])
    def test_every_code_under_every_scale_is_exact(self, rows: int) -> None:
        rng = np.random.default_rng(4)
        blocks = rng.permuted(np.arange(256, dtype=np.uint8).repeat(24)[: 192 * 32].reshape(1, 192, 2, 16))
        scales = (np.arange(192 * 2) % 129).astype(np.uint8).reshape(1, 192, 2)
        weight = pallas_kernels.Mxfp4.pack(blocks, scales)
        true, large = (
            dequantise(blocks, scales)[0],
            np.repeat(scales[0] > 2, 32, axis=1),
        )  # smaller ones may be denormal
        eye = jnp.tile(jnp.eye(64, dtype=jnp.bfloat16), (max(1, rows // 64), 1))[:rows]
        y = grouped_matmul(eye, weight, jnp.asarray([rows], jnp.int32), implementation="mosaic_gpu")
        got = np.asarray(y.astype(jnp.float32)).T
        for column in range(rows):
            same = large[:, column % 64]
            np.testing.assert_array_equal(got[same, column], true[same, column % 64])

    def test_cuda_dispatch_picks_it(self) -> None:
        x, weight, _, bias = self.packed(5, [20, 0, 4])
        pallas_kernels.reset_dispatch_report()
        jax.jit(grouped_matmul)(x, weight, jnp.asarray([20, 0, 4], jnp.int32), bias=bias)
        assert pallas_kernels.dispatch_report()["grouped_matmul"] == {"mosaic_gpu": 1, "fallback_reasons": {}}


class TestDispatchedRouting(RouteExpertsTests):
    implementation = None  # type: ignore[assignment]


class TestDispatchedAppend(AppendKVTests):
    implementation = None  # type: ignore[assignment]


class TestMosaicAppend(AppendKVTests):
    implementation = "mosaic_gpu"

    def test_more_tokens_than_blocks_of_one(self):
        """Blocks of several tokens, and a last one that begins among the tokens of the one before it."""
        self.test_every_token_lands_and_no_other_byte_changes("bfloat16", 4, 128, 256, 2501)
        self.test_every_token_lands_and_no_other_byte_changes("float16", 3, 80, 256, 2501)


class TestDispatchedCopies(CopyPagesTests):
    implementation = None  # type: ignore[assignment]


class TestMosaicCopies(CopyPagesTests):
    implementation = "mosaic_gpu"

    def test_rings_go_round(self):
        """More pieces a block than its ring has slots."""
        rng = np.random.default_rng(0)
        pool = rng.integers(-100, 100, pool_shape(5, 300, 64, 4, 64)).astype(jnp.bfloat16)
        ids = rng.permutation(300)[:200].astype(np.int32)
        ids[::7] = -1
        known = ids >= 0
        got = self.call(pallas_kernels.gather_pages, pool, ids)
        np.testing.assert_array_equal(got[known], pool[:, ids[known]].swapaxes(0, 1))
        assert not got[~known].astype(np.float32).any()
        want = pool.copy()
        want[:, ids[known]] = got[known].swapaxes(0, 1) + 1
        np.testing.assert_array_equal(self.call(pallas_kernels.scatter_pages, pool, ids, got + 1), want)


@pytest.mark.parametrize("implementation", ["triton", "mosaic_gpu"])
def test_writes_reach_the_end_of_a_pool_of_more_than_2_to_the_32_bytes(implementation):
    """Offsets inside a pool do not fit in 32 bits: 4.6e9 numbers, 9.2 GB."""
    pages, last = 35_000, 34_999
    pool = jnp.zeros(pool_shape(2, pages, 64, 8, 128), jnp.bfloat16)
    k = jax.random.normal(jax.random.key(0), (1, 8, 128), jnp.bfloat16)
    flags, id_, slot = (jnp.ones(pages, bool), jnp.ones(pages, jnp.int32)), jnp.array([last]), jnp.array([63])
    options = {"implementation": implementation}
    append = jax.jit(
        lambda p: pallas_kernels.append_kv(p, k, -k, id_, slot, *flags, layer=1, **options)[0], donate_argnums=0
    )
    pool = append(pool)
    np.testing.assert_array_equal(pool[1, last, :, 0, 63], k[0])
    np.testing.assert_array_equal(pool[1, last, :, 1, 63], -k[0])
    page = pallas_kernels.gather_pages(pool, id_, **options)
    np.testing.assert_array_equal(page[0, 1, :, 0, 63], k[0])
    assert jnp.count_nonzero(page) == 2 * jnp.count_nonzero(k)
    scatter = jax.jit(lambda p: pallas_kernels.scatter_pages(p, id_ - 1, page, **options), donate_argnums=0)
    pool = scatter(pool)
    np.testing.assert_array_equal(pool[:, last - 1], page[0])
    assert sum(int(jnp.count_nonzero(layer)) for layer in pool) == 2 * jnp.count_nonzero(page)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("implementation", ["triton", "mosaic_gpu"])
def test_decode_reads_the_end_of_a_pool_of_more_than_2_to_the_32_numbers(implementation, head_dim):
    """The last pages of 4.4e9 numbers, 8.8 GB, give the bits that they give in a pool of their own."""
    page_numbers = 8 * 2 * 64 * head_dim
    pages = -(-4_400_000_000 // (2 * page_numbers))
    own = jax.random.normal(jax.random.key(0), pool_shape(1, 3, 64, 8, head_dim), jnp.bfloat16)
    write = jax.jit(lambda pool, own: pool.at[1, pages - 3 :].set(own[0]), donate_argnums=0)
    pool = write(jnp.full(pool_shape(2, pages, 64, 8, head_dim), jnp.nan, jnp.bfloat16), own)
    q = jax.random.normal(jax.random.key(1), (2, 32, head_dim), jnp.bfloat16)
    table, lens = jnp.array([[0, 1, 2], [2, 1, -1]], jnp.int32), jnp.array([192, 100], jnp.int32)
    attend = jax.jit(pallas_kernels.paged_decode_attention, static_argnames="implementation")
    got = attend(q, pool, jnp.where(table < 0, -1, table + pages - 3), lens, layer=1, implementation=implementation)
    want = attend(q, own, table, lens, layer=0, implementation=implementation)
    np.testing.assert_array_equal(got, want)
    assert np.isfinite(np.float32(want)).all()


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
