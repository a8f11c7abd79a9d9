"""`Offloader`: copies finished pages to the host, and publishes them once their bytes have landed.

forward -> flush_full_pages -> (copy under way) -> land -> publish -> share_device_pages
           owner thread,                           bytes are there: index entries, shared device pages
           before the next donated step
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from prefix_reuse.config import EngineConfig
from prefix_reuse.errors import TransferError
from prefix_reuse.host_store import HostPageStore
from prefix_reuse.plan import pages_for
from prefix_reuse.runner import DeviceRunner
from prefix_reuse.scheduler import Scheduler
from prefix_reuse.sequence import Sequence as Row
from prefix_reuse.sequence import SequenceState
from prefix_reuse.stats import EngineCounters
from prefix_reuse.transfer import PendingCopy


class Flight(NamedTuple):
    """The pages of one or more rows that were sent together."""

    rows: tuple[tuple[Row, int, int], ...]
    """Each with its epoch then, and how many of the pages are its own, in order."""
    copy: PendingCopy
    slots: np.ndarray
    """Filled slots of each page."""

    def by_row(self) -> list[Flight]:
        """Each row's pages alone."""
        ends = np.cumsum([count for _, _, count in self.rows]).tolist()
        spans = zip(self.rows, [0, *ends[:-1]], ends, strict=True)
        return [Flight((row,), self.copy.part(first, end), self.slots[first:end]) for row, first, end in spans]


class Offloader:
    """Device-to-host copies of one engine, and what follows from them."""

    def __init__(
        self,
        config: EngineConfig,
        cache: HostPageStore,
        runner: DeviceRunner,
        scheduler: Scheduler,
        counters: EngineCounters,
    ):
        self.config, self.cache, self.runner = config, cache, runner
        self.scheduler, self.counters = scheduler, counters
        self._has_windows = any(window.window is not None for window in runner.windows)
        self.pending: list[Flight] = []
        """Copies under way, in the order in which they were started."""
        self.closing: list[Row] = []
        """Completed rows whose copies have not landed yet."""
        self.landed: dict[int, Row] = {}
        """Rows whose copies have landed and that are not published yet."""
        self.failed: list[np.ndarray] = []
        """Host pages whose copies failed, to be given up when copies land."""

    @property
    def busy(self) -> bool:
        """Whether `land` has anything to do."""
        return bool(self.pending or self.landed or self.failed or self.closing)

    def land(self, *, wait: bool = True) -> None:
        """Publishes the pages whose copies to the host are complete, releases completed rows.

        Without `wait` it takes what has landed by now, in the order in which copies were started, and leaves the rest.
        """
        while self.pending:
            rows, copy, slots = flight = self.pending[0]
            if not (wait or copy.ready):
                break
            try:
                copy.wait()
            except TransferError as error:  # the pages are not published; the row itself goes on
                if len(rows) > 1:
                    self.pending[:1] = flight.by_row()  # it hits those alone whose pages it carried
                    continue
                self._copy_failed(copy.host_pages, error)
            else:
                self.cache.finish_copy(copy.host_pages, copy.payloads, slots)
            del self.pending[0]  # only now: an interrupt while waiting loses nothing
            for row, epoch, _ in rows:
                if epoch == row.epoch:
                    row.pending_copies -= 1
                    self.landed[row.id] = row
        while self.failed:
            self.cache.fail_copy(self.failed[0])
            del self.failed[0]
        while self.landed:
            name, row = next(iter(self.landed.items()))
            self.publish(row)
            del self.landed[name]  # only now: what fails is tried again at the next boundary
        for row in [row for row in reversed(self.closing) if not row.pending_copies]:
            self.closing.remove(row)
            self.scheduler.release(row)

    def _copy_failed(self, host_pages: np.ndarray, error: BaseException) -> None:
        self.failed.append(host_pages)
        self._count_failure(host_pages, error)

    def _count_failure(self, host_pages: np.ndarray, error: BaseException) -> None:
        self.counters.faults.failed_offloads += len(host_pages)
        self.counters.faults.last_error = f"{type(error).__name__}: {error}"

    def publish(self, row: Row) -> None:
        """Makes the row's complete, committed pages index entries, and shares their device pages. Idempotent (B22)."""
        if not (self.scheduler.reuse and row.reuse):
            return
        if not self.cache.has_row(row.id):
            return
        size = self.config.page_size
        full = min(row.committed_kv_tokens, self.scheduler.publishable_tokens(row)) // size
        if full > row.published_pages:
            self.cache.publish(row.id, row.tokens[: full * size], row.namespace)
            row.published_pages = self.cache.num_published(row.id)
        self.share_device_pages(row)

    def share_device_pages(self, row: Row) -> None:
        """Points the row's published device pages at the shared ones (M3), and closes them for writing in any case."""
        if row.row is None or not (self.scheduler.reuse and row.reuse):
            return
        done, full = row.mirrored_pages, row.committed_kv_tokens // self.config.page_size
        if full <= done:
            return
        host_pages = np.asarray(self.cache.pages(row.id))[done:full]
        host_pages = host_pages[: self.scheduler.num_indexed(host_pages)]
        for account in self.runner.accounts:
            if self.scheduler.share_device:
                self.counters.decode.pages_deduplicated += account.share(row.row, host_pages, done)
            else:
                account.seal(row.row, done + len(host_pages))
        row.mirrored_pages += len(host_pages)

    def flush_full_pages(self, rows: Iterable[Row]) -> None:
        """Starts copying to the host what became full since the last flush; cached pages are not copied again (A20)."""
        size = self.config.page_size
        due = []
        for row in rows:
            full = row.committed_kv_tokens // size
            if full > row.offloaded_pages and row.uses_host:
                due.append((row, np.arange(row.offloaded_pages, full)))
        if due:
            self.start(due)
        for row, columns in due:
            row.offloaded_pages += len(columns)

    def give_back(self) -> None:
        """Gives back the device pages that the rows' windows have passed; their copies to the host are started first.

        Rows of a model without windows are not even looked at.
        """
        if not self._has_windows:
            return
        rows = [r for r in self.scheduler.running if r.is_live and r.leader is None and r.row is not None]
        self.flush_full_pages(rows)
        for row in rows:
            self.scheduler.slide(row, row.prefilled_tokens if row.replays else row.committed_kv_tokens)

    def start(self, due: list[tuple[Row, np.ndarray]]) -> None:
        """Starts copying pages, given as columns of rows, in as few calls as possible, before the next step changes the pools.

        A page that a sliding group has given back is absent from the copy. What cannot be copied is counted; its row goes on.
        """
        pages = [np.asarray(self.cache.pages(row.id))[columns] for row, columns in due]
        try:
            self.cache.begin_copy(np.concatenate(pages))
        except Exception as error:  # nothing has begun: the pages are not published, the row goes on
            if len(due) > 1:
                for one in due:  # those alone that it is about are lost
                    self.start([one])
            else:
                self._count_failure(pages[0], error)
            return
        self._dispatch(due, pages)

    def _dispatch(self, due: list[tuple[Row, np.ndarray]], pages: list[np.ndarray]) -> None:
        lengths, size = [len(some) for some in pages], self.config.page_size
        rows = np.repeat([row.row_index for row, _ in due], lengths)
        columns, host_pages = np.concatenate([columns for _, columns in due]), np.concatenate(pages)
        device_pages = [account.page_table[rows, columns] for account in self.runner.accounts]
        try:
            copy = self.runner.offload(device_pages, host_pages, lengths)
        except Exception as error:  # as when the copy fails later: nothing is published, the row goes on
            if len(due) > 1:
                for one, some in zip(due, pages, strict=True):
                    self._dispatch([one], [some])
            else:
                self._copy_failed(host_pages, error)
            return
        except BaseException as error:  # an interrupt: nobody will say that these pages have landed
            self._copy_failed(host_pages, error)
            raise
        filled = np.repeat([row.committed_kv_tokens for row, _ in due], lengths)
        slots = np.minimum(filled - size * columns, size)  # a held row's tail is partial
        self.counters.prefill.pages_offloaded += len(host_pages)
        for row, _ in due:
            row.pending_copies += 1
        flying = tuple((row, row.epoch, count) for (row, _), count in zip(due, lengths, strict=True))
        self.pending.append(Flight(flying, copy, slots))

    def detach(self, row: Row) -> None:
        """The row no longer waits for its copies; the host pages stay taken until the bytes have landed (A13)."""
        row.pending_copies = 0
        row.epoch += 1

    def hold(self, row: Row) -> None:
        """Copies what of the row is on the device only, the partial tail page included, and gives its device pages back.

        Raises `TransferError`, and leaves the row where it is, when a page cannot be copied.
        """
        size = self.config.page_size
        self.flush_full_pages([row])
        self.land()
        used = pages_for(row.committed_kv_tokens, size)
        full = row.committed_kv_tokens // size
        pages = np.asarray(self.cache.pages(row.id))
        missing = np.flatnonzero(~np.asarray(self.cache.has_payload(pages[:full]), bool))
        if len(missing) and (self.cache.accounts.refs[pages[missing]] > 1).any():
            self.detach(row)  # a page that others read cannot be written again: compute everything anew
            self.scheduler.evict(row)
            return
        again = np.concatenate([missing, np.arange(full, used)])  # a copy that failed earlier is made again
        if len(again):
            self.start([(row, again)])
            self.land()
        if not np.asarray(self.cache.has_payload(pages[:used]), bool).all():
            raise TransferError(f"request {row.request_id} stays on the device: {self.counters.faults.last_error}")
        row.move_to(SequenceState.ON_HOLD)
        self.scheduler.release_device(row)
