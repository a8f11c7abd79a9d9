"""Which device pages the rows of an admission get, in one layer group: what each needs, and where it comes from.

Pure planning: no plan changes a pool; `DevicePool.carry_out` does what a plan says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PageDemand:
    """What one row needs of one layer group on the device: host pages of its cached tokens, then fresh private pages.

    The row may own more pages later than it is given now: `reserve` at once from one call to the next, and up to `extra`
    more for the time of one prefill call.
    """

    host_pages: np.ndarray
    """int [N]: host pages in token order that must be readable on the device."""
    num_sharable: int
    """Leading host pages that are indexed and may be shared between rows; the others are loaded privately."""
    num_private: int
    """Fresh private pages behind them (suffix and runway)."""
    first: int = 0
    """Leading host pages that a sliding window has passed: they get no device page."""
    reserve: int | None = None
    """Pages that the row may own (not attach) at once; None = those that it is given now."""
    extra: int = 0
    keeps_from: int = 0
    """First column that no query of this row will ever have passed: what it owns from there on it holds to its end."""

    @property
    def num_owned(self) -> int:
        """Pages that the row counts for by itself."""
        if self.reserve is not None:
            return self.reserve
        return self.num_private + len(self.host_pages) - max(self.num_sharable, self.first)


@dataclass(frozen=True)
class DevicePlan:
    """Where each row's device pages come from. `-1 - i` in `row_pages` stands for the i-th page to allocate (A23)."""

    demands: tuple[PageDemand, ...]
    row_pages: tuple[np.ndarray, ...]
    """From column `first` of the row's demand on."""
    loads: tuple[tuple[int, int], ...]
    """(host page, allocation) pairs to copy, host to device: each needed host page once."""
    mirrors: tuple[tuple[int, int], ...]
    """The part of `loads` that becomes resident under its host page."""
    num_allocations: int
    num_attachments: int
    """Pages that rows attach and for which no live row counts yet: new copies, and resident pages that nobody keeps."""
    skipped_duplicate: int
    """Loads saved because another row of the same batch needs the same host page."""
    skipped_resident: int
    """Loads saved because the page is already on the device."""

    @property
    def row_shared(self) -> tuple[int, ...]:
        """Leading columns of each row that are shared."""
        # Without M3 the copies are the row's own, but they hold finished pages all the same: never written.
        return tuple(demand.num_sharable for demand in self.demands)

    @property
    def pages_needed(self) -> int:
        """Available pages that carrying out the plan uses up, `extra` ones apart."""
        return self.num_attachments + sum(demand.num_owned for demand in self.demands)

    @property
    def extra(self) -> int:
        """Pages more for the time of one prefill call, over all rows."""
        return sum(demand.extra for demand in self.demands)


class DevicePlanner:
    """Plans the rows of an admission one by one, each against what those before it have been given.

    One device page per unique missing host page, and nothing resident is loaded. A row costs its own pages only, however many
    rows came before it. While a planner lives, host pages that it has planned with must stay held, so that their residency
    cannot change.

    Args:
      resident_page: device page that mirrors a host page, or None.
      is_counted: whether a live row counts for that device page already (`DevicePool.is_counted`).
      share: M3. False: every row gets its own copy of every page.
    """

    def __init__(
        self, resident_page: Callable[[int], int | None], is_counted: Callable[[int], bool], share: bool
    ) -> None:
        self._resident_page, self._is_counted, self._share = resident_page, is_counted, share
        self._demands: list[PageDemand] = []
        self._row_pages: list[np.ndarray] = []
        self._loads: list[tuple[int, int]] = []
        self._mirrors: dict[int, int] = {}
        """Host page -> allocation, in order."""
        self._attached: dict[int, None] = {}
        """Resident pages that no live row counted for, in order."""
        self._copies = self._allocations = self._duplicates = self._residents = self._owned = 0
        self.extra = 0
        """As in `DevicePlan`, of the rows so far."""

    @property
    def pages_needed(self) -> int:
        """As in `DevicePlan`, of the rows so far."""
        return self._copies + len(self._attached) + self._owned

    @property
    def num_loads(self) -> int:
        """Host pages to copy so far."""
        return len(self._loads)

    def add(self, demand: PageDemand) -> None:
        """Plans one more row."""
        pages: list[int] = []
        for i, host_page in enumerate(demand.host_pages[demand.first :].tolist(), start=demand.first):
            if self._share and i < demand.num_sharable:
                page = self._resident_page(host_page)
                if page is not None:
                    self._residents += 1
                    if not self._is_counted(page):
                        self._attached[page] = None
                    pages.append(page)
                    continue
                if host_page in self._mirrors:
                    self._duplicates += 1
                    pages.append(-1 - self._mirrors[host_page])
                    continue
                self._mirrors[host_page] = self._allocations
            self._copies += i < demand.num_sharable
            self._loads.append((host_page, self._allocations))
            pages.append(self._allocate())
        pages += [self._allocate() for _ in range(demand.num_private)]
        self._demands.append(demand)
        self._row_pages.append(np.array(pages, np.int64))
        self._owned += demand.num_owned
        self.extra += demand.extra

    def _allocate(self) -> int:
        self._allocations += 1
        return -self._allocations

    def mark(self) -> tuple[int, ...]:
        """Where `undo` can come back to. All that a planner keeps only grows, so its sizes say it."""
        sizes = len(self._demands), len(self._loads), len(self._mirrors), len(self._attached)
        counts = self._copies, self._allocations, self._duplicates, self._residents, self._owned, self.extra
        return *sizes, *counts

    def undo(self, mark: tuple[int, ...]) -> None:
        """Forgets the rows that were added since `mark`."""
        rows, loads, mirrors, attached, *counts = mark
        del self._demands[rows:], self._row_pages[rows:], self._loads[loads:]
        for pages, kept in ((self._mirrors, mirrors), (self._attached, attached)):
            while len(pages) > kept:
                pages.popitem()
        self._copies, self._allocations, self._duplicates, self._residents, self._owned, self.extra = counts

    def plan(self) -> DevicePlan:
        """The plan of all rows so far."""
        return DevicePlan(
            tuple(self._demands),
            tuple(self._row_pages),
            tuple(self._loads),
            tuple(self._mirrors.items()),
            self._allocations,
            self._copies + len(self._attached),
            self._duplicates,
            self._residents,
        )


def plan_device_pages(
    demands: Sequence[PageDemand],
    resident_page: Callable[[int], int | None],
    is_counted: Callable[[int], bool],
    share: bool,
) -> DevicePlan:
    """The plan of rows that are all known at once; the other arguments are those of `DevicePlanner`."""
    planner = DevicePlanner(resident_page, is_counted, share)
    for demand in demands:
        planner.add(demand)
    return planner.plan()
