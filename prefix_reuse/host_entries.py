"""Entries: which pages of which rows become findable, and how they stop being so."""

from __future__ import annotations

from typing import Any

import numpy as np

from prefix_reuse.errors import InvalidRequestError
from prefix_reuse.hashing import as_tokens
from prefix_reuse.host_state import Transaction
from prefix_reuse.host_types import SequenceId
from prefix_reuse.host_windows import HostWindows
from prefix_reuse.index_resume import Cursor
from prefix_reuse.index_tree import NO_PAGES


class HostEntries(HostWindows):
    """The part of `HostPageStore` that moves pages into the index and out of it."""

    def publish(self, sequence_id: SequenceId, committed_tokens: Any, namespace: bytes) -> np.ndarray:
        """Make the row's full pages index entries, as far as tokens are committed and their bytes have landed.

        Idempotent. A page whose tokens are indexed under another page id stays private to the row; where that entry lacks
        the bytes of a layer group, it gets this page's. Pages that an earlier call published are not compared again.

        Args:
            sequence_id: a live sequence.
            committed_tokens: int32 token ids whose KV was computed by a successful forward, from position 0 on; or an
                int, that many tokens of the prompt given at allocation.
            namespace: digest; the namespace of the row.

        Returns:
            int32, the row's pages that are index entries now, in token order.
        """
        row = self._row(sequence_id)
        if self.index is None or not row.reuse:
            return NO_PAGES
        if namespace != row.namespace:
            raise InvalidRequestError(f"sequence {sequence_id!r} was admitted under another namespace")
        if isinstance(committed_tokens, (int, np.integer)):
            if committed_tokens > len(row.tokens):
                raise InvalidRequestError(
                    f"sequence {sequence_id!r} was admitted with {len(row.tokens)} tokens, {committed_tokens} are "
                    "committed: pass the token ids to publish generated ones"
                )
            tokens = row.tokens[: int(committed_tokens)]
        else:
            tokens = as_tokens(committed_tokens)
        full = min(len(tokens) // self.page_size, len(row.pages))
        if full == 0:
            return NO_PAGES
        own = row.pages[:full]
        with Transaction(self) as undo:
            self._step("publish")
            result = self.index.commit(tokens, own, namespace, accept=self._publishable, undo=undo, after=row.cursor)
            if self.checksums is not None:
                self.checksums.add(result.new_ids, self.payloads)
                undo.append(lambda: self._forget_checksums(result.new_ids))
            self._step("pin")
        row.cursor = Cursor(result.run, result.inserted.stop, result.run.cuts) if result.inserted.stop else None
        self._unpin(result.evicted)
        self.counters.evictions += len(result.evicted)
        self.accounts.pin(result.new_ids)
        self.counters.pin_increments += len(result.new_ids)
        old = own[: len(result.entry_ids)]
        if self.num_partial:
            self._fill_parts(result.entry_ids, old)
        return np.concatenate([old[old == result.entry_ids], result.new_ids])

    def num_published(self, sequence_id: SequenceId) -> int:
        """Leading pages of a live row whose tokens `publish` has found or made entries, under its page ids or others'."""
        cursor = self._row(sequence_id).cursor
        return 0 if cursor is None else cursor.end

    def _publishable(self, ids: np.ndarray) -> int:
        """How many leading pages are complete, not being copied, and no entry yet."""
        accounts = self.accounts
        ids = ids.astype(np.intp)
        no = (accounts.filled[ids] != self.page_size) | (accounts.copies[ids] != 0) | (accounts.pins[ids] != 0)
        return int(no.argmax()) if no.any() else len(ids)

    def is_indexed(self, page_ids: Any) -> np.ndarray:
        """bool [N]: which pages are index entries."""
        return self.accounts.pins[np.asarray(page_ids, np.int32)] > 0

    def drop_entry(self, page_id: int) -> np.ndarray:
        """A bad page and everything below it leaves the index; the page cannot be published again until rewritten.

        Returns:
            int32, page ids that lost their entry.
        """
        if self.index is None:
            return NO_PAGES
        self.accounts.filled[int(page_id)] = 0
        self._forget_parts(np.array([page_id], np.intp))
        dropped = self.index.remove(int(page_id))
        self.counters.dropped_entries += len(dropped)
        self._unpin(dropped)
        return dropped

    def evict_entries(self, n: int) -> np.ndarray:
        """Drop up to `n` index entries that nobody uses, by the index's policy; returns their page ids."""
        if self.index is None:
            return NO_PAGES
        evicted = self.index.evict(n)
        self.counters.evictions += len(evicted)
        self._unpin(evicted)
        return evicted

    def clear(self, namespace: bytes | None = None) -> np.ndarray:
        """One invalidation: all entries (of a namespace) go at once; pages in use are freed when their rows end."""
        if self.index is None:
            return NO_PAGES
        dropped = self.index.clear(namespace)
        self._unpin(dropped)
        return dropped
