"""Which rows read the same pages, found on the host from the page table alone.

The context is cut into splits of `split` tokens, as in `paged_decode_attention`. Rows are sorted by their pages, so that
rows which read the same pages in a split stand next to each other, and each such run is cut into tiles of up to
`rows_per_tile` rows. Several groups and nested prefixes need nothing more:

    place  row    split 0      1        2        3
      0     7    [A A A   A A A]  [C C]     own
      1     2    [A A A   A A A]  [C C]     own       tiles (split, first place, end place):
      2     4    [A A A   A A A]   own      own           (0, 0, 3) (0, 3, 5) (1, 0, 3) (2, 0, 2)
      3     0    [B B B]   own     own
      4     5    [B B B]   own     own

Lanes of a tile are places counted from a multiple of 8, where a copy into the Mosaic kernel's operand may start: the
tile (0, 3, 5) has its rows in lanes 3 and 4. Tiles lie within `rows_per_tile` lanes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import jax
import numpy as np

from pallas_kernels import dispatch, layout

SPLIT = 1024
"""Tokens of a split, unless said otherwise."""
ROWS_PER_TILE = 16
"""Lanes of a tile, unless said otherwise: every implementation takes them."""
ALIGN = 8  # a TMA copy into swizzled shared memory starts at a multiple of 8 rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class SharedPrefixPlan:
    """Tiles of rows that read one split together; a pytree of arrays, so that a jitted step takes it as an argument.

    Attributes:
        order: int32 `[B]`, the row at each place.
        tiles: int32 `[T, 3]`: split, first and end place. Unused tiles, which come last, have split -1.
        lanes: int32 `[B, N]`, where the state of row b over split n is: `tile * rows_per_tile + lane`; -1: no tile.
        rows_per_tile: lanes of a tile, static.
        split: tokens of a split, static.
    """

    order: jax.Array | np.ndarray
    tiles: jax.Array | np.ndarray
    lanes: jax.Array | np.ndarray
    rows_per_tile: int = field(default=ROWS_PER_TILE, metadata={"static": True})
    split: int = field(default=SPLIT, metadata={"static": True})


def plan_shared_prefix(
    page_table: np.ndarray,
    kv_lens: np.ndarray,
    page_size: int,
    *,
    split: int = SPLIT,
    rows_per_tile: int = ROWS_PER_TILE,
    min_rows: int = 2,
    num_tiles: int | None = None,
) -> SharedPrefixPlan | None:
    """Tiles of all splits that at least `min_rows` rows share, or None if there is none.

    The plan stays valid while rows grow and tables are unchanged in the splits it covers.

    Args:
        page_table: int32 `[B, M]`, on the host.
        kv_lens: int32 `[B]`; only splits that lie wholly inside a row are shared.
        page_size: slots in a page; divides `split`.
        split: tokens of one split.
        rows_per_tile: lanes of a tile, a multiple of 8; see `rows_per_tile`.
        min_rows: fewest rows that are worth a tile.
        num_tiles: T, padded to, so that one compiled shape serves many plans; where more tiles are wanted, those of most
            rows are taken and the rest is read as plain decode does. None: the next power of two that holds all.

    Raises:
        ValueError: `split` is no multiple of the page size, or `rows_per_tile` none of 8.
    """
    _check(page_size, split, rows_per_tile)
    table, lens = np.asarray(page_table, np.int32), np.asarray(kv_lens)
    batch, per_split = table.shape[0], split // page_size
    if batch < max(2, min_rows):
        return None
    whole = np.minimum(lens // split, table.shape[1] // per_split)  # [B], splits that a row has
    depth = int(np.partition(whole, -min_rows)[-min_rows])
    if depth == 0:
        return None
    pages = np.where(
        (np.arange(depth) < whole[:, None])[:, :, None],
        table[:, : depth * per_split].reshape(batch, depth, per_split),
        np.int32(-1),
    )
    order, same = _sort(pages)
    numbers, first, end = _runs(same)

    # Cut runs at `rows_per_tile` lanes from the multiple of ALIGN at or before their first place.
    begin = first // ALIGN * ALIGN
    run, cut = _count_up(-(-(end - begin) // rows_per_tile))
    low = begin[run] + cut * rows_per_tile
    tiles = np.stack([numbers[run], np.maximum(first[run], low), np.minimum(end[run], low + rows_per_tile)], axis=1)
    members = tiles[:, 2] - tiles[:, 1]
    chosen = np.flatnonzero(members >= min_rows)
    if num_tiles is not None and len(chosen) > num_tiles:
        chosen = np.sort(chosen[np.argsort(-members[chosen], kind="stable")[:num_tiles]])
    if not len(chosen):
        return None
    tiles, members = tiles[chosen], members[chosen]

    size = 1 << (len(tiles) - 1).bit_length() if num_tiles is None else num_tiles
    plan = empty_plan(batch, table.shape[1], page_size, size, split=split, rows_per_tile=rows_per_tile)
    padded, lanes = np.asarray(plan.tiles), np.asarray(plan.lanes)  # its own arrays, to be filled
    padded[: len(tiles)] = tiles
    tile, member = _count_up(members)
    place = tiles[tile, 1] + member
    lanes[order[place], tiles[tile, 0]] = tile * rows_per_tile + place - tiles[tile, 1] // ALIGN * ALIGN
    return dataclasses.replace(plan, order=order.astype(np.int32))


def empty_plan(
    batch: int,
    columns: int,
    page_size: int,
    num_tiles: int,
    *,
    split: int = SPLIT,
    rows_per_tile: int = ROWS_PER_TILE,
) -> SharedPrefixPlan:
    """A plan of this shape without tiles: the kernel reads everything as plain decode does."""
    _check(page_size, split, rows_per_tile)
    tiles = np.zeros((num_tiles, 3), np.int32)
    tiles[:, 0] = -1
    return SharedPrefixPlan(
        order=np.arange(batch, dtype=np.int32),
        tiles=tiles,
        lanes=np.full((batch, max(1, -(-columns // (split // page_size)))), -1, np.int32),
        rows_per_tile=rows_per_tile,
        split=split,
    )


def _check(page_size: int, split: int, rows_per_tile: int) -> None:
    if split < 1 or split % page_size:
        raise ValueError(f"split {split} is no multiple of the page size {page_size}")
    if rows_per_tile < 1 or rows_per_tile % ALIGN:
        raise ValueError(f"rows_per_tile {rows_per_tile} is no multiple of {ALIGN}")


def _sort(pages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of pages `[B, N, pages of a split]` in an order where equal beginnings meet, large groups first.

    Returns `(order [B], same [B - 1, N])`: whether places p and p + 1 read the same pages in split n. Large groups come
    first because a group that starts at a multiple of ALIGN needs fewer tiles.
    """
    batch = len(pages)
    flat = np.ascontiguousarray(pages).reshape(batch, -1)
    order = np.argsort(flat.view(f"V{flat[0].nbytes}")[:, 0], kind="stable")
    pages = pages[order]
    same = (pages[1:] == pages[:-1]).all(axis=2) & (pages[1:].min(axis=2) >= 0)
    group = np.concatenate([[0], np.cumsum(~same.any(axis=1))])
    moved = np.argsort(-np.bincount(group)[group], kind="stable")
    next_to = moved[1:] == moved[:-1] + 1
    return order[moved], same[np.minimum(moved[:-1], batch - 2)] & next_to[:, None]


def _runs(same: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Longest runs of places that read the same split, by split and place: `(split, first place, end place)`."""
    linked = np.zeros((same.shape[1], same.shape[0] + 2), bool)  # [N, B + 1]: place p with the one before it
    linked[:, 1:-1] = same.T
    numbers, first = np.nonzero(linked[:, 1:] & ~linked[:, :-1])
    _, last = np.nonzero(linked[:, :-1] & ~linked[:, 1:])
    return numbers, first, last + 1


def _count_up(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For counts (2, 3): `([0 0 1 1 1], [0 1 0 1 2])`."""
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) - (np.cumsum(counts) - counts)[which]


def saved_tokens(plan: SharedPrefixPlan | None) -> int:
    """Tokens whose K and V a layer reads less often than plain decode would: (rows - 1) x split of every tile."""
    if plan is None:
        return 0
    split, first, end = np.asarray(plan.tiles).T
    return int(np.sum((end - first - 1)[split >= 0])) * plan.split


def rows_per_tile(
    group: layout.LayerGroup, page_size: int, *, split: int = SPLIT, implementation: str | None = None
) -> int:
    """Lanes of a tile that suit the implementation which decode of this layer group runs on this device.

    A plan with other tiles gives the same result, only slower.

    Args:
        group: the layers; `num_heads` should be filled in.
        page_size: slots in a page.
        split: tokens of a split.
        implementation: the one that will be named in the call; None for the best on this device.
    """
    if group.num_heads is None:
        return ROWS_PER_TILE
    op, heads = "shared_prefix_attention", group.num_heads // group.num_kv_heads
    for name in dispatch.candidates(op, implementation, group.head_dim):
        try:
            return dispatch.load(op, name, "rows_per_tile")(group, heads, page_size, split)
        except (NotImplementedError, ImportError):  # as in `dispatch.call`, which will report it
            continue
    return ROWS_PER_TILE


def crossover_tokens() -> int:
    """`saved_tokens` from which sharing was measured to pay on this device (benchmarks/KERNELS.md)."""
    from pallas_kernels.pallas_gpu import tuned  # a GPU module

    return tuned("shared_prefix_attention.crossover", "", {"saved_tokens": 64 * SPLIT})["saved_tokens"]
