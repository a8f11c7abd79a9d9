"""Which rows each tile of a grouped matmul takes."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class TilePlan(NamedTuple):
    """Tiles of `block` rows that never mix groups: tile t has rows `begin[t]` to `min(begin[t] + block, end[t])`.

    Attributes:
        group: int32 `[T]`, 0..E-1, or E for padding behind the last group.
        begin: int32 `[T]`, first row.
        end: int32 `[T]`, end of the group; at most `begin` for a tile that has nothing to do.
        used: int32 scalar, tiles of groups, without those of the padding: the first ones.
    """

    group: jax.Array
    begin: jax.Array
    end: jax.Array
    used: jax.Array


def count_tiles(num_rows: int, num_groups: int, block: int) -> int:
    """Most tiles that any group sizes need: every group but one row of it may waste `block - 1` rows of a tile."""
    return (num_rows + min(num_groups + 1, num_rows) * (block - 1)) // block


def plan_tiles(group_sizes: jax.Array, num_rows: int, block: int) -> TilePlan:
    """Tiles of all rows, padding last.

    Args:
        group_sizes: int32 `[E]`; rows past their sum are padding. Negative sizes count as 0, a sum past `num_rows` is cut.
        num_rows: N.
        block: rows of a tile.
    """
    # Masked sums over [E, E] and [T, E] instead of running sums and gathers: each becomes one small kernel or joins one.
    sizes = jnp.clip(group_sizes, 0, num_rows).astype(jnp.int32)
    number = jnp.arange(sizes.shape[0], dtype=jnp.int32)
    upto = number[None, :] <= number[:, None]
    ends = jnp.minimum(jnp.sum(jnp.where(upto, sizes, 0), axis=1), num_rows)
    tile_ends = jnp.sum(jnp.where(upto, (sizes + block - 1) // block, 0), axis=1)

    tile = jnp.arange(count_tiles(num_rows, sizes.shape[0], block), dtype=jnp.int32)
    before = tile_ends[None, :] <= tile[:, None]  # groups that end before the tile
    group = jnp.sum(before, axis=1, dtype=jnp.int32)
    first_row = jnp.max(jnp.where(before, ends, 0), axis=1)
    first_tile = jnp.max(jnp.where(before, tile_ends, 0), axis=1)
    end = jnp.min(jnp.where(before, num_rows, ends), axis=1)
    return TilePlan(group, first_row + (tile - first_tile) * block, end, jnp.minimum(tile_ends[-1], tile.shape[0]))
