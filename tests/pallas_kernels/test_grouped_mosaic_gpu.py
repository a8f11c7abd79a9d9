"""Mosaic GPU grouped_matmul without a GPU: simulated with race detection, its words' places in numpy, lowered for CUDA.

The simulation runs in a process of its own, with more threads than a small machine has cores: see `simulator`. It covers
tiles, barriers and copies; what the kernel does in registers, the simulator does with `Mxfp4.values`.
"""

from __future__ import annotations

import functools
import json
import sys
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from simulator import run_simulator

import pallas_kernels as pk
from pallas_kernels import dispatch, hopper
from pallas_kernels.grouped_matmul import mosaic_gpu, mosaic_unpack
from pallas_kernels.grouped_matmul.mxfp4 import BLOCK, CODES, code_of, value_of
from pallas_kernels.testing import random_mxfp4


@dataclass(frozen=True)
class Simulated:
    """One simulation: rows of each group, rows behind the last one, sizes."""

    sizes: tuple[int, ...]
    behind: int
    outputs: int
    columns: int
    config: dict[str, int]
    options: frozenset[str] = field(default=frozenset())
    slow: bool = False


def config(block_m: int, consumers: int, bk: int, stages: int, blocks: int = 1, group_m: int = 2) -> dict[str, int]:
    names = ("block_m", "consumers", "bk", "stages", "blocks", "group_m")
    return dict(zip(names, (block_m, consumers, bk, stages, blocks, group_m), strict=True))


BOTH = frozenset({"bias", "rows"})
CASES = {
    # A group of three tiles, an empty one, one whose tile is full; a tile of outputs that is half outside; padding. Six tiles,
    # of which four and then two go through the outputs together.
    "half_a_tile_of_outputs": Simulated((3, 0, 36, 16), 5, 192, 192, config(16, 2, 128, 2, group_m=4), BOTH),
    "one_part_a_stage": Simulated((1, 25, 2), 0, 128, 320, config(16, 1, 64, 3), frozenset({"activation"})),
    "only_padding": Simulated((0, 0), 9, 64, 64, config(16, 1, 64, 2), BOTH, slow=True),
    "wide_stages": Simulated((9, 0, 40), 0, 256, 320, config(32, 2, 256, 2, group_m=1), frozenset({"rows"}), slow=True),
    "more_blocks_than_items": Simulated((4, 3), 1, 64, 128, config(16, 1, 128, 1, blocks=3), slow=True),
    "two_copies_of_weights": Simulated((5, 20), 3, 448, 128, config(16, 6, 128, 2), slow=True),
}


def sum_of_halves(x: jax.Array) -> jax.Array:
    """bf16 `[R, 2 K]` to `[R, K]`."""
    return jnp.sum(x.reshape(x.shape[0], 2, -1).astype(jnp.float32), axis=1).astype(x.dtype)


def problem(name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of the op; NaN in weights of groups without rows and in rows of no group."""
    case, rng = CASES[name], np.random.default_rng(sum(map(ord, name)))
    groups, total = len(case.sizes), sum(case.sizes)
    count = total + case.behind
    codes, scales, _ = random_mxfp4(rng, (groups, case.outputs, case.columns))
    weight = pk.Mxfp4.pack(codes, scales)
    tokens = count if "rows" not in case.options else max(1, count // 2)
    x = rng.standard_normal((tokens + 1, case.columns))
    x[-1] = np.nan
    rows = np.where(np.arange(count) < total, rng.integers(0, tokens, count), tokens)
    if "rows" not in case.options:
        x = x[np.minimum(np.arange(count), tokens)]
        x[total:] = np.nan
    options = {
        "bias": jnp.asarray(rng.standard_normal((groups, case.outputs)), jnp.float32)
        if "bias" in case.options
        else None,
        "rows": jnp.asarray(rows, jnp.int32) if "rows" in case.options else None,
        "fixed_tile": False,
    }
    if "activation" in case.options:
        x, options["activation"] = np.concatenate([x / 2, x * 1.5], axis=1), sum_of_halves
    return (jnp.asarray(x, jnp.bfloat16), weight, jnp.asarray(case.sizes, jnp.int32)), options


def simulate(names: list[str]) -> None:
    """Runs cases in the simulator and prints how far they are from the reference, as JSON."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    report = {}
    for name in names:
        args, options = problem(name)
        interpret = plgpu.InterpretGPUParams(detect_races=True)
        got = mosaic_gpu.grouped_matmul(*args, **options, config=CASES[name].config, interpret=interpret)
        want = dispatch.load("grouped_matmul", "reference")(*args, **options)
        got, want = (np.asarray(y.astype(jnp.float32)) for y in (got, want))
        live = sum(CASES[name].sizes)
        report[name] = {
            "error": float(np.abs(got - want)[:live].max(initial=0)),
            "size": float(np.abs(want[:live]).max(initial=0)),
            "zeros": bool((got[live:] == 0).all()),
        }
    print(json.dumps(report))


def check_simulated(names: list[str]) -> None:
    for name, result in run_simulator(__file__, names, threads=32, timeout=600).items():
        assert result["size"] > 0.5 or not any(CASES[name].sizes), name
        assert result["error"] <= 2.0**-7 * result["size"], (name, result)
        assert result["zeros"], name


def test_simulated_op_agrees_with_the_reference_without_races() -> None:
    check_simulated([name for name, case in CASES.items() if not case.slow])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.slow])
def test_more_simulated_shapes_agree_with_the_reference(name: str) -> None:
    check_simulated([name])


def operand_columns(thread: int) -> list[list[int]]:
    """Columns of 16 that each of four registers of a wgmma's left operand holds, by the PTX manual (64 x 16, 16-bit)."""
    return [[8 * (register // 2) + 2 * thread + one for one in range(2)] for register in range(4)]


@pytest.mark.parametrize("row_bytes", [32, 64, 128])
def test_a_threads_words_hold_what_a_wgmma_wants_of_it(row_bytes: int) -> None:
    """Reads rows of words where TMA's swizzle has put them, as each thread does, and puts its registers' numbers together."""
    rng = np.random.default_rng(row_bytes)
    columns = 2 * row_bytes
    codes, scales, _ = random_mxfp4(rng, (1, 64, columns))
    weight = pk.Mxfp4.pack(codes, np.full_like(scales, 127))
    want = np.asarray(weight.values())[0]
    plain = np.ascontiguousarray(np.asarray(weight.blocks)[0]).view(np.uint8).reshape(-1)
    address = np.arange(plain.size)
    swizzled = np.empty_like(plain)
    swizzled[address ^ ((address >> 7 & row_bytes // 16 - 1) << 4)] = plain
    memory, got = swizzled.view(np.uint16), np.full((64, columns), np.nan)
    values = [np.asarray(value_of(jnp.asarray(memory), place), np.float32) for place in range(CODES)]
    for warp, group, thread, half in np.ndindex(4, 8, 4, 2):
        row = 16 * warp + group
        for block in range(columns // BLOCK):
            at = mosaic_unpack.word_offset(row, thread, block, row_bytes) + 8 * half * row_bytes
            for place in range(CODES):
                pair = values[place][at // 2 : at // 2 + 2]
                step, register = 2 * block + place // 2, 2 * (place % 2) + half
                for value, column in zip(pair, operand_columns(thread)[register], strict=True):
                    got[row + 8 * half, 16 * step + column] = value
    np.testing.assert_array_equal(got, want)
    assert int(code_of(np.asarray(weight.blocks), 0).max()) == 15


def packed(groups: int, outputs: int, columns: int) -> Any:
    """The shapes of MXFP4 weights."""
    codes = jax.ShapeDtypeStruct((groups, outputs, columns // 32, 16), jnp.uint8)
    return jax.eval_shape(pk.Mxfp4.pack, codes, jax.ShapeDtypeStruct((groups, outputs, columns // 32), jnp.uint8))


def lowered(tokens: int, outputs: int, columns: int, groups: int = 4, **options: Any) -> str:
    def shape(*dims: int, kind: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(dims, kind)

    weight = packed(groups, outputs, columns)
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=None)
    run = jax.jit(functools.partial(pk.grouped_matmul, **options))
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        traced = run.trace(
            shape(tokens, columns, kind=jnp.bfloat16),
            weight,
            shape(groups),
            bias=shape(groups, outputs, kind=jnp.bfloat16),
        )
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("tokens", "outputs", "columns"),
    [
        (40, 5760, 2880),
        (64, 2880, 2880),
        (100, 64, 64),
        (9, 192, 128),
        (40, 64, 8192),  # as many scales as one copy takes
        pytest.param(500, 5760, 2880, marks=pytest.mark.slow),
    ],
)
def test_lowers_for_cuda_without_a_gpu(tokens: int, outputs: int, columns: int) -> None:
    """Tuned sizes of every tile pass the checks of layouts and copies, on small and odd shapes too."""
    assert "grouped_matmul_mxfp4" in lowered(tokens, outputs, columns, implementation="mosaic_gpu")


def test_shared_memory_of_tuned_sizes_fits_a_multiprocessor() -> None:
    for rows, key in ((16, "M16"), (32, "M32"), (64, "M64"), (128, "M128")):
        sizes = mosaic_gpu.DEFAULTS[key]
        names = ("consumers", "bk", "stages", "group_m")
        shape = mosaic_gpu.Shape(
            tiles=1, rows=rows, num_rows=rows, groups=32, outputs=5760, columns=2880, scales=96, has_bias=True,
            num_blocks=132, one_block=True, simulate=False, **{name: sizes[name] for name in names},
        )  # fmt: skip
        assert mosaic_gpu.shared_bytes(shape) <= hopper.SHARED_BYTES


@pytest.mark.parametrize("consumers", range(1, 8))
def test_registers_that_move_are_no_more_than_the_launch_gives(consumers: int) -> None:
    """Or `setmaxnreg` waits for ever; it takes multiples of 8 from 24 to 256, and consumers "increase" theirs."""
    even = hopper.REGISTERS // (128 * (consumers + 1)) // 8 * 8
    for rows in (16, 32, 64, 128, 256):
        moved = hopper.moved_registers(rows // 2 + mosaic_gpu.OTHER_REGISTERS, consumers)
        assert (moved is None) == (
            rows // 2 + mosaic_gpu.OTHER_REGISTERS <= even
        )  # those of the accumulator, and others
        if moved is not None:
            assert moved[0] * consumers + moved[1] <= even * (consumers + 1)
            assert even <= moved[0] <= 256
            assert 24 <= moved[1] <= even
            assert not any(number % 8 for number in moved)


@pytest.mark.parametrize(
    ("tokens", "dtype", "fixed_tile", "outputs", "before_hopper", "ran"),
    [
        (9, jnp.bfloat16, False, 64, False, "mosaic_gpu"),
        (8, jnp.bfloat16, False, 64, False, "triton"),  # without tensor cores
        (9, jnp.bfloat16, True, 64, False, "triton"),
        (9, jnp.float32, False, 64, False, "triton"),
        (9, jnp.bfloat16, False, 72, False, "triton"),
        (9, jnp.bfloat16, False, 64, True, "triton"),
    ],
)
def test_which_calls_it_takes(tokens, dtype, fixed_tile, outputs, before_hopper, ran, monkeypatch) -> None:
    monkeypatch.setattr(dispatch, "_platform", lambda: "gpu")
    monkeypatch.setattr(dispatch, "_before_hopper", lambda: before_hopper)
    weight = pk.Mxfp4.pack(*random_mxfp4(np.random.default_rng(0), (2, outputs, 64))[:2])
    dispatch.reset_dispatch_report()
    run = functools.partial(pk.grouped_matmul, fixed_tile=fixed_tile)
    jax.eval_shape(run, jnp.ones((tokens, 64), dtype), weight, jnp.asarray([tokens, 0], jnp.int32))
    report = dispatch.dispatch_report()["grouped_matmul"]
    assert report[ran] == 1
    assert bool(report["fallback_reasons"]) == (outputs == 72 or before_hopper)  # the others are not its cases
    dispatch.reset_dispatch_report()


def test_a_plan_is_used_where_its_tiles_have_the_size_that_is_wanted(monkeypatch) -> None:
    """A plan of other tiles would let rows be missed, or be read past their group's end."""
    made: list[int] = []
    plan_tiles = mosaic_gpu.plan_tiles

    def counted(group_sizes: jax.Array, num_rows: int, block: int) -> Any:
        made.append(block)
        return plan_tiles(group_sizes, num_rows, block)

    monkeypatch.setattr(mosaic_gpu, "plan_tiles", counted)
    x, weight, sizes = jnp.ones((20, 64), jnp.bfloat16), packed(2, 64, 64), jnp.asarray([20, 0], jnp.int32)
    for block in (16, 32, 64):
        tiles = plan_tiles(sizes, 20, block)
        jax.eval_shape(functools.partial(pk.grouped_matmul, tiles=tiles, implementation="mosaic_gpu"), x, weight, sizes)
    assert made == [32, 32]


@pytest.mark.parametrize("rows", [None, np.arange(20, dtype=np.int32)])
def test_numpy_arrays_go_with_traced_sizes(rows: Any) -> None:
    x: Any = np.ones((20, 64), jnp.bfloat16)
    weight = pk.Mxfp4.pack(*random_mxfp4(np.random.default_rng(0), (2, 64, 64))[:2])
    run = functools.partial(pk.grouped_matmul, x, weight, rows=rows, implementation="mosaic_gpu")
    assert jax.eval_shape(run, jnp.asarray([20, 0], jnp.int32)).shape == (20, 64)


@pytest.mark.parametrize(
    ("weight", "dtype", "options", "message"),
    [
        ((2, 64, 64), jnp.bfloat16, {}, "unpacks MXFP4"),
        ((2, 72, 64), jnp.bfloat16, {"packed": True}, "multiples of 64 outputs"),
        ((2, 64, 96), jnp.bfloat16, {"packed": True}, "64 columns"),
        ((2, 64, 64), jnp.float16, {"packed": True}, "bf16, not float16"),
        ((2, 64, 64), jnp.bfloat16, {"packed": True, "fixed_tile": True}, "no fixed tile"),
        ((2, 256, 8192), jnp.bfloat16, {"packed": True}, "shared memory"),
        ((2, 64, 8256), jnp.bfloat16, {"packed": True}, "256 scales"),
    ],
)
def test_unsupported_cases_say_so_in_one_sentence(weight, dtype, options, message) -> None:
    groups, outputs, columns = weight
    array: Any = jax.ShapeDtypeStruct(weight, dtype)
    if options.get("packed"):
        array = packed(groups, outputs, columns)
    run = functools.partial(pk.grouped_matmul, implementation="mosaic_gpu", fixed_tile=options.get("fixed_tile", False))
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(
            run, jax.ShapeDtypeStruct((20, columns), dtype), array, jax.ShapeDtypeStruct((groups,), jnp.int32)
        )


def test_one_stage_is_refused_where_it_would_wait_for_itself() -> None:
    """A consumer frees a stage after the next one is there: with one stage and two steps it would never be."""
    args = (jnp.ones((20, 128), jnp.bfloat16), packed(2, 64, 128), jnp.asarray([20, 0], jnp.int32))
    options = {"bias": None, "fixed_tile": False}
    run = functools.partial(mosaic_gpu.grouped_matmul, **options, config=config(32, 1, 64, 1))
    with pytest.raises(NotImplementedError, match="two stages"):
        jax.eval_shape(run, *args)
    run = functools.partial(mosaic_gpu.grouped_matmul, **options, config=config(32, 1, 128, 1))
    assert jax.eval_shape(run, *args).shape == (20, 64)


if __name__ == "__main__":
    simulate(sys.argv[1:])
