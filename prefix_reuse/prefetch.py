"""`Prefetcher`: starts copying host pages to the device while the rows that need them still wait in line.

              turn n                                         turn n + 1
    compute   prefill of rows that are in, decode            scatter, prefill of the row
    link      pages of the next row in line -> staging       the row after it -> staging
    host      wait for tokens, append them, publish          admit, pack, ...

At `submit` the copies start before the turn that lets the row in; in a turn they start after admission and before anything is
dispatched. What does not fit the staging memory, and parts of bundles, are copied when the row is let in. Nothing depends on
a prefetch: one that fails is counted, and the pages are copied as if there had been none.
"""

from __future__ import annotations

from collections.abc import Sequence

from prefix_reuse.device_plan import PageDemand
from prefix_reuse.host_part import Bundle, HostPart
from prefix_reuse.host_store import HostPageStore
from prefix_reuse.runner import DeviceRunner
from prefix_reuse.scheduler import Scheduler
from prefix_reuse.sequence import Sequence as Row
from prefix_reuse.stats import EngineCounters
from prefix_reuse.transfer import whole_bundles

LOOK_AHEAD = 16
"""Rows in line that are looked at: each costs a lookup in every turn."""


class Prefetcher:
    """Decides what is staged: the pages that the first rows in line would load if they were let in now."""

    def __init__(self, cache: HostPageStore, runner: DeviceRunner, scheduler: Scheduler, counters: EngineCounters):
        self.cache, self.runner, self.scheduler, self.counters = cache, runner, scheduler, counters

    @property
    def active(self) -> bool:
        return self.scheduler.reuse and self.runner.staging.max_bytes > 0

    def look_at(self, row: Row) -> None:
        """A row has joined the line: if it is one of the first, its copies start now."""
        if self.active and len(self.scheduler.waiting) <= LOOK_AHEAD:
            self._stage([row], keep=False)

    def look_ahead(self) -> None:
        """Starts the copies of the first rows in line, and drops those that none of them wants."""
        if self.active:
            self._stage([*self.scheduler.resuming, *self.scheduler.waiting][:LOOK_AHEAD], keep=True)

    def _stage(self, rows: Sequence[Row], *, keep: bool) -> None:
        staging = self.runner.staging
        try:
            wanted = dict.fromkeys(bundle for row in rows for bundle in self._bundles(row))
            if keep:
                staging.keep(wanted)
            self.counters.decode.host_bytes_prefetched += staging.start(wanted)
        except Exception as error:
            staging.clear()
            self.counters.faults.failed_prefetches += 1
            self.counters.faults.last_error = f"{type(error).__name__}: {error}"

    def _bundles(self, row: Row) -> list[Bundle]:
        """Whole bundles of host pages that `row` needs and that are not on the device, by layer group in token order."""
        if row.leader is not None:
            return []
        bundles: list[Bundle] = []
        for group, demand in enumerate(self.scheduler.demands(row)):
            payloads = self.cache.peek_payloads(self._missing(group, demand))
            parts = [payload[group] for payload in payloads if isinstance(payload, tuple)]
            bundles += whole_bundles([part for part in parts if isinstance(part, HostPart)])
        return bundles

    def _missing(self, group: int, demand: PageDemand) -> list[int]:
        resident = self.runner.accounts[group].resident_page
        pages = demand.host_pages[demand.first :].tolist()
        sharable = demand.num_sharable - demand.first if self.scheduler.share_device else 0
        return [page for i, page in enumerate(pages) if i >= sharable or resident(page) is None]
