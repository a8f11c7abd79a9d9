"""Rows that come in together: what each of them needs, and one plan of device pages per layer group for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prefix_reuse.device_plan import DevicePlan, DevicePlanner, PageDemand
from prefix_reuse.device_pool import DevicePool
from prefix_reuse.host_store import PreparedGroup
from prefix_reuse.sequence import Sequence as Row


@dataclass(frozen=True)
class Admission:
    """A sequence whose host pages are taken, and what it needs on the device."""

    sequence: Row
    demands: tuple[PageDemand, ...]
    """One per layer group."""
    group: PreparedGroup | None = None
    """Host pages of this row and its followers, to be committed once the device has room for all of them."""


class AdmissionBatch:
    """The admissions of one turn. Each is planned once, against the pools and the admissions before it; no pool changes.

    Args:
      accounts: the device pool of each layer group. They must not change while the batch lives, but for host pages that
        are forgotten and that no admission of the batch needs.
      share: M3, as in `DevicePlanner`.
    """

    def __init__(self, accounts: Sequence[DevicePool], share: bool):
        self._accounts = accounts
        self._planners = [DevicePlanner(account.resident_page, account.is_counted, share) for account in accounts]
        self.admissions: list[Admission] = []

    def __len__(self) -> int:
        return len(self.admissions)

    @property
    def num_loads(self) -> int:
        """Host pages that would be copied to the device, over all layer groups."""
        return sum(planner.num_loads for planner in self._planners)

    def try_add(self, *admissions: Admission) -> bool:
        """Adds all of `admissions` where the pools have room for them, too; else none, and returns False."""
        mark = self.mark()
        self.add(*admissions)
        for planner, account in zip(self._planners, self._accounts, strict=True):
            if not account.fits(planner):
                self.undo(mark)
                return False
        return True

    def add(self, *admissions: Admission) -> None:
        """Adds `admissions` whether or not the pools have room for them."""
        for admission in admissions:
            for planner, demand in zip(self._planners, admission.demands, strict=True):
                planner.add(demand)
        self.admissions += admissions

    def mark(self) -> tuple[tuple[int, ...], ...]:
        """Where `undo` can come back to."""
        return (len(self.admissions),), *(planner.mark() for planner in self._planners)

    def undo(self, mark: tuple[tuple[int, ...], ...]) -> None:
        """Takes back what was added since `mark`."""
        (size,), *marks = mark
        del self.admissions[size:]
        for planner, before in zip(self._planners, marks, strict=True):
            planner.undo(before)

    def plans(self) -> list[DevicePlan]:
        """The plan of each layer group."""
        return [planner.plan() for planner in self._planners]
