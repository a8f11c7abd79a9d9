"""`Offloader`: copies finished pages to the host, and publishes them once their bytes have landed.

forward -> flush_full_pages -> (copy under way) -> land -> publish -> share_device_pages
           owner thread,                           bytes are there: index entries, shared device pages
           before the next donated step
"""

from __future__ import annotations

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
        self.pending: list[tuple[Row, PendingCopy, np.ndarray, int]] = []
        """Copies under way: the row, the copy, filled slots of each page, and the row's epoch then."""
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
            row, copy, slots, epoch = self.pending[0]
            if not (wait or copy.ready):
                break
            try:
                copy.wait()
            except TransferError as error:  # the pages are not published; the row itself goes on
                self._copy_failed(copy.host_pages, error)
            else:
                self.cache.finish_copy(copy.host_pages, copy.payloads, slots)
            del self.pending[0]  # only now: an interrupt while waiting loses nothing
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

    def _copy_failed(self, host_pages: np.ndarray, error: Exception) -> None:
        self.failed.append(host_pages)
        self._count_failure(host_pages, error)

    def _count_failure(self, host_pages: np.ndarray, error: Exception) -> None:
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

    def flush_full_pages(self, row: Row) -> None:
        """Starts copying to the host what became full since the last flush; cached pages are not copied again (A20)."""
        full = row.committed_kv_tokens // self.config.page_size
        if row.uses_host and full > row.offloaded_pages:
            self.start(row, row.offloaded_pages, full)
            row.offloaded_pages = full

    def give_back(self) -> None:
        """Gives back the device pages that the rows' windows have passed; their copies to the host are started first.

        Rows of a model without windows are not even looked at.
        """
        for row in self.scheduler.running if self._has_windows else ():
            if row.is_live and row.leader is None and row.row is not None:
                self.flush_full_pages(row)
                self.scheduler.slide(row, row.prefilled_tokens if row.replays else row.committed_kv_tokens)

    def start(self, row: Row, first: int, end: int) -> None:
        """Starts copying the row's pages first..end-1; see `start_columns`."""
        self.start_columns(row, np.arange(first, end))

    def start_columns(self, row: Row, columns: np.ndarray) -> None:
        """Starts copying the row's pages `columns`; the gather is dispatched before the next step changes the pool.

        A page that a sliding group has given back is absent from the copy.
        """
        host_pages = np.asarray(self.cache.pages(row.id))[columns]
        device_pages = [account.page_table[row.row_index][columns] for account in self.runner.accounts]
        size = self.config.page_size
        slots = np.minimum(row.committed_kv_tokens - size * columns, size)  # a held row's tail is partial
        try:
            self.cache.begin_copy(host_pages)
        except Exception as error:  # nothing has begun: the pages are not published, the row goes on
            self._count_failure(host_pages, error)
            return
        try:
            copy = self.runner.offload(device_pages, host_pages)
        except Exception as error:  # as when the copy fails later: nothing is published, the row goes on
            self._copy_failed(host_pages, error)
            return
        self.counters.prefill.pages_offloaded += len(host_pages)
        row.pending_copies += 1
        self.pending.append((row, copy, slots, row.epoch))

    def detach(self, row: Row) -> None:
        """The row no longer waits for its copies; the host pages stay taken until the bytes have landed (A13)."""
        row.pending_copies = 0
        row.epoch += 1

    def hold(self, row: Row) -> None:
        """Copies what of the row is on the device only, the partial tail page included, and gives its device pages back.

        Raises `TransferError`, and leaves the row where it is, when a page cannot be copied.
        """
        size = self.config.page_size
        self.flush_full_pages(row)
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
            self.start_columns(row, again)
            self.land()
        if not np.asarray(self.cache.has_payload(pages[:used]), bool).all():
            raise TransferError(f"request {row.request_id} stays on the device: {self.counters.faults.last_error}")
        row.move_to(SequenceState.ON_HOLD)
        self.scheduler.release_device(row)
