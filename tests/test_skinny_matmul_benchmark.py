"""The experiment skinny_matmul without a GPU: simulated with race and bounds detection, lowered for CUDA, what is refused.

The simulation runs in a process of its own, with more threads than a small machine has cores: see `simulator`.
"""

from __future__ import annotations

import functools
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from simulator import run_simulator

from benchmarks import skinny_matmul as benchmark
from benchmarks.skinny_matmul_kernel import OTHER_REGISTERS, shared_bytes, skinny_matmul
from pallas_kernels.hopper import REGISTERS, SHARED_BYTES, moved_registers

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
# T, live rows, N, K, dtype, sizes: fewer rows than a tile, rows that are no whole tiles, results in several pieces, rings
# that are longer and shorter than the contraction, two blocks that read x together. Rows that are not live are NaN.
Case = tuple[int, int, int, int, Any, dict[str, Any]]
CASES: dict[str, Case] = {
    "padding": (12, 9, 64, 512, F16, {"bm": 64, "splits": 2, "stages": 3, "bk": 128}),
    "cluster": (16, 16, 128, 384, BF16, {"bm": 64, "splits": 2, "stages": 2, "cluster": 2}),
}
SLOW_CASES: dict[str, Case] = {
    "one_row": (1, 1, 64, 256, BF16, {"bm": 64, "splits": 1, "stages": 8}),
    "three_rows_in_parts": (3, 2, 128, 512, BF16, {"bm": 128, "splits": 4, "stages": 2}),
    "two_pieces_three_consumers": (72, 70, 192, 256, BF16, {"bm": 192, "splits": 2, "stages": 2}),
    "most_consumers": (128, 100, 256, 512, BF16, {"bm": 256, "splits": 2, "stages": 2}),
    "largest_cluster": (128, 100, 256, 512, BF16, {"bm": 64, "splits": 2, "stages": 2, "cluster": 4}),
    "cluster_of_wide_blocks": (128, 100, 256, 512, BF16, {"bm": 128, "splits": 2, "stages": 2, "cluster": 2}),
    "most_rows": (256, 250, 128, 192, BF16, {"bm": 128, "splits": 1, "stages": 2, "out_dtype": F32}),
}


def simulate(names: list[str]) -> None:
    """Runs cases in the simulator and prints what came out beside float64, as JSON."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    report = {}
    for name in names:
        tokens, live, columns, contracted, dtype, sizes = {**CASES, **SLOW_CASES}[name]
        keys = jax.random.split(jax.random.key(len(name)))
        x = jax.random.normal(keys[0], (tokens, contracted), dtype).at[live:].set(jnp.nan)
        w = jax.random.normal(keys[1], (columns, contracted), dtype) * contracted**-0.5
        y = skinny_matmul(x, w, **sizes, interpret=plgpu.InterpretGPUParams(detect_races=True))
        got = np.asarray(y, np.float64)
        parts = got if got.ndim == 3 else got[None]
        exact = np.einsum(
            "tsk,nsk->stn",
            np.asarray(x, np.float64).reshape(tokens, len(parts), -1),
            np.asarray(w, np.float64).reshape(columns, len(parts), -1),
        )
        report[name] = {
            "shape": y.shape,
            "dtype": str(y.dtype),
            "error": float(np.nanmax(np.abs(parts - exact))),
            "same_nan": bool((np.isnan(parts) == np.isnan(exact)).all()),
        }
    print(json.dumps(report))


@pytest.mark.parametrize("cases", [CASES, pytest.param(SLOW_CASES, marks=pytest.mark.slow)], ids=["few", "all other"])
def test_simulated_parts_agree_with_float64_without_races(cases: dict[str, Case]) -> None:
    """Each part is right by itself, in every row but those that are NaN."""
    report = run_simulator(__file__, cases, threads=48, timeout=500)
    assert list(report) == list(cases)
    for name, (tokens, _, columns, _, dtype, sizes) in cases.items():
        whole = sizes["splits"] == 1
        out_dtype = jnp.dtype(sizes.get("out_dtype", dtype if whole else F32))
        result = report[name]
        assert result["shape"] == [*([] if whole else [sizes["splits"]]), tokens, columns], name
        assert result["dtype"] == out_dtype.name, name
        assert result["same_nan"], name
        assert result["error"] < (1e-5 if out_dtype == F32 else 2e-2), (name, result)


def test_warpgroups_ask_for_no_more_registers_than_the_launch_gives() -> None:
    """Else `setmaxnreg` waits for ever, as it did with 256 rows of w and 128 of x."""
    moved = {}
    for consumers in (1, 2, 3, 4):
        for rows in range(8, (256 if consumers <= 2 else 128) + 1, 8):
            threads = 128 * (consumers + 1)
            launch = REGISTERS // threads - REGISTERS // threads % 8
            own, producer = moved_registers(rows // 2 + OTHER_REGISTERS, consumers) or (launch, launch)
            assert own >= rows // 2 + OTHER_REGISTERS, (rows, consumers)
            assert own * consumers + producer <= launch * (consumers + 1), (rows, consumers)
            assert own % 8 == producer % 8 == 0
            if own != producer:
                assert own > launch > producer >= 24, (rows, consumers)
                moved[consumers, rows] = own
    assert moved[4, 128] == 112
    assert moved[2, 256] == 240


@pytest.mark.parametrize("rows", [1, 128, 256])
def test_the_benchmark_tries_only_what_the_kernel_takes(rows: int) -> None:
    for kind, (columns, contracted) in benchmark.SHAPES.items():
        x, w = jax.ShapeDtypeStruct((rows, contracted), BF16), jax.ShapeDtypeStruct((columns, contracted), BF16)
        found = benchmark.variants(kind, rows, contracted)
        assert len(found) >= 3
        for sizes in found.values():
            y = jax.eval_shape(functools.partial(skinny_matmul, **sizes), x, w)
            assert y.size == sizes["splits"] * rows * columns
        assert benchmark.variants(kind, rows, contracted, "-s2-").items() <= found.items()


@pytest.mark.parametrize(
    ("tokens", "columns", "contracted", "sizes"),
    [
        (1, 4096, 4096, {"bm": 64, "splits": 2}),
        (20, 4096, 12288, {"bm": 128, "splits": 4}),
        (64, 4096, 4096, {"bm": 64, "splits": 2, "bk": 128}),
        (128, 24576, 4096, {"bm": 192, "splits": 1, "cluster": 4}),
        (128, 4096, 4096, {"bm": 256, "splits": 8}),
        (256, 6144, 4096, {"bm": 128, "splits": 2, "cluster": 2}),
    ],
)
def test_lowers_for_cuda_with_all_of_shared_memory(tokens, columns, contracted, sizes) -> None:
    """The kernel passes Mosaic's checks (shared memory, layouts, bank conflicts) with the deepest ring that is promised."""
    out_dtype = BF16 if sizes["splits"] == 1 else F32
    sizes = {"bk": 64, **sizes}
    room = {"bm": sizes["bm"], "bk": sizes["bk"], "out_dtype": out_dtype}
    stages = max(n for n in range(1, 33) if shared_bytes(tokens, stages=n, **room) <= SHARED_BYTES)
    x, w = jax.ShapeDtypeStruct((tokens, contracted), BF16), jax.ShapeDtypeStruct((columns, contracted), BF16)
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=None)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        run = jax.jit(lambda x, w: skinny_matmul(x, w, stages=stages, **sizes))
        text = run.trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    assert stages >= 3


@pytest.mark.parametrize(
    ("error", "message", "x", "w", "sizes"),
    [
        (NotImplementedError, "bf16 or f16", ((8, 256), F32), ((128, 256), F32), {}),
        (NotImplementedError, "1 to 256 rows", ((257, 256), BF16), ((128, 256), BF16), {}),
        (ValueError, "for x", ((8, 256), BF16), ((128, 128), BF16), {}),
        (ValueError, "must divide N", ((8, 256), BF16), ((128, 256), BF16), {"bm": 192}),
        (ValueError, "must divide N", ((8, 256), BF16), ((128, 256), BF16), {"bm": 128, "cluster": 2}),
        (ValueError, "must divide K", ((8, 256), BF16), ((128, 256), BF16), {"splits": 3}),
        (ValueError, "parts float32", ((8, 256), BF16), ((128, 256), BF16), {"splits": 2, "out_dtype": BF16}),
        (ValueError, "shared memory", ((128, 8192), BF16), ((128, 8192), BF16), {"stages": 12}),
        (ValueError, "stages", ((1, 8192), BF16), ((128, 8192), BF16), {"stages": 0}),
        (ValueError, "leave registers", ((200, 256), BF16), ((192, 256), BF16), {"bm": 192, "stages": 2}),
    ],
)
def test_what_has_no_kernel_is_refused(error, message, x, w, sizes) -> None:
    arrays = jax.ShapeDtypeStruct(*x), jax.ShapeDtypeStruct(*w)
    sizes = {"bm": 64, "splits": 1, "stages": 4, **sizes}
    with pytest.raises(error, match=message):
        jax.eval_shape(lambda x, w: skinny_matmul(x, w, **sizes), *arrays)


if __name__ == "__main__":
    simulate(sys.argv[1:])
