"""What the sections of `engine_models` share: one model, its rates, its lengths and its engines."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from benchmarks.engine_cases import close
from benchmarks.model_costs import TINY, Costs, Rates, measure_rates
from prefix_reuse import Engine, EngineConfig
from prefix_reuse.plan import pages_for
from prefix_reuse.programs import Programs

HEADROOM = 10 << 30
"""Device bytes that are left to activations, logits and staging when the pool of the decode section is sized."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of every case; `scaled` gives the same proportions on a CPU, page size included."""

    page: int = 64
    cached: int = 8192
    new: int = 128
    host: tuple[tuple[int, int], ...] = ((8192, 128), (4096, 1024), (32768, 128))
    """Cached on the host, and new."""
    context: int = 8192
    """Of a row that decodes."""
    shared: int = 7168
    rows: tuple[int, ...] = (1, 16, 64)
    chunk: int = 8192
    """Tokens of the largest prefill program."""
    deterministic_chunk: int = 512
    requests: int = 500
    groups: int = 20
    group_shared: int = 4096
    group_own: int = 256
    answer: int = 128

    def scaled(self, by: int) -> Lengths:
        """All lengths divided by `by`, and fewer requests."""
        return Lengths(
            page=self.page // by,
            cached=self.cached // by,
            new=self.new // by,
            host=tuple((cached // by, new // by) for cached, new in self.host),
            context=self.context // by,
            shared=self.shared // by,
            rows=tuple(dict.fromkeys(max(1, rows // by) for rows in self.rows)),
            chunk=self.chunk // by,
            deterministic_chunk=self.deterministic_chunk // by,
            requests=self.requests // by,
            groups=max(1, self.groups // by),
            group_shared=self.group_shared // by,
            group_own=self.group_own // by,
            answer=self.answer // by,
        )


class Bench:
    """One model, its rates and its engines, for the sections: functions of it that yield rows (plain dicts).

    Args:
      name: of the model, one of `FULL` or `TINY`.
      model: see `make_model`.
      lengths: of the cases.
      repeats: timed runs of each case, after one that is not timed.
      decode_steps: steps of one jitted decode call.
      workload_rows: rows of the workload's engine.
      profile: also print kernel times and host phases.
    """

    def __init__(
        self,
        name: str,
        model: Any,
        lengths: Lengths,
        *,
        repeats: int = 5,
        decode_steps: int = 16,
        workload_rows: int = 256,
        profile: bool = False,
    ):
        self.name, self.model, self.lengths = name, model, lengths
        self.repeats, self.decode_steps, self.workload_rows = repeats, decode_steps, workload_rows
        self.profile = profile
        self.device = jax.devices()[0]
        self.costs = Costs(model, lengths.page)
        self.rates: Rates = measure_rates(model.config.dtype, small=name in TINY)
        self.programs = Programs(model, self.config(), self.device)
        self._rng = np.random.default_rng(0)
        self._latency: Engine | None = None

    def fresh(self, n: int) -> np.ndarray:
        """n token ids that no prompt began with so far."""
        return self._rng.integers(2, self.model.vocab_size, n).astype(np.int32)

    # ---- engines

    def config(self, **sizes: Any) -> EngineConfig:
        """That of the lengths; `sizes` are further fields of it."""
        at = self.lengths
        defaults: dict[str, Any] = {
            "page_size": at.page,
            "max_prefill_tokens": at.chunk,
            "min_prefill_tokens": at.new,
            "decode_steps": self.decode_steps,
            "enable_prefix_reuse": True,
        }
        return EngineConfig(**{**defaults, **sizes})

    def engine(self, config: EngineConfig) -> Engine:
        """One that shares all compiled programs with the others."""
        return Engine(self.model, config, programs=self.programs)

    @property
    def latency_config(self) -> EngineConfig:
        """For one request at a time, up to the longest context."""
        at = self.lengths
        longest = max(cached + new for cached, new in (*at.host, (at.cached, at.new)))
        context = longest + at.page + 8 * self.decode_steps
        pages = 2 * pages_for(context, at.page)
        return self.config(num_device_pages=pages, num_host_pages=pages, max_rows=8, max_context=context)

    @property
    def latency(self) -> Engine:
        """The engine of `latency_config`, kept between sections until another needs the memory."""
        if self._latency is None:
            engine = self._latency = self.engine(self.latency_config)
            if engine.runner.transfer.pins_memory:  # as `warmup` does, which would also compile every shape
                engine.runner.transfer.reserve(engine.memory.host_bytes)
        return self._latency

    def release(self) -> None:
        """Gives back the memory of the kept engine."""
        if self._latency is not None:
            close(self._latency)
            self._latency = None

    @property
    def turns_a_page(self) -> int:
        """Turns of decoding until a page is full."""
        return -(-self.lengths.page // self.decode_steps)

    # ---- what sections are made of

    def after(self, base: np.ndarray, n: int) -> np.ndarray:
        """`base` and n fresh tokens."""
        return np.concatenate([base, self.fresh(n)])

    def repeat(self, run: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
        """What the timed runs return; one before them is not counted."""
        run()
        return [run() for _ in range(self.repeats)]

    def free_bytes(self) -> int | None:
        """Device bytes that a pool may take now; None where the device does not say."""
        stats = self.device.memory_stats() or {}
        if "bytes_limit" not in stats:
            return None
        return int(stats["bytes_limit"] - stats["bytes_in_use"] - HEADROOM)

    def memory(self, case: str, engine: Engine) -> dict[str, Any]:
        """A row: parameters, pools, a page, host pages in use, and what the device says, in units of their names."""
        stats = self.device.memory_stats() or {}
        host = engine.store.stats()
        return {
            "case": case,
            "params_GB": self.costs.param_bytes / 1e9,
            "pools_GB": engine.memory.device_bytes / 1e9,
            "page_MB": self.costs.page_bytes / 1e6,
            "host_GB": (host.num_pages - host.free_pages) * self.costs.page_bytes / 1e9,
            **{
                f"{name}_GB": stats[name] / 1e9
                for name in ("bytes_in_use", "peak_bytes_in_use", "bytes_limit")
                if name in stats
            },
        }

    def turn_ms(self, engine: Engine) -> float:
        """Milliseconds a decode step, of one turn that only decodes."""
        start = time.perf_counter()
        engine.step()
        return (time.perf_counter() - start) / self.decode_steps * 1e3
