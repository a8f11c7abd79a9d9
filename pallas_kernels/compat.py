"""The signature and page layout of JAX's TPU ragged paged attention, over the ops of this package.

For code written against `jax.experimental.pallas.ops.tpu.ragged_paged_attention`, on CPU and GPU. Its pages
`[P, S, 2K, D]` interleave keys and values by head; `ragged_paged_attention` here rearranges the pool at each call,
so keep the pool in this package's layout (`pages_from_tpu` once) where speed matters.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import layout
from pallas_kernels.ragged_paged_attention import api


def pages_from_tpu(kv_pages: jax.Array) -> jax.Array:
    """`[..., S, 2K, D]` with K and V of a head side by side, to `[..., *page_shape]`."""
    return layout.join_kv(kv_pages[..., 0::2, :], kv_pages[..., 1::2, :])


def pages_to_tpu(pages: jax.Array) -> jax.Array:
    """Inverse of `pages_from_tpu`."""
    k, v = layout.split_kv(pages)
    return jnp.stack([k, v], axis=-2).reshape(*k.shape[:-2], 2 * k.shape[-2], k.shape[-1])


def ragged_paged_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Mixed prefill and decode attention over pages, as JAX's op of this name; nothing is donated.

    Args:
        q: `[T, H, D]`.
        kv_pages: `[P, S, 2K, D]`, one layer.
        kv_lens: int32 `[B]`; only the first `num_seqs` count.
        page_indices: int32 `[B, M]`; only the first `num_seqs` rows count.
        cu_q_lens: int32 `[B + 1]`; only the first `num_seqs + 1` count.
        num_seqs: int32 `[1]`.
        sm_scale: factor of the logits, 1 by default as in JAX's op.
        sliding_window: key j is visible to query i iff `i - sliding_window < j <= i`.
        soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`.
        k_scale, v_scale: must be None.
        implementation: see `pallas_kernels.ragged_paged_attention`.

    Returns:
        `[T, H, D]`; tokens of no sequence are zero (JAX's op leaves them undefined).

    Raises:
        NotImplementedError: `k_scale` or `v_scale` is given.
    """
    if k_scale is not None or v_scale is not None:
        raise NotImplementedError("quantised pages (k_scale, v_scale) are not supported")
    if kv_pages.ndim != 4 or kv_pages.shape[2] % 2:
        raise ValueError(f"kv_pages must be [P, S, 2K, D], got shape {kv_pages.shape}")
    rows = jnp.arange(kv_lens.shape[0], dtype=jnp.int32)
    count = num_seqs.reshape(())
    return api.ragged_paged_attention(
        q,
        pages_from_tpu(kv_pages)[None],
        page_indices,
        jnp.where(jnp.arange(cu_q_lens.shape[0]) <= count, cu_q_lens, cu_q_lens[count]),
        jnp.where(rows < count, kv_lens, 0),
        layer=0,
        scale=sm_scale,
        window=sliding_window,
        soft_cap=soft_cap,
        implementation=implementation,
    )
