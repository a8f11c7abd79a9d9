"""paged_decode_attention: the shared properties, and that decode agrees with ragged attention of one query."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_decode_attention, ragged_paged_attention
from pallas_kernels.testing import DECODE_CASES, PagedCase, PagedDecodeAttentionTests, make_inputs


class TestReference(PagedDecodeAttentionTests):
    implementation = "reference"


@pytest.mark.parametrize("case", [DECODE_CASES[0], DECODE_CASES[2]], ids=str)
def test_decode_agrees_with_ragged_attention_of_one_query(case: PagedCase) -> None:
    inputs = make_inputs(case, 11)
    rows = tuple((min(1, keys), keys) for _, keys in case.rows)  # ragged rows without keys have no query
    live = np.flatnonzero([n for n, _ in rows])
    q, pool, table, lens = map(jnp.asarray, (inputs.q, inputs.pool, inputs.page_table, inputs.kv_lens))
    offsets = jnp.asarray(np.concatenate([[0], np.cumsum([n for n, _ in rows])]), jnp.int32)
    decode = paged_decode_attention(q, pool, table, lens, layer=case.layer, **inputs.options)
    ragged = ragged_paged_attention(q[live], pool, table, offsets, lens, layer=case.layer, **inputs.options)
    np.testing.assert_allclose(decode[live], ragged, atol=2e-6)
