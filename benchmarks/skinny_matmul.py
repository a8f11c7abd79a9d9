"""The experiment `skinny_matmul_kernel` beside XLA's x @ w.T, on the projections of Qwen3-8B: checked first, then timed.

    python -m benchmarks.skinny_matmul OUT.json [--shapes out,qkv] [--rows 1,16,64,128,256] [--only bm64-s2] [--check]
    NPROC=64 python -m benchmarks.skinny_matmul OUT.json --dry    # checks small shapes in the simulator on a CPU: minutes

`us` is one matmul and the small Triton kernel that reads its result whole and makes the next x, as a norm does (it adds up
the parts; `reader` is that kernel alone, on a bf16 y), in a loop over WEIGHTS weights that the L2 does not hold: the median
of differences between a long and a short loop, all variants in turn.

A variant is bmA-sB-nC-cD-bkE: rows of w of a block, splits, stages, cluster, columns of a tile. Each names itself before it
is compiled, before it is checked and before its loop runs first, and all are checked at all rows before anything is
timed. A program that stands still for PATIENCE seconds is ended: the last line names it.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import faulthandler
import functools
import json
import re
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import triton as pltriton

from benchmarks.skinny_matmul_kernel import shared_bytes, skinny_matmul
from pallas_kernels.hopper import SHARED_BYTES
from pallas_kernels.pallas_gpu import interpret_here, power_of_two, triton_call

READ = 4.5e12
SHAPES = {"out": (4096, 4096), "qkv": (6144, 4096), "down": (4096, 12288), "gate_up": (24576, 4096)}  # N, K
DRY_SHAPES = {"out": (512, 1024)}
ROWS, DRY_ROWS = "1,16,64,128,256", "1,64,128"
WEIGHTS, TWICE, SHORT, LONG = 16, 2, 2, 10  # weights, uses of each in the loop's body, turns of the loop
PATIENCE = 60
SM_SHARED, SM_BLOCK = 233472, 1024  # shared memory of a multiprocessor; what the system keeps of it for each block


@dataclasses.dataclass(frozen=True)
class Variant:
    """Sizes of the kernel, the blocks that a multiprocessor is to hold, and the rows of x to try it with."""

    bm: int
    splits: int
    blocks: int
    cluster: int
    bk: int
    least: int
    most: int


# bm, splits, blocks of a multiprocessor, cluster, bk; rows at least, rows at most
TABLE = {
    "out": [
        (64, 2, 1, 1, 64, 1, 256), (64, 2, 1, 1, 128, 1, 64), (64, 4, 2, 1, 64, 1, 64), (64, 1, 1, 1, 64, 1, 16),
        (128, 4, 1, 1, 64, 1, 256), (128, 8, 2, 1, 64, 1, 16), (256, 8, 1, 1, 64, 128, 128), (64, 2, 1, 2, 64, 16, 256),
        (64, 2, 1, 4, 64, 128, 256), (128, 4, 1, 2, 64, 64, 256), (64, 2, 1, 2, 128, 64, 128),
        (128, 2, 1, 2, 64, 128, 256), (64, 1, 1, 4, 64, 256, 256),
    ],
    "qkv": [
        (64, 1, 1, 1, 64, 1, 64), (64, 2, 2, 1, 64, 1, 64), (64, 4, 3, 1, 64, 1, 16), (192, 4, 1, 1, 64, 1, 128),
        (192, 4, 1, 1, 128, 1, 16), (192, 8, 2, 1, 64, 1, 1), (128, 2, 1, 1, 64, 1, 256), (64, 2, 2, 2, 64, 64, 128),
        (192, 4, 1, 2, 64, 64, 128), (128, 2, 1, 2, 64, 64, 256), (64, 1, 1, 2, 64, 64, 256), (64, 1, 1, 4, 64, 128, 256),
        (192, 4, 1, 4, 64, 128, 128), (128, 2, 1, 4, 64, 256, 256),
    ],
    "down": [
        (64, 2, 1, 1, 64, 1, 256), (64, 2, 1, 1, 128, 1, 64), (64, 4, 2, 1, 64, 1, 64), (64, 6, 3, 1, 64, 1, 1),
        (128, 4, 1, 1, 64, 1, 256), (128, 8, 2, 1, 64, 16, 16), (64, 2, 1, 2, 64, 16, 256), (64, 2, 1, 4, 64, 128, 256),
        (128, 4, 1, 2, 64, 64, 256), (64, 2, 1, 2, 128, 64, 128), (128, 2, 1, 2, 64, 128, 256),
        (256, 8, 1, 1, 64, 128, 128),
    ],
    "gate_up": [
        (192, 1, 1, 1, 64, 1, 128), (192, 1, 1, 1, 128, 1, 16), (64, 1, 3, 1, 64, 1, 64), (64, 1, 2, 1, 64, 1, 128),
        (128, 1, 2, 1, 64, 1, 64), (192, 2, 2, 1, 64, 1, 16), (192, 1, 1, 2, 64, 16, 128), (192, 1, 1, 4, 64, 128, 128),
        (64, 1, 2, 4, 64, 128, 128), (128, 1, 1, 1, 64, 128, 256), (128, 1, 1, 2, 64, 128, 256),
        (128, 1, 1, 4, 64, 256, 256),
    ],
}  # fmt: skip


def variants(kind: str, rows: int, contracted: int, only: str = "") -> dict[str, dict[str, int]]:
    """Label -> sizes of each variant to try with `rows` rows, with as many stages as shared memory holds."""
    found = {}
    for v in (Variant(*values) for values in TABLE[kind]):
        if not v.least <= rows <= v.most:
            continue
        steps = contracted // v.splits // v.bk
        room = min(SM_SHARED // v.blocks - SM_BLOCK, SHARED_BYTES)
        needs = functools.partial(shared_bytes, rows, bm=v.bm, bk=v.bk)
        out_dtype = jnp.bfloat16 if v.splits == 1 else jnp.float32
        fit = [n for n in range(2, min(32, steps) + 1) if needs(stages=n, out_dtype=out_dtype) <= room]
        if not fit:
            continue
        label = f"bm{v.bm}-s{v.splits}-n{fit[-1]}-c{v.cluster}-bk{v.bk}"
        if only in label:
            found[label] = {"bm": v.bm, "splits": v.splits, "stages": fit[-1], "cluster": v.cluster, "bk": v.bk}
    return found


@functools.partial(jax.jit, static_argnums=(1, 2))
def make_weight(key: jax.Array, columns: int, contracted: int) -> jax.Array:
    return jax.random.normal(key, (columns, contracted), jnp.bfloat16) * jnp.bfloat16(contracted**-0.5)


def xla_matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())))


def read(x: jax.Array, y: jax.Array) -> jax.Array:
    """The next x from x `[T, K]` and all of y `[T, N]` or `[S, T, N]`: a program a row adds up the parts and normalises."""
    tokens, contracted = x.shape
    y = y if y.ndim == 3 else y[None]
    splits, _, columns = y.shape

    def kernel(x_ref: Any, y_ref: Any, out_ref: Any) -> None:
        row = pl.program_id(0)
        column = jnp.arange(power_of_two(contracted), dtype=jnp.int32)
        inside = column < contracted
        total = pltriton.load(x_ref.at[row, column], mask=inside, other=0.0).astype(jnp.float32)
        for fold in range(-(-columns // contracted)):
            place = column % columns if columns < contracted else column + fold * contracted
            mask = inside & (place < columns)
            for part in range(splits):
                piece = pltriton.load(y_ref.at[part, row, place], mask=mask, other=0.0)
                total = total + piece.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.sum(total * total) / contracted + 1e-6)
        pltriton.store(out_ref.at[row, column], (total * scale).astype(out_ref.dtype), mask=inside)

    return triton_call(
        kernel,
        grid=(tokens,),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        num_inputs=2,
        num_warps=8,
        num_stages=1,
        interpret=interpret_here(),
        name="reader",
    )(x, y)


def compile_loop(multiply: Callable[..., jax.Array], x: jax.Array, ws: list[jax.Array]) -> Any:
    """A program of (x, ws, n): x after n turns of the loop, and one product for the check."""

    def turn(_: Any, x: jax.Array, ws: list[jax.Array]) -> jax.Array:
        for w in ws * TWICE:
            x = read(x, multiply(x, w))
        return x

    def run(x: jax.Array, ws: list[jax.Array], n: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.lax.fori_loop(0, n, functools.partial(turn, ws=ws), x), multiply(x, ws[0])

    return jax.jit(run).lower(x, ws, jnp.int32(1)).compile()


def library_of(program: Any) -> str:
    """What XLA made of its own matmul."""
    text = program.as_text()
    targets = set(re.findall(r'custom_call_target="([^"]+)"', text))
    return "cublas" if any("cublas" in target for target in targets) else "triton" if "__triton_" in text else "other"


def error_of(program: Any, x: jax.Array, ws: list[jax.Array], want: np.ndarray, splits: int) -> float:
    """Largest error of one product.

    Raises:
        ValueError: it is too large, or a row that is NaN changes another.
    """

    def product(x: jax.Array) -> np.ndarray:
        y = np.asarray(program(x, ws, jnp.int32(0))[1], np.float32)
        return functools.reduce(np.add, y) if y.ndim == 3 else y

    y = product(x)
    error = float(np.abs(y - want).max())
    limit = 2e-3 if splits > 1 else 4e-2
    if not error < limit:
        raise ValueError(f"error {error:.2e} above {limit}")
    if len(x) > 1:
        z = product(x.at[-1].set(jnp.nan))
        if not (np.array_equal(z[:-1], y[:-1]) and np.isnan(z[-1]).all()):
            raise ValueError("a row of NaN changes others")
    return error


@contextlib.contextmanager
def said(what: str, seconds: float) -> Iterator[None]:
    """Prints what is about to run, and ends the process if it has not ended after so long.

    From a thread of its own: no signal reaches Python while it waits for the device.
    """
    print(f" {what}", end="", flush=True)
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def check(label: str, job: Any, multiply_args: tuple[Any, ...], splits: int, *, turns: int) -> tuple[Any, float]:
    """The compiled program and its largest error, after `turns` turns of its loop have come to an end."""
    x, ws, want = multiply_args
    print(label, end="", flush=True)
    with said("compile", 10 * PATIENCE):
        program = job.result()
    with said("check", PATIENCE):
        error = error_of(program, x, ws, want, splits)
    with said("loop", PATIENCE):
        jax.block_until_ready(program(x, ws, jnp.int32(turns)))
    print(f" error {error:.1e}", flush=True)
    return program, error


def time_all(programs: dict[str, Callable[[int], Any]], repeats: int) -> dict[str, float]:
    """Microseconds of one matmul and its reader: medians of interleaved runs."""

    def seconds(run: Callable[[int], Any], turns: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(run(turns))
        return time.perf_counter() - start

    found = collections.defaultdict(list)
    for run in programs.values():
        seconds(run, 1)
    for _ in range(repeats):
        for label, run in programs.items():
            each = (seconds(run, LONG) - seconds(run, SHORT)) / (LONG - SHORT) / WEIGHTS / TWICE
            found[label].append(each * 1e6)
    return {label: statistics.median(values) for label, values in found.items()}


def simulator() -> Any:
    import jax.experimental.pallas.mosaic_gpu as plgpu

    return plgpu.InterpretGPUParams(detect_races=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--rows", default="", help=f"rows of x, {ROWS} unless told")
    parser.add_argument("--only", default="", help="variants whose label contains this")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--check", action="store_true", help="time nothing")
    parser.add_argument("--dry", action="store_true", help="check small shapes in the simulator; wants NPROC=64")
    options = parser.parse_args()
    shapes = DRY_SHAPES if options.dry else {kind: SHAPES[kind] for kind in options.shapes.split(",")}
    all_rows = [int(n) for n in (options.rows or (DRY_ROWS if options.dry else ROWS)).split(",")]
    interpret = simulator() if options.dry else False
    results: list[dict[str, Any]] = []
    report = {"jax": jax.__version__, "device": jax.devices()[0].device_kind, "results": results}

    def record(**values: Any) -> None:
        results.append(values)
        options.out.write_text(json.dumps(report, indent=1))

    pool = concurrent.futures.ThreadPoolExecutor(8)
    checked: dict[tuple[str, int], dict[str, Callable[[int], Any]]] = {}
    for kind, (columns, contracted) in shapes.items():
        ws = [make_weight(jax.random.key(i), columns, contracted) for i in range(1 if options.dry else WEIGHTS)]
        most = jax.random.normal(jax.random.key(99), (max(all_rows), contracted), jnp.bfloat16)
        want = np.asarray(most, np.float32) @ np.asarray(ws[0], np.float32).T
        for rows in all_rows:
            x, runs = most[:rows], checked.setdefault((kind, rows), {})
            sizes = variants(kind, rows, contracted, options.only)
            calls = {label: functools.partial(skinny_matmul, **s, interpret=interpret) for label, s in sizes.items()}
            jobs = {label: pool.submit(compile_loop, call, x, ws) for label, call in calls.items()}
            for label, job in jobs.items():
                where = {"shape": kind, "rows": rows, "label": label}
                try:
                    args = (x, ws, want[:rows])
                    name = f"{kind} T {rows} {label}:"
                    program, error = check(name, job, args, sizes[label]["splits"], turns=0 if options.dry else 1)
                except Exception as failure:  # of one variant: the others may still be measured
                    print(f" FAILED {failure!r:.300}", flush=True)
                    record(**where, failed=repr(failure)[:300])
                    continue
                record(**where, error=error)
                runs[label] = lambda n, p=program, x=x, ws=ws: p(x, ws, jnp.int32(n))
            if options.check or options.dry:
                continue
            xla = compile_loop(xla_matmul, x, ws)
            ys = [jnp.full((rows, columns), i, jnp.bfloat16) for i in range(WEIGHTS)]
            alone = compile_loop(lambda _, y: y, x, ys)
            runs[f"xla-{library_of(xla)}"] = lambda n, x=x, ws=ws, p=xla: p(x, ws, jnp.int32(n))
            runs["reader"] = lambda n, x=x, ys=ys, p=alone: p(x, ys, jnp.int32(n))
    if not (options.check or options.dry):
        for (kind, rows), runs in checked.items():
            columns, contracted = shapes[kind]
            print(f"{kind} T {rows}, least {columns * contracted * 2 / READ * 1e6:.1f} us:", end="", flush=True)
            with said("timing", 10 * PATIENCE):
                times = time_all(runs, options.repeats)
            for label, us in sorted(times.items(), key=lambda item: item[1]):
                print(f"  {label} {us:.2f}", end="", flush=True)
                record(shape=kind, rows=rows, label=label, us=us)
            print(flush=True)
    if any("failed" in row for row in results):
        raise SystemExit("some variants failed")


if __name__ == "__main__":
    main()
