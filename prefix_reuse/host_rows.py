"""Rows: the pages of live sequences, how they grow, fork, shrink and end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from prefix_reuse.errors import InvalidRequestError, TransferError
from prefix_reuse.host_state import Row, StoreState, Transaction
from prefix_reuse.host_types import HostRow, PrefixRequest, SequenceId
from prefix_reuse.index import Undo
from prefix_reuse.index_tree import NO_PAGES


class HostRows(StoreState):
    """The part of `HostPageStore` that keeps the rows."""

    def has_row(self, sequence_id: SequenceId) -> bool:
        """Whether the sequence is live."""
        return sequence_id in self._rows

    def rows(self) -> Iterable[SequenceId]:
        """Ids of the live sequences."""
        return tuple(self._rows)

    def pages(self, sequence_id: SequenceId) -> np.ndarray:
        """All pages of a live sequence in token order, shared then private, int32."""
        return self._row(sequence_id).pages.copy()

    def row(self, sequence_id: SequenceId) -> HostRow:
        """The full record of a live sequence."""
        row = self._row(sequence_id)
        shared_tokens = row.num_shared * self.page_size
        return HostRow(
            sequence_id=sequence_id,
            shared_pages=row.pages[: row.num_shared].copy(),
            private_pages=row.pages[row.num_shared :].copy(),
            logical_pages=row.pages.copy(),
            shared_prefix_tokens=shared_tokens,
            private_start=shared_tokens,
            context_length=row.context,
            capacity_tokens=row.capacity,
        )

    def set_context(self, sequence_id: SequenceId, tokens: int) -> None:
        """Record how many tokens a sequence has so far (for `row`)."""
        row = self._row(sequence_id)
        if not 0 <= tokens <= len(row.pages) * self.page_size:
            raise InvalidRequestError(f"context of {tokens} tokens does not fit {len(row.pages)} pages")
        row.context = tokens

    def grow(self, sequence_id: SequenceId, capacity_tokens: int) -> np.ndarray:
        """Add private pages until the row has room for `capacity_tokens`; evicts entries if it must.

        Returns:
            int32, the new pages. On failure the row is untouched.
        """
        row = self._row(sequence_id)
        need = max(0, -(-capacity_tokens // self.page_size) - len(row.pages))
        with Transaction(self) as undo:
            self._step("evict")
            freed = self._make_room(need, undo)
            self._step("allocate")
            pages = self.accounts.take(need)
            undo.append(lambda: self.accounts.untake(pages))
            self._step("grow")
            self.counters.ref_increments += need
        if need:
            row.pages = np.concatenate([row.pages, pages])
        row.capacity = max(row.capacity, capacity_tokens)
        self._forget(freed)
        return pages

    def fork(self, sequence_id: SequenceId, new_id: SequenceId, capacity_tokens: int | None = None) -> HostRow:
        """A second row with the same content: full pages are shared, the partial tail is copied (copy on write).

        Full pages of the source become read-only for both. Without an index every page is copied.

        Raises:
            TransferError: a page that has to be copied has not landed; nothing has changed.
        """
        source = self._row(sequence_id)
        if new_id in self._rows:
            raise InvalidRequestError(f"sequence {new_id!r} is live already; release it first")
        capacity = max(source.capacity if capacity_tokens is None else capacity_tokens, source.context)
        full = source.context // self.page_size if self.index is not None else 0
        used = -(-source.context // self.page_size)
        with Transaction(self) as undo:
            shared = source.pages[:full].copy()
            self._retain(shared)
            undo.append(lambda: self.accounts.refs.__setitem__(shared, self.accounts.refs[shared] - 1))
            need = max(used, -(-capacity // self.page_size)) - full
            self._step("evict")
            freed = self._make_room(need, undo)
            self._step("allocate")
            private = self.accounts.take(need)
            undo.append(lambda: self.accounts.untake(private))
            self.counters.ref_increments += need
            copies = self._copies(source.pages[full:used], undo, private)
            self._step("fork")
        self._forget(freed)
        self._write_copies(copies)
        request = PrefixRequest(new_id, source.tokens, capacity, source.namespace, source.reuse)
        row = self._rows[new_id] = Row(request, np.concatenate([shared, private]), full, capacity)
        row.context = source.context
        return self.row(new_id)

    def truncate(self, sequence_id: SequenceId, length: int) -> np.ndarray:
        """Cut a row to `length` tokens; a shared partial tail is first copied to a private page (copy on write).

        Returns:
            int32, pages that the row gave back. On failure the row is untouched.
        """
        row = self._row(sequence_id)
        if not 0 <= length <= row.context:
            raise InvalidRequestError(f"cannot truncate {row.context} tokens to {length}")
        keep = -(-length // self.page_size)
        dropped = row.pages[keep:]
        private, freed, copies = NO_PAGES, NO_PAGES, []
        if length % self.page_size and not self._is_writable(row.pages[keep - 1 : keep]).all():
            with Transaction(self) as undo:
                self._step("evict")
                freed = self._make_room(1, undo)
                self._step("allocate")
                private = self.accounts.take(1)
                undo.append(lambda: self.accounts.untake(private))
                self.counters.ref_increments += 1
                copies = self._copies(row.pages[keep - 1 : keep], undo, private)
                self._step("truncate")
            dropped = row.pages[keep - 1 :]
            keep -= 1
        self._forget(freed)
        self._write_copies(copies)
        row.pages = np.concatenate([row.pages[:keep], private])
        row.num_shared = min(row.num_shared, keep)
        row.context = length
        row.capacity = len(row.pages) * self.page_size
        row.tokens = row.tokens[:length]
        row.cursor = None
        if length % self.page_size:  # the slots after the cut are no longer this row's bytes: not a whole page any more
            tail = row.pages[-1]
            self.accounts.filled[tail] = min(self.accounts.filled[tail], length % self.page_size)
        self._release_refs(dropped)
        return dropped

    def _copies(self, sources: np.ndarray, undo: Undo, targets: np.ndarray) -> list[tuple[int, Any, int]]:
        """Copies of the payloads of `sources` for the first of `targets`, made before anything is exposed."""
        out = []
        for source, target in zip(sources.tolist(), targets.tolist(), strict=False):
            self._step("copy")
            if self.accounts.copies[source] or not self.accounts.filled[source]:
                raise TransferError(f"host page {source} has not landed and cannot be copied")
            payload = self.payloads[source]
            out.append((target, None if payload is None else self._copy_payload(payload), self.accounts.filled[source]))
        self.counters.copies_on_write += len(out)
        return out

    def _write_copies(self, copies: list[tuple[int, Any, int]]) -> None:
        for page, payload, filled in copies:
            self._put(page, payload)
            self.accounts.filled[page] = filled

    def release(self, sequence_id: SequenceId) -> np.ndarray:
        """Drop exactly the references that a sequence owns. Idempotent; pinned and in-flight pages live on.

        Returns:
            int32, pages that became free.
        """
        row = self._rows.pop(sequence_id, None)
        return NO_PAGES if row is None else self._release_refs(row.pages)
