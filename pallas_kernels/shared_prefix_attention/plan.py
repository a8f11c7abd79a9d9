"""Which rows read the same pages, found on the host from the page table alone.

The context is cut into splits of `split` tokens, as in `paged_decode_attention`. In each split, rows whose pages there
are the same form tiles of up to `rows_per_tile` rows. Several groups and nested prefixes need nothing more:

    split          0        1        2        3
    row 0        [A A A   A A A]  [C C]     own
    row 1        [A A A   A A A]  [C C]     own        tiles: (0; rows 0 1 2) (1; rows 0 1 2) (2; rows 0 1)
    row 2        [A A A   A A A]   own      own               (0; rows 3 4)
    row 3        [B B B]   own     own
    row 4        [B B B]   own     own
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np

SPLIT = 1024
"""Tokens of a split, unless said otherwise."""
ROWS_PER_TILE = 16


class SharedPrefixPlan(NamedTuple):
    """Tiles of rows that read one split together; arrays, so that a jitted step takes it as an argument.

    Attributes:
        rows: int32 `[T, R]`, row numbers of each tile, -1 where a tile has fewer.
        splits: int32 `[T]`, number of the split that each tile reads; -1 is an unused tile.
        covered: int32 `[B, N]`, 1 where a tile reads split n for row b.
    """

    rows: jax.Array | np.ndarray
    splits: jax.Array | np.ndarray
    covered: jax.Array | np.ndarray


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
        split: tokens of one split, the same as the kernel's.
        rows_per_tile: R.
        min_rows: smallest group that is worth a tile.
        num_tiles: T, padded to, so that one compiled shape serves many plans; where more tiles are wanted, those of most
            rows are taken and the rest is read as plain decode does. None: the next power of two that holds all.

    Raises:
        ValueError: `split` is no multiple of the page size.
    """
    if split % page_size:
        raise ValueError(f"split {split} is no multiple of the page size {page_size}")
    table = np.asarray(page_table)
    batch, columns = table.shape
    per_split = split // page_size
    tiles: list[tuple[int, list[int]]] = []
    for number in range(columns // per_split):
        inside = np.flatnonzero(np.asarray(kv_lens) >= (number + 1) * split)
        if len(inside) < min_rows:
            break
        pages = np.ascontiguousarray(table[inside, number * per_split : (number + 1) * per_split])
        groups: dict[bytes, list[int]] = {}
        for row, ids in zip(inside.tolist(), pages, strict=True):
            if ids[0] >= 0:  # columns that a window has passed
                groups.setdefault(ids.tobytes(), []).append(row)
        for members in groups.values():
            cut = (members[i : i + rows_per_tile] for i in range(0, len(members), rows_per_tile))
            tiles += [(number, tile) for tile in cut if len(tile) >= min_rows]
    if num_tiles is not None and len(tiles) > num_tiles:
        tiles = sorted(tiles, key=lambda tile: -len(tile[1]))[:num_tiles]
    if not tiles:
        return None
    size = 1 << (len(tiles) - 1).bit_length() if num_tiles is None else num_tiles
    covered = np.zeros((batch, max(1, -(-columns // per_split))), np.int32)
    rows = np.full((size, rows_per_tile), -1, np.int32)
    splits = np.full((size,), -1, np.int32)
    for index, (number, members) in enumerate(tiles):
        rows[index, : len(members)] = members
        splits[index] = number
        covered[members, number] = 1
    return SharedPrefixPlan(rows, splits, covered)


def empty_plan(batch: int, columns: int, page_size: int, num_tiles: int, *, split: int = SPLIT) -> SharedPrefixPlan:
    """A plan of this shape without tiles: the kernel reads everything as plain decode does."""
    splits = max(1, -(-columns // (split // page_size)))
    return SharedPrefixPlan(
        np.full((num_tiles, ROWS_PER_TILE), -1, np.int32),
        np.full((num_tiles,), -1, np.int32),
        np.zeros((batch, splits), np.int32),
    )


def saved_tokens(plan: SharedPrefixPlan | None) -> int:
    """Tokens whose K and V a layer reads less often than plain decode would: (rows - 1) x split of every tile."""
    if plan is None:
        return 0
    members = np.sum(np.asarray(plan.rows) >= 0, axis=1)
    return int(np.maximum(members - 1, 0).sum()) * SPLIT


def crossover_tokens() -> int:
    """`saved_tokens` from which sharing was measured to pay on this device (benchmarks/KERNELS.md)."""
    from pallas_kernels.pallas_gpu import tuned  # a GPU module

    return tuned("shared_prefix_attention.crossover", "", {"saved_tokens": 16 * SPLIT})["saved_tokens"]
