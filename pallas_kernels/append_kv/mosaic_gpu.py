"""Mosaic GPU implementation of append_kv for Hopper: keys and values pass through shared memory, no register holds one.

A block reads the keys and the values of a few tokens, one bulk copy each, while it looks up where they go. Then one
TMA store a token writes its keys of all heads (a box of the pool: every head, one slot), and one more its values. Where
the tokens do not begin at whole 128 bytes of shared memory, as such a box must, each head has a copy of its own.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as mosaic
import jax.numpy as jnp
from jax import lax

from pallas_kernels import layout
from pallas_kernels.append_kv.guard import allowed_writes
from pallas_kernels.pallas_gpu import require_pages, shape_key, tuned

plgpu: Any = mosaic  # its classes and exports confuse the type checker
DEFAULTS = {"tokens": 8, "least_blocks": 528}
"""Most tokens of a block, and the blocks that a smaller batch is spread over: 4 for each of 132 multiprocessors."""
BLOCK_BYTES = 96 << 10  # keys and values that a block holds: several blocks share a multiprocessor
MOST_BYTES = 200 << 10
ALIGN = 128  # bytes: length of a read, and address of a box in shared memory


def append_kv(
    kv_pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    page_ids: jax.Array,
    slots: jax.Array,
    writable: jax.Array,
    refcounts: jax.Array,
    *,
    layer: jax.Array,
    config: dict[str, int] | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """See `api.append_kv`; the kernel gets the pool as a Ref, so a caller that donates it gets the same buffer back.

    Args:
        config: overrides of the tuned sizes (see `DEFAULTS`).
        interpret: `plgpu.InterpretGPUParams(...)` to simulate on CPU.

    Raises:
        NotImplementedError: page size, head_dim or number of KV heads without a kernel.
    """
    require_pages(layout.page_size_of(kv_pages))
    num_kv_heads, head_dim = layout.num_kv_heads_of(kv_pages), layout.head_dim_of(kv_pages)
    vector_bytes = head_dim * kv_pages.dtype.itemsize
    token_bytes = num_kv_heads * vector_bytes
    unit = ALIGN // math.gcd(ALIGN, token_bytes)  # tokens of whole ALIGN bytes
    if vector_bytes % 16 or head_dim > 256 or num_kv_heads > 256:
        raise NotImplementedError(
            f"Mosaic GPU append writes up to 256 KV heads of up to 256 numbers in whole 16 bytes, not {num_kv_heads} of "
            f"{head_dim} ({kv_pages.dtype})."
        )
    if 2 * unit * token_bytes > MOST_BYTES:
        raise NotImplementedError(f"Mosaic GPU append has at most {MOST_BYTES} bytes of a token's K and V.")
    key = shape_key(num_kv_heads, num_kv_heads, head_dim, kv_pages.dtype)
    options = {**DEFAULTS, **tuned("append_kv.mosaic_gpu", key, {}), **(config or {})}
    tokens = min(options["tokens"], k.shape[0] // options["least_blocks"], BLOCK_BYTES // (2 * token_bytes))
    tokens = max(1, tokens // unit) * unit
    return _append(
        kv_pages, k, v, page_ids, slots, writable, refcounts, layer, tokens=tokens, unit=unit, interpret=interpret
    )


@functools.partial(jax.jit, static_argnames=("tokens", "unit", "interpret"))
def _append(kv_pages, k, v, page_ids, slots, writable, refcounts, layer, *, tokens: int, unit: int, interpret: Any):
    num_layers, num_pages, num_kv_heads, _, page_size, head_dim = kv_pages.shape
    if num_layers * num_pages * page_size >= 2**31:
        raise NotImplementedError(f"pools of {num_layers * num_pages * page_size} slots need 64-bit slot numbers")
    allowed, safe, refused = allowed_writes(kv_pages, page_ids, slots, writable, refcounts)
    if not k.shape[0]:
        return kv_pages, refused
    # The slot among those of all pages of all layers; -1 where nothing is written.
    target = jnp.where(allowed, (layer * num_pages + safe) * page_size + slots, -1)
    missing = -k.shape[0] % unit
    if missing:
        target = jnp.pad(target, (0, missing), constant_values=-1)
        k, v = (jnp.pad(x, ((0, missing), (0, 0), (0, 0))) for x in (k, v))
    pool = jax.new_ref(kv_pages.reshape(num_layers * num_pages, *kv_pages.shape[2:]))
    held = plgpu.SMEM((tokens, num_kv_heads, head_dim), kv_pages.dtype)
    plgpu.kernel(
        functools.partial(_write_kernel, page_size=page_size, tokens=tokens, boxes=unit == 1),
        out_type=(),
        scratch_types={"k_smem": held, "v_smem": held, "full": plgpu.Barrier(num_arrivals=2)},
        grid=(pl.cdiv(k.shape[0], tokens),),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
        kernel_name="append_kv",
    )(target, k, v, pool)
    return jax.freeze(pool).reshape(kv_pages.shape), refused


def _write_kernel(
    target_ref, k_ref, v_ref, pool_ref, *, k_smem, v_smem, full, page_size: int, tokens: int, boxes: bool
):
    begin = lax.axis_index("block") * tokens
    first = jnp.minimum(begin, k_ref.shape[0] - tokens)  # the last block reads tokens of the one before it again
    for source, held in ((k_ref, k_smem), (v_ref, v_smem)):
        plgpu.copy_gmem_to_smem(
            source.at[pl.ds(first, tokens)], held, full, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS
        )
    targets = [jnp.where(first + i >= begin, target_ref[first + i], -1) for i in range(tokens)]
    plgpu.barrier_wait(full)
    for i, target in enumerate(targets):

        @pl.when(target >= 0)
        def _(i: int = i, target: jax.Array = target) -> None:
            page, slot = target // page_size, target % page_size
            for kind, held in enumerate((k_smem, v_smem)):
                if boxes:
                    plgpu.copy_smem_to_gmem(held.at[i], pool_ref.at[page, :, kind, slot])
                else:
                    for head in range(held.shape[1]):
                        plgpu.copy_smem_to_gmem(held.at[i, head], pool_ref.at[page, head, kind, slot])

    plgpu.wait_smem_to_gmem(0)
