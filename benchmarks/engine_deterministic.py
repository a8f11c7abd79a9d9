"""Deterministic mode of a whole engine: whether all bits are equal, and what that costs."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.engine_bench import Bench
from benchmarks.engine_cases import ONE, close, drain, first_token
from prefix_reuse import Engine, SamplingParams
from prefix_reuse.deterministic import ONE_PROGRAM, deterministic_means
from prefix_reuse.verify import run_verify


def deterministic(bench: Bench) -> Iterator[dict[str, Any]]:
    """Whether every way to a token gives the same bits, and what deterministic mode costs."""
    started = time.perf_counter()
    report = run_verify(bench.model, deterministic=True, page_size=bench.lengths.page)
    yield {
        "case": "verify --deterministic",
        "violations": list(report.violations),
        "same_bits": {run.run: run.same_bits for run in report.runs},
        "cached_tokens": {run.run: run.cached_tokens for run in report.runs},
        "first_layer": report.first_layer,
        "seconds": time.perf_counter() - started,
    }
    default, at = bench.latency, bench.lengths
    config = dataclasses.replace(bench.latency_config, deterministic=True)
    means = deterministic_means(bench.model, config, bench.device)
    if means == ONE_PROGRAM:  # otherwise programs have the shapes of default mode
        chunk = at.deterministic_chunk
        config = dataclasses.replace(config, max_prefill_tokens=chunk, min_prefill_tokens=min(at.new, chunk))
    strict = bench.engine(config)
    figures = {name: prices(bench, engine) for name, engine in (("default", default), ("deterministic", strict))}
    close(strict)
    for name, ms in figures["default"].items():
        other = figures["deterministic"][name]
        yield {
            "case": f"price: {name}",
            "means": means,
            "default_ms": ms,
            "deterministic_ms": other,
            "ratio": other / ms,
        }


def prices(bench: Bench, engine: Engine) -> dict[str, float]:
    """Milliseconds of a cold prompt, a warm one, and a decode step of one row and of eight."""
    at = bench.lengths
    cold = bench.repeat(lambda: first_token(engine, bench.fresh(at.cached + at.new), cached=0))
    base = bench.fresh(at.context)
    engine.generate(base, ONE)
    warm = bench.repeat(lambda: first_token(engine, bench.after(base, at.new), cached=at.cached))
    figures = {"prefill": cold, "warm TTFT": warm}
    out = {name: statistics.median(run["ms"] for run in runs) for name, runs in figures.items()}
    params = SamplingParams(max_tokens=6 * bench.decode_steps, ignore_eos=True)
    for rows, context in ((1, at.context), (8, at.context // 8)):
        prompts = [bench.fresh(context) for _ in range(rows)]
        engine.generate(prompts, ONE)
        requests = [engine.submit(prompt, params) for prompt in prompts]
        engine.step()  # all of them hit and start together
        turns = [bench.turn_ms(engine) for _ in range(4)]
        for request in requests:
            engine.cancel(request)
        drain(engine)
        out[f"decode step, {rows} rows of {context}"] = statistics.median(turns)
    return out
