"""`DevicePool`: the host's account of the device pages of one layer group. It decides; `DevicePages` follows.

Every page is in exactly one state:

    free         no row names it, it mirrors nothing
    reclaimable  no row names it, but it still mirrors a host page (the next hit needs no copy); taken back in LRU order
    used         at least one row names it

A page that mirrors a host page is *resident* under that host page id. Only `share` and `attach` create mirrors.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from prefix_reuse.device_pages import UNUSED
from prefix_reuse.errors import DevicePagesExhausted, IntegrityError, PrefixReuseError, RefcountError
from prefix_reuse.plan import DevicePlan

_VERSIONS = itertools.count()


@dataclass(frozen=True)
class DevicePoolStats:
    """Pages of one device pool at one moment (A24, A28)."""

    num_pages: int
    free: int
    """Free and reclaimable together."""
    reclaimable: int
    logical: int
    """Page-table entries of live rows."""
    physical: int
    """Distinct pages that live rows name."""
    shared: int
    """Pages that mirror a host page and are named by a row."""
    shared_refs: int
    """References of rows to such pages."""

    @property
    def used(self) -> int:
        return self.physical

    @property
    def reused(self) -> int:
        """Pages that sharing saves right now."""
        return self.logical - self.physical


class DevicePool:
    """Free list, references, residency and the page table of one pool. Owned by one engine; not thread-safe."""

    def __init__(self, num_pages: int, page_size: int, max_rows: int, max_columns: int):
        self.num_pages, self.page_size = num_pages, page_size
        self.max_rows, self.max_columns = max_rows, max_columns
        self.refs = np.zeros(num_pages, np.int32)
        self.mirror = np.full(num_pages, UNUSED, np.int64)
        self.page_table = np.full((max_rows, max_columns), UNUSED, np.int32)
        self.columns = np.zeros(max_rows, np.int32)
        self.shared_pages = np.zeros(max_rows, np.int32)
        self.resident: dict[int, int] = {}
        self._touch()
        self._freed: set[int] = set()
        self._free = list(range(num_pages - 1, -1, -1))
        self._reclaimable: OrderedDict[int, None] = OrderedDict()
        self._rows = set(range(max_rows))

    def _touch(self) -> None:
        self.dirty = True
        """The device copy of the tables is stale: `DevicePages.rebuild` is due."""
        self.version = next(_VERSIONS)
        """Another number after each change of the tables."""

    # ---- what is there

    @property
    def num_available(self) -> int:
        """Pages that an allocation can get: free and reclaimable."""
        return len(self._free) + len(self._reclaimable)

    def resident_page(self, host_page: int) -> int | None:
        return self.resident.get(int(host_page))

    def pages(self, row: int) -> np.ndarray:
        """int32 view of the physical pages of `row`, in token order."""
        return self.page_table[row, : self.columns[row]]

    # ---- rows

    @property
    def free_rows(self) -> list[int]:
        """Rows of the page table that nobody holds, ascending."""
        return sorted(self._rows)

    def bind(self, row: int, pages: Sequence[int] | np.ndarray, shared: int) -> None:
        """Gives an empty `row` its pages; the first `shared` of them are attached, the rest are fresh private ones."""
        pages = np.asarray(pages, np.int32)
        if self.columns[row]:
            raise PrefixReuseError(f"row {row} already holds {self.columns[row]} pages")
        if len(pages) > self.max_columns:
            raise PrefixReuseError(f"{len(pages)} pages do not fit {self.max_columns} page-table columns")
        if len(np.unique(pages)) != len(pages) or (len(pages) and pages.min() < 0):
            raise PrefixReuseError(f"a row must name distinct pages, got {pages.tolist()}")
        self._rows.discard(row)
        for page in pages[:shared].tolist():
            self._reclaimable.pop(page, None)
        self.refs[pages] += 1
        self.page_table[row, : len(pages)] = pages
        self.columns[row], self.shared_pages[row] = len(pages), shared
        self._touch()

    def release(self, row: int | None) -> None:
        """Drops the references of `row` and gives the row back. Releasing a free row (or None) changes nothing."""
        if row is None or row in self._rows:
            return
        # Tail first, so that the least recently used reclaimable page is the deepest one of its chain.
        for page in self.pages(row)[::-1].tolist():
            self._unref(page)
        self.page_table[row] = UNUSED
        self.columns[row] = self.shared_pages[row] = 0
        self._rows.add(row)
        self._touch()

    def _unref(self, page: int) -> None:
        if self.refs[page] < 1:
            raise RefcountError(f"device page {page} is released more often than it was taken")
        self.refs[page] -= 1
        if self.refs[page] == 0:
            if self.mirror[page] == UNUSED:
                self._make_free(page)
            else:
                self._reclaimable[page] = None

    def _make_free(self, page: int) -> None:
        self._free.append(page)
        self._freed.add(page)

    def take_freed(self) -> list[int]:
        """Pages that lost their contents since the last call, by release or by reclaiming."""
        freed = sorted(self._freed)
        self._freed.clear()
        return freed

    # ---- pages

    def allocate(self, n: int) -> list[int]:
        """n distinct pages with no reference yet: free ones first, then reclaimable ones, least recently used first.

        The caller binds them to a row before it returns to the scheduler. Raises `DevicePagesExhausted`, changing nothing.
        """
        if n > self.num_available:
            raise DevicePagesExhausted(f"{n} device pages needed, {self.num_available} available of {self.num_pages}")
        pages = []
        for _ in range(n):
            if self._free:
                pages.append(self._free.pop())
            else:
                page, _ = self._reclaimable.popitem(last=False)
                del self.resident[int(self.mirror[page])]
                self.mirror[page] = UNUSED
                self._freed.add(page)
                pages.append(page)
        return pages

    def attach(self, host_pages: Sequence[int] | np.ndarray, pages: Sequence[int]) -> None:
        """Records that freshly loaded device `pages` mirror `host_pages` (they are resident from now on)."""
        for host_page, page in zip(np.asarray(host_pages).tolist(), pages, strict=True):
            if host_page in self.resident:
                raise IntegrityError(
                    f"host page {host_page} is already resident on device page {self.resident[host_page]}"
                )
            self.resident[host_page] = page
            self.mirror[page] = host_page

    def carry_out(self, plan: DevicePlan, rows: Sequence[int]) -> np.ndarray:
        """Allocates what `plan` needs and binds its rows. Returns the allocated pages, int32, for the loads.

        All or nothing: raises `DevicePagesExhausted` before anything changes.
        """
        if plan.pages_needed > self.num_available:
            raise DevicePagesExhausted(
                f"{plan.pages_needed} device pages needed, {self.num_available} available of {self.num_pages}"
            )
        for pages in plan.row_pages:  # what the plan attaches must not be reclaimed for its own allocations
            for page in pages[pages >= 0].tolist():
                self._reclaimable.pop(page, None)
        allocated = np.array(self.allocate(plan.num_allocations), np.int32)
        for row, pages, shared in zip(rows, plan.row_pages, plan.row_shared, strict=True):
            ids = np.where(pages < 0, allocated[np.where(pages < 0, -1 - pages, 0)] if len(allocated) else -1, pages)
            self.bind(row, ids, shared)
        self.attach([h for h, _ in plan.mirrors], [int(allocated[i]) for _, i in plan.mirrors])
        return allocated

    def seal(self, row: int, num_pages: int) -> None:
        """Marks the first `num_pages` columns of `row` as finished: they are published, nobody writes them any more."""
        if num_pages > self.shared_pages[row]:
            self.shared_pages[row] = num_pages
            self._touch()

    def share(self, row: int, host_pages: Sequence[int] | np.ndarray, first: int = 0) -> int:
        """Makes columns `first..` of `row` the shared form of `host_pages` (indexed, same content). Returns pages freed.

        Where a host page is resident elsewhere, the row is pointed at that page and its own copy is dropped; otherwise
        the row's page becomes the resident one. Idempotent.
        """
        freed = 0
        for column, host_page in enumerate(np.asarray(host_pages).tolist(), start=first):
            own = int(self.page_table[row, column])
            resident = self.resident.get(host_page)
            if resident is None:
                if self.mirror[own] != UNUSED:  # it mirrors another host page of the same content
                    continue
                self.resident[host_page], self.mirror[own] = own, host_page
            elif resident != own and self.mirror[own] == UNUSED:
                self._reclaimable.pop(resident, None)
                self.refs[resident] += 1
                self.page_table[row, column] = resident
                self._unref(own)
                freed += 1
        self.seal(row, first + len(host_pages))
        if freed:
            self._touch()
        return freed

    def fork(self, source: int, target: int, num_shared: int) -> tuple[int, int]:
        """Lets row `target`, which holds only its private pages so far, continue where `source` stands.

        The first `num_shared` pages of `source` come before those of `target`; from now on neither row may write them.

        Returns:
            (page, copy): the next page of `source`, and the first own page of `target`, into which what it holds belongs.
            Both are `UNUSED` where a row has none.
        """
        above, own = self.pages(source), self.pages(target).copy()
        shared = above[:num_shared].copy()
        if num_shared > len(above) or num_shared + len(own) > self.max_columns:
            raise PrefixReuseError(
                f"row {target} cannot continue row {source}: {num_shared} of {len(above)} pages before its {len(own)}"
            )
        used = shared[shared != UNUSED]
        if np.isin(used, own).any():
            raise PrefixReuseError(f"row {target} already holds pages of row {source}")
        self.refs[used] += 1
        self.columns[target] = num_shared + len(own)
        self.page_table[target, : self.columns[target]] = np.concatenate([shared, own])
        self.shared_pages[target] = num_shared
        self.seal(source, num_shared)
        self._touch()
        tail = int(above[num_shared]) if num_shared < len(above) else UNUSED
        return tail, int(own[0]) if len(own) else UNUSED

    def forget(self, host_pages: Iterable[int]) -> None:
        """The host pages are gone: their mirrors are no longer resident, and free once no row names them."""
        for host_page in host_pages:
            page = self.resident.pop(int(host_page), None)
            if page is None:
                continue
            self.mirror[page] = UNUSED
            if self.refs[page] == 0:
                del self._reclaimable[page]
                self._make_free(page)

    def drop_reclaimable(self) -> int:
        """Forgets every resident page that no row uses; the next hit loads it from the host. Returns their number."""
        pages = list(self._reclaimable)
        self.forget(self.mirror[pages].tolist())
        return len(pages)

    def stats(self) -> DevicePoolStats:
        shared = (self.mirror != UNUSED) & (self.refs > 0)
        return DevicePoolStats(
            num_pages=self.num_pages,
            free=self.num_available,
            reclaimable=len(self._reclaimable),
            logical=int(self.columns.sum()),
            physical=int((self.refs > 0).sum()),
            shared=int(shared.sum()),
            shared_refs=int(self.refs[shared].sum()),
        )

    def check_integrity(self) -> None:
        """Raises `IntegrityError` naming the broken invariant."""
        used = self.page_table[self.page_table >= 0]
        expected = np.bincount(used, minlength=self.num_pages)
        if not np.array_equal(expected, self.refs):
            raise IntegrityError(f"device refs {self.refs.tolist()} != table entries {expected.tolist()}")
        free, reclaimable = set(self._free), set(self._reclaimable)
        in_use = set(np.flatnonzero(self.refs).tolist())
        if len(free) != len(self._free) or free & reclaimable or free & in_use or reclaimable & in_use:
            raise IntegrityError("a device page is in two of: free, reclaimable, used")
        if len(free) + len(reclaimable) + len(in_use) != self.num_pages:
            lost = set(range(self.num_pages)) - free - reclaimable - in_use
            raise IntegrityError(f"device pages {sorted(lost)} are lost")
        mirrors = {int(h): int(p) for p, h in enumerate(self.mirror) if h != UNUSED}
        if mirrors != self.resident:
            raise IntegrityError("the resident map and the mirrors disagree")
        if any(self.mirror[p] != UNUSED for p in free) or any(self.mirror[p] == UNUSED for p in reclaimable):
            raise IntegrityError("a free page mirrors something, or a reclaimable page mirrors nothing")
        for row in range(self.max_rows):
            pages = self.pages(row)
            if len(np.unique(pages)) != len(pages) or (self.page_table[row, self.columns[row] :] != UNUSED).any():
                raise IntegrityError(f"row {row} names a page twice or has entries behind its columns")
            if row in self._rows and self.columns[row]:
                raise IntegrityError(f"free row {row} holds pages")
