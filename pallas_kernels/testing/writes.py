"""What every implementation of append_kv and of the page copies must do."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import layout
from pallas_kernels.append_kv.api import append_kv
from pallas_kernels.copy_pages.api import copy_within, gather_pages, scatter_pages


def bits(array: Any) -> np.ndarray:
    """Bytes of an array, so that canaries that are NaN compare equal to themselves."""
    return np.ascontiguousarray(np.asarray(array)).view(np.uint8)


def random_pool(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, nan_share: float = 0.1) -> np.ndarray:
    """Random pool with NaN strewn in, as memory that was never written would have."""
    pool = rng.standard_normal(shape).astype(np.float32)
    return np.where(rng.random(shape) < nan_share, np.nan, pool).astype(dtype)


def temp_share(function: Any, *arguments: Any) -> float:
    """Temporary memory of the compiled function, whose first argument is donated, as a share of that argument."""
    compiled = jax.jit(function, donate_argnums=0).lower(*arguments).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    pool_bytes = arguments[0].size * arguments[0].dtype.itemsize
    assert memory.alias_size_in_bytes >= pool_bytes, "the pool is not aliased with the result"
    return memory.temp_size_in_bytes / pool_bytes


class AppendKVTests:
    """Properties of append_kv."""

    implementation: str = "reference"

    def append(self, pool: Any, k: Any, v: Any, ids: Any, slots: Any, writable: Any, refcounts: Any, layer: Any) -> Any:
        try:
            new, refused = append_kv(
                jnp.asarray(pool),
                jnp.asarray(k),
                jnp.asarray(v),
                jnp.asarray(ids, jnp.int32),
                jnp.asarray(slots, jnp.int32),
                jnp.asarray(writable),
                jnp.asarray(refcounts, jnp.int32),
                layer=layer,
                implementation=self.implementation,
            )
        except NotImplementedError as error:
            pytest.skip(f"{self.implementation}: {error}")
        return np.asarray(new), int(refused)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    @pytest.mark.parametrize(("kv_heads", "dim", "size", "tokens"), [(3, 64, 16, 40), (1, 80, 32, 7), (2, 256, 128, 1)])
    def test_every_token_lands_and_no_other_byte_changes(
        self, dtype: str, kv_heads: int, dim: int, size: int, tokens: int
    ) -> None:
        rng = np.random.default_rng(tokens)
        kind, num_pages, layer = jnp.dtype(dtype), 11, 1
        pool = random_pool(rng, layout.pool_shape(3, num_pages, size, kv_heads, dim), kind)
        k, v = (rng.standard_normal((tokens, kv_heads, dim)).astype(np.float32).astype(kind) for _ in range(2))
        flat = rng.permutation(num_pages * size)[:tokens]
        ids, slots = flat // size, flat % size
        new, refused = self.append(pool, k, v, ids, slots, np.ones(num_pages, bool), np.ones(num_pages), layer)
        want_k, want_v = (np.array(part) for part in layout.split_kv(pool))
        want_k[layer, ids, slots], want_v[layer, ids, slots] = k, v
        got_k, got_v = layout.split_kv(new)
        assert refused == 0
        np.testing.assert_array_equal(bits(got_k), bits(want_k))
        np.testing.assert_array_equal(bits(got_v), bits(want_v))

    def test_padding_never_writes_and_is_not_counted(self) -> None:
        rng = np.random.default_rng(0)
        pool = random_pool(rng, layout.pool_shape(2, 7, 16, 2, 64), np.float32)
        k = rng.standard_normal((16, 2, 64)).astype(np.float32)
        ids, slots = np.full(16, -1), np.tile([0, 15, -1, 99], 4)
        new, refused = self.append(pool, k, k, ids, slots, np.ones(7, bool), np.ones(7), jnp.int32(1))
        assert refused == 0
        np.testing.assert_array_equal(bits(new), bits(pool))

    def test_shared_published_and_impossible_targets_are_refused_and_counted(self) -> None:
        """Page 0 read-only, page 1 with two references, page 2 with none, page 3 private; then ids out of range."""
        rng = np.random.default_rng(1)
        pool = random_pool(rng, layout.pool_shape(1, 6, 16, 2, 64), np.float32)
        k = rng.standard_normal((9, 2, 64)).astype(np.float32)
        ids = np.array([0, 1, 2, 3, -1, 6, 2**31 - 1, 3, 3])
        slots = np.array([0, 1, 2, 3, 0, 0, 0, 16, -1])
        writable, refcounts = np.array([False, True, True, True, True, True]), np.array([1, 2, 0, 1, 1, 1])
        new, refused = self.append(pool, k, k, ids, slots, writable, refcounts, 0)
        want_k, want_v = (np.array(part) for part in layout.split_kv(pool))
        want_k[0, 3, 3] = want_v[0, 3, 3] = k[3]
        assert refused == 7
        got_k, got_v = layout.split_kv(new)
        np.testing.assert_array_equal(bits(got_k), bits(want_k))
        np.testing.assert_array_equal(bits(got_v), bits(want_v))

    def test_page_70000_is_addressed_exactly(self) -> None:
        num_pages = 70_001
        pool = np.zeros(layout.pool_shape(1, num_pages, 16, 1, 16), jnp.bfloat16)
        k = np.ones((2, 1, 16), jnp.bfloat16)
        new, _ = self.append(pool, k, k, [70_000, 65_536], [15, 0], np.ones(num_pages, bool), np.ones(num_pages), 0)
        hit = np.argwhere(layout.split_kv(new)[0].astype(np.float32).any((-1, -2)))
        assert hit.tolist() == [[0, 65_536, 0], [0, 70_000, 15]]

    def test_donated_pool_is_updated_in_place(self) -> None:
        def step(pool: Any, k: Any, ids: Any, flags: Any, refs: Any) -> Any:
            return append_kv(pool, k, k, ids, ids, flags, refs, layer=1, implementation=self.implementation)

        arguments = (
            jax.ShapeDtypeStruct(layout.pool_shape(2, 2000, 16, 2, 64), jnp.float32),
            jax.ShapeDtypeStruct((8, 2, 64), jnp.float32),
            jax.ShapeDtypeStruct((8,), jnp.int32),
            jax.ShapeDtypeStruct((2000,), jnp.bool_),
            jax.ShapeDtypeStruct((2000,), jnp.int32),
        )
        try:
            share = temp_share(step, *arguments)
        except NotImplementedError as error:
            pytest.skip(f"{self.implementation}: {error}")
        assert share < 0.05


class CopyPagesTests:
    """Properties of gather_pages, scatter_pages and copy_within."""

    implementation: str = "reference"
    shape = layout.pool_shape(3, 13, 16, 2, 64)

    def call(self, op: Any, *arguments: Any) -> np.ndarray:
        try:
            return np.asarray(op(*map(jnp.asarray, arguments), implementation=self.implementation))
        except NotImplementedError as error:
            pytest.skip(f"{self.implementation}: {error}")

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_gather_gives_pages_and_zeros_for_unused_ids(self, dtype: str) -> None:
        pool = random_pool(np.random.default_rng(0), self.shape, jnp.dtype(dtype))
        ids = np.array([12, -1, 0, 5, 13, 2**31 - 1], np.int32)
        got = self.call(gather_pages, pool, ids)
        np.testing.assert_array_equal(bits(got[[0, 2, 3]]), bits(pool[:, [12, 0, 5]].swapaxes(0, 1)))
        assert not bits(got[[1, 4, 5]]).any()

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_scatter_writes_the_named_pages_and_no_other_byte(self, dtype: str) -> None:
        rng = np.random.default_rng(1)
        pool = random_pool(rng, self.shape, jnp.dtype(dtype))
        ids = np.array([12, -1, 0, 13, 5], np.int32)
        pages = random_pool(rng, (5, self.shape[0], *self.shape[2:]), jnp.dtype(dtype))
        want = pool.copy()
        want[:, [12, 0, 5]] = pages[[0, 2, 4]].swapaxes(0, 1)
        np.testing.assert_array_equal(bits(self.call(scatter_pages, pool, ids, pages)), bits(want))

    def test_copy_within_copies_all_layers_and_drops_unused_pairs(self) -> None:
        pool = random_pool(np.random.default_rng(2), self.shape, np.float32)
        src, dst = np.array([1, 2, -1, 3, 1], np.int32), np.array([12, 0, 4, -1, 5], np.int32)
        want = pool.copy()
        want[:, [12, 0, 5]] = pool[:, [1, 2, 1]]
        np.testing.assert_array_equal(bits(self.call(copy_within, pool, src, dst)), bits(want))

    def test_gather_then_scatter_is_the_identity_at_page_70000(self) -> None:
        pool = np.zeros(layout.pool_shape(2, 70_001, 16, 1, 16), jnp.bfloat16)
        pool[:, 70_000] = np.arange(2, dtype=np.float32).reshape(2, 1, 1, 1, 1) + 1
        ids = np.array([70_000], np.int32)
        pages = self.call(gather_pages, pool, ids)
        assert np.unique(pages.astype(np.float32)).tolist() == [1.0, 2.0]
        moved = self.call(scatter_pages, pool, ids - 70_000, pages)
        assert np.array_equal(moved[:, 0], pool[:, 70_000])
        assert np.count_nonzero(moved.astype(np.float32)) == 2 * np.count_nonzero(pool.astype(np.float32))

    def test_donated_pool_is_updated_in_place(self) -> None:
        pool = jax.ShapeDtypeStruct(layout.pool_shape(2, 2000, 16, 2, 64), jnp.float32)
        ids = jax.ShapeDtypeStruct((4,), jnp.int32)
        pages = jax.ShapeDtypeStruct((4, 2, *pool.shape[2:]), jnp.float32)
        name = self.implementation
        try:
            assert temp_share(lambda p, i, x: scatter_pages(p, i, x, implementation=name), pool, ids, pages) < 0.05
            assert temp_share(lambda p, s, d: copy_within(p, s, d, implementation=name), pool, ids, ids) < 0.05
        except NotImplementedError as error:
            pytest.skip(f"{name}: {error}")
