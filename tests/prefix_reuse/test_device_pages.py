"""`DevicePages` as plain arrays in the user's own jit: A24, A25, A27, B15, B17, X8; H12, H26."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.layout import LayerGroup
from prefix_reuse import device_pages as dp
from prefix_reuse.errors import IntegrityError

GROUP = LayerGroup(layers=(0, 1), num_kv_heads=2, head_dim=4, dtype=jnp.float32)

bind = jax.jit(dp.bind, donate_argnums=0)
extend = jax.jit(dp.extend, donate_argnums=0)
release = jax.jit(dp.release, donate_argnums=0)
give_back = jax.jit(dp.give_back, donate_argnums=0)
publish = jax.jit(dp.publish, donate_argnums=0)
fork = jax.jit(dp.fork, donate_argnums=0)
truncate = jax.jit(dp.truncate, donate_argnums=0)
rebuild = jax.jit(dp.rebuild, donate_argnums=0)


def new(num_pages: int = 8, rows: int = 3, columns: int = 4) -> dp.DevicePages:
    state = dp.create(GROUP, num_pages=num_pages, page_size=4, max_rows=rows, max_columns=columns)
    content = jnp.arange(state.kv_pages.size, dtype=jnp.float32).reshape(state.kv_pages.shape)
    return state.replace(kv_pages=content)


def may_write(state: dp.DevicePages) -> set[int]:
    return set(np.flatnonzero(np.asarray(state.writable) & (np.asarray(state.refcounts) == 1)).tolist())


def test_rows_that_share_pages_count_references_and_lose_the_right_to_write():
    """A24, A25, A27 on the device arrays."""
    state = bind(new(), 0, np.array([3, 5, 1]), shared=2, context_len=12)
    state = bind(state, 1, np.array([3, 5, 2]), shared=2, context_len=9)
    dp.check_integrity(state)
    assert np.asarray(state.refcounts).tolist() == [0, 1, 1, 2, 0, 2, 0, 0]
    assert may_write(state) == {1, 2}
    state = release(release(state, 0), 0)
    dp.check_integrity(state)
    assert np.asarray(state.refcounts)[[3, 5, 1]].tolist() == [1, 1, 0]
    assert may_write(state) == {2}  # one reference left, and still not writable: the flag was cleared on attach
    state = release(state, 1)
    assert not np.asarray(state.refcounts).any()


def test_extend_appends_private_pages_only():
    """A25."""
    state = extend(bind(new(), 0, np.array([3]), shared=1, context_len=4), 0, np.array([6, 7]))
    dp.check_integrity(state)
    assert np.asarray(state.page_table)[0].tolist() == [3, 6, 7, -1]
    assert may_write(state) == {6, 7}


def test_publish_clears_the_write_flag_of_leading_pages():
    """A27: cleared on publish, though the row is still the only user."""
    state = publish(bind(new(), 0, np.array([3, 5, 1]), context_len=9), 0, 2)
    dp.check_integrity(state)
    assert may_write(state) == {1}


def test_pages_that_a_window_has_passed_are_given_back_and_the_row_goes_on():
    """X3, A25: columns keep their places; a page that another row shares stays in use."""
    state = bind(bind(new(), 0, np.array([3, 5, 1]), context_len=12), 1, np.array([3]), shared=1, context_len=4)
    state = give_back(state, 0, 2)
    dp.check_integrity(state)
    assert np.asarray(state.page_table)[0].tolist() == [-1, -1, 1, -1]
    assert np.asarray(state.refcounts)[[3, 5, 1]].tolist() == [1, 0, 1]
    assert may_write(state) == {1}
    state = extend(state, 0, np.array([6]))
    dp.check_integrity(state)
    assert np.asarray(state.page_table)[0].tolist() == [-1, -1, 1, 6]
    state = extend(give_back(bind(new(), 0, np.array([3]), context_len=4), 0, 1), 0, np.array([6]))
    assert np.asarray(state.page_table)[0].tolist() == [-1, 6, -1, -1]  # a window of one token has passed everything
    with pytest.raises(IntegrityError, match="unmapped"):
        dp.check_integrity(state.replace(context_lens=state.context_lens.at[0].set(12)))


def test_fork_copies_the_partial_tail_and_shares_the_rest():
    """B15, B17: copy on write of all layers; the source keeps its own tail."""
    state = bind(new(), 0, np.array([3, 5]), context_len=6)
    before = np.asarray(state.kv_pages).copy()
    state = fork(state, 0, 1, 7)
    dp.check_integrity(state)
    assert np.asarray(state.page_table)[1].tolist() == [3, 7, -1, -1]
    assert int(state.context_lens[1]) == 6
    after = np.asarray(state.kv_pages)
    assert np.array_equal(after[:, 7], before[:, 5])
    keep = [p for p in range(8) if p != 7]
    assert np.array_equal(after[:, keep], before[:, keep])
    assert may_write(state) == {5, 7}


def test_fork_on_a_page_border_copies_nothing():
    state = bind(new(), 0, np.array([3, 5]), context_len=8)
    before = np.asarray(state.kv_pages).copy()
    state = fork(state, 0, 1, 7)
    dp.check_integrity(state)
    assert np.asarray(state.page_table)[1].tolist() == [3, 5, -1, -1]
    assert np.array_equal(np.asarray(state.kv_pages), before)
    assert may_write(state) == set()


def test_truncate_across_a_page_border_drops_the_page_once_and_keeps_shared_pages_closed():
    """H26: rolling back frees the extra page once; a cut into a shared page leaves it unwritable."""
    state = truncate(bind(new(), 0, np.array([3, 5, 1]), shared=2, context_len=10), 0, 7)
    dp.check_integrity(state)
    assert np.asarray(state.page_table)[0].tolist() == [3, 5, -1, -1]
    assert np.asarray(state.refcounts)[1] == 0
    assert may_write(state) == set()
    state = truncate(state, 0, 7)
    assert int(state.context_lens[0]) == 7


def test_integrity_check_names_the_broken_invariant():
    state = bind(new(), 0, np.array([3, 5]), context_len=8)
    with pytest.raises(IntegrityError, match="page 3: refcount"):
        dp.check_integrity(state.replace(refcounts=state.refcounts.at[3].set(2)))
    with pytest.raises(IntegrityError, match="twice"):
        dp.check_integrity(bind(new(), 0, np.array([3, 5, 3]), context_len=4))
    with pytest.raises(IntegrityError, match="unmapped"):
        dp.check_integrity(bind(new(), 0, np.array([3]), context_len=8))
    with pytest.raises(ValueError, match="columns"):
        dp.bind(new(), 0, np.arange(5))


def test_the_pool_is_updated_in_place():
    """Donation: no function of the table copies the pool."""
    state = dp.create(GROUP, num_pages=4096, page_size=16, max_rows=2, max_columns=4)
    pool_bytes = state.kv_pages.nbytes
    one = jnp.int32(1)
    calls = {
        "bind": (dp.bind, (one, jnp.arange(3))),
        "extend": (dp.extend, (one, jnp.arange(1))),
        "release": (dp.release, (one,)),
        "fork": (dp.fork, (one, jnp.int32(0), jnp.int32(9))),
        "rebuild": (dp.rebuild, (state.page_table, state.shared_pages, state.context_lens)),
    }
    for name, (function, args) in calls.items():
        memory = jax.jit(function, donate_argnums=0).lower(state, *args).compile().memory_analysis()
        assert memory is not None
        assert memory.temp_size_in_bytes < pool_bytes / 8, name
        assert memory.alias_size_in_bytes >= pool_bytes, name


def test_a_page_that_another_row_attached_stays_closed_when_its_row_grows():
    """A27: row 1 attached page 7 of row 0; neither an extension of row 0 nor its truncation opens it while row 1 is there."""
    state = bind(new(num_pages=16), 0, np.array([7]), context_len=4)
    state = bind(state, 1, np.array([7, 3]), shared=1, context_len=5)
    assert not state.writable[7]
    state = extend(state, 0, np.array([9]))
    assert np.asarray(state.writable)[[3, 7, 9]].tolist() == [True, False, True]
    state = truncate(state, 0, 4)
    assert not state.writable[7]
    dp.check_integrity(state)
    state = extend(release(state, 1), 0, np.array([9]))  # nobody else has it now
    assert np.asarray(state.writable)[[7, 9]].tolist() == [True, True]
    dp.check_integrity(state)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_order_of_operations_keeps_refcounts_equal_to_table_entries(data):
    """`refcounts == bincount(page_table)`, and a shared page is never writable, after every operation."""
    state, free = new(num_pages=16), list(range(16))
    held: dict[int, list[int]] = {}
    for _ in range(data.draw(st.integers(1, 8))):
        row = data.draw(st.integers(0, 2))
        op = data.draw(st.sampled_from(["bind", "release", "extend", "publish", "truncate"]))
        if op == "bind" and row not in held:
            donor = data.draw(st.sampled_from([[], *held.values()]))
            shared = donor[: data.draw(st.integers(0, len(donor)))]
            own = [free.pop() for _ in range(data.draw(st.integers(0, min(2, 4 - len(shared)))))]
            held[row] = shared + own
            pages = np.full(4, -1, np.int32)
            pages[: len(held[row])] = held[row]
            state = bind(state, row, pages, shared=len(shared), context_len=4 * len(held[row]))
        elif op == "release":
            state = release(state, row)
            held.pop(row, None)
        elif op == "extend" and row in held and len(held[row]) < 4 and free:
            page = free.pop()
            held[row].append(page)
            state = extend(state, row, np.array([page]))
        elif op == "publish" and row in held:
            state = publish(state, row, min(1, len(held[row])))
        elif op == "truncate" and row in held:
            keep = data.draw(st.integers(0, len(held[row])))
            state = truncate(state, row, 4 * keep)
            held[row] = held[row][: min(keep, -(-int(state.context_lens[row]) // 4))]
        dp.check_integrity(state)
        for r in range(3):
            mine = [p for p in np.asarray(state.page_table)[r].tolist() if p >= 0]
            assert mine == held.get(r, [])


def test_rebuild_rewrites_every_column_and_derives_the_rest():
    """S9: no stale id survives a rebuild."""
    state = bind(new(), 2, np.array([0, 4, 6]), context_len=12)
    table = np.full((3, 4), -1, np.int32)
    table[0, :3], table[1, :2] = [3, 5, 1], [3, 2]
    state = rebuild(state, table, np.array([1, 1, 0], np.int32), np.array([9, 5, 0], np.int32))
    dp.check_integrity(state)
    assert np.array_equal(np.asarray(state.page_table), table)
    assert may_write(state) == {5, 1, 2}


def test_a_fresh_pool_can_be_filled_with_nan():
    state = dp.create(GROUP, num_pages=2, page_size=4, max_rows=1, max_columns=1, fill=float("nan"))
    assert np.isnan(np.asarray(state.kv_pages)).all()
