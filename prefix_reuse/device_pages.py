"""`DevicePages`: the page state of one layer group as plain arrays, and the pure functions that change it.

    page_table (rows x columns)          kv_pages (layers x pages)          refcounts   writable
    row 0:  7  2  5 -1                   page 2: shared by rows 0 and 1     2           False
    row 1:  7  2  9 -1                   page 5: row 0's own tail           1           True

Every function is `(state, ...) -> state`, runs under `jax.jit`, and is meant to be called with `state` donated: the pool is
then updated in place. The host decides which pages a row gets; nothing here allocates. Invariant, held by every function:
`refcounts == bincount(page_table)`; a page may be written only where `writable` is set **and** its refcount is 1.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from pallas_kernels import copy_within
from pallas_kernels.layout import LayerGroup, page_size_of, pool_shape
from prefix_reuse.errors import IntegrityError

UNUSED = -1
"""Page-table entry of a column that a row does not use; mapped out of range before any indexing."""


class DevicePages(struct.PyTreeNode):
    """Pages of one layer group. L layers of the group, P pages, R rows, M page-table columns, S slots per page."""

    kv_pages: jax.Array
    """[L, P, *page_shape], the model's dtype: K and V of every layer; the layout is `pallas_kernels.layout`'s."""
    page_table: jax.Array
    """int32 [R, M]: physical page of row r, column m; `UNUSED` where the row has none."""
    context_lens: jax.Array
    """int32 [R]: tokens of the row whose KV is written."""
    shared_pages: jax.Array
    """int32 [R]: leading columns that are shared and therefore never written."""
    writable: jax.Array
    """bool [P]: cleared when a page is published or attached."""
    refcounts: jax.Array
    """int32 [P]: live rows that name the page."""

    @property
    def num_pages(self) -> int:
        return self.kv_pages.shape[1]

    @property
    def page_size(self) -> int:
        return page_size_of(self.kv_pages)

    @property
    def num_rows(self) -> int:
        return self.page_table.shape[0]

    @property
    def num_columns(self) -> int:
        return self.page_table.shape[1]


def create(
    group: LayerGroup, *, num_pages: int, page_size: int, max_rows: int, max_columns: int, fill: float = 0.0
) -> DevicePages:
    """An empty pool: no row has a page. `fill` is what unwritten slots hold (tests use NaN)."""
    shape = pool_shape(len(group.layers), num_pages, page_size, group.num_kv_heads, group.head_dim)
    return DevicePages(
        kv_pages=jnp.full(shape, fill, group.dtype),
        page_table=jnp.full((max_rows, max_columns), UNUSED, jnp.int32),
        context_lens=jnp.zeros(max_rows, jnp.int32),
        shared_pages=jnp.zeros(max_rows, jnp.int32),
        writable=jnp.zeros(num_pages, bool),
        refcounts=jnp.zeros(num_pages, jnp.int32),
    )


def count_references(page_table: jax.Array, num_pages: int) -> jax.Array:
    """int32 [P]: how many entries of `page_table` (any shape) name each page; `UNUSED` counts nowhere."""
    ids = jnp.where(page_table < 0, num_pages, page_table).ravel()
    return jnp.zeros(num_pages, jnp.int32).at[ids].add(1, mode="drop")


def rebuild(state: DevicePages, page_table: Any, shared_pages: Any, context_lens: Any) -> DevicePages:
    """Donates `state`. Replaces all rows by the host's tables; refcounts and write flags follow from them.

    Args:
      page_table: int32 [R, M]; every column is rewritten, so that no stale id survives.
      shared_pages: int32 [R]; leading columns of each row that are shared.
      context_lens: int32 [R].
    """
    return state.replace(**tables(page_table, shared_pages, context_lens, state.num_pages))


def tables(page_table: Any, shared_pages: Any, context_lens: Any, num_pages: int) -> dict[str, jax.Array]:
    """All of a `DevicePages` but `kv_pages`, for these tables; arguments as in `rebuild`."""
    page_table = jnp.asarray(page_table, jnp.int32)
    shared_pages = jnp.asarray(shared_pages, jnp.int32)
    used = page_table >= 0
    column = jnp.arange(page_table.shape[1], dtype=jnp.int32)[None, :]
    private = used & (column >= shared_pages[:, None])
    shared = used & ~private
    writable = jnp.zeros(num_pages, bool).at[jnp.where(private, page_table, num_pages)].set(True, mode="drop")
    writable = writable.at[jnp.where(shared, page_table, num_pages)].set(False, mode="drop")
    return {
        "page_table": page_table,
        "shared_pages": shared_pages,
        "context_lens": jnp.asarray(context_lens, jnp.int32),
        "writable": writable,
        "refcounts": count_references(page_table, num_pages),
    }


def _set_row(
    state: DevicePages, row: jax.Array, pages: jax.Array, shared: jax.Array, context: jax.Array
) -> DevicePages:
    old = state.page_table[row]
    delta = count_references(pages, state.num_pages) - count_references(old, state.num_pages)
    column = jnp.arange(state.num_columns, dtype=jnp.int32)
    attached = jnp.where((pages >= 0) & (column < shared), pages, state.num_pages)
    dropped = jnp.where(old < 0, state.num_pages, old)
    refcounts = state.refcounts + delta
    # A page of its own that another row has attached meanwhile stays closed.
    alone = refcounts.at[pages].get(mode="clip") == 1
    private = jnp.where((pages >= 0) & (column >= shared) & alone, pages, state.num_pages)
    gone = refcounts.at[dropped].get(mode="fill", fill_value=1) == 0
    writable = state.writable.at[jnp.where(gone, dropped, state.num_pages)].set(False, mode="drop")
    writable = writable.at[private].set(True, mode="drop").at[attached].set(False, mode="drop")
    return state.replace(
        page_table=state.page_table.at[row].set(pages),
        context_lens=state.context_lens.at[row].set(context),
        shared_pages=state.shared_pages.at[row].set(shared),
        writable=writable,
        refcounts=refcounts,
    )


def bind(state: DevicePages, row: Any, pages: Any, *, shared: Any = 0, context_len: Any = 0) -> DevicePages:
    """Donates `state`. Gives `row` exactly these pages; what it held before is released.

    Args:
      row: int32 scalar.
      pages: int32 [N], N <= M: physical pages in token order, the first `shared` of them shared with others.
      shared: leading pages that this row must not write; their write flag is cleared.
      context_len: tokens whose KV the pages already hold.
    """
    pages = jnp.asarray(pages, jnp.int32)
    if pages.shape[0] > state.num_columns:
        raise ValueError(f"a row has {state.num_columns} columns, got {pages.shape[0]} pages")
    pages = jnp.pad(pages, (0, state.num_columns - pages.shape[0]), constant_values=UNUSED)
    return _set_row(state, jnp.asarray(row), pages, jnp.int32(shared), jnp.int32(context_len))


def extend(state: DevicePages, row: Any, pages: Any) -> DevicePages:
    """Donates `state`. Appends private pages (int32 [N]) after the columns that `row` uses."""
    row = jnp.asarray(row)
    pages = jnp.asarray(pages, jnp.int32)
    mapped = jnp.where(state.page_table[row] >= 0, jnp.arange(1, state.num_columns + 1), 0)
    # A window of one token may have passed all of them.
    used = jnp.maximum(jnp.max(mapped), -(-state.context_lens[row] // state.page_size))
    columns = used + jnp.arange(pages.shape[0])
    table = state.page_table[row].at[columns].set(pages, mode="drop")
    return _set_row(state, row, table, state.shared_pages[row], state.context_lens[row])


def release(state: DevicePages, row: Any) -> DevicePages:
    """Donates `state`. Drops all references of `row`; releasing an empty row changes nothing."""
    nothing = jnp.full(state.num_columns, UNUSED, jnp.int32)
    return _set_row(state, jnp.asarray(row), nothing, jnp.int32(0), jnp.int32(0))


def give_back(state: DevicePages, row: Any, num_columns: Any) -> DevicePages:
    """Donates `state`. Drops the first `num_columns` pages of `row`, which its sliding window has passed."""
    row = jnp.asarray(row)
    column = jnp.arange(state.num_columns, dtype=jnp.int32)
    pages = jnp.where(column < jnp.int32(num_columns), UNUSED, state.page_table[row])
    return _set_row(state, row, pages, state.shared_pages[row], state.context_lens[row])


def publish(state: DevicePages, row: Any, num_pages: Any) -> DevicePages:
    """Donates `state`. Marks the first `num_pages` columns of `row` as shared: nobody may write them any more."""
    row = jnp.asarray(row)
    shared = jnp.maximum(state.shared_pages[row], jnp.int32(num_pages))
    return _set_row(state, row, state.page_table[row], shared, state.context_lens[row])


def fork(state: DevicePages, source: Any, target: Any, tail_page: Any) -> DevicePages:
    """Donates `state`. Makes row `target` continue where row `source` stands, by copy on write.

    Full pages are shared (both rows then refuse to write them); a partly filled tail page is copied, all layers, to
    `tail_page` (int32 scalar, a page that nobody uses; ignored when the context ends on a page border).
    """
    source, target = jnp.asarray(source), jnp.asarray(target)
    tail_page = jnp.int32(tail_page)
    context = state.context_lens[source]
    full = context // state.page_size
    has_tail = context % state.page_size > 0
    column = jnp.arange(state.num_columns, dtype=jnp.int32)
    old = state.page_table[source]
    pages = jnp.where(column < full, old, UNUSED)
    pages = jnp.where((column == full) & has_tail, tail_page, pages)
    tail_source = jnp.where(has_tail, old[jnp.minimum(full, state.num_columns - 1)], UNUSED)
    kv_pages = copy_within(state.kv_pages, tail_source[None], jnp.where(has_tail, tail_page, UNUSED)[None])
    state = publish(state.replace(kv_pages=kv_pages), source, full)
    return _set_row(state, target, pages, full, context)


def truncate(state: DevicePages, row: Any, context_len: Any) -> DevicePages:
    """Donates `state`. Shortens `row` to `context_len` tokens and drops the pages behind it.

    Cutting into a shared page leaves that page shared, so that a later write into it is refused: copy it first (`fork`).
    """
    row = jnp.asarray(row)
    context = jnp.minimum(jnp.int32(context_len), state.context_lens[row])
    keep = -(-context // state.page_size)
    column = jnp.arange(state.num_columns, dtype=jnp.int32)
    pages = jnp.where(column < keep, state.page_table[row], UNUSED)
    return _set_row(state, row, pages, jnp.minimum(state.shared_pages[row], keep), context)


def check_integrity(state: DevicePages) -> None:
    """Raises `IntegrityError` naming the invariant that the arrays break (reads them back; for tests and debugging)."""
    table = np.asarray(state.page_table)
    refcounts = np.asarray(state.refcounts)
    writable = np.asarray(state.writable)
    shared = np.asarray(state.shared_pages)
    context_lens = np.asarray(state.context_lens)
    if table.max(initial=UNUSED) >= state.num_pages or table.min(initial=0) < UNUSED:
        raise IntegrityError(f"page_table names a page outside 0..{state.num_pages - 1}")
    expected = np.bincount(table[table >= 0], minlength=state.num_pages)
    if not np.array_equal(expected, refcounts):
        bad = int(np.flatnonzero(expected != refcounts)[0])
        raise IntegrityError(f"page {bad}: refcount {refcounts[bad]}, but {expected[bad]} table entries name it")
    for row, pages in enumerate(table):
        used = pages[pages >= 0]
        if len(np.unique(used)) != len(used):
            raise IntegrityError(f"row {row} names a page twice: {used.tolist()}")
        attached = pages[: shared[row]]
        if writable[attached[attached >= 0]].any():
            raise IntegrityError(f"row {row}: a shared page is writable")
        need = -(-int(context_lens[row]) // state.page_size)
        if (pages[:need] < 0).any() and need:
            window_hole = pages[:need] < 0  # leading columns that a sliding window has passed
            first_used = int(np.argmax(~window_hole)) if (~window_hole).any() else need
            if window_hole[first_used:].any():
                raise IntegrityError(f"row {row}: context of {int(context_lens[row])} tokens has unmapped columns")
