"""Your own jitted step over `DevicePages`, without the engine: the second prompt reuses the pages of the first."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from models.testing import tiny_llama
from prefix_reuse import device_pages
from prefix_reuse.steps import commit, make_attend, paged_kv

PAGE_SIZE = 4
model = tiny_llama()  # or anything with forward(params, tokens, positions, kv, attend), unembed and kv_groups
attend = make_attend(model.kv_groups)


def step(params, pools, row, tokens, start):
    """Donates `pools`. Runs `tokens` of one row from position `start` on; returns (logits of the last token, pools)."""
    end = start + tokens.shape[0]
    positions = start + jnp.arange(tokens.shape[0])
    rows, first_token = jnp.stack([row]), jnp.array([0, tokens.shape[0]])
    kv = paged_kv(pools, rows, jnp.zeros_like(tokens), positions, tokens >= 0, first_token, jnp.stack([end]))
    hidden, kv = model.forward(params, tokens, positions, kv, attend)
    return model.unembed(params, hidden[-1:])[0], commit(pools, kv, rows, jnp.stack([end]))


jit_step = jax.jit(step, donate_argnums=1)
bind = jax.jit(device_pages.bind, donate_argnums=0)
publish = jax.jit(device_pages.publish, donate_argnums=0)

prefix, one, two = jnp.arange(2, 10), jnp.array([40, 41, 42]), jnp.array([50, 51])
sizes = {"num_pages": 8, "page_size": PAGE_SIZE, "max_rows": 2, "max_columns": 4}
pools = tuple(device_pages.create(group, **sizes) for group in model.kv_groups)

pools = tuple(bind(pool, 0, jnp.array([0, 1, 2])) for pool in pools)  # row 0: three private pages
logits_one, pools = jit_step(model.params, pools, jnp.int32(0), jnp.concatenate([prefix, one]), jnp.int32(0))
shared = len(prefix) // PAGE_SIZE  # whole pages only: two of them
pools = tuple(publish(pool, 0, shared) for pool in pools)  # nobody writes them from now on
pools = tuple(bind(pool, 1, jnp.array([0, 1, 5]), shared=shared, context_len=len(prefix)) for pool in pools)
logits_two, pools = jit_step(model.params, pools, jnp.int32(1), two, jnp.int32(len(prefix)))  # two tokens, not ten
print("page table", pools[0].page_table.tolist(), "refcounts", pools[0].refcounts.tolist())
