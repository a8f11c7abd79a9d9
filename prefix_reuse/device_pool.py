"""`DevicePool`: the host's account of the device pages of one layer group. It decides; `DevicePages` follows.

Every page is in exactly one state:

    free         no row names it, it mirrors nothing
    reclaimable  no row names it, but it still mirrors a host page (the next hit needs no copy); taken back in LRU order
    used         at least one row names it

A page that mirrors a host page is *resident* under that host page id. Only `share` and `attach` create mirrors.

Rows of a sliding group give pages back at the front and take pages at the end while they run (`slide`). So that they never
wait for each other half way, each page in use is counted for by somebody from admission on:

    reserve   pages that a row owns, or may own at once later
    attached  pages of a hit: together by the rows that attach them, unless the row that owns the page keeps it to its end
    extra     pages for the chunks of one prefill call, once for all rows
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from prefix_reuse.device_pages import UNUSED
from prefix_reuse.device_plan import DevicePlan, DevicePlanner, PageDemand
from prefix_reuse.errors import DevicePagesExhausted, IntegrityError, PrefixReuseError, RefcountError

_VERSIONS = itertools.count()


@dataclass(frozen=True)
class DevicePoolStats:
    """Pages of one device pool at one moment (A24, A28)."""

    num_pages: int
    free: int
    """Free and reclaimable together; with sliding windows some of them are promised to rows."""
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

    def __init__(self, num_pages: int, page_size: int, max_rows: int, max_columns: int, *, chunk_pages: int = 0):
        self.num_pages, self.page_size = num_pages, page_size
        self.max_rows, self.max_columns = max_rows, max_columns
        self.chunk_pages = chunk_pages
        """Extra pages that all rows together may own for the time of one prefill call (`GroupWindow.chunk_pages`)."""
        self.reset()

    def reset(self) -> None:
        """Empties the pool: no row holds anything."""
        num_pages, max_rows = self.num_pages, self.max_rows
        self.refs = np.zeros(num_pages, np.int32)
        self.mirror = np.full(num_pages, UNUSED, np.int64)
        self.page_table = np.full((max_rows, self.max_columns), UNUSED, np.int32)
        self.columns = np.zeros(max_rows, np.int32)
        """Columns in use, those that a window has passed included."""
        self.fronts = np.zeros(max_rows, np.int32)
        """Leading columns that the row's window has passed; they are `UNUSED`."""
        self.shared_pages = np.zeros(max_rows, np.int32)
        self.reserve = np.zeros(max_rows, np.int64)
        self.extra = np.zeros(max_rows, np.int64)
        self.keeps_from = np.zeros(max_rows, np.int32)
        self.attached = np.zeros(num_pages, np.int32)
        """Rows that name a page which they do not own."""
        self.kept = np.zeros(num_pages, bool)
        """The row that owns the page holds it to its end."""
        self._attaches = np.zeros((max_rows, self.max_columns), bool)
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
        """Pages that nobody counts for: what an admission may still take."""
        return self._room(0)

    def _room(self, more_extra: int) -> int:
        attached = int(np.count_nonzero((self.attached > 0) & ~self.kept))
        extra = min(self.chunk_pages, int(self.extra.sum()) + more_extra)
        return self.num_pages - int(self.reserve.sum()) - attached - extra

    def fits(self, plan: DevicePlan | DevicePlanner) -> bool:
        """Whether the pool can keep what carrying out `plan`, or what is planned so far, promises its rows."""
        return plan.pages_needed <= self._room(plan.extra)

    def is_counted(self, page: int) -> bool:
        """Whether a live row counts for `page` already, so that attaching it takes no available page."""
        return bool(self.attached[page] or self.kept[page])

    def resident_page(self, host_page: int) -> int | None:
        return self.resident.get(int(host_page))

    def pages(self, row: int) -> np.ndarray:
        """int32 view of the pages of `row` in token order; `UNUSED` where its window has passed."""
        return self.page_table[row, : self.columns[row]]

    # ---- rows

    @property
    def free_rows(self) -> list[int]:
        """Rows of the page table that nobody holds, ascending."""
        return sorted(self._rows)

    def bind(self, row: int, pages: Sequence[int] | np.ndarray, shared: int, demand: PageDemand | None = None) -> None:
        """Gives an empty `row` its pages; the first `shared` of them are attached, the rest are fresh private ones.

        Args:
            pages: in token order; those before `demand.first` are `UNUSED`.
            demand: what the row may own later; None: no more than this.
        """
        pages = np.asarray(pages, np.int32)
        demand = demand or PageDemand(pages[:shared], shared, len(pages) - shared)
        used = pages[demand.first :]
        if self.columns[row]:
            raise PrefixReuseError(f"row {row} already holds {self.columns[row]} pages")
        if len(pages) > self.max_columns:
            raise PrefixReuseError(f"{len(pages)} pages do not fit {self.max_columns} page-table columns")
        if len(np.unique(used)) != len(used) or (len(used) and used.min() < 0):
            raise PrefixReuseError(f"a row must name distinct pages, got {pages.tolist()}")
        self._rows.discard(row)
        attached = pages[demand.first : shared]
        for page in attached.tolist():
            self._reclaimable.pop(page, None)
        self.refs[used] += 1
        self.page_table[row, : len(pages)] = pages
        self.columns[row], self.fronts[row], self.shared_pages[row] = len(pages), demand.first, shared
        self.reserve[row], self.extra[row], self.keeps_from[row] = demand.num_owned, demand.extra, demand.keeps_from
        self.attached[attached] += 1
        self._attaches[row, demand.first : shared] = True
        self.kept[pages[max(demand.first, shared, demand.keeps_from) :]] = True
        self._touch()

    def slide(self, row: int, first: int, end: int | None = None) -> int:
        """Gives back the pages of `row` before column `first`, and gives it private ones up to column `end`.

        What was given back is `UNUSED` in the table, and free or reclaimable unless another row names it. Nothing that the
        row may own by its demand is ever missing.

        Returns:
            Pages that the row gave back.

        Raises:
            DevicePagesExhausted: more pages than the row may own; only the pages before `first` have gone then.
        """
        front, columns = int(self.fronts[row]), int(self.columns[row])
        passed = range(front, min(first, columns))
        if first > front:
            for column in passed:
                self._drop(row, column)
            self.fronts[row] = first
            self.columns[row] = columns = max(columns, first)
            self._touch()
        end = columns if end is None else end
        new = end - columns
        if new > 0:
            owned = columns - int(self.fronts[row]) - int(self._attaches[row, :columns].sum())
            if owned + new > self.reserve[row] + min(self.extra[row], self.chunk_pages):
                raise DevicePagesExhausted(
                    f"row {row} owns {owned} pages and needs {new} more; {self.reserve[row]} are its own, "
                    f"{min(self.extra[row], self.chunk_pages)} more for a chunk"
                )
            pages = self.allocate(new)
            self.refs[pages] += 1
            self.page_table[row, columns:end] = pages
            self.kept[pages[max(0, int(self.keeps_from[row]) - columns) :]] = True
            self.columns[row] = end
            self._touch()
        return len(passed)

    def settle(self, row: int) -> None:
        """The prompt of `row` is computed: from now on it needs no pages for chunks."""
        self.extra[row] = 0

    def release(self, row: int | None) -> None:
        """Drops the references of `row` and gives the row back. Releasing a free row (or None) changes nothing."""
        if row is None or row in self._rows:
            return
        # Tail first, so that the least recently used reclaimable page is the deepest one of its chain.
        for column in range(int(self.columns[row]) - 1, int(self.fronts[row]) - 1, -1):
            self._drop(row, column)
        self.columns[row] = self.fronts[row] = self.shared_pages[row] = 0
        self.reserve[row] = self.extra[row] = self.keeps_from[row] = 0
        self._rows.add(row)
        self._touch()

    def _drop(self, row: int, column: int) -> None:
        """Takes the page of one column from `row`."""
        page = int(self.page_table[row, column])
        self.page_table[row, column] = UNUSED
        if page == UNUSED:
            return
        if self._attaches[row, column]:
            self._attaches[row, column] = False
            self.attached[page] -= 1
        else:
            self.kept[page] = False
        self._unref(page)

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

    @property
    def _num_free(self) -> int:
        return len(self._free) + len(self._reclaimable)

    def allocate(self, n: int) -> list[int]:
        """n distinct pages with no reference yet: free ones first, then reclaimable ones, least recently used first.

        The caller binds them to a row before it returns to the scheduler. Raises `DevicePagesExhausted`, changing nothing.
        """
        if n > self._num_free:
            raise DevicePagesExhausted(f"{n} device pages needed, {self._num_free} free of {self.num_pages}")
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
        if not self.fits(plan):
            raise DevicePagesExhausted(
                f"{plan.pages_needed} device pages needed, {self.num_available} available of {self.num_pages}"
            )
        for pages in plan.row_pages:  # what the plan attaches must not be reclaimed for its own allocations
            for page in pages[pages >= 0].tolist():
                self._reclaimable.pop(page, None)
        allocated = np.array(self.allocate(plan.num_allocations), np.int32)
        for row, pages, demand in zip(rows, plan.row_pages, plan.demands, strict=True):
            ids = np.where(pages < 0, allocated[np.where(pages < 0, -1 - pages, 0)] if len(allocated) else -1, pages)
            self.bind(row, np.concatenate([np.full(demand.first, UNUSED), ids]), demand.num_sharable, demand)
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
        the row's page becomes the resident one. Columns that the row's window has passed are left as they are, and so are
        copies whose exchange would take a page that another row was promised. Idempotent.
        """
        freed = 0
        for column, host_page in enumerate(np.asarray(host_pages).tolist(), start=first):
            own = int(self.page_table[row, column])
            if own == UNUSED:
                continue
            resident = self.resident.get(host_page)
            if resident is None:
                if self.mirror[own] != UNUSED:  # it mirrors another host page of the same content
                    continue
                self.resident[host_page], self.mirror[own] = own, host_page
            elif resident != own and self.mirror[own] == UNUSED and self._may_exchange(row, column, resident):
                self._reclaimable.pop(resident, None)
                if not self._attaches[row, column] and self.kept[own]:
                    self.reserve[row] -= 1  # it never owns a page in this column again
                self._drop(row, column)
                self.refs[resident] += 1
                self.attached[resident] += 1
                self._attaches[row, column] = True
                self.page_table[row, column] = resident
                freed += 1
        self.seal(row, first + len(host_pages))
        if freed:
            self._touch()
        return freed

    def _may_exchange(self, row: int, column: int, resident: int) -> bool:
        """Whether `row` may attach `resident` in place of its own page of `column`."""
        own = int(self.page_table[row, column])
        # What nobody else attaches is no longer counted for once the row has left it.
        alone = self.attached[own] == 1 if self._attaches[row, column] else self.kept[own] and not self.attached[own]
        return bool(alone) or self.is_counted(resident) or self.num_available > 0

    def fork(self, source: int, target: int, num_shared: int, first: int = 0) -> tuple[int, int]:
        """Lets row `target`, which holds only its private pages so far, continue where `source` stands.

        The first `num_shared` pages of `source` come before those of `target`; from now on neither row may write them.
        Those before column `first` are left out: the window of `target` has passed them.

        Returns:
            (page, copy): the next page of `source`, and the first own page of `target`, into which what it holds belongs.
            Both are `UNUSED` where a row has none.
        """
        above, own = self.pages(source), self.pages(target).copy()
        shared = above[:num_shared].copy()
        shared[:first] = UNUSED
        if num_shared > len(above) or num_shared + len(own) > self.max_columns:
            raise PrefixReuseError(
                f"row {target} cannot continue row {source}: {num_shared} of {len(above)} pages before its {len(own)}"
            )
        used = shared[shared != UNUSED]
        if np.isin(used, own).any():
            raise PrefixReuseError(f"row {target} already holds pages of row {source}")
        before = self.num_available
        self.refs[used] += 1
        self.attached[used] += 1
        self.columns[target] = num_shared + len(own)
        self.fronts[target] = num_shared - len(used)
        self.page_table[target, : self.columns[target]] = np.concatenate([shared, own])
        self._attaches[target, :num_shared] = shared != UNUSED
        self.kept[own] = np.arange(num_shared, self.columns[target]) >= self.keeps_from[target]
        self.reserve[source] -= before - self.num_available  # what it had kept for those that follow it
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
            free=self._num_free,
            reclaimable=len(self._reclaimable),
            logical=int(np.count_nonzero(self.page_table != UNUSED)),
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
            pages, front = self.pages(row), self.fronts[row]
            if (pages[:front] != UNUSED).any() or (pages[front:] == UNUSED).any():
                raise IntegrityError(f"row {row} has {front} columns behind its window: {pages.tolist()}")
            pages = pages[front:]
            if len(np.unique(pages)) != len(pages) or (self.page_table[row, self.columns[row] :] != UNUSED).any():
                raise IntegrityError(f"row {row} names a page twice or has entries behind its columns")
            if row in self._rows and self.columns[row]:
                raise IntegrityError(f"free row {row} holds pages")
        self._check_counts()

    def _check_counts(self) -> None:
        """Every page in use is counted for, and no row owns more than it was promised."""
        used = self.page_table != UNUSED
        if (self._attaches & ~used).any():
            raise IntegrityError("a row attaches a page that it does not name")
        expected = np.bincount(self.page_table[self._attaches], minlength=self.num_pages)
        if not np.array_equal(expected, self.attached):
            raise IntegrityError(f"attached {self.attached.tolist()} != attaching entries {expected.tolist()}")
        owns = used & ~self._attaches
        owners = np.bincount(self.page_table[owns], minlength=self.num_pages)
        keeps = owns & (np.arange(self.max_columns) >= self.keeps_from[:, None])
        keepers = np.bincount(self.page_table[keeps], minlength=self.num_pages) > 0
        if owners.max(initial=0) > 1 or not np.array_equal(keepers, self.kept):
            raise IntegrityError("a device page has two owners, or is kept by a row that does not own it")
        owned = owns.sum(axis=1)
        if (owned > self.reserve + np.minimum(self.extra, self.chunk_pages)).any() or self.num_available < 0:
            raise IntegrityError(
                f"rows own {owned.tolist()} pages of {self.reserve.tolist()} promised, {self.num_available} are available"
            )
