"""How figures of whole engines are summed up and printed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.profiling import Timeline

MOST_KERNELS, MOST_WAITS = 40, 24


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Median and spread of `ms`, and the median of the engine's own TTFT."""
    times = sorted(run["ms"] for run in runs)
    own = statistics.median(run["ttft_ms"] for run in runs)
    return {"ms": statistics.median(times), "ms_min": times[0], "ms_max": times[-1], "ttft_ms": own}


def beside(ideal: float, runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The least time, and how many times it the median is."""
    return {"ideal_ms": ideal, "times_ideal": statistics.median(run["ms"] for run in runs) / ideal}


def print_row(row: dict[str, Any]) -> None:
    shown = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in row.items() if key != "case"}
    print(f"  {row['case']:28s} " + "  ".join(f"{key} {value}" for key, value in shown.items()), flush=True)


def print_kernels(what: str, times: dict[str, tuple[float, int]], calls: int) -> None:
    total = sum(ms for ms, _ in times.values()) / calls
    print(f"    kernels of {what}: {total:.3f} ms, {sum(n for _, n in times.values()) // calls} launches", flush=True)
    for name, (ms, count) in list(times.items())[:MOST_KERNELS]:
        print(f"      {ms / calls:9.4f} ms  x{count / calls:<7.1f} {name[:110]}", flush=True)


def print_timeline(what: str, found: Timeline) -> None:
    print_kernels(what, found.kernels, 1)
    print(f"    first to last kernel {found.span:.3f} ms; longest waits, by the kernel that ended them", flush=True)
    for title, times in (("", found.gaps), ("    host calls", found.host)):
        if title:
            print(title, flush=True)
        for name, (ms, count) in list(times.items())[:MOST_WAITS]:
            print(f"      {ms:9.4f} ms  x{count:<5d} {name[:110]}", flush=True)


def print_phases(what: str, runs: Sequence[dict[str, tuple[float, int]]]) -> None:
    """Medians of host milliseconds by phase; a phase contains those that are called within it."""
    print(f"    host time of {what}", flush=True)
    for name in runs[0]:
        ms = statistics.median(run[name][0] for run in runs)
        print(f"      {ms:9.3f} ms  x{runs[0][name][1]:<6d} {name}", flush=True)
