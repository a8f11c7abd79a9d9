"""One decode step of a whole model at Qwen3-8B's dimensions (random weights), against the card's own read rate.

    python -m benchmarks.decode_step OUT.json [--layers 36] [--profile]

The step is the engine's (`prefix_reuse.steps.decode_steps`): append, attention, MLP, unembedding, sampling. Milliseconds of a
step come from the difference of a call of LONG steps and one of SHORT, medians of REPEATS. The limit is the bytes that
must be read (weights but the embedding table, and K and V, a shared page once) over the rate at which a plain sum reads
4 GB in the same run.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import models
import pallas_kernels as pk
from benchmarks.profiling import kernel_times
from prefix_reuse import device_pages
from prefix_reuse.config import SamplingParams
from prefix_reuse.programs import jit_step
from prefix_reuse.sampling import sampling_state
from prefix_reuse.steps import DecodeInputs, decode_steps, make_attend

QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
PAGE, CONTEXT, SHARED = 64, 8192, 7168
SHORT, LONG, REPEATS = 2, 18, 7


def read_rate(size: int = 2 << 30) -> float:
    """Bytes a second at which a sum reads `size` bf16 numbers: 4 GB."""
    numbers = jnp.ones((size,), jnp.bfloat16)

    @jax.jit
    def total(numbers, n):
        return jax.lax.fori_loop(
            0, n, lambda i, s: s + jnp.sum(numbers + i.astype(numbers.dtype), dtype=jnp.float32), 0.0
        )

    times = []
    for _ in range(REPEATS + 1):
        pair = []
        for n in (2, 10):
            start = time.perf_counter()
            total(numbers, jnp.int32(n)).block_until_ready()
            pair.append(time.perf_counter() - start)
        times.append((pair[1] - pair[0]) / 8)
    return numbers.nbytes / statistics.median(times[1:])


def random_pool(state: device_pages.DevicePages) -> device_pages.DevicePages:
    """Fills the pool layer by layer, so that little scratch memory is needed."""

    @partial(jax.jit, donate_argnums=0)
    def fill(pool, layer):
        key = jax.random.fold_in(jax.random.key(0), layer)
        return pool.at[layer].set(jax.random.normal(key, pool.shape[1:], pool.dtype))

    pool = state.kv_pages
    for layer in range(pool.shape[0]):
        pool = fill(pool, jnp.int32(layer))
    return state.replace(kv_pages=pool)


def large_copies(text: str, at_least: int = 8 << 20) -> list[str]:
    """Copy and slice instructions of a compiled program that write `at_least` bytes: there should be none."""
    found = []
    for line in text.splitlines():
        match = re.search(r"= (bf16|f16|f32)\[([\d,]+)\]\S* (copy|dynamic-slice|slice|copy-start)\(", line)
        if match:
            size = {"f32": 4}.get(match[1], 2) * int(np.prod([int(n) for n in match[2].split(",")]))
            if size >= at_least:
                found.append(line.strip()[:160])
    return found


def make_inputs(model: Any, B: int, context: int, steps: int, plan: Any) -> DecodeInputs:
    """A greedy batch of B rows that never ends."""
    arrays: dict[str, Any] = {
        "rows": np.arange(B, dtype=np.int32),
        "tokens": np.arange(B, dtype=np.int32),
        "context_lens": np.full(B, context, np.int32),
        "remaining": np.full(B, 1000, np.int32),
        "stop_ids": np.full((B, 8), -1, np.int32),
        "num_steps": np.int32(steps),
        "sampling": sampling_state([SamplingParams()] * B, list(range(B)), B),
        "counts": jnp.zeros((B, model.vocab_size), jnp.int32),
        "index": np.zeros(B, np.int32),
        "shared": (plan,),
    }
    return jax.device_put(DecodeInputs(**arrays))


def measure(
    model: Any, state: Any, B: int, context: int, plan: Any, profiled: bool, xla: dict[str, str]
) -> tuple[dict[str, Any], Any]:
    """Times of one step, and the pool that comes back."""
    attend = make_attend(model.kv_groups)
    step = jit_step(partial(decode_steps, model, attend, LONG), **xla)
    batches = {n: make_inputs(model, B, context, n, plan) for n in (SHORT, LONG)}
    started = time.perf_counter()
    program = step.lower(model.params, (state,), batches[SHORT]).compile()
    row: dict[str, Any] = {"compile_s": time.perf_counter() - started}

    def run(n: int) -> float:
        nonlocal state
        start = time.perf_counter()
        outputs, (state,) = program(model.params, (state,), batches[n])
        jax.block_until_ready((outputs, state))
        if int(outputs.refused):
            raise RuntimeError("the step refused writes: its table is wrong")
        return time.perf_counter() - start

    run(SHORT)
    times = sorted((run(LONG) - run(SHORT)) / (LONG - SHORT) * 1e3 for _ in range(REPEATS))
    row |= {"ms": statistics.median(times), "ms_min": times[0], "ms_max": times[-1]}
    row["temp_MB"] = program.memory_analysis().temp_size_in_bytes / 1e6
    row["large_copies"] = large_copies(program.as_text())
    if profiled:
        row["kernels_ms"] = {
            f"{name} x{count // SHORT}": ms / SHORT for name, (ms, count) in kernel_times(lambda: run(SHORT)).items()
        }
    return row, state


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=QWEN3_8B["num_hidden_layers"])
    parser.add_argument("--rows", default="1,16,64")
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--shared", type=int, default=SHARED)
    parser.add_argument("--profile", action="store_true", help="kernel times of every case")
    parser.add_argument(
        "--xla", action="append", default=[], metavar="OPTION=VALUE", help="compile with this XLA option"
    )
    options = parser.parse_args()
    xla = dict(option.split("=", 1) for option in options.xla)
    sizes = [int(n) for n in options.rows.split(",")]
    model = models.from_config({**QWEN3_8B, "num_hidden_layers": options.layers})
    weights = sum(a.nbytes for a in jax.tree.leaves(model.params)) - model.params["embed"].nbytes
    rate = read_rate()
    rows: list[dict[str, Any]] = []
    result = {
        "gpu": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "read_rate_TBps": rate / 1e12,
        "weights_GB": weights / 1e9,
    }
    print(result, flush=True)
    result["rows"] = rows
    columns, most = options.context // PAGE + 1, max(sizes)
    (group,) = model.kv_groups
    state = random_pool(
        device_pages.create(group, num_pages=most * columns + 1, page_size=PAGE, max_rows=most, max_columns=columns)
    )
    token_bytes = pk.page_bytes(group, PAGE) // PAGE
    own = np.random.default_rng(0).permutation(most * columns).astype(np.int32).reshape(most, columns)
    rebuild = jax.jit(device_pages.rebuild, donate_argnums=0)
    cases = [(b, 0, False) for b in sizes] + [(b, options.shared, p) for b in sizes[1:] for p in (False, True)]
    for B, shared, planned in cases:
        table, head = own.copy(), shared // PAGE
        table[:B, :head] = own[0, :head]
        table[B:] = -1
        lens = np.full(most, options.context, np.int32)
        state = rebuild(state, table, np.full(most, head, np.int32), lens)
        lanes = pk.rows_per_tile(group, PAGE)
        plan = pk.plan_shared_prefix(table[:B], lens[:B], PAGE, rows_per_tile=lanes) if planned else None
        times, state = measure(model, state, B, options.context, plan, options.profile, xla)
        read = weights + (shared + B * (options.context - shared)) * token_bytes
        limit = read / rate * 1e3
        row = {"B": B, "own": options.context - shared, "shared": shared, "shared_reads": planned, "limit_ms": limit}
        rows.append({**row, "of_limit": limit / times["ms"], **times})
        kernels = times.pop("kernels_ms", {})
        print(json.dumps({**row, "of_limit": limit / times["ms"], **times}), flush=True)
        for name, ms in list(kernels.items())[:14]:
            print(f"    {ms:8.4f} ms a step  {name}", flush=True)
        options.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
