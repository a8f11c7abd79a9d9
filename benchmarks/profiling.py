"""Kernel times from JAX's profiler."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax


def kernel_times(run: Callable[[], Any]) -> dict[str, tuple[float, int]]:
    """GPU kernels of one call of `run`, which must wait for its results: name -> (milliseconds in all, launches)."""
    times: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        file = next(Path(folder).rglob("*.xplane.pb"))
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            if "GPU" not in plane.name:
                continue
            for line in plane.lines:
                if line.name is None or not line.name.startswith("Stream"):
                    continue
                for event in line.events:
                    times[event.name] += event.duration_ns / 1e6
                    counts[event.name] += 1
    return {name: (ms, counts[name]) for name, ms in times.most_common()}
