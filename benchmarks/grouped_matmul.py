"""grouped_matmul on the expert shapes of gpt-oss-20b and Qwen3-30B-A3B: checked, timed, beside XLA's ragged_dot.

    python -m benchmarks.grouped_matmul OUT.json [--check] [--tokens 1,16,64,128,8192] [--only mxfp4] [--seconds 140]

"chosen" is what the op takes by itself; every other label is a launch of one kernel. T tokens choose their experts at
random. A chain walks through ROUTINGS choices and enough copies of the weights that no call finds its own in the L2. `ms` is
wall time per call of a jitted loop (median, least and most of REPEATS differences between a long and a short one), the plan
of tiles and adding up a row of each result included; `kernel_ms` the kernel alone by the profiler. The limit is the larger
of bytes over 4.5 TB/s (weights of the experts that have rows, x and y, each once) and operations over 700 TFLOP/s. Every
timed launch is compared with a float32 oracle on its own output; `--check` does that alone, with NaN in the weights of
experts without rows.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk
from benchmarks.profiling import kernel_times
from models.mxfp4 import dequantise
from pallas_kernels.grouped_matmul import mosaic_gpu
from pallas_kernels.grouped_matmul.plan import FEW_ROWS, rows_of_tile
from pallas_kernels.grouped_matmul.triton import grouped_matmul

READ, MULTIPLY = 4.5e12, 700e12
ROUTINGS, SLOW_ROUTINGS, SHORT, REPEATS, LEAST_MS, COLD_BYTES = 16, 2, 1, 5, 8, 400 << 20
SAMPLED = 192


@dataclass(frozen=True)
class Case:
    """A matmul of an expert layer: E experts, k a token, `columns` to `out`."""

    name: str
    experts: int
    k: int
    columns: int
    out: int
    kind: str


CASES = (
    Case("gpt-oss-20b gate_up", 32, 4, 2880, 5760, "mxfp4"),
    Case("gpt-oss-20b down", 32, 4, 2880, 2880, "mxfp4"),
    Case("gpt-oss-20b gate_up", 32, 4, 2880, 5760, "bfloat16"),
    Case("gpt-oss-20b down", 32, 4, 2880, 2880, "bfloat16"),
    Case("qwen3-30b-a3b gate_up", 128, 8, 2048, 1536, "bfloat16"),
    Case("qwen3-30b-a3b down", 128, 8, 768, 2048, "bfloat16"),
)


def launch(block_m: int, block_n: int, block_k: int, warps: int, stages: int, swap: int = 0, group_m: int = 8) -> dict:
    """Launch parameters by name."""
    names = ("block_m", "block_n", "block_k", "num_warps", "num_stages", "swap", "group_m")
    return dict(zip(names, (block_m, block_n, block_k, warps, stages, swap, group_m), strict=True))


# block_n, block_k, warps, stages, swap
FEW = {
    "mxfp4": [
        (64, 256, 4, 4, 1), (64, 128, 4, 4),
    ],
    "bfloat16": [(32, 128, 4, 4), (64, 128, 4, 3), (64, 64, 4, 6), (64, 128, 4, 4, 1), (128, 64, 4, 4, 1)],
}  # fmt: skip
# block_n, block_w, warps of the kernel for a few rows of MXFP4 weights
VECTOR = [(4, 256, 1), (8, 256, 1), (2, 256, 1), (4, 128, 1), (8, 256, 2), (16, 256, 4)]
VECTOR_TOKENS = 4
# rows of a tile -> consumers, bk, stages, blocks, group_m of the Mosaic kernel, beside its own
MOSAIC = {
    16: [(3, 256, 5, 1, 8), (2, 256, 3, 2, 8), (4, 128, 8, 1, 8)],
    32: [(3, 256, 4, 1, 8), (4, 128, 6, 1, 8)],
    64: [(3, 128, 5, 1, 8), (2, 128, 7, 1, 8)],
    128: [(3, 128, 3, 1, 8), (4, 64, 4, 1, 8), (2, 128, 4, 1, 8)],
}
# block_m, then as above, then group_m
MANY = {
    "mxfp4": [
        (128, 128, 128, 8, 3, 1), (128, 256, 128, 8, 2, 1),
    ],
    "bfloat16": [
        (128, 128, 64, 8, 3), (128, 128, 64, 8, 4), (128, 256, 64, 8, 3),
        (128, 128, 64, 8, 3, 0, 1), (128, 128, 64, 4, 4),
    ],
}  # fmt: skip


def launches(case: Case, tokens: int) -> list[dict[str, int] | None]:
    """What to time of the Triton kernel; None is its own launch."""
    rows = rows_of_tile(tokens * case.k, case.experts, False)
    if rows == 128:
        return [None, *(launch(*values) for values in MANY[case.kind])]
    if tokens == 16:
        return [None]
    tried: list[dict[str, int] | None] = [None, *(launch(rows, *values) for values in FEW[case.kind])]
    if case.kind == "mxfp4" and tokens <= VECTOR_TOKENS:
        names = ("block_n", "block_w", "num_warps")
        tried += [{"most_rows": tokens * case.k, **dict(zip(names, values, strict=True))} for values in VECTOR]
    return tried


def mosaic_launches(case: Case, tokens: int) -> list[dict[str, int]]:
    """What to time of the Mosaic kernel, which takes no calls of a few rows."""
    block_m = rows_of_tile(tokens * case.k, case.experts, False)
    names = ("consumers", "bk", "stages", "blocks", "group_m")
    if case.kind != "mxfp4" or tokens * case.k <= FEW_ROWS:
        return []
    return [{"block_m": block_m, **dict(zip(names, values, strict=True))} for values in MOSAIC[block_m]]


def make_weights(case: Case, number: int) -> Any:
    """Random weights; MXFP4 ones have the scales of a trained model's size."""
    keys = jax.random.split(jax.random.key(number), 2)
    shape = (case.experts, case.out, case.columns)
    if case.kind == "bfloat16":
        return jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16) * case.columns**-0.5)(keys[0])
    blocks = jax.random.bits(keys[0], (*shape[:2], case.columns // 32, 16), jnp.uint8)
    scales = jax.random.randint(keys[1], (*shape[:2], case.columns // 32), 115, 122).astype(jnp.uint8)
    return jax.jit(pk.Mxfp4.pack)(blocks, scales)


def copies_of(case: Case) -> list[Any]:
    """So many random weights that all of them do not fit in the L2."""
    leaves = jax.tree.leaves(jax.eval_shape(functools.partial(make_weights, case), 0))
    size = sum(a.size * a.dtype.itemsize for a in leaves)
    return [make_weights(case, number) for number in range(-(-COLD_BYTES // size))]


def make_routings(case: Case, tokens: int) -> np.ndarray:
    """int32 [ROUTINGS, E]: rows of each expert."""
    rng = np.random.default_rng(tokens)
    chosen = np.argsort(rng.random((ROUTINGS, tokens, case.experts)), axis=-1)[..., : case.k]
    return np.stack([np.bincount(routing.ravel(), minlength=case.experts) for routing in chosen]).astype(np.int32)


def ragged_dot(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
    """XLA's own grouped matmul."""
    numbers = jax.lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
    y = jax.lax.ragged_dot_general(x, weight, sizes, numbers, preferred_element_type=jnp.float32)
    return y.astype(x.dtype)


def calls_of(case: Case, tokens: int) -> dict[str, Any]:
    """Label -> function of (x, weight, group sizes)."""
    calls: dict[str, Any] = {"chosen": pk.grouped_matmul}
    for config in launches(case, tokens):
        run = functools.partial(grouped_matmul, bias=None, fixed_tile=False, config=config)
        calls["triton" if config is None else json.dumps(config)] = run
    for config in mosaic_launches(case, tokens):
        run = functools.partial(mosaic_gpu.grouped_matmul, bias=None, fixed_tile=False, config=config)
        calls[f"mosaic {json.dumps(config)}"] = run
    if case.kind == "bfloat16":
        calls["ragged_dot"] = ragged_dot
    return calls


def compile_chain(call: Any, turns: int, x: Any, weights: Any, sizes: Any) -> Any:
    """A program of `n` walks through the last `turns` routings, n traced: the last result, and a sum over all calls.

    The sum takes a row of every result, since XLA drops a call whose result nobody uses.
    """

    def chain(n, x, weights, sizes):
        def walk(number, carry):
            y, total = carry
            for weight in weights:
                y = call(x, weight, sizes[number % turns + ROUTINGS - turns])
                total = total + y[0].astype(jnp.float32)
            return y, total

        out = weights[0].shape[1]
        empty = jnp.zeros((x.shape[0], out), x.dtype), jnp.zeros(out, jnp.float32)
        return jax.lax.fori_loop(0, n * turns, walk, empty)

    return jax.jit(chain).lower(jnp.int32(1), x, weights, sizes).compile()


def time_chain(chain: Any, args: Any, calls: int) -> dict[str, Any]:
    """Milliseconds per call, by the clock and by the profiler; `calls` in one walk."""

    def seconds(walks: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(chain(jnp.int32(walks), *args))
        return time.perf_counter() - start

    seconds(SHORT)
    guess = max(1e-6, (seconds(3) - seconds(SHORT)) / 2)
    walks = max(2, min(200, round(LEAST_MS / 1e3 / guess)))
    repeats = REPEATS if guess < 0.1 else 2
    times = sorted((seconds(SHORT + walks) - seconds(SHORT)) / (walks * calls) * 1e3 for _ in range(repeats))
    kernels = kernel_times(lambda: jax.block_until_ready(chain(jnp.int32(SHORT), *args)))
    each = {name: ms / calls for name, (ms, _) in kernels.items()}
    own = sum(ms for name, ms in each.items() if "grouped_matmul" in name)
    launches = sum(count for name, (_, count) in kernels.items() if "grouped_matmul" in name)
    if launches not in (0, SHORT * calls):
        raise RuntimeError(f"{launches} launches of {SHORT * calls} calls: times per call would be wrong")
    row = {
        "ms": statistics.median(times),
        "ms_min": times[0],
        "ms_max": times[-1],
        "all_kernels_ms": sum(each.values()),
    }
    return {**row, "kernel_ms": own or row["all_kernels_ms"]}


@jax.jit
def exact_rows(x: jax.Array, weight: Any, rows: jax.Array, groups: jax.Array) -> jax.Array:
    """float32 results of some rows."""

    def one(pair):
        row, group = pair
        own = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, group, keepdims=False), weight)
        own = own.values() if isinstance(own, pk.Mxfp4) else own.astype(jnp.float32)
        return jnp.dot(own, x[row].astype(jnp.float32), precision="highest")

    return jax.lax.map(one, (rows, groups))


def error_of(y: Any, x: Any, weight: Any, sizes: np.ndarray) -> float:
    """Largest error over its bar (a bfloat16 rounding of the value and a little of the mean size): passes below 1."""
    count = int(sizes.sum())
    rows = np.unique(np.concatenate([np.cumsum(sizes)[:-1] % count, np.linspace(0, count - 1, SAMPLED).astype(int)]))
    groups = np.searchsorted(np.cumsum(sizes), rows, side="right")
    want = np.asarray(exact_rows(x, weight, jnp.asarray(rows, jnp.int32), jnp.asarray(groups, jnp.int32)))
    if not bool(jnp.isfinite(y).all()) or bool(jnp.any(y[count:])):
        return float("inf")
    bar = 2.0**-8 * np.abs(want) + 1e-3 * np.sqrt(np.mean(want**2))
    return float(np.max(np.abs(np.asarray(y[rows].astype(jnp.float32)) - want) / bar))


def check_codes() -> bool:
    """Every code under every scale, against numpy's dequantisation, through the kernel (an identity as x) and `values`."""
    rng = np.random.default_rng(0)
    blocks = rng.permuted(np.arange(256, dtype=np.uint8).repeat(9)[: 129 * 16].reshape(1, 129, 1, 16))
    scales = np.arange(129, dtype=np.uint8).reshape(1, 129, 1)
    true = dequantise(blocks, scales)[0]
    weight = pk.Mxfp4.pack(blocks, scales)
    good = np.array_equal(np.asarray(weight.values())[0][2:], true[2:])  # less would be denormal
    for swap in (0, 1):
        x = jnp.eye(32, dtype=jnp.bfloat16)
        config = launch(32, 64, 64, 4, 2, swap)
        y = grouped_matmul(x, weight, jnp.array([32]), bias=None, fixed_tile=False, config=config)
        good &= np.array_equal(np.asarray(y.astype(jnp.float32)).T[2:], true[2:])
    return good


def check(case: Case, tokens: int) -> dict[str, Any]:
    """All launches of a case, on three routings, with padding rows and NaN (a scale too large) wherever no row may look."""
    weight, routings = make_weights(case, 0), make_routings(case, tokens)
    rows = tokens * case.k + 5
    x = jax.random.normal(jax.random.key(1), (rows, case.columns), jnp.bfloat16).at[tokens * case.k :].set(jnp.nan)
    if tokens == 128:  # all rows to one expert, or to two unequal ones
        routings[1], routings[2] = 0, 0
        routings[1, 3], routings[2, :2] = tokens * case.k, (1, tokens * case.k - 1)
    calls = {label: call for label, call in calls_of(case, tokens).items() if label != "ragged_dot"}
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        programs = pool.map(
            lambda call: jax.jit(call).lower(x, weight, jnp.asarray(routings[0])).compile(), calls.values()
        )
    errors: dict[str, float] = {}
    for label, run in zip(calls, programs, strict=True):
        worst = 0.0
        for sizes in routings[:3]:
            unused = jnp.asarray(sizes == 0)[:, None, None]
            poisoned = (
                pk.Mxfp4(weight.blocks, jnp.where(unused, jnp.uint8(129), weight.scales))
                if isinstance(weight, pk.Mxfp4)
                else jnp.where(unused, jnp.nan, weight)
            )
            worst = max(worst, error_of(run(x, poisoned, jnp.asarray(sizes)), x, poisoned, sizes))
        errors[label] = worst
    fixed = jax.jit(functools.partial(grouped_matmul, bias=None, fixed_tile=True))
    sizes = np.zeros(case.experts, np.int32)
    sizes[:3] = 1, 150, 70
    wide = jax.random.normal(jax.random.key(2), (256, case.columns), jnp.bfloat16)
    together, alone = fixed(wide, weight, jnp.asarray(sizes)), []
    for row in (0, 1, 64, 150, 151, 220):
        single = jnp.asarray(np.eye(case.experts, dtype=np.int32)[np.searchsorted(np.cumsum(sizes), row, side="right")])
        alone.append(bool(jnp.array_equal(fixed(wide[row : row + 1], weight, single)[0], together[row])))
    return {"errors": errors, "same_bits_alone": all(alone), "passed": max(errors.values()) < 1 and all(alone)}


def measure(case: Case, tokens: int, weights: Any, report: Any, deadline: float) -> None:
    """Compiles all launches in parallel and times them one by one."""
    routings = make_routings(case, tokens)
    x = jax.random.normal(jax.random.key(1), (tokens * case.k, case.columns), jnp.bfloat16)
    args = (x, weights, jnp.asarray(routings))
    calls = calls_of(case, tokens)
    turns = {label: ROUTINGS if label != "ragged_dot" else SLOW_ROUTINGS for label in calls}
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        futures = {label: pool.submit(compile_chain, call, turns[label], *args) for label, call in calls.items()}
    expert_bytes = sum(a.nbytes for a in jax.tree.leaves(weights[0])) / case.experts
    touched = float((routings > 0).sum(1).mean())
    moved = touched * expert_bytes + x.nbytes + 2 * x.shape[0] * case.out
    operations = 2 * x.shape[0] * case.columns * case.out
    limit = max(moved / READ, operations / MULTIPLY) * 1e3
    for label, future in futures.items():
        if time.perf_counter() > deadline:
            report(case, tokens, label, {"skipped": "out of time"})
            continue
        try:
            chain = future.result()
            row = time_chain(chain, args, turns[label] * len(weights))
            row["of_limit"] = limit / row["kernel_ms"]
            row["error_over_bar"] = error_of(chain(jnp.int32(1), *args)[0], x, weights[-1], routings[-1])
            row |= {"limit_ms": limit, "MB": moved / 1e6, "GFLOP": operations / 1e9}
            row |= {"TBps": moved / row["kernel_ms"] / 1e9, "TFLOPs": operations / row["kernel_ms"] / 1e9}
        except Exception as error:
            row = {"error": repr(error)[:400]}
        report(case, tokens, label, row)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--check", action="store_true", help="compare with the oracle and time nothing")
    parser.add_argument("--tokens", default="1,64,8192,16,128")
    parser.add_argument("--only", default="", help="cases whose name and kind contain this")
    parser.add_argument("--seconds", type=float, default=140, help="time nothing more after so long")
    options = parser.parse_args()
    deadline = time.perf_counter() + options.seconds
    rows: list[dict[str, Any]] = []
    result = {"jax": jax.__version__, "gpu": jax.devices()[0].device_kind, "rows": rows}

    def report(case: Case, tokens: int, label: str, row: dict[str, Any]) -> None:
        rows.append({"case": case.name, "kind": case.kind, "tokens": tokens, "label": label, **row})
        text = " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items())
        print(case.name, case.kind, tokens, label, text, flush=True)
        options.out.write_text(json.dumps(result, indent=1))

    cases = [case for case in CASES if options.only in f"{case.name} {case.kind}"]
    if options.check:
        result["codes_exact"] = check_codes()
        print("codes exact:", result["codes_exact"], flush=True)
        for case in cases:
            for tokens in (1, 128, 1200):
                report(case, tokens, "check", check(case, tokens))
        passed = result["codes_exact"] and all(row["passed"] for row in rows)
        raise SystemExit(0 if passed else 1)
    for tokens in (int(n) for n in options.tokens.split(",")):
        for case in cases:
            measure(case, tokens, copies_of(case), report, deadline)
    print(f"{time.perf_counter() - deadline + options.seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
