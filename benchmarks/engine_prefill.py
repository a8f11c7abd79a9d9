"""Times to the first token: cold, warm, beside an engine without reuse, and with the prefix on the host only."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.engine_bench import Bench
from benchmarks.engine_cases import ONE, close, first_event, first_token
from benchmarks.engine_phases import phase_times
from benchmarks.engine_report import beside, print_kernels, print_phases, print_timeline, summary
from benchmarks.profiling import kernel_times, timeline
from prefix_reuse import Engine


def ttft(bench: Bench) -> Iterator[dict[str, Any]]:
    """Cold and warm, and reuse off beside on with nothing to hit, taking turns."""
    at, engine = bench.lengths, bench.latency
    off = bench.engine(dataclasses.replace(bench.latency_config, enable_prefix_reuse=False))
    pairs: list[tuple[float, float]] = []
    colds: list[dict[str, Any]] = []
    for i in range(1 + max(7, bench.repeats)):  # the first compiles
        prompts = [bench.fresh(at.cached + at.new) for _ in range(2)]
        order = ((engine, 0), (off, 1)) if i % 2 else ((off, 1), (engine, 0))
        runs = {n: first_token(e, prompts[n], cached=0) for e, n in order}
        if i:
            colds.append(runs[0])
            pairs.append((runs[0]["ms"], runs[1]["ms"]))
    close(off)
    case = {"cached": at.cached, "new": at.new}
    ideal = bench.costs.prefill_ms(bench.rates, 0, at.cached + at.new)
    yield {"case": "cold", **case, **summary(colds), **beside(ideal, colds)}
    ratios = sorted(on / off for on, off in pairs)
    yield {
        "case": "0% hits, reuse on / off",
        "ratio": statistics.median(ratios),
        "ratio_min": ratios[0],
        "ratio_max": ratios[-1],
        "on_ms": statistics.median(on for on, _ in pairs),
        "off_ms": statistics.median(off for _, off in pairs),
    }
    base = bench.fresh(at.cached)
    engine.generate(base, ONE)
    warm = bench.repeat(lambda: first_token(engine, bench.after(base, at.new), cached=at.cached))
    ideal = bench.costs.prefill_ms(bench.rates, at.cached, at.new)
    yield {"case": "warm", **case, **summary(warm), **beside(ideal, warm)}
    streams = sorted(bench.repeat(lambda: first_event(engine, bench.after(base, at.new))), key=lambda run: run["ms"])
    times = [run["ms"] for run in streams]
    yield {"case": "warm, stream", "ms": statistics.median(times), "ms_min": times[0], "ms_max": times[-1]}
    yield bench.memory("memory", engine)
    if bench.profile:
        profile_warm(bench, engine, base)


def host(bench: Bench) -> Iterator[dict[str, Any]]:
    """The cached pages lie on the host only: they come over the link first."""
    engine = bench.latency
    for cached, new in bench.lengths.host:
        base = bench.fresh(cached)
        engine.generate(base, ONE)

        def run(base: np.ndarray = base, cached: int = cached, new: int = new) -> dict[str, Any]:
            engine.drop_device_pages()
            before = engine.stats().decode.host_pages_loaded
            row = first_token(engine, bench.after(base, new), cached=cached)
            return {**row, "pages_loaded": engine.stats().decode.host_pages_loaded - before}

        runs = bench.repeat(run)
        transfer = bench.costs.load_ms(bench.rates, cached)
        compute = bench.costs.prefill_ms(bench.rates, cached, new)
        warm = bench.repeat(lambda b=base, c=cached, n=new: first_token(engine, bench.after(b, n), cached=c))
        yield {
            "case": "host only",
            "cached": cached,
            "new": new,
            **summary(runs),
            "pages_loaded": runs[-1]["pages_loaded"],
            "ideal_transfer_ms": transfer,
            "ideal_compute_ms": compute,
            **beside(max(transfer, compute), runs),
            "warm_ms": statistics.median(run["ms"] for run in warm),
        }


def profile_warm(bench: Bench, engine: Engine, base: np.ndarray) -> None:
    """Prints kernels, waits and host phases of a cold and a warm prompt."""
    at = bench.lengths
    print_kernels("a cold TTFT", kernel_times(lambda: first_token(engine, bench.fresh(at.cached + at.new))), 1)
    print_timeline("a warm TTFT", timeline(lambda: first_token(engine, bench.after(base, at.new))))
    runs = [phase_times(engine, lambda: first_token(engine, bench.after(base, at.new))) for _ in range(5)]
    print_phases("a warm TTFT", runs)
