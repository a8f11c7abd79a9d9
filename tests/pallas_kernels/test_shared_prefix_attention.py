"""Shared-prefix decode: the plan finds groups and nested levels, and the result is that of plain decode."""

from __future__ import annotations

import jax
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


def used_tiles(plan: pk.SharedPrefixPlan) -> list[tuple[int, int, int]]:
    """(split, first place, end place) of every tile, having checked that the plan is consistent."""
    order, tiles, lanes = (np.asarray(a) for a in (plan.order, plan.tiles, plan.lanes))
    assert sorted(order.tolist()) == list(range(len(order)))
    used = [tuple(tile) for tile in tiles.tolist() if tile[0] >= 0]
    assert (tiles[len(used) :, 0] == -1).all()
    seen = np.full_like(lanes, -1)
    for number, (split, first, end) in enumerate(used):
        start = first // 8 * 8
        assert first < end <= start + plan.rows_per_tile
        seen[order[first:end], split] = number * plan.rows_per_tile + np.arange(first, end) - start
    np.testing.assert_array_equal(lanes, seen)
    return used


def rows_of(plan: pk.SharedPrefixPlan) -> set[tuple[int, tuple[int, ...]]]:
    """(split, rows) of every tile."""
    return {(n, tuple(sorted(plan.order[first:end].tolist()))) for n, first, end in used_tiles(plan)}


def grouped_table(groups: list[list[int]], batch: int, columns: int = 4) -> np.ndarray:
    """Every row has its own pages, except that the rows of a group share all of one's."""
    table = np.arange(batch * columns, dtype=np.int32).reshape(batch, columns)
    for rows in groups:
        table[rows] = table[rows[0]]
    return table


def test_plan_finds_groups_and_nested_levels():
    _, _, table, lens = shared_inputs(np.random.default_rng(0))
    plan = pk.plan_shared_prefix(table, lens, PAGE, split=SPLIT)
    assert plan is not None
    assert rows_of(plan) == {(0, (0, 1, 2)), (0, (3, 4)), (1, (0, 1, 2)), (2, (0, 1))}
    covered = np.asarray(plan.lanes) >= 0
    assert covered.tolist() == [[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]
    assert pk.saved_tokens(plan) == (2 + 1 + 2 + 1) * SPLIT


def test_the_largest_group_begins_at_place_0():
    """And so needs as few tiles as there can be, wherever its rows and pages are."""
    rng = np.random.default_rng(3)
    for _ in range(5):
        rows = rng.permutation(40)
        table = grouped_table([rows[:5].tolist(), rows[5:37].tolist()], 40)[:, ::-1].copy()
        plan = pk.plan_shared_prefix(table, np.full(40, 64), PAGE, split=SPLIT, rows_per_tile=32)
        assert plan is not None
        assert used_tiles(plan) == [(0, 0, 32), (0, 32, 37)]
        assert rows_of(plan) == {(0, tuple(sorted(rows[5:37].tolist()))), (0, tuple(sorted(rows[:5].tolist())))}


def test_tiles_are_cut_at_lanes_counted_from_a_multiple_of_8():
    """Twelve rows at place 13 lie in lanes 5 to 16 counted from place 8: two tiles of 16 lanes."""
    table = grouped_table([list(range(13)), list(range(13, 25))], 25)
    plan = pk.plan_shared_prefix(table, np.full(25, 64), PAGE, split=SPLIT, rows_per_tile=16, min_rows=1)
    assert plan is not None
    assert used_tiles(plan) == [(0, 0, 13), (0, 13, 24), (0, 24, 25)]
    wider = pk.plan_shared_prefix(table, np.full(25, 64), PAGE, split=SPLIT, rows_per_tile=24)
    assert wider is not None
    assert used_tiles(wider) == [(0, 0, 13), (0, 13, 25)]


def test_plan_cuts_large_groups_into_tiles_and_pads_to_a_power_of_two():
    table = grouped_table([list(range(40))], 40)
    plan = pk.plan_shared_prefix(table, np.full(40, 64, np.int32), PAGE, split=SPLIT, rows_per_tile=16)
    assert plan is not None
    assert plan.tiles.shape == (4, 3)
    assert used_tiles(plan) == [(0, 0, 16), (0, 16, 32), (0, 32, 40)]


def test_a_tile_that_would_hold_one_row_is_left_to_plain_decode():
    table = grouped_table([list(range(17))], 17)
    plan = pk.plan_shared_prefix(table, np.full(17, 64, np.int32), PAGE, split=SPLIT, rows_per_tile=16)
    assert plan is not None
    assert used_tiles(plan) == [(0, 0, 16)]
    assert np.sum(np.asarray(plan.lanes) < 0) == 1


def test_plan_of_a_fixed_size_takes_the_tiles_of_most_rows():
    table = grouped_table([[0, 1], [2, 3, 4, 5, 6], [7, 8, 9]], 10)
    plan = pk.plan_shared_prefix(table, np.full(10, 64), PAGE, split=SPLIT, num_tiles=2)
    assert plan is not None
    assert plan.tiles.shape == (2, 3)
    assert rows_of(plan) == {(0, (2, 3, 4, 5, 6)), (0, (7, 8, 9))}


def test_rows_that_do_not_fill_a_split_are_not_in_its_tiles():
    """They have the same pages, but a tile reads the whole split for all of its rows."""
    table = grouped_table([list(range(6))], 6, columns=8)
    plan = pk.plan_shared_prefix(table, np.array([128, 63, 127, 64, 128, 0]), PAGE, split=SPLIT)
    assert plan is not None
    assert rows_of(plan) == {(0, (0, 2, 3, 4)), (1, (0, 4))}


def test_splits_with_columns_that_a_window_has_passed_are_not_shared():
    table = grouped_table([[0, 1, 2]], 3, columns=12)
    table[:, :4] = -1
    table[2, :6] = -1
    plan = pk.plan_shared_prefix(table, np.full(3, 192), PAGE, split=SPLIT)
    assert plan is not None
    assert rows_of(plan) == {(1, (0, 1)), (2, (0, 1, 2))}
    assert (np.asarray(plan.lanes)[:, 0] == -1).all()


def test_plans_of_one_size_have_one_shape_and_one_program():
    """Several plans of a bucket, with and without tiles, are one compiled step."""
    few = pk.plan_shared_prefix(grouped_table([[0, 1]], 8), np.full(8, 64), PAGE, split=SPLIT, num_tiles=4)
    many = pk.plan_shared_prefix(grouped_table([[0, 1], [2, 3]], 8), np.full(8, 64), PAGE, split=SPLIT, num_tiles=4)
    none = pk.empty_plan(8, 4, PAGE, 4, split=SPLIT)
    traced = []
    step = jax.jit(lambda plan: traced.append(plan.rows_per_tile) or plan.tiles.sum())
    for plan in (few, many, none):
        step(plan)
    assert traced == [16]
    assert pk.saved_tokens(none) == pk.saved_tokens(None) == 0


def test_no_plan_where_nothing_is_shared():
    table = np.arange(8, dtype=np.int32).reshape(2, 4)
    assert pk.plan_shared_prefix(table, np.full(2, 64, np.int32), PAGE, split=SPLIT) is None
    assert pk.plan_shared_prefix(table[:1], np.full(1, 64, np.int32), PAGE, split=SPLIT) is None
    assert pk.plan_shared_prefix(np.zeros((3, 4), np.int32), np.full(3, 63), PAGE, split=SPLIT) is None


def test_bad_sizes_are_refused():
    table = np.zeros((2, 4), np.int32)
    with pytest.raises(ValueError, match="multiple of the page size"):
        pk.plan_shared_prefix(table, np.full(2, 64), 48, split=SPLIT)
    with pytest.raises(ValueError, match="rows_per_tile 12"):
        pk.plan_shared_prefix(table, np.full(2, 64), PAGE, split=SPLIT, rows_per_tile=12)
    q, pool, table, lens = shared_inputs(np.random.default_rng(0))
    wrong = pk.empty_plan(5, 12, PAGE, 2, split=SPLIT)  # of a narrower table
    with pytest.raises(ValueError, match=r"plan\.lanes"):
        pk.shared_prefix_attention(q, pool, jnp.asarray(table), jnp.asarray(lens), wrong, layer=0)


@pytest.mark.parametrize("seed", range(4))
def test_plan_covers_what_rows_share_and_nothing_else(seed):
    """Against a slow search: random trees of prefixes, lengths and row orders."""
    rng = np.random.default_rng(seed)
    batch, columns, per_split = 30, 24, SPLIT // PAGE
    table = np.zeros((batch, columns), np.int32)
    for row in range(1, batch):
        keep = rng.integers(0, columns)
        table[row] = np.concatenate([table[rng.integers(row), :keep], 1000 * row + np.arange(columns - keep)])
    table = table[rng.permutation(batch)]
    lens = rng.integers(0, columns * PAGE + 1, batch)
    plan = pk.plan_shared_prefix(table, lens, PAGE, split=SPLIT, rows_per_tile=32)
    assert plan is not None
    used_tiles(plan)
    lanes = np.asarray(plan.lanes)
    for number in range(columns // per_split):
        pages = table[:, number * per_split : (number + 1) * per_split]
        inside = lens >= (number + 1) * SPLIT
        for row in range(batch):
            same = np.flatnonzero((pages == pages[row]).all(1) & inside)
            mates = (
                np.flatnonzero(lanes[:, number] // 32 == lanes[row, number] // 32) if lanes[row, number] >= 0 else []
            )
            assert set(mates) <= set(same)
            if inside[row] and len(same) > 1 and lanes[row, number] < 0:  # the only row of its tile
                others = same[same != row]
                assert (lanes[others, number] >= 0).all()


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("window", [None, 70])
def test_shared_equals_plain_decode(implementation, window):
    rng = np.random.default_rng(1)
    q, pool, table, lens = shared_inputs(rng)
    plan = pk.plan_shared_prefix(table, lens, PAGE, split=SPLIT)
    assert plan is not None
    options = {"window": window, "sinks": jnp.asarray(rng.normal(size=6), jnp.float32), "soft_cap": 9.0}
    args = (q, pool, jnp.asarray(table), jnp.asarray(lens))
    out, lse = pk.shared_prefix_attention(
        *args, plan, layer=1, return_lse=True, implementation=implementation, **options
    )
    want, want_lse = pk.paged_decode_attention(*args, layer=1, return_lse=True, implementation="reference", **options)
    np.testing.assert_allclose(out, want, atol=1e-5)
    np.testing.assert_allclose(lse, want_lse, atol=1e-5)
