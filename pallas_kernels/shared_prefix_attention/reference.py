"""XLA implementation of shared_prefix_attention: plain decode, which reads shared pages once per row."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels.paged_decode_attention import reference
from pallas_kernels.shared_prefix_attention.plan import SharedPrefixPlan


def shared_prefix_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    page_table: jax.Array,
    kv_lens: jax.Array,
    plan: SharedPrefixPlan,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """See `api.shared_prefix_attention`."""
    del plan
    return reference.paged_decode_attention(q, kv_pages, page_table, kv_lens, **options)
