"""Mosaic GPU shared-prefix decode without a GPU: simulated with race and bounds detection, and lowered for CUDA.

The simulation runs in a process of its own, with more threads than a small machine has cores: see `simulator`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from simulator import run_simulator

import pallas_kernels as pk
from pallas_kernels import dispatch
from pallas_kernels.shared_prefix_attention import mosaic_gpu
from pallas_kernels.testing import PagedCase, attention_oracle, make_inputs, share_pages

# Keys of each row, and which rows share how many. In the plan's order the groups begin at places 0, 5 and 9; the first
# has a nested one; row 6 ends with a shared split, row 5 is shorter than a split and row 11 is empty.
KEYS = (70, 200, 100, 90, 230, 50, 128, 64, 65, 193, 127, 0, 200)
GROUPS = (((1, 4, 6, 9, 12), 128), ((4, 9, 12), 192), ((0, 3, 7, 10), 64), ((2, 8), 64))
SPLIT = 64


@dataclass(frozen=True)
class Simulated:
    """One simulation: the inputs, and how they are cut."""

    case: PagedCase
    rows_per_tile: int
    slow: bool = False
    block_kv: int = 64
    split: int = SPLIT
    groups: tuple[Any, ...] = GROUPS
    ended: bool = False  # the row whose table the first tile reads has ended since the plan was made


def paged(name: str, heads: int, kv_heads: int, head_dim: int, **options: Any) -> PagedCase:
    keys = options.pop("keys", KEYS)
    return PagedCase(name, tuple((1, n) for n in keys), heads, kv_heads, head_dim, **{"dtype": jnp.bfloat16, **options})


LONG_KEYS = tuple(300 - 7 * row for row in range(20))
CASES = {
    simulated.case.name: simulated
    for simulated in (
        Simulated(paged("group4_dim64_sinks", 4, 1, 64, sinks=True), 32, ended=True),
        Simulated(paged("group8_dim128_soft_cap", 8, 1, 128, soft_cap=5.0, dtype=jnp.float16), 16),
        Simulated(paged("group4_dim128_two_kv_heads", 8, 2, 128, page_size=32, sinks=True, scale=0.2), 16, slow=True),
        Simulated(paged("group4_dim80_page32", 4, 1, 80, page_size=32, sinks=True), 32, slow=True),
        Simulated(paged("group8_dim96", 8, 1, 96, dtype=jnp.float16), 16, slow=True),
        Simulated(paged("nothing_shared", 4, 1, 64), 32, slow=True, groups=()),
        Simulated(paged("group3_dim64", 3, 1, 64, page_size=64), 128, slow=True),
        Simulated(
            paged("two_tiles_of_a_group", 16, 2, 64, keys=LONG_KEYS, page_size=16), 16, slow=True, block_kv=128,
            split=128, groups=((range(2, 20), 128), (range(2), 256)),
        ),
    )
}  # fmt: skip


def problem(simulated: Simulated) -> tuple[Any, pk.SharedPrefixPlan, tuple[Any, ...], dict[str, Any]]:
    """Inputs on the host, plan, positional and keyword arguments of the op."""
    inputs = share_pages(make_inputs(simulated.case, 7), simulated.groups)
    plan = pk.plan_shared_prefix(
        inputs.page_table, inputs.kv_lens, simulated.case.page_size, split=simulated.split,
        rows_per_tile=simulated.rows_per_tile,
    )  # fmt: skip
    if plan is None:
        columns, size = inputs.page_table.shape[1], simulated.case.page_size
        plan = pk.empty_plan(len(KEYS), columns, size, 2, split=simulated.split, rows_per_tile=simulated.rows_per_tile)
    if simulated.ended:
        lens = inputs.kv_lens.copy()
        lens[plan.order[plan.tiles[0, 1]]] = 0
        case = dataclasses.replace(simulated.case, rows=tuple((1, int(n)) for n in lens))
        inputs = dataclasses.replace(inputs, case=case, kv_lens=lens)
    arrays = tuple(jnp.asarray(a) for a in (inputs.q, inputs.pool, inputs.page_table, inputs.kv_lens))
    return inputs, plan, arrays, {**inputs.options, "layer": inputs.case.layer, "return_lse": True}


def simulate(names: list[str]) -> None:
    """Runs cases in the simulator and prints errors against float64, and the reference's, as JSON."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    interpret = plgpu.InterpretGPUParams(detect_races=True)
    report = {}
    for name in names:
        simulated = CASES[name]
        inputs, plan, (q, pool, table, lens), options = problem(simulated)
        config = {"num_blocks": 2, "block_kv": simulated.block_kv, "stages": 2, "block": 32, "splits_per_step": 2}
        scale = simulated.case.head_dim**-0.5 if options["scale"] is None else options["scale"]
        got = mosaic_gpu.shared_prefix_attention(
            q, pool, table, lens, plan, **{**options, "scale": scale, "layer": jnp.int32(options["layer"])}, config=config,
            interpret=interpret,
        )  # fmt: skip
        plain = pk.paged_decode_attention(q, pool, table, lens, implementation="reference", **options)
        (out, lse), want = (tuple(np.asarray(x, np.float64) for x in pair) for pair in (got, attention_oracle(inputs)))
        live = np.isfinite(want[1])
        report[name] = {
            "out": float(np.abs(out - want[0]).max()),
            "reference": float(np.abs(np.asarray(plain[0], np.float64) - want[0]).max()),
            "lse": float(np.abs(lse[live] - want[1][live]).max()),
            "same_empty": bool((np.isneginf(lse) == ~live).all() and not out[~live].any()),
            "nothing_shared": not simulated.groups,
            "tiles": int((np.asarray(plan.tiles)[:, 0] >= 0).sum()),
        }
    print(json.dumps(report))


def check_simulated(names: list[str]) -> None:
    for name, result in run_simulator(__file__, names, threads=16, timeout=900).items():
        assert (result["tiles"] == 0) if result["nothing_shared"] else (result["tiles"] >= 3), name
        assert result["out"] <= 2 * result["reference"] + 1e-6, (name, result)
        assert result["lse"] < 1e-4, name
        assert result["same_empty"], name


def test_simulated_op_agrees_with_float64_without_races() -> None:
    """Nothing that no row owns, and no state that was not written, reaches an output."""
    check_simulated([name for name, simulated in CASES.items() if not simulated.slow])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, simulated in CASES.items() if simulated.slow])
def test_more_simulated_shapes_agree_with_float64(name: str) -> None:
    check_simulated([name])


@pytest.mark.parametrize(
    ("heads", "head_dim", "page", "dtype", "config"),
    [
        (8, 128, 16, jnp.bfloat16, {}),
        (16, 64, 64, jnp.float16, {}),
        (8, 128, 32, jnp.bfloat16, {"block_kv": 64, "stages": 4}),
        (8, 80, 16, jnp.bfloat16, {}),
        (8, 96, 64, jnp.float16, {}),
    ],
)
def test_lowers_for_cuda_without_a_gpu(heads, head_dim, page, dtype, config, monkeypatch) -> None:
    """Both kinds of kernels pass their checks (shared memory, layouts) with tuned sizes, sinks and a soft cap."""
    monkeypatch.setattr(mosaic_gpu, "interpret_here", lambda: False)

    def shape(*dims: int, kind: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(dims, kind)

    pool = shape(*pk.pool_shape(2, 64, page, 2, head_dim), kind=dtype)
    q, table, lens = shape(21, heads, head_dim, kind=dtype), shape(21, 4096 // page), shape(21)
    plan = pk.SharedPrefixPlan(shape(21), shape(8, 3), shape(21, 4), rows_per_tile=16)
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=None)
    options = {"window": None, "soft_cap": 9.0, "return_lse": True, "scale": 0.1, "config": config}

    def run(q: jax.Array, pool: jax.Array, table: jax.Array, lens: jax.Array, plan: pk.SharedPrefixPlan) -> Any:
        sinks = jnp.zeros(heads)
        return mosaic_gpu.shared_prefix_attention(
            q, pool, table, lens, plan, layer=jnp.int32(1), sinks=sinks, **options
        )

    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        text = jax.jit(run).trace(q, pool, table, lens, plan).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    assert text.count("__gpu$xla.gpu.triton") == 2  # own splits and merge


@pytest.mark.parametrize(
    ("heads", "head_dim", "dtype", "rows_per_tile", "options", "message"),
    [
        (8, 64, jnp.bfloat16, 16, {"window": 3000}, "no window"),
        (8, 64, jnp.float32, 16, {}, "bf16 or f16"),
        (8, 112, jnp.bfloat16, 16, {}, "head_dim"),
        (8, 64, jnp.bfloat16, 40, {}, "at most 32 rows a tile"),
        (8, 64, jnp.bfloat16, 16, {"scale": -1.0}, "positive scale"),
        (8, 64, jnp.bfloat16, 16, {"split": 64}, "splits of whole 128 keys"),
    ],
)
def test_unsupported_cases_say_so_in_one_sentence(heads, head_dim, dtype, rows_per_tile, options, message) -> None:
    pool = jax.ShapeDtypeStruct(pk.pool_shape(1, 9, 16, 2, head_dim), dtype)
    q, lens = jax.ShapeDtypeStruct((4, heads, head_dim), dtype), jax.ShapeDtypeStruct((4,), jnp.int32)
    table = jax.ShapeDtypeStruct((4, 256), jnp.int32)
    split = options.get("split", 1024)
    plan = pk.empty_plan(4, 256, 16, 2, split=split, rows_per_tile=rows_per_tile)
    options = {name: value for name, value in options.items() if name != "split"}
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(
            functools.partial(pk.shared_prefix_attention, layer=0, implementation="mosaic_gpu", **options),
            q, pool, table, lens, plan,
        )  # fmt: skip


def test_rows_per_tile_are_those_of_the_implementation_that_will_run(monkeypatch) -> None:
    def group(num_heads: int | None, head_dim: int = 128, dtype: Any = jnp.bfloat16, **options: Any) -> pk.LayerGroup:
        return pk.LayerGroup((0,), 8, head_dim, dtype, num_heads=num_heads, **options)

    monkeypatch.setattr(dispatch, "_platform", lambda: "gpu")
    monkeypatch.setattr(dispatch, "_before_hopper", lambda: False)
    monkeypatch.setitem(
        dispatch.PREFERENCE,
        "shared_prefix_attention",
        ("shared_prefix_attention", ("mosaic_gpu", "triton", "reference")),
    )
    assert [pk.rows_per_tile(group(heads), 16) for heads in (8, 24, 32, 64, 128)] == [128, 128, 32, 16, 16]
    assert pk.rows_per_tile(group(None), 16) == 16
    assert pk.rows_per_tile(group(16), 16, implementation="triton") == 32
    # What the Mosaic kernel has not falls to Triton: windows, f32, wide heads, older cards.
    assert pk.rows_per_tile(group(8, window=4096), 16) == 64
    assert pk.rows_per_tile(group(8, dtype=jnp.float32), 16) == 64
    assert pk.rows_per_tile(group(8, head_dim=256), 16) == 64
    monkeypatch.setattr(dispatch, "_before_hopper", lambda: True)
    assert pk.rows_per_tile(group(32), 16) == 16
    assert pk.rows_per_tile(group(128), 16) == 8
    monkeypatch.setattr(dispatch, "_platform", lambda: "cpu")
    assert pk.rows_per_tile(group(32), 16) == 16


if __name__ == "__main__":
    simulate(sys.argv[1:])
