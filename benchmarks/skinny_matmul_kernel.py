"""An experiment that no model uses: a Mosaic GPU matmul of few rows for Hopper, whose weight streams once through TMA.

    producer warpgroup    tiles of w (bm x bk) and of x (T x bk) -> ring of stages
    consumer warpgroups   64 rows of w each: acc[64, T] += w x^T (wgmma), transposed on its way to memory

The operands are swapped: rows of the weight are M of the wgmma and rows of x are N, which goes down to 8, so that few
rows waste nothing. One block multiplies `bm` rows of w with one of `splits` parts of the contraction; parts leave in
float32 and whoever reads them adds them up, part 0 first. A row's bits depend on `splits` and `bk` and on nothing else.

Measured once, on an H200, with 64 rows and N = K = 4096 (`benchmarks/KERNELS.md`, "A whole decode step"): 13.15 us with the
kernel that reads the result, where XLA's matmul and that kernel took 17.21. Largest error 1.1e-5.

Open: that run stood still at 128 rows; which variant did is not known. One fault that explains it was found
afterwards, with `bm` 256 and more than 104 rows: consumers asked for 4 x 120 + 24 registers a thread where the launch
gives five warpgroups 96 each, and `setmaxnreg` waits for ever (see `pallas_kernels.hopper`). It is
mended, and not yet run on the card.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as mosaic
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.hopper import SHARED_BYTES, moved_registers

plgpu: Any = mosaic  # its classes and exports confuse the type checker
DTYPES = (jnp.bfloat16, jnp.float16)
MAX_ROWS = 256  # N of one wgmma
ROWS = 64  # M of one wgmma
STAGED = 64  # most rows of x whose results a consumer stages at once on their way to memory
OTHER_REGISTERS = 48  # of a consumer's thread, beside its accumulator


@dataclasses.dataclass(frozen=True)
class Shape:
    """Everything static about one kernel."""

    tokens: int  # rows of x
    rows: int  # tokens rounded up to whole tiles of 8
    columns: int
    contracted: int
    dtype: Any
    out_dtype: Any
    bm: int
    bk: int
    splits: int
    stages: int
    cluster: int

    @property
    def consumers(self) -> int:
        """Consumer warpgroups of a block."""
        return self.bm // ROWS

    @property
    def steps(self) -> int:
        """Tiles along the contraction that one block reads."""
        return self.contracted // self.splits // self.bk


def shared_bytes(tokens: int, *, bm: int, stages: int, bk: int = 64, out_dtype: DTypeLike = jnp.float32) -> int:
    """Shared memory that a block takes at most, in bytes: ring, staged results, barriers."""
    rows = -(-tokens // 8) * 8
    staged = bm * min(rows, STAGED) * jnp.dtype(out_dtype).itemsize
    return stages * (bm + rows) * bk * 2 + staged + 2 * 8 * stages + 2048


def skinny_matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    bm: int,
    splits: int,
    stages: int,
    cluster: int = 1,
    bk: int = 64,
    out_dtype: DTypeLike | None = None,
    interpret: Any = False,
) -> jax.Array:
    """`x @ w.T`, whole or in parts of its sum.

    Products are summed in float32. Fastest where T is up to 8 or a multiple of 8: else x is padded and the result cut.

    Args:
        x: `[T, K]`, bf16 or f16, T in 1..256.
        w: `[N, K]` in x's dtype, row-major, as checkpoints store it.
        bm: rows of w of one block: 64, 128, 192 or 256, of which `cluster` blocks divide N; at most 128 for T above 128.
        splits: parts S of the contraction; each of K / S, a multiple of `bk`.
        stages: tiles in flight.
        cluster: neighbouring blocks along N that read x together.
        bk: columns of a tile, a multiple of 64.
        out_dtype: of the result: None for x's dtype or, in parts, float32 (which parts must be).
        interpret: `plgpu.InterpretGPUParams(...)` to simulate on CPU.

    Returns:
        `[T, N]` in `out_dtype` with one split, else float32 `[S, T, N]`, whose sum over S is the product.

    Raises:
        ValueError: shapes, dtypes or sizes do not fit together.
        NotImplementedError: dtype or number of rows without a kernel.
    """
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1] or x.dtype != w.dtype:
        raise ValueError(f"w must be {x.dtype} [N, K] for x [T, K], got {w.dtype} {w.shape} for {x.shape}")
    (tokens, contracted), columns = x.shape, w.shape[0]
    if x.dtype not in DTYPES:
        raise NotImplementedError(f"Mosaic GPU skinny matmul computes in bf16 or f16, not {x.dtype}.")
    if not 1 <= tokens <= MAX_ROWS:
        raise NotImplementedError(f"Mosaic GPU skinny matmul has 1 to {MAX_ROWS} rows, not {tokens}.")
    out_dtype = jnp.dtype((x.dtype if splits == 1 else jnp.float32) if out_dtype is None else out_dtype)
    if out_dtype != jnp.float32 and (splits > 1 or out_dtype != x.dtype):
        raise ValueError(f"results must be {x.dtype} or float32, and parts float32, got {out_dtype}, {splits=}")
    if bm % ROWS or not ROWS <= bm <= 256 or columns % (bm * cluster):
        raise ValueError(f"{cluster=} blocks of bm rows, 64, 128, 192 or 256, must divide N = {columns}, got {bm=}")
    if splits < 1 or bk % 64 or bk < 64 or contracted % (splits * bk):
        raise ValueError(f"{splits=} parts of whole tiles of {bk=}, a multiple of 64, must divide K = {contracted}")
    if stages < 1 or shared_bytes(tokens, bm=bm, stages=stages, bk=bk, out_dtype=out_dtype) > SHARED_BYTES:
        raise ValueError(f"{stages=} of bm {bm} and bk {bk} with {tokens} rows do not fit into shared memory")
    rows = -(-tokens // 8) * 8
    if rows > 128 and bm > 128:
        raise ValueError(f"more than 128 rows leave registers for bm up to 128, got {bm=}")
    # TMA fills what lies outside an array, but cuts it in whole tiles of 8 rows unless it has less than one.
    padded = rows if interpret or tokens > 8 else tokens
    s = Shape(
        tokens=padded,
        rows=rows,
        columns=columns,
        contracted=contracted,
        dtype=x.dtype,
        out_dtype=out_dtype,
        bm=bm,
        bk=bk,
        splits=splits,
        stages=min(stages, contracted // splits // bk),
        cluster=cluster,
    )
    if padded != tokens:
        x = jnp.pad(x, ((0, padded - tokens), (0, 0)))
    parts = _product(x, w, s, interpret)[:, :tokens]
    return parts[0] if splits == 1 else parts


@functools.partial(jax.jit, static_argnames=("s", "interpret"))
def _product(x: jax.Array, w: jax.Array, s: Shape, interpret: Any) -> jax.Array:
    names = ("x", "w", "out")

    def entry(*arrays: Any, **scratch: Any) -> None:
        _body(s, {**dict(zip(names, arrays, strict=True)), **scratch})

    clusters = {"cluster": (s.cluster,), "cluster_names": ("cta",)} if s.cluster > 1 else {}
    return plgpu.kernel(
        entry,
        out_type=jax.ShapeDtypeStruct((s.splits, s.tokens, s.columns), s.out_dtype),
        scratch_types=_scratch(s),
        grid=(s.columns // s.bm // s.cluster, s.splits),
        grid_names=("tile", "split"),
        **clusters,
        num_threads=s.consumers + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
        kernel_name="skinny_matmul",
    )(x, w)


def _tiled(minor: int, dtype: Any) -> tuple[Any, ...]:
    bits = jnp.finfo(dtype).bits
    swizzle = plgpu.find_swizzle(minor * bits)
    return (plgpu.TilingTransform((8, 8 * swizzle // bits)), plgpu.SwizzleTransform(swizzle))


def _scratch(s: Shape) -> dict[str, Any]:
    operand = _tiled(s.bk, s.dtype)
    stage = (s.consumers, min(s.rows, STAGED), ROWS)
    if s.cluster > 1:  # a slot is free when all that read its x have: each block fills those of all
        free = plgpu.ClusterBarrier(collective_axes=("cta",), num_arrivals=s.consumers, num_barriers=s.stages)
    else:
        free = plgpu.Barrier(num_arrivals=s.consumers, num_barriers=s.stages)
    return {
        "w_smem": plgpu.SMEM((s.stages, s.bm, s.bk), s.dtype, transforms=operand),
        "x_smem": plgpu.SMEM((s.stages, s.rows, s.bk), s.dtype, transforms=operand),
        "stage": plgpu.SMEM(stage, s.out_dtype, transforms=_tiled(ROWS, s.out_dtype)),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=s.stages),
        "free": free,
    }


def _first_row(s: Shape) -> jax.Array:
    """First row of w of this block."""
    tile = lax.axis_index("tile")
    return (tile * s.cluster + lax.axis_index("cta") if s.cluster > 1 else tile) * s.bm


def _rows(start: int, size: int) -> Any:
    """Rows of x or of a result; not static, because the last tile may reach beyond the array."""
    return pl.ds(lax.axis_index("split") * 0 + start, size)


def _produce(s: Shape, refs: dict[str, Any]) -> None:
    row, column = _first_row(s), lax.axis_index("split") * (s.steps * s.bk)
    shared = {"collective_axes": "cta"} if s.cluster > 1 else {}

    def columns(index: jax.Array) -> Any:
        return pl.ds(pl.multiple_of(column + index * s.bk, s.bk), s.bk)

    def fill(index: jax.Array, _: None) -> None:
        slot = index % s.stages
        tile = refs["w"].at[pl.ds(row, s.bm), columns(index)]
        plgpu.copy_gmem_to_smem(tile, refs["w_smem"].at[slot], refs["full"].at[slot])
        tile = refs["x"].at[_rows(0, s.rows), columns(index)]
        plgpu.copy_gmem_to_smem(tile, refs["x_smem"].at[slot], refs["full"].at[slot], **shared)

    def refill(index: jax.Array, _: None) -> None:
        plgpu.barrier_wait(refs["free"].at[index % s.stages])
        fill(index, None)

    lax.fori_loop(0, s.stages, fill, None)
    lax.fori_loop(s.stages, s.steps, refill, None)
    # Every barrier ends as it began; and no block of a cluster leaves before the others' last signals have reached it.
    lax.fori_loop(0, s.stages, lambda slot, _: plgpu.barrier_wait(refs["free"].at[slot]), None)


def _consume(s: Shape, refs: dict[str, Any]) -> None:
    wg = lax.axis_index("wg")

    def multiply(acc: Any) -> jax.Array:
        def step(index: jax.Array, _: None) -> None:
            slot = index % s.stages
            plgpu.barrier_wait(refs["full"].at[slot])
            plgpu.wgmma(
                acc,
                refs["w_smem"].at[slot, pl.ds(wg * ROWS, ROWS)],
                refs["x_smem"].at[slot].transpose((1, 0)),
            )
            plgpu.wgmma_wait(1)  # the step before has read its slot

            @pl.when(index > 0)
            def _free() -> None:
                plgpu.barrier_arrive(refs["free"].at[(index - 1) % s.stages])

        lax.fori_loop(0, s.steps, step, None)
        return acc[...]

    acc = pl.run_scoped(multiply, plgpu.ACC((ROWS, s.rows), jnp.float32))
    plgpu.barrier_arrive(refs["free"].at[(s.steps - 1) % s.stages])
    _write(s, refs, acc)


def _write(s: Shape, refs: dict[str, Any], acc: jax.Array) -> None:
    """Transpose and copy the results to memory, in pieces of `STAGED` rows of x."""
    wg = lax.axis_index("wg")
    columns = pl.ds(_first_row(s) + wg * ROWS, ROWS)
    for start in range(0, s.rows, STAGED):
        size = min(STAGED, s.rows - start)
        if start:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the copy before has left the staging buffer
        stage = refs["stage"].at[wg, pl.ds(0, size)]
        piece = acc[:, start : start + size].astype(s.out_dtype)
        stage.transpose((1, 0))[...] = plgpu.layout_cast(piece, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(stage, refs["out"].at[lax.axis_index("split"), _rows(start, size), columns])
    plgpu.wait_smem_to_gmem(0)


def _body(s: Shape, refs: dict[str, Any]) -> None:
    wg = lax.axis_index("wg")
    moved = moved_registers(s.rows // 2 + OTHER_REGISTERS, s.consumers)

    @pl.when(wg < s.consumers)
    def _consumers() -> None:
        if moved:
            plgpu.set_max_registers(moved[0], action="increase")
        _consume(s, refs)

    @pl.when(wg == s.consumers)
    def _producer() -> None:
        if moved:
            plgpu.set_max_registers(moved[1], action="decrease")
        _produce(s, refs)
