"""Decode steps of rows that all run together, with contexts of their own or with most of them shared."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.engine_bench import Bench
from benchmarks.engine_cases import ONE, close, drain, without_host_copies
from benchmarks.engine_phases import phase_times
from benchmarks.engine_report import print_kernels, print_phases
from benchmarks.expert_reads import ExpertReads, decoded, mean_distinct
from benchmarks.profiling import kernel_times
from prefix_reuse import Engine, SamplingParams
from prefix_reuse.plan import pages_for


def decode(bench: Bench) -> Iterator[dict[str, Any]]:
    """Steps of B rows, each with a context of its own or with most of it shared."""
    bench.release()
    at = bench.lengths
    turns = 5 + bench.turns_a_page + max(8, bench.repeats)  # timed, and those that start, end and profile
    steps = bench.decode_steps * turns
    tail = pages_for(steps + 1, at.page) + 1
    own_pages = at.context // at.page + tail
    room = bench.free_bytes()
    limit = room // bench.costs.page_bytes if room is not None else max(at.rows) * own_pages + tail
    fits = [rows for rows in at.rows if rows * own_pages <= limit]
    most = max(at.rows)
    shared_pages = at.shared // at.page + most * (own_pages - at.shared // at.page)
    pages = max([rows * own_pages for rows in fits] + [shared_pages]) + tail
    config = bench.config(
        num_device_pages=pages,
        num_host_pages=pages + tail,
        max_rows=most,
        max_context=own_pages * at.page,
        min_prefill_tokens=max(at.new, most),
    )
    engine = bench.engine(config)
    experts = ExpertReads(engine) if bench.costs.num_experts else None
    params = SamplingParams(max_tokens=steps, ignore_eos=True)
    for shared in (0, at.shared):
        head = bench.fresh(shared)
        prompts = [
            np.concatenate([head, bench.fresh(at.context - shared)]) for _ in range(most if shared else max(fits))
        ]
        started = time.perf_counter()
        with without_host_copies(engine):
            engine.generate(prompts, ONE)
        filled = time.perf_counter() - started
        for rows in at.rows:
            if shared and rows == 1:
                continue
            case = {"case": "decode", "rows": rows, "shared": shared, "own": at.context - shared}
            if not shared and rows not in fits:
                need = rows * own_pages * bench.costs.page_bytes
                yield {**case, "left_out": f"{need / 1e9:.1f} GB of pages do not fit {(room or 0) / 1e9:.1f} GB"}
                continue
            yield {
                **case,
                **decode_rows(bench, engine, prompts[:rows], params, shared, experts),
                "fill_s": filled,
            }
        engine.clear_cache()
    yield bench.memory("memory, decode", engine)
    close(engine)


def decode_rows(
    bench: Bench,
    engine: Engine,
    prompts: Sequence[np.ndarray],
    params: SamplingParams,
    shared: int,
    experts: ExpertReads | None,
) -> dict[str, Any]:
    """Times turns of the engine in which all rows decode. Every prompt is cached: a turn starts them all.

    The steps of the last turn are then looked at for what they read; `experts` is None for a dense model.
    """
    rows, earlier = len(prompts), engine.stats().decode.tokens
    requests = [engine.submit(prompt, params) for prompt in prompts]
    engine.step()  # admits, replays last tokens, compiles
    for _ in range(bench.turns_a_page):  # until pages are full: their copy compiles, too
        engine.step()
    before = engine.stats()
    if (before.decode.tokens - earlier) % rows or len(engine.scheduler.running) != rows:
        raise RuntimeError("the rows did not start together")
    turns = [bench.turn_ms(engine) for _ in range(max(8, bench.repeats))]
    after = engine.stats()
    if after.decode.tokens - before.decode.tokens != rows * len(turns) * bench.decode_steps:
        raise RuntimeError("a row stopped while it was timed")
    live = engine.scheduler.running
    taken, _ = decoded(live, bench.decode_steps)
    read = experts.mean(live, bench.decode_steps) if experts else None
    if bench.profile:
        profile_decode(bench, engine, rows, shared)
    for request in requests:
        engine.cancel(request)
    drain(engine)
    ideal = bench.costs.decode_ms(bench.rates, len(prompts[0]), rows, shared, read)
    ms = statistics.mean(turns)
    return {
        "ms": ms,  # of all turns: those in which pages fill and are copied to the host count too
        "ms_median": statistics.median(turns),
        "ms_min": min(turns),
        "ms_max": max(turns),
        "tokens_per_s": rows / ms * 1e3,
        "ideal_ms": ideal,
        "of_ideal": ideal / ms,
        "distinct_tokens": mean_distinct(taken),  # that a step takes: why rows choose the same experts
        **({} if read is None else {"experts_read": read, "experts_expected": bench.costs.experts(rows)}),
        "shared_reads": after.decode.shared_prefix_steps > before.decode.shared_prefix_steps,
    }


def profile_decode(bench: Bench, engine: Engine, rows: int, shared: int) -> None:
    """Prints host phases of one turn and kernels of another."""
    what = f"a decode step of {rows} rows, {shared} shared"
    print_phases(f"a turn of {bench.decode_steps} steps, {rows} rows", [phase_times(engine, engine.step)])
    print_kernels(what, kernel_times(engine.step), bench.decode_steps)
