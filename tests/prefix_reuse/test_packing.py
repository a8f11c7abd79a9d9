"""Host arrays of a batch travel as one array; what comes out is what went in, to the bit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prefix_reuse import SamplingParams
from prefix_reuse.packing import PackedCall, pack, unpack
from prefix_reuse.sampling import sampling_state


def batch(seed: int, rows: int = 3) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    params = [
        SamplingParams(temperature=float(rng.uniform(0.1, 2)), seed=int(rng.integers(2**32))) for _ in range(rows)
    ]
    return {
        "ids": rng.integers(-(2**31), 2**31, (rows, 4)).astype(np.int32),
        "writes": rng.random(5) < 0.5,
        "steps": np.int32(7 + seed),
        "sampling": sampling_state(params, range(rows), rows),
        "none": None,
        "nothing": np.zeros((0, 4), np.int32),
        "odd": np.array([np.nan, -0.0, np.inf, 1e-45], np.float32),
        "strided": rng.integers(0, 9, (4, rows)).astype(np.int32).T,
        "on the device": jnp.arange(6),
        "half": np.arange(4, dtype=np.float16),
    }


def test_every_array_comes_out_as_it_went_in() -> None:
    tree = batch(0)
    words, rest, layout = pack(tree)
    assert words.dtype == np.int32
    assert [leaf.dtype for leaf in rest] == [np.float16, np.int32]
    out = jax.jit(unpack, static_argnums=2)(words, rest, layout)
    assert jax.tree.structure(out) == jax.tree.structure(tree)
    for got, want in zip(jax.tree.leaves(out), jax.tree.leaves(tree), strict=True):
        assert (got.shape, got.dtype) == (np.shape(want), want.dtype)
        assert np.asarray(got).tobytes() == np.asarray(want).tobytes()


def test_one_shape_is_traced_once_and_what_was_packed_may_be_overwritten() -> None:
    traced = []

    def function(scale: jax.Array, tree: dict[str, Any]) -> jax.Array:
        traced.append(1)
        return scale * (tree["ids"].sum() + tree["steps"] + tree["sampling"].seed.astype(jnp.int32).sum())

    call = PackedCall(function)
    for seed in range(4):
        tree = batch(seed)
        want = function(jnp.int32(3), jax.tree.map(jnp.asarray, tree))
        traced.clear() if seed == 0 else None
        got = call(jnp.int32(3), tree)
        tree["ids"][:] = 0
        assert int(got) == int(want)
    assert len(traced) == 1 + 3  # the plain calls, and one trace for all packed ones
    call(jnp.int32(3), batch(0, rows=2))
    assert len(traced) == 5


def test_donation_and_lowering_are_those_of_jit() -> None:
    call = PackedCall(lambda x, tree: x + tree["ids"].sum(), donate_argnums=0)
    x = jnp.zeros(1000, jnp.int32)
    program = call.lower(x, batch(0)).compile()
    assert program.memory_analysis().alias_size_in_bytes == x.nbytes
    words, rest, _ = pack(batch(1))
    assert np.array_equal(program(x + 0, words=words, rest=rest), call(x, batch(1)))
    assert x.is_deleted()
    with pytest.raises(KeyError):
        call(jnp.zeros(1000, jnp.int32), {})
