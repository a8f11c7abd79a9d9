"""Mosaic GPU appends and page copies without a GPU: the shared properties in the simulator, and lowered for CUDA.

The simulator needs more threads than a small machine has cores (see `simulator`), so that the simulated
classes are collected by a pytest of their own, with race and bounds detection.
"""

from __future__ import annotations

import functools
import importlib
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels.testing import AppendKVTests, CopyPagesTests
from pallas_kernels.testing.writes import bits, random_pool

SIMULATING = "SIMULATE_MOSAIC_GPU" in os.environ
RING = {"piece_bytes": 1024, "stages": 3, "writes": 1, "num_blocks": 3}


def simulated(op: str, package: str, config: dict[str, int]) -> Any:
    import jax.experimental.pallas.mosaic_gpu as plgpu

    module = importlib.import_module(f"pallas_kernels.{package}.mosaic_gpu")
    return functools.partial(getattr(module, op), config=config, interpret=plgpu.InterpretGPUParams(detect_races=True))


class TestSimulatedAppend(AppendKVTests):
    """Blocks of several tokens, the last of which begins among the tokens of the one before it."""

    __test__ = SIMULATING
    implementation = "mosaic_gpu"
    test_donated_pool_is_updated_in_place = None  # type: ignore[assignment]

    def append(self, pool: Any, k: Any, v: Any, ids: Any, slots: Any, writable: Any, refcounts: Any, layer: Any) -> Any:
        new, refused = simulated("append_kv", "append_kv", {"tokens": 6, "least_blocks": 3})(
            *map(jnp.asarray, (pool, k, v)),
            *(jnp.asarray(numbers, jnp.int32) for numbers in (ids, slots)),
            jnp.asarray(writable),
            jnp.asarray(refcounts, jnp.int32),
            layer=jnp.asarray(layer, jnp.int32),
        )
        return np.asarray(new), int(refused)


class TestSimulatedCopies(CopyPagesTests):
    """A ring that is shorter than the work of a block."""

    __test__ = SIMULATING
    implementation = "mosaic_gpu"
    test_donated_pool_is_updated_in_place = None  # type: ignore[assignment]

    def call(self, op: Any, *arguments: Any) -> np.ndarray:
        return np.asarray(simulated(op.__name__, "copy_pages", RING)(*map(jnp.asarray, arguments)))

    def test_pieces_of_pages_that_are_no_power_of_two(self) -> None:
        """3 heads of 80: pieces of 960 bytes, 16 of them a page."""
        pool = random_pool(np.random.default_rng(3), pk.pool_shape(2, 5, 16, 3, 80), jnp.bfloat16)
        got = self.call(pk.gather_pages, pool, np.array([4, -1, 1], np.int32))
        np.testing.assert_array_equal(bits(got[[0, 2]]), bits(pool[:, [4, 1]].swapaxes(0, 1)))
        assert not bits(got[1]).any()


@pytest.mark.slow
@pytest.mark.skipif(SIMULATING, reason="this is the simulation")
def test_simulated_kernels_have_the_shared_properties_and_no_race():
    root = pathlib.Path(__file__).parents[2]
    environment = {
        **os.environ, "NPROC": "16", "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu", "SIMULATE_MOSAIC_GPU": "1",
    }  # fmt: skip
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", __file__, "-k", "TestSimulated"],
        cwd=root, capture_output=True, text=True, env=environment, timeout=600, check=False,
    )  # fmt: skip
    said = process.stdout + process.stderr
    assert process.returncode == 0, said[-3000:]
    assert "RACE" not in said
    passed = re.search(r"(\d+) passed", said)
    assert passed is not None
    assert int(passed[1]) >= 20, "classes that were not collected prove nothing"
    assert "skipped" not in said


def shape(*dims: int, kind: Any = jnp.int32) -> Any:
    return jax.ShapeDtypeStruct(dims, kind)


def programs(pool: Any, tokens: int, entries: int) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Every op of this file with arguments for this pool."""
    kv = shape(tokens, pool.shape[2], pool.shape[-1], kind=pool.dtype)
    pages = shape(entries, pool.shape[0], *pool.shape[2:], kind=pool.dtype)
    flags = shape(pool.shape[1], kind=jnp.bool_), shape(pool.shape[1])
    return {
        "append_kv": (functools.partial(pk.append_kv, layer=0), (pool, kv, kv, shape(tokens), shape(tokens), *flags)),
        "gather_pages": (pk.gather_pages, (pool, shape(entries))),
        "scatter_pages": (pk.scatter_pages, (pool, shape(entries), pages)),
        "copy_within": (pk.copy_within, (pool, shape(entries), shape(entries))),
    }


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "page", "dtype"),
    [
        (8, 64, 16, jnp.bfloat16),
        (1, 80, 32, jnp.bfloat16),
        (2, 80, 16, jnp.float32),
        (3, 96, 64, jnp.float16),
        (8, 128, 128, jnp.bfloat16),
        (16, 256, 64, jnp.float32),
    ],
)
def test_lowers_for_cuda_with_its_pool_in_place(kv_heads, head_dim, page, dtype):
    """The kernels pass Mosaic's checks, and the pool is the custom call's own operand and result: nothing copies it."""
    pool = shape(*pk.pool_shape(3, 64, page, kv_heads, head_dim), kind=dtype)
    for name, (op, args) in programs(pool, 3000 if head_dim < 96 else 9, 9).items():
        traced = jax.jit(functools.partial(op, implementation="mosaic_gpu")).trace(*args)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        [call] = [line for line in text.splitlines() if "mosaic_gpu" in line and "custom_call" in line]
        assert ("output_operand_alias" in call) == (name != "gather_pages"), name
        assert "stablehlo.optimization_barrier" not in text, name
        if name != "append_kv":
            assert not re.search(r"stablehlo\.(copy|concatenate|pad|scatter|dynamic_update_slice)", text), name


def test_no_tokens_and_no_pages_need_no_kernel():
    pool = jnp.ones(pk.pool_shape(1, 3, 16, 1, 64), jnp.bfloat16)
    none, nothing = jnp.zeros(0, jnp.int32), jnp.zeros((0, 1, 64), jnp.bfloat16)
    flags = jnp.ones(3, bool), jnp.ones(3, jnp.int32)
    new, refused = pk.append_kv(pool, nothing, nothing, none, none, *flags, layer=0, implementation="mosaic_gpu")
    np.testing.assert_array_equal(new, pool)
    assert int(refused) == 0
    gathered = pk.gather_pages(pool, none, implementation="mosaic_gpu")
    assert gathered.shape == (0, 1, *pool.shape[2:])
    np.testing.assert_array_equal(pk.scatter_pages(pool, none, gathered, implementation="mosaic_gpu"), pool)
    np.testing.assert_array_equal(pk.copy_within(pool, none, none, implementation="mosaic_gpu"), pool)


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "page", "dtype", "reason"),
    [
        (2, 64, 8, jnp.float32, "at least 16 slots"),
        (2, 20, 16, jnp.bfloat16, "whole 16 bytes"),
        (2, 512, 16, jnp.bfloat16, "up to 256 numbers"),
        (128, 256, 16, jnp.float32, "bytes of a token"),
    ],
)
def test_appends_without_a_kernel_are_refused(kv_heads, head_dim, page, dtype, reason):
    pool = shape(*pk.pool_shape(1, 9, page, kv_heads, head_dim), kind=dtype)
    op, args = programs(pool, 4, 4)["append_kv"]
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(functools.partial(op, implementation="mosaic_gpu"), *args)


@pytest.mark.parametrize("name", ["gather_pages", "scatter_pages", "copy_within"])
def test_copies_without_a_kernel_are_refused(name):
    op, args = programs(shape(*pk.pool_shape(1, 9, 3, 1, 8), kind=jnp.bfloat16), 4, 4)[name]
    with pytest.raises(NotImplementedError, match="pages of whole 128 bytes, not 96"):
        jax.eval_shape(functools.partial(op, implementation="mosaic_gpu"), *args)
