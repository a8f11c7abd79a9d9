"""The wrapper with JAX's TPU signature against JAX's own reference of that op."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat, layout

tpu = pytest.importorskip("jax.experimental.pallas.ops.tpu.ragged_paged_attention")


def _arguments() -> tuple[Any, ...]:
    """Two live sequences of four: what lies behind them is garbage that must not count."""
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.standard_normal((12, 4, 64)), jnp.float32)
    pages = jnp.asarray(rng.standard_normal((9, 16, 4, 64)), jnp.float32)
    table = jnp.asarray(rng.permutation(9)[:8].reshape(4, 2), jnp.int32)
    kv_lens = jnp.array([20, 31, 999, -5], jnp.int32)
    return q, pages, kv_lens, table, jnp.array([0, 7, 8, -3, 77], jnp.int32), jnp.array([2], jnp.int32)


@pytest.mark.parametrize("options", [{}, {"sm_scale": 0.125, "sliding_window": 5}, {"soft_cap": 3.0}])
def test_agrees_with_jax(options: dict[str, Any]) -> None:
    arguments = _arguments()
    got = compat.ragged_paged_attention(*arguments, **options)
    want = tpu.ref_ragged_paged_attention(*arguments, **options)
    np.testing.assert_allclose(got[:8], want, atol=2e-5)
    assert not np.any(got[8:])


def test_pages_go_there_and_back() -> None:
    pages = jnp.asarray(np.random.default_rng(1).standard_normal((3, 16, 4, 8)), jnp.float32)
    ours = compat.pages_from_tpu(pages)
    assert ours.shape == (3, *layout.page_shape(16, 2, 8))
    np.testing.assert_array_equal(np.asarray(compat.pages_to_tpu(ours)), np.asarray(pages))


def test_quantised_pages_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="quantised"):
        compat.ragged_paged_attention(*_arguments(), k_scale=0.5)
