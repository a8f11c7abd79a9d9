"""Counters of an engine, one class per stage, and the printable snapshot that `Engine.stats()` returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pallas_kernels import RowInvariance
from prefix_reuse.device_pool import DevicePoolStats


@dataclass
class RequestCounters:
    submitted: int = 0
    completed: int = 0
    cancelled: int = 0
    refused: int = 0
    """Bad or oversized requests, refused at submit."""
    prefill_failures: int = 0
    """Prefill batches that raised; their rows went back to the queue."""
    reentries: int = 0
    wave_waits: int = 0
    """Times a request waited one step for another that computes its prefix."""


@dataclass
class PrefillCounters:
    """M2: what prompts cost; samples that share one prefill count once. A resumed row counts in `resumed_tokens` only."""

    prompt_tokens: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    hits: int = 0
    full_hits: int = 0
    misses: int = 0
    resumed_tokens: int = 0
    """Tokens that evicted rows brought back, computed or found; never counted as hits."""
    batches: int = 0
    pages_offloaded: int = 0
    """Pages whose copy to the host was started; cached pages are never copied again."""


@dataclass
class DecodeCounters:
    """M3 and decode."""

    steps: int = 0
    tokens: int = 0
    shared_prefix_steps: int = 0
    """Steps in which rows read shared pages together (X2)."""
    shared_prefix_tokens_saved: int = 0
    """Tokens whose K and V each layer did not read again, over all such steps."""
    host_pages_loaded: int = 0
    """Unique host pages copied to the device."""
    host_bytes_loaded: tuple[int, ...] = ()
    """Bytes copied to the device by layer group; a sliding group loads the pages of a hit's last window only (X3)."""
    host_bytes_prefetched: int = 0
    """Bytes whose copy to the device was started before their row was let in."""
    window_pages_returned: int = 0
    """Device pages of sliding groups that rows gave back because their window had passed them (X3)."""
    loads_skipped_duplicate: int = 0
    """Copies saved because another row of the same batch needed the page too."""
    loads_skipped_resident: int = 0
    """Copies saved because the page was on the device already."""
    rollbacks: int = 0
    """Admissions taken back because their pages could not be bound or loaded."""
    pages_deduplicated: int = 0
    """Private copies that were dropped for a resident shared page."""


@dataclass
class FaultCounters:
    """Everything that made a row recompute or drop something; never silent."""

    failed_offloads: int = 0
    failed_loads: int = 0
    failed_prefetches: int = 0
    """Copies that could not be started early; the pages are copied when their row is let in."""
    failed_dissolves: int = 0
    """Times that the memory of a bundle with few pages left could not be freed for want of memory for their copies; a later
    turn tries it again. Host memory may then exceed what `max_host_bytes` says."""
    device_resets: int = 0
    last_error: str = ""
    """What the last failed copy or load said."""


@dataclass
class SnapshotCounters:
    """Saves and loads of host pages (prefixes and whole caches)."""

    saved_pages: int = 0
    loaded_pages: int = 0
    faults: int = 0
    """Damaged pages that were found."""
    dropped_pages: int = 0
    """Those, and the pages that follow them."""
    damaged_sets: int = 0
    """Sets that were not whole, so that an older one was used."""
    refused: str = ""
    """Reason of the last load that was refused (`snapshot_format.Refusal`)."""


@dataclass
class EngineCounters:
    requests: RequestCounters = field(default_factory=RequestCounters)
    prefill: PrefillCounters = field(default_factory=PrefillCounters)
    decode: DecodeCounters = field(default_factory=DecodeCounters)
    faults: FaultCounters = field(default_factory=FaultCounters)
    snapshot: SnapshotCounters = field(default_factory=SnapshotCounters)


@dataclass(frozen=True)
class NumericsStats:
    """How deterministic mode keeps its promise; of matmuls in row-invariant mode only."""

    means: str = ""
    """"row-invariant" or "one program"; empty in default mode."""
    xla_matmuls: int = 0
    """Shapes of matmuls that XLA runs, since its bits were seen to be the kernel's."""
    kernel_matmuls: int = 0
    """Shapes that the kernel runs."""
    different_matmuls: tuple[str, ...] = ()
    """Those of them at which XLA's bits differ; XLA might be faster there."""
    fixed_tile: bool = False
    """The kernel's tiles were seen to differ in their bits on this card, so that one serves all shapes, slowly."""

    @classmethod
    def of(cls, means: str, matmuls: RowInvariance | None) -> NumericsStats:
        if matmuls is None:
            return cls(means)
        known = matmuls.known | matmuls.seen
        different = tuple(str(shape) for shape in sorted(matmuls.different))
        return cls(means, len(matmuls.equal), len(known - matmuls.equal), different, matmuls.fixed_tile)


@dataclass(frozen=True)
class EngineStats:
    """One moment of an engine. `print(stats)` gives a table; `dataclasses.asdict(stats)` plain numbers."""

    enabled: bool
    """Reuse was asked for."""
    active: bool
    disabled_reason: str
    """Why it is not active though enabled; empty otherwise."""
    stages: Mapping[str, bool]
    requests: RequestCounters
    prefill: PrefillCounters
    decode: DecodeCounters
    faults: FaultCounters
    snapshot: SnapshotCounters
    device: tuple[DevicePoolStats, ...]
    """Per layer group."""
    host: Any
    """`host_store.HostStats`."""
    compilations: Mapping[str, int]
    numerics: NumericsStats = NumericsStats()

    def __str__(self) -> str:
        lines = [f"prefix reuse: enabled={self.enabled} active={self.active} {self.disabled_reason}".rstrip()]
        lines.append("stages: " + " ".join(f"{name}={on}" for name, on in self.stages.items()))
        parts = [
            ("requests", self.requests),
            ("prefill", self.prefill),
            ("decode", self.decode),
            ("faults", self.faults),
            ("snapshot", self.snapshot),
        ]
        parts += [(f"device pages {i}", stats) for i, stats in enumerate(self.device)]
        parts.append(("host pages", self.host))
        parts.append(("numerics", self.numerics))
        for title, part in parts:
            values = {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
            if isinstance(part, DevicePoolStats):
                values["pages_saved"] = part.reused
            lines.append(f"{title}: " + " ".join(f"{name}={value}" for name, value in values.items()))
        lines.append("compilations: " + (" ".join(f"{k}={v}" for k, v in self.compilations.items()) or "none"))
        return "\n".join(lines)
