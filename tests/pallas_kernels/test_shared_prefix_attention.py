"""Shared-prefix decode: the plan finds groups and nested levels, and the result is that of plain decode."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk

SPLIT, PAGE = 64, 16


def shared_inputs(rng, heads=6, kv_heads=2, head_dim=80):
    """Five rows: 0-2 share two splits, 0 and 1 a third, 3 and 4 another first one; all else is their own."""
    lens = np.array([250, 200, 150, 64, 100], np.int32)
    table = np.full((5, 16), -1, np.int32)
    ids = iter(rng.permutation(90))
    for row, n in enumerate(lens):
        table[row, : -(-n // PAGE)] = [next(ids) for _ in range(-(-n // PAGE))]
    table[1:3, :8] = table[0, :8]
    table[1, 8:12] = table[0, 8:12]
    table[4, :4] = table[3, :4]
    pool = np.full(pk.pool_shape(2, 91, PAGE, kv_heads, head_dim), np.nan, np.float32)
    for row, n in enumerate(lens):
        for column in range(-(-n // PAGE)):
            used = min(PAGE, n - column * PAGE)
            pool[:, table[row, column], :, :, :used] = rng.normal(size=(2, kv_heads, 2, used, head_dim))
    q = rng.normal(size=(5, heads, head_dim)).astype(np.float32)
    return jnp.asarray(q), jnp.asarray(pool), table, lens


def test_plan_finds_groups_and_nested_levels():
    _, _, table, lens = shared_inputs(np.random.default_rng(0))
    plan = pk.plan_shared_prefix(table, lens, PAGE, split=SPLIT, rows_per_tile=4)
    assert plan is not None
    tiles = {
        (int(n), tuple(r for r in rows if r >= 0)) for n, rows in zip(plan.splits, plan.rows, strict=True) if n >= 0
    }
    assert tiles == {(0, (0, 1, 2)), (0, (3, 4)), (1, (0, 1, 2)), (2, (0, 1))}
    assert plan.covered.tolist() == [[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]


def test_plan_cuts_large_groups_into_tiles_and_pads_to_a_power_of_two():
    table = np.tile(np.arange(4, dtype=np.int32), (10, 1))
    plan = pk.plan_shared_prefix(table, np.full(10, 64, np.int32), PAGE, split=SPLIT, rows_per_tile=4)
    assert plan is not None
    assert plan.rows.shape == (4, 4)
    assert sorted(plan.rows[plan.rows >= 0].tolist()) == list(range(10))


def test_plan_of_a_fixed_size_takes_the_tiles_of_most_rows():
    table = np.tile(np.arange(4, dtype=np.int32), (10, 1))
    plan = pk.plan_shared_prefix(table, np.full(10, 64), PAGE, split=SPLIT, rows_per_tile=4, num_tiles=2)
    assert plan is not None
    assert plan.rows.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert plan.covered[:, 0].tolist() == [1] * 8 + [0] * 2


def test_no_plan_where_nothing_is_shared():
    table = np.arange(8, dtype=np.int32).reshape(2, 4)
    assert pk.plan_shared_prefix(table, np.full(2, 64, np.int32), PAGE, split=SPLIT) is None


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("window", [None, 70])
def test_shared_equals_plain_decode(implementation, window):
    rng = np.random.default_rng(1)
    q, pool, table, lens = shared_inputs(rng)
    plan = pk.plan_shared_prefix(table, lens, PAGE, split=SPLIT, rows_per_tile=4)
    assert plan is not None
    options = {"window": window, "sinks": jnp.asarray(rng.normal(size=6), jnp.float32), "soft_cap": 9.0}
    args = (q, pool, jnp.asarray(table), jnp.asarray(lens))
    out, lse = pk.shared_prefix_attention(
        *args, plan, layer=1, split=SPLIT, return_lse=True, implementation=implementation, **options
    )
    want, want_lse = pk.paged_decode_attention(*args, layer=1, return_lse=True, implementation="reference", **options)
    np.testing.assert_allclose(out, want, atol=1e-5)
    np.testing.assert_allclose(lse, want_lse, atol=1e-5)
