"""Work list of the Mosaic GPU prefill kernel, computed on the device by XLA from the row lengths.

A tile is `tokens_per_tile` consecutive query tokens of one row, for one group of query heads that share a KV head. An
item is a tile over a range of key blocks: all that it sees or, when keys are split, one chunk of them. Heavy items come
first; within one weight the tiles that read the same keys are neighbours, so that they meet in the L2 cache.

Tiles start at multiples of 8 tokens: a row that starts elsewhere begins with tokens of the row before, which its first
tile computes and throws away. The tokens behind the last row form one more row without keys: its tiles write the zeros
that padding must hold.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

FIELDS = 11
ROW, HEADS, TOKEN, FIRST, LAST, POSITION, BEGIN, END, SLOT, CHUNK, KV_LEN = range(FIELDS)
ALIGN = 8  # a TMA copy into swizzled shared memory starts at a multiple of 8 rows
TILES_PER_BLOCK = 8  # tiles of one row and head that run next to each other
MAX_COMPARED = 4096  # rank by comparing all pairs up to this many blocks: one fused XLA kernel instead of a sort


class Schedule(NamedTuple):
    """Items, how many are real, and where each token's tile keeps its softmax statistics.

    Attributes:
        items: int32 `[max_items, FIELDS]`: row, group of heads, first token of the tile, first and
            end token of the row in the tile, absolute position of the tile's first token, first and end key block,
            slot of the statistics, chunk, kv_len.
        count: int32 `[1]`.
        slots: int32 `[T]`: slot of the token's tile in chunk 0; chunk c is `c * num_slots` further.
        lanes: int32 `[T]`: the token's number inside its tile.
        chunk_range: two int32 `[T]`: first and end chunk that an item computed for this token (0 and 0: none).
    """

    items: jax.Array
    count: jax.Array
    slots: jax.Array
    lanes: jax.Array
    chunk_range: tuple[jax.Array, jax.Array]


def num_slots(num_tokens: int, num_rows: int, tokens_per_tile: int) -> int:
    """Most tiles that rows of `num_tokens` tokens in all can have, the padding row included."""
    padded = num_tokens + (num_rows + 1) * (tokens_per_tile - 1 + ALIGN - 1)
    return min(num_tokens, padded // tokens_per_tile)


def _cdiv(a: jax.Array, b: int) -> jax.Array:
    return (a + b - 1) // b


def _rank_heaviest_first(work: jax.Array) -> jax.Array:
    """Permutation that sorts `work` in descending order, stable."""
    n = work.shape[0]
    if n > MAX_COMPARED:
        return jnp.argsort(-work, stable=True)
    number = jnp.arange(n)
    before = (work[None, :] > work[:, None]) | ((work[None, :] == work[:, None]) & (number[None, :] < number[:, None]))
    return jnp.zeros(n, jnp.int32).at[before.sum(axis=1)].set(number.astype(jnp.int32))


def build(
    q_offsets: jax.Array,
    kv_lens: jax.Array,
    *,
    num_tokens: int,
    tokens_per_tile: int,
    num_head_groups: int,
    block_kv: int,
    window: int | None,
    chunk: int,
    num_chunks: int,
) -> Schedule:
    """Build the work list.

    Args:
        q_offsets: int32 `[B + 1]`.
        kv_lens: int32 `[B]`.
        num_tokens: T, padding included.
        tokens_per_tile: query tokens in a tile.
        num_head_groups: groups of query heads; each tile exists once for every group.
        block_kv: keys in a key block.
        window: sliding window in tokens.
        chunk: keys in a chunk, a multiple of `block_kv`.
        num_chunks: 1: an item runs over all its keys. More: one item for each of that many chunks.
    """
    rows = kv_lens.shape[0]
    lead = q_offsets % ALIGN
    start = q_offsets - lead
    q_len = jnp.concatenate([q_offsets[1:], jnp.full(1, num_tokens, jnp.int32)]) - q_offsets
    kv_len = jnp.concatenate([kv_lens, jnp.zeros(1, jnp.int32)])
    base = kv_len - q_len - lead  # position of the token at `start`
    span = jnp.where(q_len > 0, lead + q_len, 0)
    tiles = _cdiv(span, tokens_per_tile)
    blocks = _cdiv(tiles, TILES_PER_BLOCK)
    tile_end, block_end = jnp.cumsum(tiles), jnp.cumsum(blocks)
    slots = num_slots(num_tokens, rows, tokens_per_tile)
    max_blocks = min(slots, num_slots(num_tokens, rows, tokens_per_tile * TILES_PER_BLOCK))

    def key_range(first: jax.Array, end: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys seen by tokens at positions first..end-1."""
        end = jnp.maximum(end, 0)
        begin = jnp.zeros_like(end) if window is None else jnp.maximum(first - window + 1, 0)
        return begin, end

    # Blocks of tiles (times chunks), heaviest first.
    number = jnp.arange(max_blocks)
    row = jnp.minimum((block_end[None, :] <= number[:, None]).sum(axis=1), rows)
    in_row = number - (block_end - blocks)[row]
    present = jnp.clip(tiles[row] - in_row * TILES_PER_BLOCK, 0, TILES_PER_BLOCK)
    present = jnp.where(number < block_end[-1], present, 0)
    first_token = in_row * TILES_PER_BLOCK * tokens_per_tile
    end_token = jnp.minimum(first_token + present * tokens_per_tile, span[row])
    begin, end = key_range(base[row] + jnp.maximum(first_token, lead[row]), base[row] + end_token)
    chunk_of = jnp.zeros_like(number)
    if num_chunks > 1:

        def each(x: jax.Array) -> jax.Array:
            return jnp.repeat(x, num_chunks, total_repeat_length=max_blocks * num_chunks)

        chunk_of = jnp.tile(jnp.arange(num_chunks), max_blocks)
        row, in_row, present, begin, end = each(row), each(in_row), each(present), each(begin), each(end)
        begin, end = jnp.maximum(begin, chunk_of * chunk), jnp.minimum(end, (chunk_of + 1) * chunk)
        present = jnp.where(begin < end, present, 0)
    work = jnp.where(present > 0, jnp.maximum(end - begin, 0), -1)
    order = _rank_heaviest_first(work)
    row, in_row, present, chunk_of = row[order], in_row[order], present[order], chunk_of[order]
    items_end = jnp.cumsum(present * num_head_groups)

    max_items = slots * num_head_groups * num_chunks
    number = jnp.arange(max_items)
    block = jnp.minimum((items_end[None, :] <= number[:, None]).sum(axis=1), items_end.shape[0] - 1)
    rest = number - (items_end - present * num_head_groups)[block]
    width = jnp.maximum(present[block], 1)
    heads, tile = rest // width, in_row[block] * TILES_PER_BLOCK + rest % width
    row, chunk_of = row[block], chunk_of[block]
    skip = tile * tokens_per_tile
    first_lane = jnp.clip(lead[row] - skip, 0, tokens_per_tile)
    end_lane = jnp.clip(span[row] - skip, 0, tokens_per_tile)
    position = base[row] + skip
    begin, end = key_range(position + first_lane, position + end_lane)
    begin, end = begin // block_kv, _cdiv(end, block_kv)
    if num_chunks > 1:
        per_chunk = chunk // block_kv
        begin, end = jnp.maximum(begin, chunk_of * per_chunk), jnp.minimum(end, (chunk_of + 1) * per_chunk)
    slot = chunk_of * slots + (tile_end - tiles)[row] + tile
    fields = [
        jnp.minimum(row, rows - 1),
        heads,
        start[row] + skip,
        first_lane,
        end_lane,
        position,
        begin,
        end,
        slot,
        chunk_of,
        kv_len[row],
    ]
    items = jnp.stack([field.astype(jnp.int32) for field in fields], axis=1)

    # Where a token's statistics are.
    token = jnp.arange(num_tokens)
    row = (q_offsets[None, 1:] <= token[:, None]).sum(axis=1)
    local = token - start[row]
    tile = local // tokens_per_tile
    first = base[row] + jnp.maximum(tile * tokens_per_tile, lead[row])
    end = base[row] + jnp.minimum((tile + 1) * tokens_per_tile, span[row])
    begin, end = key_range(first, end)
    begin, end = begin // block_kv * block_kv, jnp.where(row < rows, end, 0)
    return Schedule(
        items=items,
        count=items_end[-1:].astype(jnp.int32),
        slots=(tile_end - tiles)[row] + tile,
        lanes=local % tokens_per_tile,
        chunk_range=(begin // chunk, jnp.where(begin < end, _cdiv(end, chunk), 0)),
    )
