"""Errors name the argument, what was expected and what came."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

from pallas_kernels import append_kv, layout, paged_decode_attention, ragged_paged_attention, scatter_pages

POOL = jnp.zeros(layout.pool_shape(2, 5, 16, 2, 64))
TABLE = jnp.zeros((3, 4), jnp.int32)
LENS = jnp.zeros(3, jnp.int32)
OFFSETS = jnp.zeros(4, jnp.int32)
Q = jnp.zeros((8, 4, 64))


def _ragged(
    q: Any = Q, pool: Any = POOL, table: Any = TABLE, offsets: Any = OFFSETS, lens: Any = LENS, **kw: Any
) -> Any:
    return ragged_paged_attention(q, pool, table, offsets, lens, **{"layer": 0, **kw})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"q": jnp.zeros((8, 4, 32))}, r"q must be \[tokens, heads, 64\].*\(8, 4, 32\)"),
        ({"q": jnp.zeros((8, 3, 64))}, "3 query heads are no multiple of 2 KV heads"),
        ({"q": Q.astype(jnp.bfloat16)}, "q is bfloat16 but kv_pages is float32"),
        ({"pool": jnp.zeros((2, 5, 16, 64))}, "kv_pages must be"),
        ({"pool": POOL.astype(jnp.int8)}, "kv_pages must be f32, bf16 or f16, got int8"),
        ({"table": TABLE.astype(jnp.uint32)}, r"page_table must be int32 \[\?, \?\], got uint32"),
        ({"offsets": LENS}, r"q_offsets must be int32 \[4\], got int32 \(3,\)"),
        ({"lens": OFFSETS}, r"kv_lens must be int32 \[3\], got int32 \(4,\)"),
        ({"layer": 2}, "layer 2 is outside the pool's 2 layers"),
        ({"layer": -1}, "layer -1 is outside"),
        ({"layer": jnp.zeros(2, jnp.int32)}, "layer must be an integer scalar"),
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"soft_cap": 0.0}, "soft_cap must be positive"),
        ({"sinks": jnp.zeros(2)}, r"sinks must be \[4\]"),
    ],
)
def test_attention_refuses(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _ragged(**arguments)


def test_decode_wants_one_query_per_row() -> None:
    with pytest.raises(ValueError, match="q has 8 rows but page_table has 3"):
        paged_decode_attention(Q, POOL, TABLE, LENS, layer=0)


def test_writes_refuse_wrong_shapes() -> None:
    k, ids = jnp.zeros((8, 2, 64)), jnp.zeros(8, jnp.int32)
    flags, refs = jnp.ones(5, bool), jnp.ones(5, jnp.int32)
    with pytest.raises(ValueError, match=r"v must be float32 \(8, 2, 64\), got float32 \(8, 1, 64\)"):
        append_kv(POOL, k, k[:, :1], ids, ids, flags, refs, layer=0)
    with pytest.raises(ValueError, match="writable must be bool"):
        append_kv(POOL, k, k, ids, ids, refs, refs, layer=0)
    with pytest.raises(ValueError, match=r"pages must be float32 \(8, 2, 2, 2, 16, 64\)"):
        scatter_pages(POOL, ids, jnp.zeros((8, 1, 2, 2, 16, 64)))
