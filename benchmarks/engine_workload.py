"""Many requests at once: groups with a common beginning each, run to the end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from benchmarks.engine_bench import Bench
from benchmarks.engine_cases import close
from benchmarks.engine_phases import phase_times
from benchmarks.engine_report import print_phases
from prefix_reuse import Engine, SamplingParams
from prefix_reuse.plan import pages_for

PREFILL_CALLS = 16
"""Of a turn of the workload: enough for all rows, which then decode together."""


def workload(bench: Bench) -> Iterator[dict[str, Any]]:
    """All requests at once: groups with a common beginning each, greedy, run to the end."""
    bench.release()
    at = bench.lengths
    tokens = at.group_shared + at.group_own + at.answer
    own_pages = pages_for(tokens, at.page) - at.group_shared // at.page + 1
    groups = at.groups * at.group_shared // at.page
    config = bench.config(
        num_device_pages=groups + bench.workload_rows * own_pages,
        num_host_pages=groups + (at.requests + bench.workload_rows) * own_pages // 2,
        max_rows=bench.workload_rows,
        prefill_calls=PREFILL_CALLS,
        max_context=pages_for(tokens, at.page) * at.page,
        min_prefill_tokens=at.chunk // 4,
        min_decode_rows=max(1, bench.workload_rows // 4),
    )
    engine = bench.engine(config)
    params = SamplingParams(max_tokens=at.answer, ignore_eos=True)
    for attempt in ("first, compiling", "timed"):
        heads = [bench.fresh(at.group_shared) for _ in range(at.groups)]
        prompts = [bench.after(heads[i % at.groups], at.group_own) for i in range(at.requests)]
        before = engine.stats()
        start = time.perf_counter()
        outputs = engine.generate(prompts, params)
        seconds = time.perf_counter() - start
        after = engine.stats()
        if any(len(output.token_ids) != at.answer for output in outputs):
            raise RuntimeError("an answer is too short")
        computed = after.prefill.computed_tokens - before.prefill.computed_tokens
        yield {
            "case": f"workload, {attempt}",
            "requests": at.requests,
            "seconds": seconds,
            "tokens_per_s": at.requests * at.answer / seconds,
            "cached_tokens": after.prefill.cached_tokens - before.prefill.cached_tokens,
            "computed_tokens": computed,
            "least_computed_tokens": at.groups * at.group_shared + at.requests * at.group_own,
            "prefill_batches": after.prefill.batches - before.prefill.batches,
            "decode_steps": after.decode.steps - before.decode.steps,
            "compiled": sum(after.compilations.values()) - sum(before.compilations.values()),
            "ideal_s": ideal_seconds(bench, computed),
        }
        engine.clear_cache()
    if bench.profile:
        profile_workload(bench, engine, params)
    yield bench.memory("memory, workload", engine)
    close(engine)


def ideal_seconds(bench: Bench, computed: int) -> float:
    """Seconds: the computed prompt tokens' FLOPs, and decoding with all rows of the engine at work."""
    at = bench.lengths
    own = at.group_own + at.answer // 2
    prefill = bench.costs.prefill_flops(at.group_shared // 2, 1) * computed / bench.rates.matmul
    rows = min(bench.workload_rows, at.requests)
    shared = at.groups * bench.costs.kv_bytes(at.group_shared)
    step = bench.costs.weight_bytes(rows) + shared + rows * bench.costs.kv_bytes(own)
    return prefill + at.requests / rows * at.answer * step / bench.rates.read


def profile_workload(bench: Bench, engine: Engine, params: SamplingParams) -> None:
    """Prints host phases of one more pass."""
    at = bench.lengths
    heads = [bench.fresh(at.group_shared) for _ in range(at.groups)]
    prompts = [bench.after(heads[i % at.groups], at.group_own) for i in range(at.requests)]
    print_phases("the workload", [phase_times(engine, lambda: engine.generate(prompts, params))])
