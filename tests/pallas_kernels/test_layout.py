"""Page layout: shapes, bytes, and the two views of a page."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from pallas_kernels import LayerGroup, layout


def test_page_bytes_are_the_bytes_of_the_pool() -> None:
    group = LayerGroup(layers=(0, 2, 4), num_kv_heads=3, head_dim=64, dtype=jnp.bfloat16, window=128)
    shape = layout.pool_shape(3, 7, 16, 3, 64)
    assert layout.page_bytes(group, 16) * 7 == np.prod(shape) * 2
    assert layout.page_bytes(group, 16) == 3 * 2 * 16 * 3 * 64 * 2


def test_split_and_join_are_inverse_and_slot_first() -> None:
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.standard_normal((5, 16, 3, 64)), jnp.float32) for _ in range(2))
    pages = layout.join_kv(k, v)
    assert pages.shape == (5, *layout.page_shape(16, 3, 64))
    for got, want in zip(layout.split_kv(pages), (k, v), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def test_sizes_are_read_back_from_a_pool() -> None:
    pool = jnp.zeros(layout.pool_shape(2, 5, 32, 3, 80))
    assert (layout.page_size_of(pool), layout.num_kv_heads_of(pool), layout.head_dim_of(pool)) == (32, 3, 80)
