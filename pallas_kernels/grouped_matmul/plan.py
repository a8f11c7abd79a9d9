"""Which rows each tile of a grouped matmul takes."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels.pallas_gpu import power_of_two

FIXED_ROWS = 64
FEW_ROWS = 8
"""Rows up to which MXFP4 weights are multiplied without tensor cores."""


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["group", "begin", "end", "used"], meta_fields=["block"]
)
@dataclasses.dataclass(frozen=True)
class TilePlan:
    """Tiles of `block` rows that never mix groups: tile t has rows `begin[t]` to `min(begin[t] + block, end[t])`.

    Attributes:
        group: int32 `[T]`, 0..E-1, or E for padding behind the last group.
        begin: int32 `[T]`, first row.
        end: int32 `[T]`, end of the group; at most `begin` for a tile that has nothing to do.
        used: int32 scalar, tiles of groups, without those of the padding: the first ones.
        block: rows of a tile at most; static.
    """

    group: jax.Array
    begin: jax.Array
    end: jax.Array
    used: jax.Array
    block: int


def rows_of_tile(num_rows: int, num_groups: int, fixed: bool) -> int:
    """Rows of a GPU tile for so many rows of all groups: twice the mean, so that few groups need a second tile."""
    return FIXED_ROWS if fixed else min(max(power_of_two(-(-2 * num_rows // num_groups)), 16), 128)


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
    used = jnp.minimum(tile_ends[-1], tile.shape[0])
    return TilePlan(*tile_rows(ends, tile_ends, tile, num_rows, block), used, block)


def tile_rows(
    ends: jax.Array, tile_ends: jax.Array, tile: jax.Array, num_rows: int, block: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(group, begin, end) of tiles `tile` int32 `[T]`, from where each group's rows and tiles end, int32 `[E]` both."""
    before = tile_ends[None, :] <= tile[:, None]  # groups that end before the tile
    group = jnp.sum(before.astype(jnp.int32), axis=1)
    first_row = jnp.max(jnp.where(before, ends[None, :], 0), axis=1)
    first_tile = jnp.max(jnp.where(before, tile_ends[None, :], 0), axis=1)
    end = jnp.min(jnp.where(before, num_rows, ends[None, :]), axis=1)
    return group, first_row + (tile - first_tile) * block, end
