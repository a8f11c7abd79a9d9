"""What an `Engine` is made of, and the requests that it has."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from prefix_reuse.binding import bind_store
from prefix_reuse.cache import PrefixCache
from prefix_reuse.capability import check_model, get_prefix_reuse_capability
from prefix_reuse.config import EngineConfig, SamplingParams
from prefix_reuse.deterministic import deterministic_means
from prefix_reuse.errors import ConfigError, SnapshotError, TransferError, UnknownRequestError
from prefix_reuse.geometry import StoreGeometry, canonical_device
from prefix_reuse.hashing import weight_fingerprint
from prefix_reuse.host_store import HostPageStore
from prefix_reuse.intake import Intake
from prefix_reuse.memory import LOG, plan_memory
from prefix_reuse.offload import Offloader
from prefix_reuse.outputs import RequestOutput
from prefix_reuse.prefetch import Prefetcher
from prefix_reuse.programs import Programs
from prefix_reuse.runner import DeviceRunner
from prefix_reuse.scheduler import Scheduler
from prefix_reuse.sequence import Sequence as Row
from prefix_reuse.sequence import SequenceState
from prefix_reuse.snapshot_format import Identity, Refusal
from prefix_reuse.stats import EngineCounters
from prefix_reuse.steps import PagedModel


@dataclasses.dataclass
class Request:
    """A request whose output was not handed out yet."""

    prompt: np.ndarray
    """int32 [N]"""
    params: SamplingParams
    samples: list[Row]
    logits: list[np.ndarray] = dataclasses.field(default_factory=list)
    """Of scoring: f32 [T, V] of each chunk."""


class EngineState:
    """The parts of an `Engine`, put together; the arguments are explained there."""

    def __init__(
        self,
        model: PagedModel,
        config: EngineConfig | None = None,
        *,
        device: Any = None,
        programs: Programs | None = None,
        store: HostPageStore | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        config = config or EngineConfig()
        check_model(model)
        self.model, self.config, self._clock = model, config, clock
        self.max_context = min(config.max_context or model.max_context, model.max_context)
        device = canonical_device(device)
        self.memory = plan_memory(model, config, device)
        means = deterministic_means(model, config, device)
        geometry = StoreGeometry.of(model.kv_groups, config.page_size, device)
        capability = get_prefix_reuse_capability(model, config.page_size)
        self.store, self.capability = bind_store(store, config, self.memory.host_pages, geometry, capability)
        pool_tokens = min(config.num_device_pages, self.store.num_pages) * config.page_size
        if min(pool_tokens, self.max_context) < 2:
            raise ConfigError(
                f"pools of {pool_tokens} tokens and a context of {self.max_context} hold no prompt + 1 token"
            )
        self.pool_tokens = pool_tokens
        self.active = config.m1 and self.capability.supported
        self.counters = EngineCounters()
        if config.compilation_cache:
            enable_compilation_cache()
        self.programs = programs or Programs(model, config, device)
        staging_bytes = self.memory.staging_bytes if self.active else 0
        self.runner = DeviceRunner(model, config, self.max_context, device, self.programs, staging_bytes)
        self.store.listen(self._host_pages_freed)
        self.scheduler = Scheduler(config, self.store, self.runner, self.counters)
        self.offloader = Offloader(config, self.store, self.runner, self.scheduler, self.counters)
        self.prefetcher = Prefetcher(self.store, self.runner, self.scheduler, self.counters)
        fingerprint = weight_fingerprint(self.runner.params) if self.active else ""
        self.intake = Intake(model, config, self.capability, self.max_context, pool_tokens, fingerprint, means)
        platform = {"device": device.device_kind, "jaxlib": importlib.metadata.version("jaxlib")}
        self.cache = PrefixCache(
            self.store,
            self.intake,
            adopt=self.programs.transfer.adopt,
            land=self.offloader.land,
            tidy=lambda: self._tidy(None),
            identity=lambda: Identity(self.intake.base_namespace(), geometry, platform),
            counters=self.counters.snapshot,
            snapshot_dir=config.snapshot_dir,
        )
        self.copies_in_background = device.platform == "gpu"
        """Copies to the host go on while rows decode; a boundary waits for them only when somebody needs them."""
        self._requests: dict[int, Request] = {}
        self._ids = self.store.ids
        self._finished: list[RequestOutput] = []
        if self.active and config.snapshot_dir is not None:
            self._load_snapshot()

    def _load_snapshot(self) -> None:
        """A snapshot that must not be used is no reason not to start: the engine starts cold and the stats say why."""
        try:
            LOG.info("%s", self.cache.load_snapshot())
        except (SnapshotError, OSError) as error:
            if getattr(error, "reason", "") != Refusal.NONE:
                LOG.warning("the snapshot is not used: %s", error)

    def _host_pages_freed(self, host_pages: np.ndarray) -> None:
        for account in self.runner.accounts:
            account.forget(np.asarray(host_pages).tolist())

    def _tidy(self, most: int | None = 1) -> None:
        """See `PageTransfer.tidy`; nobody's work fails for it, but it is counted."""
        try:
            self.runner.transfer.tidy(most)
        except TransferError as error:
            self.counters.faults.failed_dissolves += 1
            self.counters.faults.last_error = f"{type(error).__name__}: {error}"

    def _live(self, request_id: int) -> Request:
        if request_id not in self._requests:
            raise UnknownRequestError(f"request {request_id} is not live")
        return self._requests[request_id]

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do (requests on hold do not count)."""
        on_hold = sum(1 for r in self.scheduler.running if r.state is SequenceState.ON_HOLD)
        active = len(self.scheduler.running) - on_hold + len(self.scheduler.resuming) + len(self.scheduler.waiting)
        return bool(active or self.offloader.busy or self._finished)


def enable_compilation_cache() -> None:
    """Turns on JAX's persistent compilation cache in the user's cache folder, unless a folder is configured already."""
    if jax.config.jax_compilation_cache_dir is None:
        root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        jax.config.update("jax_compilation_cache_dir", os.path.join(root, "prefix_reuse", "xla"))
