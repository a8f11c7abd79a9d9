"""What deterministic mode costs on one GPU beside default mode, and where its bits come from.

    python -m benchmarks.deterministic OUT.json [--parts bits,linear,attention,steps] [--layers 36] [--profile]

    bits       XLA's matmul against the row-invariant kernel, and the kernel's tiles against each other, on the shapes of
               Qwen3-8B, Qwen3-30B-A3B and gpt-oss-20b at several numbers of rows
    linear     launches of the kernel beside XLA's matmul as default mode compiles it and as row-invariant programs do
    attention  decode rows through the prefill kernel, with variants, beside the decode kernel; and prefill itself
    steps      the engine's own programs at Qwen3-8B's dimensions in both modes: a decode step over 8192 tokens a row, 128
               tokens over 8192 cached ones, 2048 tokens from scratch; and whether decode writes the bits of prefill

Kernels are timed as loops inside one jitted call, over weights or layers of more than 300 MB; the time of a short loop is
subtracted. Medians.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import models
import pallas_kernels as pk
from benchmarks import tuned_table
from benchmarks.decode_step import PAGE, QWEN3_8B, make_inputs, random_pool
from benchmarks.profiling import kernel_times
from pallas_kernels.paged_decode_attention import triton as decode_kernel
from pallas_kernels.ragged_paged_attention import mosaic_gpu
from pallas_kernels.row_invariant_matmul import proof, triton, xla
from pallas_kernels.row_invariant_matmul.mode import MatmulShape
from prefix_reuse import EngineConfig, device_pages
from prefix_reuse.packing import pack
from prefix_reuse.plan import Chunk, pack_chunks
from prefix_reuse.programs import Programs
from prefix_reuse.runner import prefill_inputs

COLD_BYTES = 300 << 20
CONTEXT, SUFFIX, PROMPT = 8192, 128, 2048
WORKERS = 12
# name: (N, K, dtype of the result)
SHAPES: dict[str, tuple[int, int, str]] = {
    "qwen3-8b qkv": (6144, 4096, "bfloat16"),
    "qwen3-8b out": (4096, 4096, "bfloat16"),
    "qwen3-8b gate_up": (24576, 4096, "bfloat16"),
    "qwen3-8b down": (4096, 12288, "bfloat16"),
    "qwen3-8b unembed": (151936, 4096, "float32"),
    "qwen3-30b-a3b qkv": (5120, 2048, "bfloat16"),
    "qwen3-30b-a3b out": (2048, 4096, "bfloat16"),
    "qwen3-30b-a3b router": (128, 2048, "float32"),
    "qwen3-30b-a3b unembed": (151936, 2048, "float32"),
    "gpt-oss-20b qkv": (5120, 2880, "bfloat16"),
    "gpt-oss-20b out": (2880, 4096, "bfloat16"),
    "gpt-oss-20b router": (32, 2880, "float32"),
    "gpt-oss-20b unembed": (201088, 2880, "float32"),
}
TIMED_ROWS = (1, 16, 64, 128, 256)
COMPARED_ROWS = (16, 128, 256, 512, 1024, 2048)

# block_m, block_n, block_k, num_warps, num_stages, weight_first
FEW = [
    (16, 32, 128, 4, 4, 0),
    (16, 32, 128, 4, 6, 0),
    (16, 32, 256, 4, 4, 0),
    (16, 16, 128, 4, 8, 0),
    (16, 16, 256, 4, 4, 0),
    (16, 16, 256, 4, 6, 0),
    (16, 16, 256, 2, 5, 0),
    (16, 16, 512, 4, 4, 0),
    (16, 64, 128, 4, 5, 0),
    (16, 64, 64, 4, 6, 1),
    (16, 64, 128, 4, 4, 1),
    (16, 64, 128, 4, 6, 1),
    (16, 128, 64, 4, 6, 1),
    (16, 32, 256, 4, 4, 1),
]
SOME = [
    (64, 32, 128, 4, 4, 0),
    (64, 32, 128, 4, 6, 0),
    (64, 32, 256, 4, 3, 0),
    (64, 64, 64, 4, 5, 0),
    (64, 64, 128, 4, 4, 0),
    (64, 64, 64, 4, 5, 1),
    (64, 64, 128, 4, 4, 1),
    (64, 128, 64, 4, 4, 1),
    (64, 128, 64, 4, 4, 0),
    (32, 64, 128, 4, 4, 1),
]
MANY = [
    (64, 64, 64, 4, 5, 0),
    (64, 128, 64, 4, 4, 0),
    (64, 128, 64, 4, 4, 1),
    (128, 32, 128, 4, 4, 0),
    (128, 64, 64, 4, 4, 0),
    (128, 64, 128, 8, 3, 0),
    (128, 128, 64, 8, 4, 0),
    (128, 128, 64, 4, 4, 0),
    (128, 256, 64, 8, 3, 0),
]
NAMES: tuple[str, ...] = ("block_m", "block_n", "block_k", "num_warps", "num_stages", "weight_first")
ATTENTION = {
    "default": {},
    "chunk 1024": {"chunk": 1024},
    "chunk 512": {"chunk": 512},
    "chunk 2048 split": {"split": True},
    "chunk 1024 split": {"chunk": 1024, "split": True},
    "chunk 512 split": {"chunk": 512, "split": True},
    "chunk 512 whole": {"chunk": 512, "split": False},
    "block 64, 4 stages": {"block_kv": 64, "stages": 4},
}


def compile_all(lowered: Sequence[Any]) -> list[Any]:
    """Compiled programs, or the error of each that does not compile."""

    def one(program: Any) -> Any:
        try:
            return program.compile()
        except Exception as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        return list(pool.map(one, lowered))


def per_loop(run: Callable[[int], Any], *, repeats: int = 5, target_s: float = 0.02) -> tuple[float, float, float]:
    """Milliseconds of one turn of a loop that `run(n)` runs n times: median, least, most."""

    def seconds(n: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(run(n))
        return time.perf_counter() - start

    seconds(1)
    guess = max(seconds(3) - seconds(1), 1e-5) / 2
    steps = int(min(200, max(3, target_s / guess)))
    times = sorted((seconds(steps + 1) - seconds(1)) / steps * 1e3 for _ in range(repeats))
    return statistics.median(times), times[0], times[-1]


# ---- bits


def bits() -> dict[str, Any]:
    """For each shape and number of rows, whether XLA's matmul has the kernel's bits."""
    device = jax.devices()[0]
    shapes = {
        MatmulShape(rows, n, k, "bfloat16", out): name for name, (n, k, out) in SHAPES.items() for rows in COMPARED_ROWS
    }
    start = time.perf_counter()
    tiles = proof.tiles_agree(shapes, device)
    middle = time.perf_counter()
    same = proof.compare(shapes, device, least_rows=1)
    result: dict[str, Any] = {name: {} for name in SHAPES}
    for shape, equal in same.items():
        result[shapes[shape]][str(shape.rows)] = equal
    return {
        "tiles agree": tiles,
        "tiles_s": middle - start,
        "compare_s": time.perf_counter() - middle,
        "xla has the kernel's bits": result,
    }


def all_launches_agree() -> dict[str, Any]:
    """Whether every launch of `linear` gives the same bits on one matmul; the launches that do not."""
    x = jax.random.normal(jax.random.key(0), (256, 4096), jnp.bfloat16)
    weight = jax.random.normal(jax.random.key(1), (1024, 4096), jnp.bfloat16)
    launches = sorted({*FEW, *SOME, *MANY})
    programs = compile_all([jax.jit(by_kernel(launch, jnp.bfloat16)).lower(x, weight) for launch in launches])
    want = jax.jit(
        functools.partial(xla.matmul, out_dtype=jnp.dtype(jnp.bfloat16)), compiler_options=xla.COMPILER_OPTIONS
    )
    wide = jnp.concatenate([x] * 4)
    expected = np.asarray(want(wide, weight))[:256].view(np.uint16)
    differ = {}
    for launch, program in zip(launches, programs, strict=True):
        if isinstance(program, Exception):
            continue
        got = np.asarray(program(x, weight)).view(np.uint16)
        if (got != expected).any():
            differ[str(launch)] = float((got != expected).mean())
    return {"launches": len(launches), "differ from XLA at 1024 rows": differ}


# ---- matmuls


def by_kernel(launch: tuple[int, ...], out_dtype: Any) -> Callable[[jax.Array, jax.Array], jax.Array]:
    config = dict(zip(NAMES, launch, strict=True))
    return lambda x, w: triton.row_invariant_matmul(x, w, None, out_dtype=jnp.dtype(out_dtype), config=config)


def by_default(out_dtype: Any) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """As `models.layers.linear` does it in default mode."""
    return lambda x, w: jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.dtype(out_dtype))


def matmul_loop(multiply: Callable[..., jax.Array]) -> Callable[..., Any]:
    def loop(n: jax.Array, x: jax.Array, weights: list[jax.Array]) -> Any:
        def body(_: Any, carry: Any) -> Any:
            x, results = carry[0], []
            for weight in weights:  # one after the other, and nothing but them
                x, y = jax.lax.optimization_barrier((x, multiply(x, weight)))
                results.append(y)
            return x, results

        empty = [jnp.zeros(y.shape, y.dtype) for y in jax.eval_shape(lambda: [multiply(x, w) for w in weights])]
        return jax.lax.fori_loop(0, n, body, (x, empty))

    return loop


def linear(names: Sequence[str], rows: Sequence[int]) -> list[dict[str, Any]]:
    """Milliseconds of every launch and of XLA, for each shape and number of rows."""
    results = []
    for name in names:
        n, k, out = SHAPES[name]
        count = max(1, COLD_BYTES // (n * k * 2) + 1)
        weights = [jax.random.normal(jax.random.key(i), (n, k), jnp.bfloat16) * k**-0.5 for i in range(count)]
        xs = {m: jax.random.normal(jax.random.key(99), (m, k), jnp.bfloat16) for m in rows}
        turn = jnp.int32(1)
        # XLA's default times candidates on the card while it compiles: alone, and first.
        programs: dict[tuple[int, str], Any] = {}
        for m in rows:
            loop = jax.jit(matmul_loop(by_default(out)))
            programs[m, "xla"] = loop.lower(turn, xs[m], weights).compile()
        lowered = {}
        for m in rows:
            plain = matmul_loop(functools.partial(xla.matmul, out_dtype=jnp.dtype(out)))
            exact = jax.jit(plain, compiler_options=xla.COMPILER_OPTIONS)
            lowered[m, "xla, row-invariant options"] = exact.lower(turn, xs[m], weights)
            for launch in FEW if m <= 16 else SOME if m <= 64 else MANY:
                lowered[m, str(launch)] = jax.jit(matmul_loop(by_kernel(launch, out))).lower(turn, xs[m], weights)
        programs |= dict(zip(lowered, compile_all(list(lowered.values())), strict=True))
        for m in rows:
            row: dict[str, Any] = {"shape": name, "N": n, "K": k, "M": m, "weight_MB": n * k * 2 / 1e6, "ms": {}}
            for (own, label), program in programs.items():
                if own != m:
                    continue
                if isinstance(program, Exception):
                    row.setdefault("errors", {})[label] = repr(program)[:160]
                    continue

                def run(turns: int, program: Any = program, x: jax.Array = xs[m], w: Any = weights) -> Any:
                    return program(jnp.int32(turns), x, w)

                try:
                    row["ms"][label] = per_loop(run, repeats=3)[0] / count
                except Exception as error:
                    row.setdefault("errors", {})[label] = repr(error)[:160]
            best = min((ms, label) for label, ms in row["ms"].items() if not label.startswith("xla"))
            row["best"], row["best_ms"] = best[1], best[0]
            row["best_over_xla"] = best[0] / row["ms"]["xla"]
            row["TBps"] = n * k * 2 / best[0] / 1e9
            print(json.dumps(row), flush=True)
            results.append(row)
    return results


def make_table(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Entries of the card's table, by the row: a launch whose worst time beside XLA's default, over all shapes and numbers of
    rows of its class, is the least; one of a single shape where that is more than 3% better there. And up to how many rows
    the kernel is faster than XLA, on the sum of the shapes.
    """
    launches: dict[str, dict[str, int]] = {}
    for kind in dict.fromkeys(triton.class_names(row["M"], row["N"]) for row in rows):
        some = [row for row in rows if triton.class_names(row["M"], row["N"]) == kind]
        launches[f"{kind} bfloat16"] = as_launch(usual := least_worst(some)[1])
        for n, k in sorted({(row["N"], row["K"]) for row in some}):
            own = [row for row in some if (row["N"], row["K"]) == (n, k)]
            worst, label = least_worst(own)
            if max(row["ms"][usual] / row["ms"]["xla"] for row in own) > 1.03 * worst:
                launches[f"{kind.split()[0]} N{n} K{k} bfloat16"] = as_launch(label)
    sizes = sorted({row["M"] for row in rows})
    sums: dict[int, dict[str, float]] = {}
    for m in sizes:
        own = [row for row in rows if row["M"] == m]
        sums[m] = {
            "kernel": sum(row["ms"][launch_label(launches, row)] for row in own),
            "exact": sum(row["ms"]["xla, row-invariant options"] for row in own),
        }
    slower = [m for m in sizes if all(sums[n]["exact"] < sums[n]["kernel"] for n in sizes if n >= m)]
    least = max((m for m in sizes if m < min(slower, default=0)), default=0) + 1
    return {
        "row_invariant_matmul.triton": launches,
        "row_invariant_matmul": {"default": {"xla_rows": least}},
    }


def least_worst(rows: Sequence[dict[str, Any]]) -> tuple[float, str]:
    """The launch that all of `rows` have whose worst time over XLA's default is the least."""
    labels = set.intersection(*({*row["ms"]} for row in rows))
    labels = {label for label in labels if not label.startswith("xla")}
    return min((max(row["ms"][label] / row["ms"]["xla"] for row in rows), label) for label in labels)


def as_launch(label: str) -> dict[str, int]:
    return dict(zip(NAMES, json.loads(label.replace("(", "[").replace(")", "]")), strict=True))


def launch_label(launches: dict[str, dict[str, int]], row: dict[str, Any]) -> str:
    kind = triton.class_names(row["M"], row["N"])
    exact = f"{kind.split()[0]} N{row['N']} K{row['K']} bfloat16"
    return str(tuple(launches.get(exact, launches[f"{kind} bfloat16"]).values()))


# ---- attention


def attention_loop(attend: Callable[..., jax.Array], prepare: Callable[..., Any], layers: int) -> Any:
    """`attend(layer, plan, q, ...)` n times, over the layers in turn; the plan is made once."""

    def loop(n: jax.Array, *arrays: jax.Array) -> jax.Array:
        plan = prepare(*arrays)

        def body(i: jax.Array, carry: Any) -> Any:
            q, _ = carry
            return jax.lax.optimization_barrier((q, attend(i % layers, plan, q, *arrays[1:])))

        return jax.lax.fori_loop(0, n, body, (arrays[0], jnp.zeros_like(arrays[0])))[1]

    return jax.jit(loop)


def prefill_loop(config: dict[str, Any], layers: int, keywords: dict[str, Any]) -> Any:
    def attend(layer: jax.Array, plan: Any, *arrays: jax.Array) -> jax.Array:
        return mosaic_gpu.ragged_paged_attention(*arrays, layer=layer, plan=plan, config=config, **keywords)[0]

    return attention_loop(attend, lambda *arrays: mosaic_gpu.make_plan(*arrays, window=None, config=config), layers)


def decode_loop(layers: int, keywords: dict[str, Any]) -> Any:
    def attend(layer: jax.Array, plan: Any, q: Any, pool: Any, table: Any, offsets: Any, lens: Any) -> jax.Array:
        return decode_kernel.paged_decode_attention(q, pool, table, lens, layer=layer, **keywords)[0]

    return attention_loop(attend, lambda *arrays: None, layers)


def attention() -> list[dict[str, Any]]:
    """Milliseconds of one layer: 32 query heads, 8 KV heads of 128, page 64, 8192 tokens and more a row."""
    results = []
    some = {name: ATTENTION[name] for name in ("chunk 1024", "chunk 512", "block 64, 4 stages")}
    for rows, new, variants in ((1, 1, ATTENTION), (16, 1, some), (64, 1, some), (1, SUFFIX, some), (1, PROMPT, some)):
        total = PROMPT if new == PROMPT else CONTEXT + new
        columns = -(-total // PAGE)
        pages = rows * columns
        layers = max(2, -(-COLD_BYTES // (pages * 8 * 2 * PAGE * 128 * 2)))
        pool = jax.random.normal(jax.random.key(1), pk.pool_shape(layers, pages, PAGE, 8, 128), jnp.bfloat16)
        table = jax.random.permutation(jax.random.key(2), pages).astype(jnp.int32).reshape(rows, columns)
        q = jax.random.normal(jax.random.key(0), (rows * new, 32, 128), jnp.bfloat16)
        offsets, lens = jnp.arange(rows + 1, dtype=jnp.int32) * new, jnp.full(rows, total, jnp.int32)
        keywords = {"scale": 128**-0.5, "window": None, "sinks": None, "soft_cap": None, "return_lse": False}
        row: dict[str, Any] = {"rows": rows, "new": new, "keys": total, "ms": {}}
        expected: dict[int, Any] = {}

        arrays = (q, pool, table, offsets, lens)
        configs: dict[str, dict[str, Any]] = {"default": {}, **{k: v for k, v in variants.items() if k != "default"}}
        loops = {name: prefill_loop(config, layers, keywords) for name, config in configs.items()}
        if new == 1:
            loops["decode kernel"] = decode_loop(layers, keywords)
        lowered = [loop.lower(jnp.int32(1), *arrays) for loop in loops.values()]
        for label, program in zip(loops, compile_all(lowered), strict=True):
            if isinstance(program, Exception):
                row.setdefault("errors", {})[label] = repr(program)[:160]
                continue

            def run(n: int, program: Any = program, arrays: Any = arrays) -> Any:
                return program(jnp.int32(n), *arrays)

            row["ms"][label] = per_loop(run)[0]
            if label != "decode kernel":  # bits belong to a size of chunks
                chunk = {**mosaic_gpu.TUNED["default"], **variants.get(label, {})}["chunk"], "block 64" in label
                got = np.asarray(run(1)).view(np.uint16)
                if (got != expected.setdefault(hash(chunk), got)).any():
                    row.setdefault("split and whole differ", []).append(label)
        print(json.dumps(row), flush=True)
        results.append(row)
        del pool, arrays
    return results


# ---- the engine's programs


class Mode:
    """The programs of one mode over one pool."""

    def __init__(self, model: Any, max_rows: int, deterministic: bool):
        self.model, self.max_rows = model, max_rows
        config = EngineConfig(
            page_size=PAGE, max_rows=max_rows, max_prefill_tokens=PROMPT, decode_steps=LONG, deterministic=deterministic
        )
        self.programs = Programs(model, config, jax.devices()[0])
        start = time.perf_counter()
        self.programs.prove_matmuls({1, 16, 64, SUFFIX, PROMPT, max_rows})
        self.prove_s = time.perf_counter() - start
        self.lowered: dict[str, Any] = {}
        self.inputs: dict[str, Any] = {}
        self.compiled: dict[str, Any] = {}

    def lower(self, pools: Any, sizes: Sequence[int]) -> None:
        """Traces all cases. Decode compiles once for both numbers of steps."""
        for rows in sizes:
            for steps in (SHORT, LONG):
                self.inputs[f"decode {rows} {steps}"] = make_inputs(self.model, rows, CONTEXT, steps, None)
            batch = self.inputs[f"decode {rows} {LONG}"]
            self.lowered[f"decode {rows}"] = self.programs.decode.lower(self.model.params, pools, batch)
        for name, tokens, start in (("suffix", SUFFIX, CONTEXT), ("prompt", PROMPT, 0)):
            chunk = Chunk(0, np.arange(tokens, dtype=np.int32), start, True, True)
            batch = pack_chunks([chunk], num_tokens=tokens, num_rows=self.max_rows, table_rows=self.max_rows)
            self.inputs[name] = jax.device_put(prefill_inputs(batch))
            self.lowered[name] = self.programs.prefill.lower(self.model.params, pools, self.inputs[name])

    def run(self, name: str, batch: str, pools: Any) -> tuple[Any, Any]:
        words, rest, _ = pack(self.inputs[batch])
        return self.compiled[name](self.model.params, pools, words=words, rest=rest)


SHORT, LONG = 2, 14


def steps(layers: int, sizes: Sequence[int], profiled: bool) -> dict[str, Any]:
    """Both modes on the engine's own programs."""
    model = models.from_config({**QWEN3_8B, "num_hidden_layers": layers})
    (group,) = model.kv_groups
    columns, most = (CONTEXT + SUFFIX) // PAGE + 1, max(sizes)
    state = device_pages.create(group, num_pages=most * columns + 1, page_size=PAGE, max_rows=most, max_columns=columns)
    table = np.random.default_rng(0).permutation(most * columns).astype(np.int32).reshape(most, columns)
    rebuild = jax.jit(device_pages.rebuild, donate_argnums=0)
    pools: Any = (rebuild(random_pool(state), table, np.zeros(most, np.int32), np.full(most, CONTEXT, np.int32)),)
    modes = {name: Mode(model, most, name == "deterministic") for name in ("default", "deterministic")}
    result: dict[str, Any] = {"layers": layers, "prove_s": modes["deterministic"].prove_s, "cases": {}}
    matmuls = modes["deterministic"].programs.matmuls
    assert matmuls is not None, "the model's matmuls are not row-invariant"
    result["xla"] = [str(shape) for shape in sorted(matmuls.equal)]
    result["different"] = [str(shape) for shape in sorted(matmuls.different)]
    for mode in modes.values():
        mode.lower(pools, sizes)
    start = time.perf_counter()
    for name, lowered in modes["default"].lowered.items():  # XLA times candidates: one at a time
        modes["default"].compiled[name] = lowered.compile()
    middle = time.perf_counter()
    exact = modes["deterministic"]
    exact.compiled = dict(zip(exact.lowered, compile_all(list(exact.lowered.values())), strict=True))
    result |= {"compile_default_s": middle - start, "compile_deterministic_s": time.perf_counter() - middle}
    for mode in modes.values():
        for program in mode.compiled.values():
            if isinstance(program, Exception):
                raise program

    def seconds(mode: Mode, name: str, batches: Sequence[str]) -> float:
        nonlocal pools
        start = time.perf_counter()
        outputs = None
        for batch in batches:
            outputs, pools = mode.run(name, batch, pools)
        jax.block_until_ready((outputs, pools))
        if outputs is not None and int(outputs.refused):
            raise RuntimeError("the step refused writes: its table is wrong")
        return time.perf_counter() - start

    for name in exact.compiled:
        case: dict[str, Any] = {}
        for label, mode in modes.items():
            if name.startswith("decode"):
                short, long, per = [f"{name} {SHORT}"], [f"{name} {LONG}"], LONG - SHORT
            else:
                short, long, per = [name], [name] * 6, 5
            seconds(mode, name, short)
            times = sorted((seconds(mode, name, long) - seconds(mode, name, short)) / per * 1e3 for _ in range(5))
            case[label] = {"ms": statistics.median(times), "ms_min": times[0], "ms_max": times[-1]}
            if profiled:
                divisor = SHORT if name.startswith("decode") else 1

                def once(mode: Mode = mode, name: str = name, short: Any = short) -> None:
                    seconds(mode, name, short)

                kernels = list(kernel_times(once).items())
                case[label]["kernels_ms"] = {
                    f"{kernel} x{count / divisor:g}": ms / divisor for kernel, (ms, count) in kernels[:16]
                }
                case[label]["kernels_total_ms"] = sum(ms for _, (ms, _) in kernels) / divisor
        case["ratio"] = case["deterministic"]["ms"] / case["default"]["ms"]
        result["cases"][name] = case
        print(name, json.dumps(case), flush=True)
    for label, mode in modes.items():
        result[f"{label}: decode writes the bits of prefill"], pools = same_keys(mode, table, pools, sizes)
    print(json.dumps({k: v for k, v in result.items() if k != "cases"}), flush=True)
    return result


def same_keys(mode: Mode, table: np.ndarray, pools: Any, sizes: Sequence[int]) -> tuple[dict[str, Any], Any]:
    """Row 0's keys and values at `CONTEXT`, all layers: from prefill of 128 tokens, and from decode of one, in each batch."""
    page, suffix = int(table[0, CONTEXT // PAGE]), np.asarray(mode.inputs["suffix"].tokens)
    outputs, pools = mode.run("suffix", "suffix", pools)
    want = np.asarray(pools[0].kv_pages[:, page, :, :, 0])
    logits = None
    found = {}
    for rows in sizes:
        batch = mode.inputs[f"decode {rows} {SHORT}"]
        forced = batch.replace(tokens=batch.tokens.at[0].set(int(suffix[0])))
        outputs, pools = mode.compiled[f"decode {rows}"](mode.model.params, pools, forced)
        got = np.asarray(pools[0].kv_pages[:, page, :, :, 0])
        second = np.asarray(pools[0].kv_pages[:, page, :, :, 1])
        same = got.tobytes() == want.tobytes()
        if logits is None:
            logits = (int(np.asarray(outputs.tokens)[0, 0]), second.tobytes())
        again = logits == (int(np.asarray(outputs.tokens)[0, 0]), second.tobytes())
        layer = next((i for i in range(len(got)) if got[i].tobytes() != want[i].tobytes()), None)
        found[f"{rows} rows"] = {
            "same": same,
            "first layer that differs": layer,
            "second step as with fewer rows": again,
        }
    return found, pools


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--parts", default="bits,linear,attention,steps")
    parser.add_argument("--layers", type=int, default=QWEN3_8B["num_hidden_layers"])
    parser.add_argument("--rows", default="1,16,64", help="decode batches of `steps`")
    parser.add_argument("--shapes", help="names of `linear`, separated by commas; default: Qwen3-8B's")
    parser.add_argument("--profile", action="store_true", help="kernel times of every case of `steps`")
    parser.add_argument("--table", type=Path, help="the card's table, to be updated by `linear`")
    options = parser.parse_args()
    device = jax.devices()[0]
    result: dict[str, Any] = {"gpu": device.device_kind, "jax": jax.__version__, "seconds": {}}
    parts: dict[str, Callable[[], Any]] = {
        "bits": lambda: {**bits(), **all_launches_agree()},
        "linear": lambda: linear(
            options.shapes.split(",") if options.shapes else [n for n in SHAPES if n.startswith("qwen3-8b")], TIMED_ROWS
        ),
        "attention": attention,
        "steps": lambda: steps(options.layers, [int(n) for n in options.rows.split(",")], options.profile),
    }
    for part in options.parts.split(","):
        start = time.perf_counter()
        result[part] = parts[part]()
        result["seconds"][part] = time.perf_counter() - start
        if part == "linear":
            result["table"] = make_table(result["linear"])
            if options.table is not None:
                tuned_table.update(options.table, result["table"])
        if part == "bits":
            print(json.dumps(result["bits"]), flush=True)
        print(part, f"{result['seconds'][part]:.1f} s", flush=True)
        options.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
