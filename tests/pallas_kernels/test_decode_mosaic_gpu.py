"""Mosaic GPU decode: simulated on CPU with race detection, refused where it has no kernel."""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk

LENS = [0, 1, 150, 256]  # with a window of 40 the third row looks across a border of splits
CASES = {
    "plain": {"heads": 8, "kv_heads": 2, "head_dim": 128, "page": 16},
    "window_and_sinks": {"heads": 16, "kv_heads": 2, "head_dim": 64, "page": 16, "window": 40, "sinks": True},
    "soft_cap": {"heads": 8, "kv_heads": 2, "head_dim": 64, "page": 32, "soft_cap": 3.0},
}


def inputs(case):
    rng = np.random.default_rng(0)
    page, kv_heads, head_dim = case["page"], case["kv_heads"], case["head_dim"]
    columns = max(LENS) // page + 1
    pool = np.full(pk.pool_shape(2, 4 * columns + 3, page, kv_heads, head_dim), np.nan, np.float32)
    order = rng.permutation(pool.shape[1])[: 4 * columns].reshape(4, columns)
    table = np.full((4, columns), -1, np.int32)
    for row, n in enumerate(LENS):
        passed = max(0, n - case["window"]) // page if "window" in case else 0  # given back: -1, and NaN in the pool
        for column in range(passed, -(-n // page)):
            table[row, column] = order[row, column]
            used = min(page, n - column * page)
            pool[:, order[row, column], :, :, :used] = rng.normal(size=(2, kv_heads, 2, used, head_dim))
    q = jnp.asarray(rng.normal(size=(4, case["heads"], head_dim)), jnp.bfloat16)
    return q, jnp.asarray(pool, jnp.bfloat16), jnp.asarray(table), jnp.asarray(LENS, jnp.int32)


def simulate() -> None:
    """Runs every case in the simulator and prints errors against the reference as JSON."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    module = importlib.import_module("pallas_kernels.paged_decode_attention.mosaic_gpu")
    report = {}
    for name, case in CASES.items():
        args = inputs(case)
        sinks = jnp.linspace(-1, 1, case["heads"]) if case.get("sinks") else None
        options = {"window": case.get("window"), "soft_cap": case.get("soft_cap"), "sinks": sinks, "return_lse": True}
        got = module.paged_decode_attention(
            *args,
            **options,
            layer=jnp.int32(1),
            scale=0.1,
            config={"split": 128, "block": 64, "num_blocks": 3, "stages": 2},
            interpret=plgpu.InterpretGPUParams(detect_races=True),
        )
        want = pk.paged_decode_attention(*args, **options, layer=1, scale=0.1, implementation="reference")
        got, want = ([np.asarray(x, np.float64) for x in pair] for pair in (got, want))
        live = np.isfinite(want[1])
        report[name] = {
            "out": float(np.abs(got[0] - want[0]).max()),
            "lse": float(np.abs(got[1][live] - want[1][live]).max()),
            "same_empty": bool((np.isneginf(got[1]) == ~live).all()),
        }
    print(json.dumps(report))


def test_simulated_kernel_agrees_and_has_no_race():
    root = pathlib.Path(__file__).parents[2]
    environment = {**os.environ, "NPROC": "16", "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
    process = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, env=environment, timeout=600, check=False
    )
    assert process.returncode == 0, process.stderr[-3000:]
    assert "RACE" not in process.stdout + process.stderr
    for name, errors in json.loads(process.stdout.splitlines()[-1]).items():
        assert errors["out"] < 0.02, name
        assert errors["lse"] < 1e-4, name
        assert errors["same_empty"], name


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page", "dtype"),
    [
        (8, 2, 96, 16, jnp.bfloat16),
        (8, 2, 64, 16, jnp.float32),
        (6, 2, 64, 16, jnp.bfloat16),
        (8, 2, 64, 48, jnp.bfloat16),
    ],
)
def test_cases_without_a_kernel_are_refused(heads, kv_heads, head_dim, page, dtype):
    pool = jax.ShapeDtypeStruct(pk.pool_shape(1, 9, page, kv_heads, head_dim), dtype)
    q, lens = jax.ShapeDtypeStruct((4, heads, head_dim), dtype), jax.ShapeDtypeStruct((4,), jnp.int32)
    table = jax.ShapeDtypeStruct((4, 4), jnp.int32)
    with pytest.raises(NotImplementedError, match="Mosaic GPU decode"):
        jax.eval_shape(
            lambda *a: pk.paged_decode_attention(*a, layer=0, implementation="mosaic_gpu"), q, pool, table, lens
        )


if __name__ == "__main__":
    simulate()
