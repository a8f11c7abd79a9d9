"""route_experts: the shared properties of its implementations, what it refuses, CUDA lowering."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels.grouped_matmul.plan import plan_tiles
from pallas_kernels.route_experts import triton
from pallas_kernels.testing import RouteExpertsTests


class TestReference(RouteExpertsTests):
    implementation = "reference"


class TestTriton(RouteExpertsTests):
    implementation = "triton"
    same_bits = False


@pytest.mark.parametrize("softmax_first", [False, True])
@pytest.mark.parametrize(
    ("tokens", "experts", "k", "launches"), [(1, 32, 4, 1), (16, 128, 8, 1), (128, 128, 8, 2), (8320, 128, 8, 2)]
)
def test_it_lowers_for_cuda_without_a_gpu(tokens, experts, k, launches, softmax_first, monkeypatch):
    monkeypatch.setattr(triton, "interpret_here", lambda: False)
    shape: Any = jax.ShapeDtypeStruct
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=None)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        run = functools.partial(pk.route_experts, k=k, softmax_first=softmax_first, implementation="triton")
        traced = jax.jit(run).trace(shape((tokens, experts), jnp.float32), bias=shape((experts,), jnp.bfloat16))
        assert traced.lower(lowering_platforms=("cuda",)).as_text().count("__gpu$xla.gpu.triton") == launches


def test_counts_of_more_tables_than_a_table_has_tokens_are_added_up(monkeypatch):
    monkeypatch.setattr(triton, "TABLES", ((1000, 16),))  # 18 tables of 16 tokens
    logits = np.random.default_rng(0).normal(size=(16 * 17 + 3, 5)).astype(np.float32)
    want, got = (
        pk.route_experts(jnp.asarray(logits), 2, softmax_first=False, implementation=name)
        for name in ("reference", "triton")
    )
    np.testing.assert_array_equal(got.experts, want.experts)
    TestTriton().check_places(got, 5)


def test_tiles_are_planned_in_as_many_steps_as_they_need(monkeypatch):
    monkeypatch.setattr(triton, "TILES", 8)
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(47, 20)), jnp.float32)
    got = pk.route_experts(logits, 3, softmax_first=False, implementation="triton")
    assert got.tiles is not None
    assert int(got.tiles.used) > 16
    TestTriton().check_places(got, 20)


def test_what_does_not_fit_is_refused():
    logits = jnp.ones((4, 8))
    for call, message in (
        (lambda: pk.route_experts(logits[0], 2, softmax_first=True), "logits must be"),
        (lambda: pk.route_experts(logits.astype(jnp.bfloat16), 2, softmax_first=True), "in f32"),
        (lambda: pk.route_experts(logits, 9, softmax_first=True), "k must be 1 to 8"),
        (lambda: pk.route_experts(logits, 0, softmax_first=True), "k must be 1 to 8"),
        (lambda: pk.route_experts(logits, 2, bias=logits, softmax_first=True), "bias must be"),
        (lambda: pk.route_experts(logits, 2, softmax_first=False, normalise=True), "normalise is for"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    none = pk.route_experts(logits[:0], 2, softmax_first=True)
    assert none.weights.shape == none.place.shape == (0, 2)
    assert none.tokens.shape == (0,)
    assert not none.group_sizes.any()
    with pytest.raises(NotImplementedError, match="at most 512 experts"):
        pk.route_experts(jnp.ones((1, 513)), 2, softmax_first=True, implementation="triton")


def test_the_matmul_takes_what_was_routed():
    """Rows read where the tokens are, with the tiles that came with the routing, and with others."""
    routing = pk.route_experts(
        jnp.sin(jnp.arange(60.0)).reshape(12, 5), 2, softmax_first=False, implementation="triton"
    )
    x, weight = jnp.sin(jnp.arange(12 * 32.0)).reshape(12, 32), jnp.cos(jnp.arange(5 * 16 * 32.0)).reshape(5, 16, 32)
    want = pk.grouped_matmul(x[routing.tokens], weight, routing.group_sizes, implementation="reference")
    assert routing.tiles is not None
    for implementation in ("reference", "triton"):
        for fixed in (False, True):
            got = pk.grouped_matmul(
                x, weight, routing.group_sizes, rows=routing.tokens, tiles=routing.tiles, fixed_tile=fixed,
                implementation=implementation,
            )  # fmt: skip
            assert jnp.allclose(got, want, atol=1e-5)


@pytest.mark.parametrize(("rows", "groups"), [(12, 5), (24, 6), (600, 5)])
def test_tiles_of_other_rows_or_groups_are_refused(rows: int, groups: int):
    """A kernel would read tiles that are not there."""
    x, weight, sizes = jnp.ones((12, 32)), jnp.ones((5, 16, 32)), jnp.full(5, 4, jnp.int32)
    tiles = plan_tiles(jnp.zeros(groups, jnp.int32), rows, 16)
    with pytest.raises(ValueError, match="24 rows of 5 groups make 7 tiles of 16"):
        pk.grouped_matmul(x, weight, sizes, rows=jnp.zeros(24, jnp.int32), tiles=tiles)
