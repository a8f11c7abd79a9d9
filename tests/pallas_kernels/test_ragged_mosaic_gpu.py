"""Mosaic GPU prefill without a GPU: simulated with race and bounds detection, and lowered for CUDA.

The simulation runs in a process of its own, with more threads than a small machine has cores: see `simulator`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from simulator import run_simulator

from pallas_kernels import layout
from pallas_kernels.ragged_paged_attention import mosaic_gpu, mosaic_schedule, reference

ROWS = (
    (5, 70),
    (0, 0),
    (27, 130),
)  # new tokens, total tokens; the second consumer's 16 tokens are all of the third row
CASES: dict[str, dict[str, Any]] = {
    "whole": {"config": {"chunk": 64, "split": False}},
    "split": {"config": {"chunk": 64, "split": True}},
    "options": {"config": {"chunk": 64, "split": False}, "window": 40, "sinks": True, "soft_cap": 20.0},
    "split options": {"config": {"chunk": 64, "split": True}, "window": 40, "sinks": True, "soft_cap": 20.0},
    "d80": {"config": {"chunk": 64, "split": False}, "dim": 80, "page": 32, "window": 40, "sinks": True},
    "d80 split": {"config": {"chunk": 64, "split": True}, "dim": 80, "page": 32, "window": 40, "sinks": True},
}
SLOW_CASES: dict[str, dict[str, Any]] = {
    "d96": {"config": {"chunk": 64, "split": False}, "dim": 96, "page": 128, "dtype": jnp.float16},
    "d96 split": {"config": {"chunk": 64, "split": True}, "dim": 96, "page": 128, "dtype": jnp.float16},
}
SMALL = {"num_blocks": 1, "block_kv": 64, "stages": 2}


def batch(
    *, dim: int = 64, page: int = 16, dtype: Any = jnp.bfloat16, window: int | None = None
) -> tuple[jax.Array, ...]:
    """Rows over a pool whose unowned slots and pages are NaN, with three tokens of padding; layer 1 of 2 is used.

    Pages that the window of every query has passed are given back: -1 in the table, NaN in the pool.
    """
    rng = np.random.default_rng(3)
    counts = [-(-total // page) for _, total in ROWS]
    ids = rng.permutation(sum(counts) + 2)[: sum(counts)]
    kv = np.full(layout.pool_shape(2, sum(counts) + 2, page, 1, dim), np.nan, np.float32)
    table = np.full((len(ROWS), max(counts) + 1), -1, np.int32)
    for row, count in enumerate(counts):
        table[row, :count], ids = ids[:count], ids[count:]
        passed = 0 if window is None else max(0, ROWS[row][1] - ROWS[row][0] - window + 1) // page
        table[row, :passed] = -1
        for column in range(passed, count):
            used = min(page, ROWS[row][1] - column * page)
            kv[1, table[row, column], :, :, :used] = rng.standard_normal((1, 2, used, dim))
    q = rng.standard_normal((sum(new for new, _ in ROWS) + 3, 4, dim))
    offsets = np.concatenate([[0], np.cumsum([new for new, _ in ROWS])]).astype(np.int32)
    lens = np.array([total for _, total in ROWS], np.int32)
    return jnp.asarray(q, dtype), jnp.asarray(kv, dtype), jnp.asarray(table), jnp.asarray(offsets), jnp.asarray(lens)


def options(case: dict[str, Any], dim: int = 64) -> dict[str, Any]:
    sinks = jnp.asarray([0.5, -1.0, 2.0, 0.0]) if case.get("sinks") else None
    return {
        "scale": dim**-0.5,
        "window": case.get("window"),
        "sinks": sinks,
        "soft_cap": case.get("soft_cap"),
        "return_lse": True,
        "layer": jnp.int32(1),
    }


def simulate(names: list[str]) -> None:
    """Runs cases in the simulator and prints errors against the reference as JSON."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    interpret = plgpu.InterpretGPUParams(detect_races=True)
    report, outs = {}, {}
    for name in names:
        case = {**CASES, **SLOW_CASES}[name]
        kind = {key: case[key] for key in ("dim", "page", "dtype", "window") if key in case}
        arguments, keywords = batch(**kind), options(case, case.get("dim", 64))

        def run(*arrays: jax.Array, case: Any = case, keywords: Any = keywords) -> Any:
            config = {**SMALL, **case["config"]}
            return mosaic_gpu.ragged_paged_attention(*arrays, **keywords, config=config, interpret=interpret)

        got = [np.asarray(x, np.float64) for x in jax.jit(run)(*arguments)]
        want = [np.asarray(x, np.float64) for x in reference.ragged_paged_attention(*arguments, **keywords)]
        live = np.isfinite(want[1])
        report[name] = {
            "out": float(np.linalg.norm(got[0] - want[0]) / np.linalg.norm(want[0])),
            "lse": float(np.abs(got[1][live] - want[1][live]).max()),
            "same_empty": bool((np.isneginf(got[1]) == ~live).all()),
            "padding": float(np.abs(got[0][-3:]).max()),
        }
        outs[name] = got[0]
        if name.endswith("split"):
            report[name]["same_bits"] = bool((outs[name.removesuffix("split").strip() or "whole"] == outs[name]).all())
    print(json.dumps(report))


def run_simulation(names: list[str]) -> dict[str, Any]:
    return run_simulator(__file__, names, threads=16, timeout=600)


@pytest.fixture(scope="module")
def simulated() -> dict[str, Any]:
    return run_simulation(list(CASES))


def check(result: dict[str, Any]) -> None:
    assert result["out"] < 5e-3
    assert result["lse"] < 1e-4
    assert result["same_empty"]
    assert result["padding"] == 0.0


@pytest.mark.parametrize("name", CASES)
def test_simulated_kernel_matches_reference_without_races(simulated: dict[str, Any], name: str) -> None:
    """NaN outside the rows never reaches an output; padding is zero; empty rows have lse -inf."""
    check(simulated[name])


@pytest.mark.parametrize("name", ["split", "d80 split"])
def test_split_keys_give_the_bits_of_one_block(simulated: dict[str, Any], name: str) -> None:
    """One block over all chunks and one block a chunk agree in every bit, by powers of two as rescaling factors."""
    assert simulated[name]["same_bits"]


@pytest.mark.slow
def test_more_simulated_heads_match_reference_without_races() -> None:
    report = run_simulation(list(SLOW_CASES))
    assert list(report) == list(SLOW_CASES)
    for result in report.values():
        check(result)
    assert report["d96 split"]["same_bits"]


@pytest.mark.parametrize(
    ("dim", "page", "dtype", "case"),
    [
        (128, 16, jnp.bfloat16, {"config": {"chunk": 128, "split": False}, "window": 40, "sinks": True}),
        (64, 64, jnp.float16, {"config": {"chunk": 128, "split": True}, "soft_cap": 20.0}),
        (80, 16, jnp.float16, {"config": {"chunk": 128, "split": False}, "window": 40, "sinks": True}),
        (80, 64, jnp.bfloat16, {"config": {"chunk": 128, "split": True}, "soft_cap": 20.0}),
        (96, 128, jnp.bfloat16, {"config": {"chunk": 128, "split": False}, "sinks": True}),
        (96, 32, jnp.bfloat16, {"config": {"chunk": 128, "split": True}}),
    ],
)
def test_lowers_for_cuda_without_a_gpu(dim: int, page: int, dtype: Any, case: dict[str, Any]) -> None:
    """The kernel passes Mosaic's checks (shared memory, layouts) with its tuned sizes."""
    arguments, keywords = batch(dim=dim, page=page, dtype=dtype), options(case, dim)

    def run(*arrays: jax.Array) -> Any:
        return mosaic_gpu.ragged_paged_attention(*arrays, **keywords, config=case["config"])

    text = jax.jit(run).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


def test_unsupported_cases_say_so_in_one_sentence() -> None:
    q, kv, table, offsets, lens = batch(dtype=jnp.float32)
    with pytest.raises(NotImplementedError, match="bf16 or f16"):
        mosaic_gpu.ragged_paged_attention(q, kv, table, offsets, lens, **options({}))
    q, kv, table, offsets, lens = batch(dim=112)
    with pytest.raises(NotImplementedError, match="head_dim"):
        mosaic_gpu.ragged_paged_attention(q, kv, table, offsets, lens, **options({}, 112))


def test_schedule_lists_every_tile_once_heaviest_first() -> None:
    """Every token of every row is in exactly one item per head group, and the key ranges only fall."""
    offsets, lens = jnp.array([0, 5, 5, 305, 310], jnp.int32), jnp.array([70, 0, 4000, 900], jnp.int32)
    plan = mosaic_schedule.build(
        offsets, lens, num_tokens=320, tokens_per_tile=32, num_head_groups=2, block_kv=64, window=None, chunk=2048,
        num_chunks=1,
    )  # fmt: skip
    items = np.asarray(plan.items)[: int(plan.count[0])]
    seen = np.zeros((2, 320), np.int64)
    for item in items:
        token = item[mosaic_schedule.TOKEN]
        assert token % mosaic_schedule.ALIGN == 0
        seen[item[mosaic_schedule.HEADS], token + item[mosaic_schedule.FIRST] : token + item[mosaic_schedule.LAST]] += 1
    assert (seen == 1).all()
    work = items[:, mosaic_schedule.END] - items[:, mosaic_schedule.BEGIN]
    assert work[0] == work.max()
    assert work[-1] == 0  # the padding tokens come last


if __name__ == "__main__":
    simulate(sys.argv[1:])
