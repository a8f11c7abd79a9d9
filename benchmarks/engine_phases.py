"""Where the host's time goes in what an engine does: inclusive milliseconds of its phases."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax

from prefix_reuse import Engine


def phases_of(engine: Engine) -> list[tuple[str, Any, str]]:
    """(label, owner, attribute) of what is timed; indented ones are called within the one above."""
    runner, programs = engine.runner, engine.programs
    return [
        ("submit", engine, "submit"),
        ("turn", engine, "_turn"),
        ("  land copies, publish", engine.offloader, "land"),
        ("  admit", engine.scheduler, "admit"),
        ("    choose rows", engine.scheduler, "_choose"),
        ("      look up", engine.scheduler, "cached_pages"),
        ("      plan and reserve", engine.scheduler, "_take_host_pages"),
        ("        host pages", engine.scheduler, "_allocate_host_pages"),
        ("    read host pages", engine.scheduler, "_read_loads"),
        ("    carry out", engine.scheduler, "_carry_out"),
        ("      dispatch loads", runner, "load"),
        ("  prefill", engine, "_prefill"),
        ("  decode", engine, "_decode"),
        ("    page tables", runner, "sync_tables"),
        ("    pack", runner, "_pack"),
        ("    sampling inputs", runner, "_sampling"),
        ("    shared-prefix plan", runner.shared, "plan"),
        ("    dispatch prefill", programs, "prefill"),
        ("    dispatch decode", programs, "decode"),
        ("    wait for the device", jax, "device_get"),
        ("    dispatch offloads", engine.offloader, "flush_full_pages"),
        ("    end requests", engine, "_complete"),
    ]


def phase_times(engine: Engine, run: Callable[[], Any]) -> dict[str, tuple[float, int]]:
    """Calls `run` once: label -> (milliseconds in all, calls). What was never called is left out."""
    spent: dict[str, list[float]] = {}
    undo: list[tuple[Any, str, Any]] = []

    def timed(label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **keywords)
            finally:
                spent[label].append((time.perf_counter() - start) * 1e3)

        return call

    try:
        for label, owner, name in phases_of(engine):
            spent[label] = []
            undo.append((owner, name, vars(owner).get(name)))
            setattr(owner, name, timed(label, getattr(owner, name)))
        run()
    finally:
        for owner, name, before in undo:
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
    return {label: (sum(times), len(times)) for label, times in spent.items() if times}
