"""Mosaic GPU implementation of grouped_matmul with MXFP4 weights, for Hopper: some warps fetch, others unpack and multiply.

    producer warpgroup    tiles of packed weights (bm x bk) and of x (rows x bk) -> ring of stages (TMA)
    consumer warpgroups   64 outputs each: words -> bf16 in registers -> acc[64, rows] += w x^T (wgmma)

The operands are swapped: outputs are M of the wgmma, whose left operand can come from registers, and rows are N. The words
of `mxfp4.py` need no other order: a thread's word of a block is what a wgmma wants of it (see `mosaic_unpack.py`). While a
consumer's codes are multiplied it unpacks the next ones, and the others are at other places of theirs.

Blocks are persistent; each takes every so manieth pair of a tile of rows and a tile of outputs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as mosaic
import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_matmul.mosaic_unpack import store_transposed, unpack
from pallas_kernels.grouped_matmul.mxfp4 import BLOCK, CODES, Mxfp4
from pallas_kernels.grouped_matmul.plan import TilePlan, count_tiles, plan_tiles, rows_of_tile
from pallas_kernels.hopper import SHARED_BYTES, moved_registers
from pallas_kernels.pallas_gpu import power_of_two, tuned

plgpu: Any = mosaic  # its classes and exports confuse the type checker
OUTPUTS = 64  # of a consumer: M of one wgmma
COLUMNS = 64  # of one call of wgmma: 128 bytes of x
WIDTHS = (64, 128, 256)  # columns of a stage: 32, 64 or 128 bytes of weights
MULTIPROCESSORS = 132  # of an H100 or H200, for programs that are lowered without a GPU
MOST_COPIED = 256  # elements of a TMA copy along each axis
OTHER_REGISTERS = 64  # of a consumer's thread, beside its accumulator
DEFAULTS = {
    "M16": {"consumers": 4, "bk": 256, "stages": 4, "blocks": 1, "group_m": 8},
    "M32": {"consumers": 4, "bk": 256, "stages": 3, "blocks": 1, "group_m": 8},
    "M64": {"consumers": 4, "bk": 128, "stages": 4, "blocks": 1, "group_m": 8},
    "M128": {"consumers": 4, "bk": 64, "stages": 4, "blocks": 1, "group_m": 4},
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """Everything static about one kernel."""

    tiles: int  # of rows, at most
    rows: int  # of a tile
    num_rows: int
    groups: int
    outputs: int
    columns: int
    scales: int  # bytes of a row of weights
    has_bias: bool
    consumers: int
    bk: int
    stages: int
    num_blocks: int
    one_block: bool  # of a multiprocessor
    group_m: int
    simulate: bool

    @property
    def bm(self) -> int:
        """Outputs of a block."""
        return OUTPUTS * self.consumers

    @property
    def copies(self) -> int:
        """Copies of a tile of weights: one has at most 256 rows."""
        return -(-self.bm // MOST_COPIED)

    @property
    def numbers(self) -> int:
        """Tiles of outputs."""
        return -(-self.outputs // self.bm)

    @property
    def steps(self) -> int:
        """Tiles along the columns."""
        return -(-self.columns // self.bk)


def grouped_matmul(
    x: jax.Array,
    weight: jax.Array | Mxfp4,
    group_sizes: jax.Array,
    *,
    bias: jax.Array | None,
    rows: jax.Array | None = None,
    activation: Callable[[jax.Array], jax.Array] | None = None,
    tiles: TilePlan | None = None,
    fixed_tile: bool,
    config: dict[str, int] | None = None,
    interpret: Any = False,
) -> jax.Array:
    """See `api.grouped_matmul`; `config` overrides the tuned launch parameters.

    These are: `block_m` rows of a tile; `consumers` of a block, 64 outputs each; `bk` columns of a stage; `stages`; `blocks`
    of a multiprocessor; `group_m`: tiles of rows that go through the outputs together. `interpret`:
    `plgpu.InterpretGPUParams(...)` to simulate on a CPU.
    """
    if not isinstance(weight, Mxfp4):
        raise NotImplementedError("Mosaic GPU grouped_matmul unpacks MXFP4; other weights are Triton's.")
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(f"Mosaic GPU grouped_matmul computes in bf16, not {x.dtype}.")
    if fixed_tile:
        raise NotImplementedError("Mosaic GPU grouped_matmul has no fixed tile.")
    num_rows = x.shape[0] if rows is None else rows.shape[0]
    groups, outputs, columns = weight.shape
    if outputs % OUTPUTS or columns % COLUMNS:
        raise NotImplementedError(
            f"Mosaic GPU grouped_matmul has multiples of {OUTPUTS} outputs and {COLUMNS} columns, not {outputs} and {columns}."
        )
    if weight.scales.shape[2] > MOST_COPIED:
        raise NotImplementedError(
            f"Mosaic GPU grouped_matmul copies {MOST_COPIED} scales of a row at once, {columns} columns have more."
        )
    block_m = (config or {}).get("block_m", rows_of_tile(num_rows, groups, fixed=False))
    key = f"M{min(max(power_of_two(block_m), 16), 128)}"
    chosen = {**tuned("grouped_matmul.mosaic_gpu", key, DEFAULTS[key]), **(config or {})}
    if tiles is None or tiles.block != block_m:
        tiles = plan_tiles(group_sizes, num_rows, block_m)
    s = Shape(
        tiles=count_tiles(num_rows, groups, block_m),
        rows=block_m,
        num_rows=num_rows,
        groups=groups,
        outputs=outputs,
        columns=columns,
        scales=weight.scales.shape[2],
        has_bias=bias is not None,
        consumers=min(chosen["consumers"], outputs // OUTPUTS),
        bk=max(bk for bk in WIDTHS if bk <= max(min(chosen["bk"], columns), COLUMNS)),
        stages=chosen["stages"],
        num_blocks=chosen["blocks"] * _multiprocessors(bool(interpret)),
        one_block=chosen["blocks"] == 1,
        group_m=chosen["group_m"],
        simulate=bool(interpret),
    )
    if s.stages < 2 <= s.steps:  # a consumer waits for the next stage before it frees its own
        raise NotImplementedError("Mosaic GPU grouped_matmul needs two stages where columns fill more than one.")
    if shared_bytes(s) > SHARED_BYTES:
        raise NotImplementedError(
            f"{columns} columns take more shared memory than a block has ({shared_bytes(s)} bytes)."
        )
    # Tiles of x on their own: a TMA copy into swizzled memory begins at a multiple of 8 rows.
    row = jnp.minimum(tiles.begin[:, None] + jnp.arange(block_m, dtype=jnp.int32)[None, :], num_rows - 1).reshape(-1)
    x = jnp.asarray(x)[row if rows is None else jnp.asarray(rows)[row]]
    x = x if activation is None else activation(x)
    return _matmul(x, weight, tiles, bias, s=s, interpret=interpret)


def shared_bytes(s: Shape) -> int:
    """Shared memory of a block, in bytes: ring, scales, staged results, barriers."""
    stage = s.bm * s.bk // 2 + s.rows * s.bk * 2
    return s.stages * stage + 2 * s.bm * s.scales + s.bm * s.rows * 2 + 16 * s.stages + 2048


def _multiprocessors(simulate: bool) -> int:
    return 2 if simulate else getattr(jax.devices()[0], "core_count", MULTIPROCESSORS)


@functools.partial(jax.jit, static_argnames=("s", "interpret"))
def _matmul(x, weight, plan, bias, *, s, interpret):
    arrays = {
        "group": plan.group,
        "begin": plan.begin,
        "end": plan.end,
        "used": plan.used.reshape(1),
        "x": x,
        "blocks": weight.blocks,
        "scales": weight.scales,
    }
    if bias is not None:
        arrays["bias"] = bias
    names = (*arrays, "out")

    def entry(*refs: Any, **scratch: Any) -> None:
        _body(s, {**dict(zip(names, refs, strict=True)), **scratch})

    return plgpu.kernel(
        entry,
        out_type=jax.ShapeDtypeStruct((s.num_rows, s.outputs), x.dtype),
        scratch_types=_scratch(s),
        grid=(s.num_blocks,),
        grid_names=("block",),
        num_threads=s.consumers + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
        kernel_name="grouped_matmul_mxfp4",
    )(*arrays.values())


def _scratch(s: Shape) -> dict[str, Any]:
    words = (plgpu.SwizzleTransform(s.bk // 2),)
    operand = (plgpu.TilingTransform((8, COLUMNS)), plgpu.SwizzleTransform(128))
    return {
        "w_smem": plgpu.SMEM((s.stages, s.bm, s.bk // CODES), jnp.uint16, transforms=words),
        "x_smem": plgpu.SMEM((s.stages, s.rows, s.bk), jnp.bfloat16, transforms=operand),
        "scales_smem": plgpu.SMEM((2, s.bm, s.scales), jnp.uint8),
        "stage": plgpu.SMEM((s.consumers, s.rows, OUTPUTS), jnp.bfloat16),
        "full": plgpu.Barrier(num_arrivals=1 + s.copies, num_barriers=s.stages),
        "free": plgpu.Barrier(num_arrivals=s.consumers, num_barriers=s.stages),
        "scales_full": plgpu.Barrier(num_arrivals=s.copies, num_barriers=2),
        "scales_free": plgpu.Barrier(num_arrivals=s.consumers, num_barriers=2),
    }


@dataclasses.dataclass(frozen=True)
class Item:
    """A tile of rows times a tile of outputs; `count` items with weights came before it in this block."""

    tile: jax.Array
    group: jax.Array
    output: jax.Array
    count: jax.Array


def _items(s: Shape, refs: dict[str, Any], run: Any, zero: Any) -> jax.Array:
    """Calls `run` with this block's items, `zero` with those of rows behind the last group; returns how many were run."""
    block, used = lax.axis_index("block"), refs["used"][0]
    behind = jnp.where(used < s.tiles, s.num_rows - refs["begin"][jnp.minimum(used, s.tiles - 1)], 0)
    tiles = used + (jnp.maximum(behind, 0) + s.rows - 1) // s.rows

    def one(turn: jax.Array, count: jax.Array) -> jax.Array:
        number = turn * s.num_blocks + block
        first = number // (s.group_m * s.numbers) * s.group_m
        height = jnp.minimum(tiles - first, s.group_m)
        inside = number % (s.group_m * s.numbers)
        tile = first + inside % height
        group = refs["group"][tile]
        item = Item(tile, jnp.minimum(group, s.groups - 1), pl.multiple_of(inside // height * s.bm, s.bm), count)
        pl.when(group < s.groups)(lambda: run(item))
        if zero is not None:
            pl.when(group == s.groups)(lambda: zero(item))
        return count + jnp.where(group < s.groups, 1, 0)

    total = tiles * s.numbers
    turns = total // s.num_blocks + jnp.where(block < total % s.num_blocks, 1, 0)
    return lax.fori_loop(0, turns, one, jnp.int32(0))


def _produce(s: Shape, refs: dict[str, Any], item: Item) -> None:
    half, size = item.count % 2, s.bm // s.copies

    def part_of(first: Any, part: int) -> Any:
        return pl.ds(first + part * size, size)

    @pl.when(item.count >= 2)
    def _wait() -> None:
        plgpu.barrier_wait(refs["scales_free"].at[half])

    for part in range(s.copies):
        source = refs["scales"].at[item.group, part_of(item.output, part)]
        plgpu.copy_gmem_to_smem(source, refs["scales_smem"].at[half, part_of(0, part)], refs["scales_full"].at[half])
    before = item.count * s.steps

    def step(index: jax.Array, _: None) -> None:
        slot = (before + index) % s.stages

        @pl.when(before + index >= s.stages)
        def _wait() -> None:
            plgpu.barrier_wait(refs["free"].at[slot])

        words = pl.ds(pl.multiple_of(index * (s.bk // CODES), s.bk // CODES), s.bk // CODES)
        for part in range(s.copies):
            source = refs["blocks"].at[item.group, part_of(item.output, part), words]
            target = refs["w_smem"].at[slot, part_of(0, part)]
            plgpu.copy_gmem_to_smem(source, target, refs["full"].at[slot])
        source = refs["x"].at[
            pl.ds(pl.multiple_of(item.tile * s.rows, s.rows), s.rows), pl.ds(pl.multiple_of(index * s.bk, s.bk), s.bk)
        ]
        plgpu.copy_gmem_to_smem(source, refs["x_smem"].at[slot], refs["full"].at[slot])

    lax.fori_loop(0, s.steps, step, None)


def _drain(s: Shape, refs: dict[str, Any], count: jax.Array) -> None:
    """Leave no signal unread in the barriers."""

    def slots(number: jax.Array, _: None) -> None:
        plgpu.barrier_wait(refs["free"].at[number % s.stages])

    def halves(number: jax.Array, _: None) -> None:
        plgpu.barrier_wait(refs["scales_free"].at[number % 2])

    lax.fori_loop(jnp.maximum(count * s.steps - s.stages, 0), count * s.steps, slots, None)
    lax.fori_loop(jnp.maximum(count - 2, 0), count, halves, None)


def _consume(s: Shape, refs: dict[str, Any], item: Item) -> None:
    wg = lax.axis_index("wg")
    half, before = item.count % 2, item.count * s.steps
    mine, parts = pl.ds(pl.multiple_of(wg * OUTPUTS, OUTPUTS), OUTPUTS), s.bk // COLUMNS
    scales = refs["scales_smem"].at[half, mine]
    plgpu.barrier_wait(refs["scales_full"].at[half])

    def weights(index: jax.Array, part: int) -> jax.Array:
        """bf16 `[OUTPUTS, COLUMNS]`: a part of a stage."""
        words = refs["w_smem"].at[(before + index) % s.stages, mine]
        block = index * (s.bk // BLOCK) + part * (COLUMNS // BLOCK)
        return unpack(words, scales, part, block, columns=s.bk, simulate=s.simulate)

    def x_of(index: jax.Array, part: int) -> Any:
        return refs["x_smem"].at[(before + index) % s.stages, :, pl.ds(part * COLUMNS, COLUMNS)]

    def begin(index: jax.Array) -> jax.Array:
        plgpu.barrier_wait(refs["full"].at[(before + index) % s.stages])
        return weights(index, 0)

    def free(index: jax.Array) -> None:
        plgpu.barrier_arrive(refs["free"].at[(before + index) % s.stages])

    def multiply(acc: Any) -> jax.Array:
        def step(index: jax.Array, w: jax.Array, *, last: bool) -> jax.Array:
            for part in range(parts):
                plgpu.wgmma(acc, w, x_of(index, part).transpose((1, 0)))
                if part + 1 < parts:
                    w = weights(index, part + 1)
                elif not last:
                    w = begin(index + 1)
                plgpu.wgmma_wait(0)
            free(index)
            return w

        # A turn has an even number of parts, so that the two sets of registers change places without being copied.
        unroll = 1 if parts % 2 == 0 else 2
        turns = (s.steps - 1) // unroll

        def turn(number: jax.Array, w: jax.Array) -> jax.Array:
            for index in range(unroll):
                w = step(number * unroll + index, w, last=False)
            return w

        w = lax.fori_loop(0, turns, turn, begin(jnp.int32(0)))
        for index in range(turns * unroll, s.steps):
            w = step(jnp.int32(index), w, last=index == s.steps - 1)
        return acc[...]

    def simulated(index: jax.Array, acc: jax.Array) -> jax.Array:
        """A step for the simulator, which knows no operands in registers."""
        w = begin(index)
        for part in range(parts):
            w = weights(index, part) if part else w
            acc = acc + jnp.dot(w, x_of(index, part)[...].T, preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # unlike those of wgmma, these reads have to be ordered before the next copy into the slot
        free(index)
        return acc

    if s.simulate:
        acc = lax.fori_loop(0, s.steps, simulated, jnp.zeros((OUTPUTS, s.rows), jnp.float32))
    else:
        acc = pl.run_scoped(multiply, plgpu.ACC((OUTPUTS, s.rows), jnp.float32))
    plgpu.barrier_arrive(refs["scales_free"].at[half])
    if s.has_bias:
        column = jnp.minimum(item.output + wg * OUTPUTS, s.outputs - OUTPUTS)
        layout = plgpu.Layout.WGMMA.reduce(1)
        bias = plgpu.load(refs["bias"].at[item.group, pl.ds(column, OUTPUTS)], layout=layout, optimized=False)
        acc = acc + lax.broadcast_in_dim(bias.astype(jnp.float32), acc.shape, [0])
    _write(s, refs, item, acc.astype(jnp.bfloat16))


def _zero(s: Shape, refs: dict[str, Any], item: Item) -> None:
    zero = jnp.zeros((OUTPUTS, s.rows), jnp.bfloat16)
    _write(s, refs, item, zero if s.simulate else plgpu.layout_cast(zero, plgpu.Layout.WGMMA))


def _write(s: Shape, refs: dict[str, Any], item: Item, values: jax.Array) -> None:
    """The tile's own rows of `values` [OUTPUTS, rows]: all at once or one by one."""
    wg = lax.axis_index("wg")
    stage = refs["stage"].at[wg]
    begin = refs["begin"][item.tile]
    length = jnp.minimum(refs["end"][item.tile] - begin, s.rows)
    output = pl.multiple_of(item.output + wg * OUTPUTS, OUTPUTS)
    columns = pl.ds(output, OUTPUTS)
    inside = output < s.outputs  # a row's copy is a run of bytes, which is not cut where the row ends
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the results before have left the buffer
    store_transposed(stage, values, simulate=s.simulate)
    plgpu.commit_smem()

    @pl.when(inside & (length == s.rows))
    def _all() -> None:
        plgpu.copy_smem_to_gmem(stage, refs["out"].at[pl.ds(begin, s.rows), columns])

    @pl.when(inside & (length < s.rows))
    def _some() -> None:
        def one(row: jax.Array, _: None) -> None:
            plgpu.copy_smem_to_gmem(stage.at[row], refs["out"].at[begin + row, columns])

        lax.fori_loop(0, length, one, None)


def _body(s: Shape, refs: dict[str, Any]) -> None:
    wg = lax.axis_index("wg")
    moved = moved_registers(s.rows // 2 + OTHER_REGISTERS, s.consumers) if s.one_block else None

    @pl.when(wg < s.consumers)
    def _consumers() -> None:
        if moved:
            plgpu.set_max_registers(moved[0], action="increase")
        _items(s, refs, lambda item: _consume(s, refs, item), lambda item: _zero(s, refs, item))
        plgpu.wait_smem_to_gmem(0)

    @pl.when(wg == s.consumers)
    def _producer() -> None:
        if moved:
            plgpu.set_max_registers(moved[1], action="decrease")
        count = _items(s, refs, lambda item: _produce(s, refs, item), None)
        _drain(s, refs, count)
