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
        used: int32 scalar, tiles that have rows: the first ones.
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
    ends = jnp.minimum(jnp.cumsum(jnp.maximum(group_sizes, 0)), num_rows).astype(jnp.int32)
    ends = jnp.append(ends, jnp.int32(num_rows))
    begins = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    tiles = (ends - begins + block - 1) // block
    tile_ends = jnp.cumsum(tiles).astype(jnp.int32)
    tile = jnp.arange(count_tiles(num_rows, group_sizes.shape[0], block), dtype=jnp.int32)
    group = jnp.sum(tile_ends[None, :] <= tile[:, None], axis=1, dtype=jnp.int32)
    known = jnp.minimum(group, group_sizes.shape[0])
    begin = begins[known] + (tile - (tile_ends - tiles)[known]) * block
    return TilePlan(known, begin, ends[known], tile_ends[-1])
