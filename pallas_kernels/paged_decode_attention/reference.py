"""XLA implementation of paged_decode_attention for any backend: all rows in step over chunks of keys."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import chunks


@functools.partial(jax.jit, static_argnames=("scale", "window", "soft_cap", "return_lse"))
def paged_decode_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    page_table: jax.Array,
    kv_lens: jax.Array,
    *,
    layer: jax.Array,
    scale: float,
    window: int | None,
    sinks: jax.Array | None,
    soft_cap: float | None,
    return_lse: bool,
) -> tuple[jax.Array, jax.Array]:
    """See `api.paged_decode_attention`; always returns `(out, lse)`, and XLA drops what is not used."""
    del return_lse
    batch, num_heads, head_dim = q.shape
    page_size, num_kv_heads = chunks.page_size_and_heads(kv_pages)
    group = num_heads // num_kv_heads
    per_chunk = chunks.pages_per_chunk(page_size)
    chunk = per_chunk * page_size
    table = chunks.pad_table(page_table, per_chunk)
    rows = q.reshape(batch, num_kv_heads, group, head_dim)
    begin = jnp.zeros_like(kv_lens) if window is None else jnp.maximum(kv_lens - window, 0)

    def run_chunk(number, state):
        ids = jax.lax.dynamic_slice_in_dim(table, number * per_chunk, per_chunk, axis=1)
        pages = chunks.gather(kv_pages, layer, ids)  # [B, pages, K, 2, S, D]
        k, v = (pages[:, :, :, part].swapaxes(1, 2).reshape(batch, num_kv_heads, chunk, head_dim) for part in (0, 1))
        key_position = number * chunk + jnp.arange(chunk, dtype=jnp.int32)
        visible = (key_position >= begin[:, None]) & (key_position < kv_lens[:, None])
        visible &= jnp.repeat(ids >= 0, page_size, axis=1)
        v = jnp.where(visible[:, None, :, None], v, jnp.zeros((), v.dtype))
        return chunks.update(state, rows, k, v, visible[:, None, None], scale=scale, soft_cap=soft_cap)

    # A row that starts later (window) or ends earlier than others has chunks of no visible key: they change no bit.
    first = jnp.min(jnp.where(kv_lens > 0, begin, jnp.iinfo(jnp.int32).max)) // chunk
    state = jax.lax.fori_loop(
        first,
        (jnp.max(kv_lens, initial=0) + chunk - 1) // chunk,
        run_chunk,
        chunks.empty_state((batch, num_kv_heads, group), head_dim),
    )
    sink_rows = None if sinks is None else sinks.astype(jnp.float32).reshape(num_kv_heads, group, 1)
    out, lse = chunks.finish(state, sink_rows)
    return out.astype(q.dtype).reshape(batch, num_heads, head_dim), lse.reshape(batch, num_heads)
