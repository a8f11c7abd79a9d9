"""Copies: the bytes of host pages, on their way in and once they have landed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from prefix_reuse.errors import SharedPageWriteError, TransferError
from prefix_reuse.host_state import StoreState, Transaction


class HostCopies(StoreState):
    """The part of `HostPageStore` that takes and gives bytes; pages that several may read are write-once."""

    def begin_copy(self, page_ids: Any) -> None:
        """Announce copies into private pages; they are neither freed nor published until the copies end.

        A page that several rows share because they follow one that computes it is written once, before it has any bytes.

        Raises:
            SharedPageWriteError: a page that is indexed, shared or not owned by any row.
            TransferError: a copy into the page is in flight already.
        """
        ids = self.accounts.check_ids(page_ids)
        # Rows that follow another one name its pages before there are bytes in them: those may still be written, once.
        awaited = (self.accounts.refs[ids] > 1) & (self.accounts.pins[ids] == 0) & (self.accounts.filled[ids] == 0)
        writable = self._is_writable(ids) | awaited
        if not writable.all():
            bad = ids[~writable]
            raise SharedPageWriteError(
                f"host pages {bad.tolist()[:8]} must not be written: refs {self.accounts.refs[bad].tolist()[:8]}, "
                f"pins {self.accounts.pins[bad].tolist()[:8]}"
            )
        if self.accounts.copies[ids].any():
            raise TransferError(f"a copy into one of host pages {ids.tolist()[:8]} is in flight; let it end first")
        self._checkpoint("begin_copy")
        self.accounts.copies[ids] += 1
        self.accounts.filled[ids] = 0
        self._forget_parts(ids)
        self._forget_checksums(ids)
        self.counters.copies_started += len(ids)

    def finish_copy(self, page_ids: Any, payloads: Sequence[Any] | None, slots: Any = None) -> None:
        """The bytes have landed. Pages whose row ended meanwhile become free instead.

        Args:
            page_ids: as in `begin_copy`.
            payloads: one per page, opaque (a tuple over layer groups); None = a simulation without bytes.
            slots: int or int [N], token slots that the bytes cover; None = whole pages. Only whole pages are published.
        """
        ids = self.accounts.check_ids(page_ids)
        if payloads is not None and len(payloads) != len(ids):
            raise TransferError(f"{len(payloads)} payloads for {len(ids)} host pages")
        self._checkpoint("finish_copy")
        freed = self.accounts.end_copy(ids)
        alive = self.accounts.refs[ids] + self.accounts.pins[ids] > 0
        self.accounts.filled[ids] = np.where(alive, self.page_size if slots is None else slots, 0)
        if payloads is not None:
            for page, payload in zip(ids.tolist(), payloads, strict=True):
                self._put(page, payload)
        self._forget(freed)

    def fail_copy(self, page_ids: Any) -> None:
        """The copies were lost: the pages keep no bytes and cannot be published; nothing else is affected."""
        ids = self.accounts.check_ids(page_ids)
        self._checkpoint("fail_copy")
        freed = self.accounts.end_copy(ids)
        self.payloads[ids] = None
        self._forget_parts(ids)
        self.counters.copies_failed += len(ids)
        self._forget(freed)

    def _checkpoint(self, name: str) -> None:
        """The one step of an operation that has been checked and writes from here on."""
        if self._fault is not None:
            with Transaction(self):
                self._step(name)

    def read(self, page_id: int) -> Any:
        """The payload of a page whose bytes have landed; verified in integrity mode.

        Raises:
            TransferError: no bytes, or a copy is in flight.
            IntegrityError: a checksum differs (names page, layer, K or V).
        """
        page = int(page_id)
        if not 0 <= page < self.num_pages or not self.accounts.filled[page] or self.accounts.copies[page]:
            raise TransferError(f"host page {page} holds no complete bytes")
        payload = self.payloads[page]
        if self.checksums is not None:
            self.checksums.verify(page, payload)
        return payload

    def peek_payloads(self, page_ids: Sequence[int]) -> list[Any]:
        """The payloads of those pages whose bytes have landed, not verified: for looking ahead, not for use."""
        ids = np.asarray(page_ids, np.int64)
        return self.payloads[ids[self.has_payload(ids)]].tolist() if len(ids) else []

    def has_payload(self, page_id: Any) -> Any:
        """Whether the bytes of a page have landed; for an array of ids, a bool array."""
        ids = np.asarray(page_id)
        landed = (self.accounts.filled[ids] > 0) & (self.accounts.copies[ids] == 0)
        return bool(landed) if ids.ndim == 0 else landed
