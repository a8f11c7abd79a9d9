"""Mosaic GPU implementation of the page copies for Hopper: bulk copies through shared memory, many in flight.

    producer warpgroup   piece of a page -> slot of a ring
    consumer warpgroup   slot of the ring -> the same piece of the other page

A page of one layer is one contiguous block on both sides, so that pieces of it are copied as bytes and no number passes
through a register. One block per multiprocessor walks over items `(entry, layer, piece)`; reads run ahead of writes by
the length of the ring.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as mosaic
import jax.numpy as jnp
from jax import lax

from pallas_kernels.pallas_gpu import tuned

plgpu: Any = mosaic  # its classes and exports confuse the type checker
DEFAULTS = {"piece_bytes": 16384, "stages": 10, "writes": 4, "num_blocks": 132}
"""Most bytes of a piece, slots of the ring, writes that may still read their slot (fewer than slots), and blocks."""
ALIGN = 128  # bytes: length of a bulk copy to shared memory


@dataclasses.dataclass(frozen=True)
class Shape:
    """Everything static about one kernel."""

    entries: int
    layers: int
    num_pages: int
    numbers: int  # of one page of one layer
    piece: int  # numbers of one copy
    dtype: Any
    stages: int
    writes: int
    num_blocks: int

    @property
    def pieces(self) -> int:
        """Pieces of one page of one layer."""
        return self.numbers // self.piece

    @property
    def items(self) -> int:
        """Pieces of all entries and layers."""
        return self.entries * self.layers * self.pieces


class Item(NamedTuple):
    """One piece: its entry in the id arrays, its layer and its first number in the page."""

    entry: jax.Array
    layer: jax.Array
    column: jax.Array


class Move(NamedTuple):
    """Where an item's numbers are and go: rows of flat arrays. What is not `known` is not copied."""

    source: Any
    source_row: jax.Array
    target: Any
    target_row: jax.Array
    known: jax.Array


def gather_pages(
    kv_pages: jax.Array, page_ids: jax.Array, *, config: dict[str, int] | None = None, interpret: Any = False
) -> jax.Array:
    """See `api.gather_pages`.

    Args:
        config: overrides of the tuned sizes (see `DEFAULTS`).
        interpret: `plgpu.InterpretGPUParams(...)` to simulate on CPU.

    Raises:
        NotImplementedError: pages of a length without a kernel.
    """
    return _gather(kv_pages, page_ids, shape=_shape("gather_pages", kv_pages, page_ids, config), interpret=interpret)


def scatter_pages(
    kv_pages: jax.Array,
    page_ids: jax.Array,
    pages: jax.Array,
    *,
    config: dict[str, int] | None = None,
    interpret: Any = False,
) -> jax.Array:
    """See `api.scatter_pages` and `gather_pages` here; the kernel gets the pool as a Ref."""
    shape = _shape("scatter_pages", kv_pages, page_ids, config)
    return _scatter(kv_pages, page_ids, pages, shape=shape, interpret=interpret)


def copy_within(
    kv_pages: jax.Array,
    src: jax.Array,
    dst: jax.Array,
    *,
    config: dict[str, int] | None = None,
    interpret: Any = False,
) -> jax.Array:
    """See `api.copy_within` and `gather_pages` here; the kernel gets the pool as a Ref."""
    return _copy(kv_pages, src, dst, shape=_shape("copy_within", kv_pages, src, config), interpret=interpret)


def _shape(op: str, kv_pages: jax.Array, ids: jax.Array, config: dict[str, int] | None) -> Shape:
    options = {**DEFAULTS, **tuned(f"{op}.mosaic_gpu", kv_pages.dtype.name, {}), **(config or {})}
    numbers, itemsize = math.prod(kv_pages.shape[2:]), kv_pages.dtype.itemsize
    if numbers * itemsize % ALIGN:
        raise NotImplementedError(
            f"Mosaic GPU page copies have pages of whole {ALIGN} bytes, not {numbers * itemsize}."
        )
    units = numbers * itemsize // ALIGN  # a piece is a whole number of them, and pieces are equal
    pieces = next(n for n in range(-(-numbers * itemsize // options["piece_bytes"]), units + 1) if units % n == 0)
    shape = Shape(
        entries=ids.shape[0],
        layers=kv_pages.shape[0],
        num_pages=kv_pages.shape[1],
        numbers=numbers,
        piece=numbers // pieces,
        dtype=kv_pages.dtype,
        stages=options["stages"],
        writes=options["writes"],
        num_blocks=options["num_blocks"],
    )
    if shape.items >= 2**31:
        raise NotImplementedError(f"{shape.items} pieces need 64-bit numbers")
    return dataclasses.replace(shape, num_blocks=min(shape.num_blocks, shape.items))


@functools.partial(jax.jit, static_argnames=("shape", "interpret"))
def _gather(kv_pages, page_ids, *, shape: Shape, interpret: Any):
    s = shape
    out = jax.ShapeDtypeStruct((s.entries * s.layers, s.numbers), s.dtype)
    pages = jnp.zeros(out.shape, out.dtype)
    if s.items:
        [pages] = _launch(s, _gather_move, "gather_pages", interpret, out=(out,), zeros=True)(page_ids, _flat(kv_pages))
    return pages.reshape(s.entries, s.layers, *kv_pages.shape[2:])


@functools.partial(jax.jit, static_argnames=("shape", "interpret"))
def _scatter(kv_pages, page_ids, pages, *, shape: Shape, interpret: Any):
    if not shape.items:
        return kv_pages
    pool = jax.new_ref(_flat(kv_pages))
    _launch(shape, _scatter_move, "scatter_pages", interpret)(page_ids, _flat(pages), pool)
    return jax.freeze(pool).reshape(kv_pages.shape)


@functools.partial(jax.jit, static_argnames=("shape", "interpret"))
def _copy(kv_pages, src, dst, *, shape: Shape, interpret: Any):
    if not shape.items:
        return kv_pages
    pool = jax.new_ref(_flat(kv_pages))
    _launch(shape, _copy_move, "copy_within", interpret)(src, dst, pool)
    return jax.freeze(pool).reshape(kv_pages.shape)


def _flat(pages: jax.Array) -> jax.Array:
    """One row per page and layer; no byte moves."""
    return pages.reshape(pages.shape[0] * pages.shape[1], -1)


def _page(s: Shape, ids: Any, item: Item) -> tuple[jax.Array, jax.Array]:
    """Row of the flat pool, and whether the page exists."""
    page = ids[item.entry]
    known = (page >= 0) & (page < s.num_pages)
    return item.layer * s.num_pages + jnp.where(known, page, 0), known


def _gather_move(s: Shape, item: Item, ids: Any, pool: Any, out: Any) -> Move:
    row, known = _page(s, ids, item)
    return Move(pool, row, out, item.entry * s.layers + item.layer, known)


def _scatter_move(s: Shape, item: Item, ids: Any, pages: Any, pool: Any) -> Move:
    row, known = _page(s, ids, item)
    return Move(pages, item.entry * s.layers + item.layer, pool, row, known)


def _copy_move(s: Shape, item: Item, src: Any, dst: Any, pool: Any) -> Move:
    source, known = _page(s, src, item)
    target, also_known = _page(s, dst, item)
    return Move(pool, source, pool, target, known & also_known)


def _launch(
    s: Shape, move: Callable[..., Move], name: str, interpret: Any, *, out: tuple[Any, ...] = (), zeros: bool = False
) -> Callable[..., Any]:
    scratch = {
        "ring": plgpu.SMEM((s.stages, s.piece), s.dtype),
        "full": plgpu.Barrier(num_arrivals=1, num_barriers=s.stages),
        "free": plgpu.Barrier(num_arrivals=1, num_barriers=s.stages),
    }
    if zeros:  # whole vectors of all threads of a warpgroup
        scratch["zeros"] = plgpu.SMEM((-(-s.piece // 1024) * 1024,), s.dtype)

    def entry(*arrays: Any, **scratch: Any) -> None:
        _body(s, lambda item: move(s, item, *arrays), scratch)

    return plgpu.kernel(
        entry,
        out_type=out,
        scratch_types=scratch,
        grid=(s.num_blocks,),
        grid_names=("block",),
        num_threads=2,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
        kernel_name=name,
    )


def _walk(s: Shape, place: Callable[[Item], Move], run: Callable[[Item, Move, jax.Array], None]) -> jax.Array:
    """`run(item, move, known items before)` over this block's items. Returns the number of known ones."""
    block = lax.axis_index("block")

    def one(index: jax.Array, step: jax.Array) -> jax.Array:
        number = index * s.num_blocks + block
        row = number // s.pieces
        item = Item(row // s.layers, row % s.layers, pl.multiple_of(number % s.pieces * s.piece, s.piece))
        move = place(item)
        run(item, move, step)
        return step + jnp.where(move.known, 1, 0)

    return lax.fori_loop(0, (s.items - block + s.num_blocks - 1) // s.num_blocks, one, jnp.int32(0))


def _body(s: Shape, place: Callable[[Item], Move], refs: dict[str, Any]) -> None:
    ring, full, free = refs["ring"], refs["full"], refs["free"]
    wg = lax.axis_index("wg")

    def read(item: Item, move: Move, step: jax.Array) -> None:
        @pl.when(move.known)
        def _() -> None:
            slot = step % s.stages

            @pl.when(step >= s.stages)
            def _wait() -> None:
                plgpu.barrier_wait(free.at[slot])

            plgpu.copy_gmem_to_smem(
                move.source.at[move.source_row, pl.ds(item.column, s.piece)],
                ring.at[slot],
                full.at[slot],
                oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
            )

    def write(item: Item, move: Move, step: jax.Array) -> None:
        target = move.target.at[move.target_row, pl.ds(item.column, s.piece)]

        @pl.when(move.known)
        def _() -> None:
            slot = step % s.stages
            plgpu.barrier_wait(full.at[slot])
            plgpu.copy_smem_to_gmem(ring.at[slot], target)
            plgpu.wait_smem_to_gmem(s.writes, wait_read_only=True)

            @pl.when(step >= s.writes)
            def _free() -> None:
                plgpu.barrier_arrive(free.at[(step - s.writes) % s.stages])

        if "zeros" in refs:

            @pl.when(jnp.logical_not(move.known))
            def _zeros() -> None:
                plgpu.copy_smem_to_gmem(refs["zeros"].at[pl.ds(0, s.piece)], target)

    @pl.when(wg == 0)
    def _writer() -> None:
        if "zeros" in refs:
            refs["zeros"][...] = jnp.zeros(refs["zeros"].shape, s.dtype)
            plgpu.commit_smem()
        steps = _walk(s, place, write)
        plgpu.wait_smem_to_gmem(0)
        last = jnp.maximum(steps - s.writes, 0)
        lax.fori_loop(last, steps, lambda step, _: plgpu.barrier_arrive(free.at[step % s.stages]), None)

    @pl.when(wg == 1)
    def _reader() -> None:
        steps = _walk(s, place, read)
        # Take the last signals, so that every barrier ends as it began.
        lax.fori_loop(0, jnp.minimum(steps, s.stages), lambda slot, _: plgpu.barrier_wait(free.at[slot]), None)
