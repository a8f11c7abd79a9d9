"""Where time goes, from JAX's profiler."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax


def kernel_times(run: Callable[[], Any]) -> dict[str, tuple[float, int]]:
    """GPU kernels of one call of `run`, which must wait for its results: name -> (milliseconds in all, launches)."""
    return _sums((name, end - start) for name, start, end in _gpu_events(_planes(run)))


class Timeline(NamedTuple):
    """Where the time of one call goes, in milliseconds."""

    kernels: dict[str, tuple[float, int]]
    """name -> (milliseconds in all, launches)."""
    span: float
    """From the first kernel's start to the last one's end."""
    gaps: dict[str, tuple[float, int]]
    """Time without any kernel, by the kernel that ended it."""
    host: dict[str, tuple[float, int]]
    """What the host's threads did, inclusive: functions of the driver and of XLA."""


def timeline(run: Callable[[], Any]) -> Timeline:
    """`run` must wait for its results. The profiler makes the host's part longer."""
    planes = _planes(run)
    events = sorted(_gpu_events(planes), key=lambda event: event[1])
    gaps, until = [], events[0][1] if events else 0.0
    for name, start, end in events:
        gaps.append((name, max(0.0, start - until)))
        until = max(until, end)
    host = [
        (event.name, event.duration_ns / 1e6)
        for plane in planes
        if "CPU" in plane.name
        for line in plane.lines
        for event in line.events
        if not event.name.startswith("$")  # Python functions
    ]
    kernels = _sums((name, end - start) for name, start, end in events)
    return Timeline(kernels, until - events[0][1] if events else 0.0, _sums(gaps), _sums(host))


def _planes(run: Callable[[], Any]) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        file = next(Path(folder).rglob("*.xplane.pb"))
        return list(jax.profiler.ProfileData.from_file(str(file)).planes)


def _gpu_events(planes: Iterable[Any]) -> Iterator[tuple[str, float, float]]:
    """(name, start, end) in milliseconds."""
    for plane in planes:
        if "GPU" not in plane.name:
            continue
        for line in plane.lines:
            if line.name is None or not line.name.startswith("Stream"):
                continue
            for event in line.events:
                yield event.name, event.start_ns / 1e6, (event.start_ns + event.duration_ns) / 1e6


def _sums(events: Iterable[tuple[str, float]]) -> dict[str, tuple[float, int]]:
    times: defaultdict[str, list[float]] = defaultdict(list)
    for name, ms in events:
        times[name].append(ms)
    sums = {name: (sum(each), len(each)) for name, each in times.items()}
    return dict(sorted(sums.items(), key=lambda item: -item[1][0]))
