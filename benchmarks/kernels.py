"""GPU kernels: checks against float64, times, and FlashInfer on the same shapes in the same run.

Times are per call, from the difference between a jitted chain of `LONG` and one of `SHORT` calls (each call's queries
come from the one before), so that dispatch cancels. Inputs of one chain are over 200 MB: layers are rotated.

Usage: python benchmarks/kernels.py OUT.json [--check] [--tune] [--peer] [--only OPS]
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import importlib
import itertools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk
from benchmarks.profiling import kernel_times

INNER, SHORT, LONG, REPEATS, LEAST_MS = 8, 1, 3, 7, 20
PLAIN: dict[str, Any] = {"window": None, "sinks": None, "soft_cap": None, "return_lse": False}
# B, H, K, D, context, page, shared tokens (peer only)
DECODE = [
    [64, 32, 8, 128, 8192, 16, 7168],
    [64, 64, 8, 64, 8192, 16, 7168],
    [8, 32, 8, 128, 32768, 16, 28672],
    [1, 32, 8, 128, 8192, 16, 0],
    [64, 32, 8, 128, 8192, 64, 0],
]
# B, H, K, D, cached, new, page
PREFILL = [
    [8, 32, 8, 128, 8192, 128, 64],
    [8, 32, 8, 128, 8192, 1024, 64],
    [8, 64, 8, 64, 8192, 128, 64],
    [1, 32, 8, 128, 32768, 64, 64],
    [1, 32, 8, 128, 0, 8192, 64],
]
DECODE_CONFIGS: dict[str, list[dict[str, int]]] = {
    "triton": [
        {"block": block, "split": split, "num_warps": warps, "num_stages": stages}
        for block, split, warps, stages in [
            (64, 1024, 2, 4),
            (64, 2048, 2, 4),
            (64, 2048, 4, 4),
            (64, 2048, 2, 3),
            (64, 1024, 4, 4),
            (64, 1024, 4, 3),
            (64, 1024, 2, 3),
            (64, 512, 2, 4),
        ]
    ],
    "mosaic_gpu": [
        {"block": 64, "split": 1024, "stages": 5},
        {"block": 64, "split": 2048, "stages": 5},
        {"block": 64, "split": 512, "stages": 5},
        {"block": 64, "split": 2048, "stages": 3},
        {"block": 128, "split": 2048, "stages": 2},
        {"block": 128, "split": 2048, "stages": 4},
    ],
}
# (split, rows of a tile or None for what suits the kernel, launch parameters)
SHARED_CONFIGS: dict[str, list[tuple[int, int | None, dict[str, int]]]] = {
    "triton": [
        (split, rows, {"tile_block": tile, "own_block": own, "num_warps": warps, "num_stages": stages})
        for split, rows, tile, own, warps, stages in [
            (1024, 16, 64, 64, 4, 2), (1024, 16, 64, 64, 4, 3), (1024, 32, 64, 64, 4, 2), (1024, 32, 64, 64, 8, 2),
            (1024, 8, 64, 64, 4, 2), (1024, 8, 64, 64, 4, 3), (1024, 16, 32, 64, 4, 2), (1024, 16, 64, 32, 4, 2),
            (512, 16, 64, 64, 4, 2), (512, 16, 64, 64, 4, 3), (512, 32, 64, 64, 4, 2), (512, 8, 64, 64, 4, 2),
            (512, 8, 64, 64, 4, 3), (2048, 16, 64, 64, 4, 2), (1024, 16, 128, 64, 4, 2), (512, 32, 64, 64, 4, 3),
        ]
    ],
    "mosaic_gpu": [
        (1024, None, {}),
        (512, None, {}),
        (2048, None, {}),
        (1024, None, {"block_kv": 64, "stages": 4}),
        (512, None, {"block_kv": 64, "stages": 4}),
        (2048, None, {"block_kv": 64, "stages": 4}),
        (1024, None, {"splits_per_step": 4}),
        (1024, None, {"splits_per_step": 16}),
        (1024, None, {"merge_warps": 2}),
        (512, None, {"splits_per_step": 16, "merge_warps": 2}),
        (1024, None, {"block": 64, "num_warps": 4, "num_stages": 3}),
        (1024, None, {"block": 64, "num_warps": 2, "num_stages": 4}),
    ],
}  # fmt: skip
# Launch parameters of decode over a window, beside the shipped ones
WINDOW_CONFIGS: list[dict[str, int]] = [
    {"block": block, "split": 1024, "num_warps": warps, "num_stages": stages}
    for block, warps, stages in [(128, 2, 1), (128, 4, 1), (64, 1, 3), (64, 4, 3), (64, 2, 2), (32, 2, 4)]
]
WINDOW_PREFILL_CONFIGS: list[dict[str, int]] = [{"block_kv": 64}, {"block_kv": 64, "stages": 6}, {"stages": 3}]
# head_dim, and ops that both kinds of kernels have for it
HEAD_DIMS = {80: ("decode", "prefill", "shared"), 96: ("decode", "prefill", "shared"), 256: ("decode",)}
# Launch parameters of the Mosaic kernels that write, beside their defaults ({})
APPEND_CONFIGS = [{}, {"tokens": 2}, {"tokens": 4}, {"tokens": 16}]
COPY_CONFIGS = [
    {},
    {"piece_bytes": 8192, "stages": 20, "writes": 8},
    {"piece_bytes": 32768, "stages": 5, "writes": 2},
    {"piece_bytes": 16384, "stages": 5, "writes": 2, "num_blocks": 264},
    {"piece_bytes": 8192, "stages": 8, "writes": 3, "num_blocks": 396},
]
# rows x shared tokens of the crossover map; 1024 tokens of each row's own
CROSSOVER_ROWS, CROSSOVER_SHARED, OWN = (2, 4, 8, 16, 64), (1024, 4096, 16384), 1024
PREFILL_CONFIGS = [
    {"block_q": block_q, "block_k": block_k, "num_warps": warps, "num_stages": stages}
    for block_q, block_k, warps, stages in [
        (128, 64, 8, 3),
        (128, 128, 8, 2),
        (128, 64, 4, 3),
        (64, 64, 4, 3),
        (128, 32, 4, 4),
        (128, 128, 8, 3),
    ]
]


def kernel_of(op: str, implementation: str) -> Any:
    """The implementation's own function, which takes `config` beside the op's arguments."""
    package = {"gather_pages": "copy_pages", "scatter_pages": "copy_pages"}.get(op, op)
    return getattr(importlib.import_module(f"pallas_kernels.{package}.{implementation}"), op)


def make_pool(key, B, K, D, ctx, S, dtype=jnp.bfloat16, min_bytes=300 << 20):
    """Random pool of as many layers as exceed the L2 several times, and a shuffled table."""
    M = -(-ctx // S)
    layer_bytes = B * M * K * 2 * S * D * jnp.dtype(dtype).itemsize
    L = min(16, max(1, -(-min_bytes // layer_bytes)))
    shape = pk.pool_shape(L, B * M, S, K, D)
    pool = jax.jit(lambda key: jax.random.normal(key, shape, dtype))(key)
    table = np.random.default_rng(0).permutation(B * M).astype(np.int32).reshape(B, M)
    return pool, jnp.asarray(table)


def temp_bytes(program) -> int:
    """Scratch memory of a compiled program: shows that no pool was copied."""
    memory = program.memory_analysis()
    return -1 if memory is None else memory.temp_size_in_bytes


def compile_chain(call, args):
    """One program that runs `n * INNER` calls, n traced; `call(q, layer, *args)` returns the next q.

    The inner loop's length is static: only the outer one, once in `INNER` calls, waits for the host to see its end.
    """

    def chain(n, q, pool, *rest):
        layers = pool.shape[0]

        def inner(i, q):
            return call(q, jnp.int32(i % layers), pool, *rest)

        return jax.lax.fori_loop(0, n, lambda _, q: jax.lax.fori_loop(0, INNER, inner, q), q)

    return jax.jit(chain).lower(jnp.int32(1), *args).compile()


def time_chain(chain, args) -> dict[str, float]:
    """Milliseconds per call: median and spread of the differences between a long and a SHORT chain.

    The long one is LONG rounds, or as many as take about LEAST_MS: launches jitter by tens of microseconds.
    """

    def seconds(rounds: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(chain(jnp.int32(rounds), *args))
        return time.perf_counter() - start

    seconds(SHORT)
    guess = max(1e-6, (seconds(LONG) - seconds(SHORT)) / (LONG - SHORT))
    long = max(LONG, min(400, round(LEAST_MS / 1e3 / guess)))
    times = [(seconds(long) - seconds(SHORT)) / ((long - SHORT) * INNER) * 1e3 for _ in range(REPEATS)]
    times.sort()
    return {"ms": statistics.median(times), "ms_min": times[0], "ms_max": times[-1]}


def time_kernels(chain, args) -> dict[str, Any]:
    """By the profiler, milliseconds per call: the op's own kernels, without the loop around them, and every kernel."""
    rounds = 2
    times = kernel_times(lambda: jax.block_until_ready(chain(jnp.int32(rounds), *args)))
    each = {name: ms / (rounds * INNER) for name, (ms, _) in times.items()}
    own = sum(ms for name, ms in each.items() if "attention" in name)
    return {"kernel_ms": own, "kernels": {name: round(ms, 5) for name, ms in each.items() if ms > 5e-4}}


def sweep(name, shape, calls, args, report):
    """Compiles all `(label, call)` in parallel, times them one by one, keeps what failed as an error."""
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        futures = {label: pool.submit(compile_chain, call, args) for label, call in calls.items()}
    for label, future in futures.items():
        try:
            chain = future.result()
            row = time_chain(chain, args)
            row |= time_kernels(chain, args)
            row["temp_bytes"] = temp_bytes(chain)
        except Exception as error:
            row = {"error": repr(error)[:300]}
        report(name, shape, label, row)


def run_decode(shape, configs, implementations, report):
    B, H, K, D, ctx, S, _ = shape
    pool, table = make_pool(jax.random.key(0), B, K, D, ctx, S)
    lens = jnp.full((B,), ctx, jnp.int32)
    q = jax.random.normal(jax.random.key(1), (B, H, D), jnp.bfloat16)
    calls = {}
    for name in implementations:
        kernel = kernel_of("paged_decode_attention", name)

        def call(q, layer, pool, table, lens, config=None, kernel=kernel):
            options = {**PLAIN, "scale": D**-0.5, "layer": layer}
            return kernel(q, pool, table, lens, config=config, **options)[0]

        for config in configs.get(name, [None]):
            calls[f"{name} {json.dumps(config)}"] = functools.partial(call, config=config)
    sweep("decode", shape, calls, (q, pool, table, lens), report)


def shared_plan(name, table, lens, H, K, D, S, split=pk.SPLIT, rows=None):
    """The plan of this table, with tiles that suit the implementation unless `rows` says otherwise."""
    group = pk.LayerGroup((0,), K, D, jnp.bfloat16, num_heads=H)
    rows = pk.rows_per_tile(group, S, split=split, implementation=name) if rows is None else rows
    return pk.plan_shared_prefix(np.asarray(table), np.asarray(lens), S, split=split, rows_per_tile=rows)


def shared_call(name, plan, config, D):
    kernel = kernel_of("shared_prefix_attention", name)

    def call(q, layer, pool, table, lens):
        options = {**PLAIN, "scale": D**-0.5, "layer": layer}
        return kernel(q, pool, table, lens, plan, config=config, **options)[0]

    return call


def plain_call(D):
    plain = kernel_of("paged_decode_attention", "triton")
    return lambda q, layer, pool, table, lens: plain(q, pool, table, lens, scale=D**-0.5, layer=layer, **PLAIN)[0]


def run_shared(shape, configs, implementations, report):
    """Shared-prefix decode over split sizes, tile sizes and launch parameters, beside plain decode on the same table."""
    B, H, K, D, ctx, S, shared = shape
    pool, table = make_pool(jax.random.key(0), B, K, D, ctx, S)
    table = table.at[:, : shared // S].set(table[0, : shared // S])
    lens = jnp.full((B,), ctx, jnp.int32)
    q = jax.random.normal(jax.random.key(1), (B, H, D), jnp.bfloat16)
    calls = {"plain triton": plain_call(D)}
    own = -(-(ctx - shared) // S)

    def own_call(q, layer, pool, table, lens, config=None):
        kernel = kernel_of("paged_decode_attention", "triton")
        options = {**PLAIN, "scale": D**-0.5, "layer": layer}
        return kernel(q, pool, table[:, -own:], jnp.minimum(lens, own * S), config=config, **options)[0]

    calls["own tokens alone"] = own_call
    for name in implementations:
        for split, rows, config in configs.get(name, [(pk.SPLIT, None, None)]):
            if rows is not None and rows > 2 * B:
                continue
            plan = shared_plan(name, table, lens, H, K, D, S, split, rows)
            if plan is None:
                continue
            label = f"{name} split {split} rows {plan.rows_per_tile} {json.dumps(config)}"
            calls[label] = shared_call(name, plan, config, D)
    sweep("shared", shape, calls, (q, pool, table, lens), report)


def run_crossover(H, K, D, implementations, report, S=64):
    """Default launches of plain and shared decode over rows x shared length: where sharing begins to pay."""
    longest = CROSSOVER_SHARED[-1] + OWN
    pool, full = make_pool(jax.random.key(0), CROSSOVER_ROWS[-1], K, D, longest, S)
    cases = []
    for rows, shared in itertools.product(CROSSOVER_ROWS, CROSSOVER_SHARED):
        table = full[:rows, : (shared + OWN) // S].at[:, : shared // S].set(full[0, : shared // S])
        lens = jnp.full((rows,), shared + OWN, jnp.int32)
        q = jax.random.normal(jax.random.key(1), (rows, H, D), jnp.bfloat16)
        calls = {"plain": plain_call(D)}
        for name in implementations:
            calls[f"shared {name}"] = shared_call(name, shared_plan(name, table, lens, H, K, D, S), None, D)
        for label, call in calls.items():
            cases.append(([rows, H, K, D, shared + OWN, S, shared], label, call, (q, pool, table, lens)))
    with concurrent.futures.ThreadPoolExecutor(14) as threads:
        chains = list(threads.map(lambda case: compile_chain(case[2], case[3]), cases))
    for (shape, label, _, args), chain in zip(cases, chains, strict=True):
        report("crossover", shape, label, time_kernels(chain, args))


def run_head_dims(report):
    """Triton beside Mosaic at the less usual sizes of heads, both with the launches that they choose."""
    names = ("triton", "mosaic_gpu")
    for head_dim, ops in HEAD_DIMS.items():
        shape = [64, 32, 8, head_dim, 8192, 64]
        if "decode" in ops:
            run_decode([*shape, 0], {}, names, report)
        if "shared" in ops:
            run_shared([*shape, 7168], {}, names, report)
        if "prefill" in ops:
            run_prefill([8, 32, 8, head_dim, 8192, 128, 64], {}, names, report)


def run_window(report, tune=False):
    """GPT-OSS shapes: window and sinks at a long context, beside the plain kernel over the tokens that are read."""
    H, K, D, S, window, ctx = 64, 8, 64, 64, 128, 8192
    sinks = jax.random.normal(jax.random.key(2), (H,), jnp.float32)
    kernel = kernel_of("paged_decode_attention", "triton")

    def decode(q, layer, pool, table, lens, sinks, length=ctx, window=None, with_sinks=False, **options):
        keywords = {**PLAIN, "window": window, "sinks": sinks if with_sinks else None, "scale": D**-0.5, "layer": layer}
        keywords |= options
        return kernel(q, pool, table[:, : -(-length // S)], jnp.minimum(lens, length), **keywords)[0]

    for B in (1, 64):
        pool, table = make_pool(jax.random.key(0), B, K, D, ctx, S)
        q = jax.random.normal(jax.random.key(1), (B, H, D), jnp.bfloat16)
        calls = {
            "plain over the window": functools.partial(decode, length=window),
            "window and sinks": functools.partial(decode, window=window, with_sinks=True),
            "plain over everything": decode,
            "sinks over everything": functools.partial(decode, with_sinks=True),
            "window alone": functools.partial(decode, window=window),
        }
        for config in WINDOW_CONFIGS if tune else []:
            run = functools.partial(decode, config=config)
            calls[f"plain over the window {json.dumps(config)}"] = functools.partial(run, length=window)
            calls[f"window and sinks {json.dumps(config)}"] = functools.partial(run, window=window, with_sinks=True)
        lens = jnp.full((B,), ctx, jnp.int32)
        sweep("window decode", [B, H, K, D, ctx, S, window], calls, (q, pool, table, lens, sinks), report)

    def prefill(
        q, layer, pool, table, offsets, lens, sinks, name="mosaic_gpu", window=None, with_sinks=False, **options
    ):
        keywords = {**PLAIN, "window": window, "sinks": sinks if with_sinks else None, "scale": D**-0.5, "layer": layer}
        keywords |= options
        return kernel_of("ragged_paged_attention", name)(q, pool, table, offsets, lens, **keywords)[0]

    # 64 rows of one window of cached and one of new tokens are what 8 rows of 1024 new tokens see through it.
    for B, cached, new in ((8, ctx, 1024), (64, window, window)):
        pool, table = make_pool(jax.random.key(0), B, K, D, cached + new, S)
        q = jax.random.normal(jax.random.key(1), (B * new, H, D), jnp.bfloat16)
        offsets, lens = jnp.arange(B + 1, dtype=jnp.int32) * new, jnp.full((B,), cached + new, jnp.int32)
        calls = {}
        for name in ("mosaic_gpu", "triton"):
            run = functools.partial(prefill, name=name)
            calls[f"{name}: plain over everything"] = run
            if cached == ctx and tune and name == "mosaic_gpu":
                for config in WINDOW_PREFILL_CONFIGS:
                    label = f"{name}: window and sinks {json.dumps(config)}"
                    calls[label] = functools.partial(run, window=window, with_sinks=True, config=config)
            if cached == ctx:
                calls[f"{name}: window alone"] = functools.partial(run, window=window)
                calls[f"{name}: sinks over everything"] = functools.partial(run, with_sinks=True)
                calls[f"{name}: window and sinks"] = functools.partial(run, window=window, with_sinks=True)
        shape = [B, H, K, D, cached, new, S, window]
        sweep("window prefill", shape, calls, (q, pool, table, offsets, lens, sinks), report)


def run_prefill(shape, configs, implementations, report):
    B, H, K, D, cached, new, S = shape
    pool, table = make_pool(jax.random.key(0), B, K, D, cached + new, S)
    lens = jnp.full((B,), cached + new, jnp.int32)
    offsets = jnp.arange(B + 1, dtype=jnp.int32) * new
    q = jax.random.normal(jax.random.key(1), (B * new, H, D), jnp.bfloat16)
    calls = {}
    for name in implementations:
        kernel = kernel_of("ragged_paged_attention", name)

        def call(q, layer, pool, table, offsets, lens, config=None, kernel=kernel):
            options = {**PLAIN, "scale": D**-0.5}
            options |= {} if config is None else {"config": config}
            return kernel(q, pool, table, offsets, lens, layer=layer, **options)[0]

        for config in configs.get(name, [None]):
            calls[f"{name} {json.dumps(config)}"] = functools.partial(call, config=config)
    sweep("prefill", shape, calls, (q, pool, table, offsets, lens), report)


def run_append(report, tune=False):
    """Decode-sized and prefill-sized writes at 8 KV heads of 128; bytes are those read and written."""
    pool = jnp.zeros(pk.pool_shape(4, 8192, 16, 8, 128), jnp.bfloat16)
    P = pool.shape[1]
    for T in (64, 8192):
        k = jax.random.normal(jax.random.key(0), (T, 8, 128), jnp.bfloat16)
        slots = jnp.arange(T, dtype=jnp.int32) % 16
        ids = jnp.asarray(np.random.default_rng(0).permutation(P)[: -(-T // 16)].astype(np.int32)).repeat(16)[:T]
        flags = (jnp.ones(P, bool), jnp.ones(P, jnp.int32))
        kernels = {name: kernel_of("append_kv", name) for name in ("triton", "mosaic_gpu", "reference")}
        for config in APPEND_CONFIGS[1:] if tune and T > 64 else []:
            kernels[f"mosaic_gpu {json.dumps(config)}"] = functools.partial(kernels["mosaic_gpu"], config=config)
        for name, kernel in kernels.items():

            def chain(n, pool, k, kernel=kernel, ids=ids, slots=slots, flags=flags):
                for i in range(n):
                    pool, _ = kernel(pool, k, k, ids, slots, *flags, layer=jnp.int32(i % 4))
                return pool

            try:
                runs = [
                    jax.jit(functools.partial(chain, n), donate_argnums=0).lower(pool, k).compile() for n in (4, 36)
                ]
            except Exception as error:
                report("append", [T, 8, 128], name, {"error": repr(error)[:300]})
                continue
            times = []
            for _ in range(REPEATS + 1):
                pair = []
                for run in runs:
                    start = time.perf_counter()
                    pool = jax.block_until_ready(run(pool, k))
                    pair.append(time.perf_counter() - start)
                times.append((pair[1] - pair[0]) / 32 * 1e3)
            ms = statistics.median(times[1:])
            moved = 4 * k.nbytes
            row = {"ms": ms, "GBps": moved / ms / 1e6, "temp_bytes": temp_bytes(runs[0])}
            report("append", [T, 8, 128], name, row)


def run_copies(report, tune=False):
    """Gather and scatter of 256 pages of 36 layers; bytes are those read and written."""
    pool = jax.random.normal(jax.random.key(0), pk.pool_shape(36, 2048, 16, 8, 128), jnp.bfloat16)
    ids = jnp.asarray(np.random.default_rng(0).permutation(2048).astype(np.int32)).reshape(8, 256)
    pages = jax.block_until_ready(pk.gather_pages(pool, ids[0], implementation="triton"))
    kernels = {}
    for name, config in [("triton", {}), *(("mosaic_gpu", config) for config in (COPY_CONFIGS if tune else [{}]))]:
        for op in ("gather", "scatter"):
            kernel = kernel_of(f"{op}_pages", name)
            label = f"{op} {name} {json.dumps(config)}" if config else f"{op} {name}"
            kernels[label] = functools.partial(kernel, config=config) if config else kernel
    for label, kernel in kernels.items():
        gathers = label.startswith("gather")
        try:
            if gathers:
                program = jax.jit(kernel).lower(pool, ids[0]).compile()
            else:
                program = jax.jit(kernel, donate_argnums=0).lower(pool, ids[0], pages).compile()
        except Exception as error:
            report("copy", [256, 36], label, {"error": repr(error)[:300]})
            continue
        times = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            for row_ids in ids:
                if gathers:
                    pages = program(pool, row_ids)
                else:
                    pool = program(pool, row_ids, pages)
            jax.block_until_ready((pool, pages))
            times.append((time.perf_counter() - start) / len(ids) * 1e3)
        ms = statistics.median(times)
        temp = temp_bytes(program)
        report("copy", [256, 36], label, {"ms": ms, "GBps": 2 * pages.nbytes / ms / 1e6, "temp_bytes": temp})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--check", action="store_true", help="compare with float64 first")
    parser.add_argument("--tune", action="store_true", help="sweep launch parameters")
    parser.add_argument("--peer", action="store_true", help="time FlashInfer too")
    parser.add_argument("--only", default="decode,shared,crossover,window,prefill,append,copy")
    parser.add_argument("--implementations", default="triton")
    parser.add_argument("--plain-peer", action="store_true", help="leave out the peer's shared-prefix kernels")
    parser.add_argument("--rows", type=int, default=None, help="only the first rows of each op")
    options = parser.parse_args()
    only, names = options.only.split(","), options.implementations.split(",")
    decode, prefill = DECODE[: options.rows], PREFILL[: options.rows]
    rows: list[dict] = []
    result = {"jax": jax.__version__, "gpu": jax.devices()[0].device_kind, "rows": rows}

    def report(op, shape, label, row):
        rows.append({"op": op, "shape": shape, "label": label, **row})
        text = " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items())
        print(op, shape, label, text, flush=True)
        options.out.write_text(json.dumps(result, indent=1))

    peer_decode = [[*shape[:6], 0] for shape in decode] if options.plain_peer else decode
    peer = [sys.executable, str(Path(__file__).with_name("flashinfer_peer.py")), f"{options.out}.peer"]
    peer += [json.dumps(peer_decode if "decode" in only else []), json.dumps(prefill if "prefill" in only else [])]
    compiling = subprocess.Popen([*peer, "--compile"]) if options.peer else None
    if options.check:
        import kernel_checks

        kernel_checks.run(names, [op for op in ("decode", "shared", "prefill") if op in only], report)
    if compiling is not None:
        compiling.wait(timeout=240)
    decode_configs = DECODE_CONFIGS if options.tune else {}
    prefill_configs = {"triton": PREFILL_CONFIGS} if options.tune else {}
    shared_configs = SHARED_CONFIGS if options.tune else {}
    for shape in decode if "decode" in only else []:
        run_decode(shape, decode_configs, names, report)
    for shape in prefill if "prefill" in only else []:
        run_prefill(shape, prefill_configs, names, report)
    for shape in decode if "shared" in only else []:
        if shape[6]:
            run_shared(shape, shared_configs, names, report)
    if "crossover" in only:
        run_crossover(32, 8, 128, names, report)
        run_crossover(64, 8, 64, names, report)
    if "window" in only:
        run_window(report, options.tune)
    if "head_dims" in only:
        run_head_dims(report)
    if "append" in only:
        run_append(report, options.tune)
    if "copy" in only:
        run_copies(report, options.tune)
    if options.peer:
        subprocess.run(peer, check=False)
        if Path(f"{options.out}.peer").exists():
            result["peer"] = json.loads(Path(f"{options.out}.peer").read_text())
            options.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
