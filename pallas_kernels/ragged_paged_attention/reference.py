"""XLA implementation of ragged_paged_attention for any backend, in the manner of FlashAttention.

Queries are cut into blocks of tokens of one row, keys into chunks at absolute positions. A block runs over the chunks
between its window's start and its last visible key, so padding of the table or of the batch costs nothing.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import chunks

BLOCK_TOKENS = 64
FIXED_BLOCK_TOKENS = 16


@functools.partial(jax.jit, static_argnames=("scale", "window", "soft_cap", "return_lse", "fixed_tile"))
def ragged_paged_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    page_table: jax.Array,
    q_offsets: jax.Array,
    kv_lens: jax.Array,
    *,
    layer: jax.Array,
    scale: float,
    window: int | None,
    sinks: jax.Array | None,
    soft_cap: float | None,
    return_lse: bool,
    fixed_tile: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See `api.ragged_paged_attention`; always returns `(out, lse)`, and XLA drops what is not used."""
    del return_lse
    num_tokens, num_heads, head_dim = q.shape
    page_size, num_kv_heads = chunks.page_size_and_heads(kv_pages)
    group = num_heads // num_kv_heads
    block = FIXED_BLOCK_TOKENS if fixed_tile else min(BLOCK_TOKENS, num_tokens)
    table = chunks.pad_table(page_table, page_size)

    # [K, T, G, D]: the query heads of one KV head become rows of one matmul. The extra block keeps slices unclamped.
    folded = jnp.pad(q, ((0, block), (0, 0), (0, 0))).reshape(-1, num_kv_heads, group, head_dim).swapaxes(0, 1)
    sink_rows = None
    if sinks is not None:
        sink_rows = jnp.tile(sinks.astype(jnp.float32).reshape(num_kv_heads, 1, group), (1, block, 1))
        sink_rows = sink_rows.reshape(num_kv_heads, block * group, 1)

    q_lens = q_offsets[1:] - q_offsets[:-1]
    first_block = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum((q_lens + block - 1) // block)]).astype(
        jnp.int32
    )

    def run_block(index, carry):
        outs, lses = carry
        row = jnp.sum(first_block[1:] <= index, dtype=jnp.int32)  # searchsorted would compile to one more loop
        skip = (index - first_block[row]) * block
        start = q_offsets[row] + skip
        count = jnp.minimum(q_lens[row] - skip, block)
        first_position = kv_lens[row] - q_lens[row] + skip
        end = first_position + count  # keys from here on are invisible to the whole block
        begin = jnp.int32(0) if window is None else jnp.maximum(first_position - window + 1, 0)
        rows = jax.lax.dynamic_slice_in_dim(folded, start, block, axis=1).reshape(num_kv_heads, block * group, head_dim)
        query_position = first_position + jnp.repeat(jnp.arange(block, dtype=jnp.int32), group)[:, None]

        out, lse = chunks.attend(
            rows,
            query_position,
            kv_pages,
            table[row],
            begin,
            end,
            layer=layer,
            scale=scale,
            window=window,
            sinks=sink_rows,
            soft_cap=soft_cap,
        )
        live = (jnp.arange(block) < count)[:, None]
        out = out.reshape(num_kv_heads, block, group, head_dim).swapaxes(0, 1).reshape(block, num_heads, head_dim)
        lse = lse.reshape(num_kv_heads, block, group).swapaxes(0, 1).reshape(block, num_heads)
        # A short block ends inside the next row: leave zeros there, its own block comes later.
        out = jnp.where(live[..., None], out, 0.0).astype(q.dtype)
        lse = jnp.where(live, lse, -jnp.inf)
        outs = jax.lax.dynamic_update_slice(outs, out, (start, 0, 0))
        return outs, jax.lax.dynamic_update_slice(lses, lse, (start, 0))

    outs = jnp.zeros((num_tokens + block, num_heads, head_dim), q.dtype)
    lses = jnp.full((num_tokens + block, num_heads), -jnp.inf, jnp.float32)
    outs, lses = jax.lax.fori_loop(0, first_block[-1], run_block, (outs, lses))
    return outs[:num_tokens], lses[:num_tokens]
