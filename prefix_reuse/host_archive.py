"""Archive: whole pages out of the store and into it, all layer groups at once, or not at all.

    export      pages -> a value                          import_pages   a value -> private pages of a row
    checkpoint  a row -> a value                          restore        a value -> a row (its pages come before the row)
                                                          insert         prefixes with their bytes -> index entries

Ids, shapes, dtypes and layout are checked before the first write; whatever fails leaves the store exactly as it was.
Only the bytes of a sliding layer group may be absent (None), and not those that a restored row's window reaches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from prefix_reuse.errors import InvalidRequestError, SharedPageWriteError, TransferError
from prefix_reuse.geometry import StoreGeometry
from prefix_reuse.hashing import as_tokens
from prefix_reuse.host_copies import HostCopies
from prefix_reuse.host_rows import HostRows
from prefix_reuse.host_state import Row, Transaction
from prefix_reuse.host_types import HostRow, PrefixRequest, SequenceId
from prefix_reuse.host_windows import HostWindows
from prefix_reuse.index import Undo
from prefix_reuse.index_tree import NO_PAGES
from prefix_reuse.windows import first_page


@dataclass(frozen=True)
class PageExport:
    """Bytes of whole pages, in the form in which the store keeps them.

    Attributes:
        geometry: what each page looks like.
        payloads: [N], each a tuple over layer groups of arrays `[L, *page_shape]`, or None where the page lacks the bytes of
            a sliding group; never written again by the store.
        slots: [N], token slots of each page that hold something.
    """

    geometry: StoreGeometry
    payloads: tuple[Any, ...]
    slots: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.payloads)


@dataclass(frozen=True)
class RowCheckpoint:
    """A live row as a value: what `HostPageStore.restore` needs to bring it back, here or in a store of equal geometry.

    Attributes:
        tokens: int32, the prompt that the row was admitted with.
        namespace: digest of the namespace.
        context_length: tokens of the sequence so far.
        capacity_tokens: tokens that the row has room for.
        reuse: whether the row may attach entries and publish.
        pages: the pages of the first `context_length` tokens, the partly filled tail included.
    """

    tokens: np.ndarray
    namespace: bytes
    context_length: int
    capacity_tokens: int
    reuse: bool
    pages: PageExport


class StoredPrefix(NamedTuple):
    """A prefix for `HostPageStore.insert`: its tokens and the bytes of its pages.

    Attributes:
        namespace: digest of the namespace.
        tokens: int32 [N * page_size].
        payloads: [N], one per page, as in `PageExport`.
    """

    namespace: bytes
    tokens: np.ndarray
    payloads: Sequence[Any]


class HostArchive(HostRows, HostCopies, HostWindows):
    """The part of `HostPageStore` that exports and imports bytes. It needs a bound store (`bind`)."""

    def export(self, page_ids: Any) -> PageExport:
        """The bytes of pages, all layers of all groups. Changes nothing.

        Raises:
            TransferError: a page whose bytes have not landed, or are not what the geometry says.
            IntegrityError: in integrity mode, bytes that changed since the page was published.
            GeometryError: the store is not bound.
        """
        geometry = self.bound_geometry()
        ids = self.accounts.check_ids(page_ids)
        payloads = []
        for page in ids.tolist():
            self._step("export")
            payload = self.read(page)
            geometry.check_payload(payload)
            payloads.append(payload)
        return PageExport(geometry, tuple(payloads), tuple(self.accounts.filled[ids].tolist()))

    def import_pages(self, page_ids: Any, pages: PageExport) -> None:
        """Fill private pages of live rows with exported bytes.

        Args:
            page_ids: distinct pages that exactly one row owns and no copy is on its way to.
            pages: as many, of the geometry of this store.

        Raises:
            GeometryError, TransferError: pages of another geometry, or not whole.
            SharedPageWriteError: a page that is shared, indexed or not owned; a copy into one is in flight.
        """
        ids = self.accounts.check_ids(page_ids)
        if len(ids) != len(pages):
            raise InvalidRequestError(f"{len(pages)} exported pages for {len(ids)} host pages")
        self._check_export(pages)
        writable = self._is_writable(ids) & (self.accounts.copies[ids] == 0)
        if not writable.all():
            raise SharedPageWriteError(f"host pages {ids[~writable].tolist()[:8]} must not be written now")
        with Transaction(self):
            self._step("import")
        self._forget_checksums(ids)
        self._fill(ids, pages.payloads, pages.slots)

    def checkpoint(self, sequence_id: SequenceId) -> RowCheckpoint:
        """A live row as a value. Changes nothing; the row goes on.

        Raises:
            TransferError: a page of its context has not landed: copy it to the host first.
        """
        row = self._row(sequence_id)
        used = -(-row.context // self.page_size)
        pages = self.export(row.pages[:used])
        for page, slots, at in zip(row.pages.tolist(), pages.slots, range(used), strict=False):
            need = min(self.page_size, row.context - at * self.page_size)
            if slots < need:
                raise TransferError(f"host page {page} holds {slots} of {need} tokens of sequence {sequence_id!r}")
        self._check_window(pages, row.context)
        return RowCheckpoint(row.tokens.copy(), row.namespace, row.context, row.capacity, row.reuse, pages)

    def restore(self, checkpoint: RowCheckpoint, sequence_id: SequenceId) -> HostRow:
        """Bring a row back: its pages hold their bytes before the row exists (B18). All or nothing.

        Leading pages of the prompt that are index entries now are attached instead of written again.

        Raises:
            HostPagesExhausted: no room, even after evicting what nobody uses.
            GeometryError, TransferError: pages of another geometry, or not whole.
        """
        self._check_export(checkpoint.pages)
        if sequence_id in self._rows:
            raise InvalidRequestError(f"sequence {sequence_id!r} is live already; release it first")
        tokens, context = as_tokens(checkpoint.tokens), checkpoint.context_length
        used = -(-context // self.page_size)
        if len(checkpoint.pages) != used or checkpoint.capacity_tokens < context:
            raise InvalidRequestError(
                f"a row of {context} tokens and room for {checkpoint.capacity_tokens} has {used} pages of context, "
                f"the checkpoint {len(checkpoint.pages)}"
            )
        self._check_window(checkpoint.pages, context)
        with Transaction(self) as undo:
            shared = NO_PAGES
            if self.index is not None and checkpoint.reuse:
                shared = self.peek(tokens[:context], checkpoint.namespace).page_ids.copy()
            self._hold_for_now(shared, undo)
            hit = len(shared)
            need = -(-checkpoint.capacity_tokens // self.page_size) - hit
            self._step("evict")
            freed = self._make_room(need, undo)
            self._step("allocate")
            private = self.accounts.take(need)
            undo.append(lambda: self.accounts.untake(private))
            self.counters.ref_increments += need
            self._step("restore")
        self._forget(freed)
        self._fill(private[: used - hit], checkpoint.pages.payloads[hit:], checkpoint.pages.slots[hit:])
        request = PrefixRequest(sequence_id, tokens, checkpoint.capacity_tokens, checkpoint.namespace, checkpoint.reuse)
        row = Row(request, np.concatenate([shared, private]), hit, checkpoint.capacity_tokens)
        row.context = context
        self._rows[sequence_id] = row
        return self.row(sequence_id)

    def insert(self, prefixes: Sequence[StoredPrefix], *, may_evict: bool = True) -> int:
        """Index prefixes whose bytes come from outside; pages that are indexed already keep theirs. All or nothing.

        Args:
            prefixes: in the order in which they were last used, hottest last.
            may_evict: whether other entries may go to make room.

        Returns:
            Pages that became entries.

        Raises:
            HostPagesExhausted: no room for all of them.
            TransferError: bytes of another shape or dtype.
        """
        if self.index is None:
            return 0
        geometry = self.bound_geometry()
        prefixes = [prefix._replace(tokens=as_tokens(prefix.tokens)) for prefix in prefixes]
        for prefix in prefixes:
            if len(prefix.payloads) * self.page_size != len(prefix.tokens):
                raise InvalidRequestError(f"{len(prefix.payloads)} pages for {len(prefix.tokens)} tokens")
            for payload in prefix.payloads:
                geometry.check_payload(payload)
        with Transaction(self) as undo:
            matches = []
            for prefix in prefixes:
                match = self.index.peek(prefix.tokens, prefix.namespace)
                matches.append(match.page_ids.copy())
                self._hold_for_now(matches[-1], undo)
            slots, num_new = _new_pages(prefixes, [len(ids) for ids in matches], 4 * self.page_size)
            self._step("evict")
            freed = self._make_room(num_new, undo) if may_evict else NO_PAGES
            self._step("allocate")
            pages = self.accounts.take(num_new)
            undo.append(lambda: self.accounts.untake(pages))
            self.counters.ref_increments += num_new
            self._step("insert")
        # From here on nothing can fail. The index comes last: an undone commit would not merge the runs that it split.
        self._forget(freed)
        inserted = written = 0
        for prefix, known, new in zip(prefixes, matches, slots, strict=True):
            ids = np.concatenate([known, pages[new]])
            # A page that an earlier prefix has filled is an entry by now: it may only get what it lacks.
            there = len(known) + sum(number < written for number in new)
            self._fill(ids[there:], prefix.payloads[there:], [self.page_size] * (len(ids) - there))
            written += len(ids) - there
            for page, payload in zip(ids[:there].tolist() if self.num_partial else (), prefix.payloads, strict=False):
                self._fill_from(page, _frozen(payload))
            result = self.index.commit(prefix.tokens, ids, prefix.namespace)
            self._unpin(result.evicted)
            self.counters.evictions += len(result.evicted)
            self.accounts.pin(result.new_ids)
            self.counters.pin_increments += len(result.new_ids)
            if self.checksums is not None:
                self.checksums.add(result.new_ids, self.payloads)
            inserted += len(result.new_ids)
        self.counters.imported_pages += inserted
        for ids in (*matches, pages):
            self._release_refs(ids)
        return inserted

    def _check_export(self, pages: PageExport) -> None:
        geometry = self.bound_geometry()
        reason, detail = geometry.difference(pages.geometry)
        if reason:
            raise TransferError(f"{reason}: {detail}")
        for payload, slots in zip(pages.payloads, pages.slots, strict=True):
            geometry.check_payload(payload)
            if not 0 < slots <= self.page_size:
                raise TransferError(f"an exported page has {slots} filled slots of {self.page_size}")

    def _check_window(self, pages: PageExport, context: int) -> None:
        """Raises `TransferError` when a row of `context` tokens could not go on: its window reaches absent bytes."""
        for group, window in enumerate(self.windows):
            first = first_page(context, window, self.page_size)
            absent = [at for at, payload in enumerate(pages.payloads) if at >= first and payload[group] is None]
            if absent:
                raise TransferError(
                    f"a row of {context} tokens reads page {absent[0]} of layer group {group} (window {window}), "
                    "whose bytes are absent"
                )

    def _hold_for_now(self, ids: np.ndarray, undo: Undo) -> None:
        """References before any eviction (B7)."""
        self._step("lease")
        self._retain(ids)
        undo.append(lambda: self.accounts.refs.__setitem__(ids, self.accounts.refs[ids] - 1))

    def _fill(self, ids: np.ndarray, payloads: Sequence[Any], slots: Sequence[int]) -> None:
        for page, payload, filled in zip(ids.tolist(), payloads, slots, strict=False):
            self._put(page, _frozen(payload))
            self.accounts.filled[page] = filled


def _frozen(payload: Any) -> Any:
    """The payload, with a copy of every array that its owner could still write to."""
    return tuple(np.array(a) if isinstance(a, np.ndarray) and a.flags.writeable else a for a in payload)


def _new_pages(prefixes: Sequence[StoredPrefix], hits: Sequence[int], step: int) -> tuple[list[list[int]], int]:
    """Numbers the pages behind the hit of each prefix; equal beginnings get equal numbers. Also returns how many there are."""
    number: dict[tuple[Any, bytes], int] = {}
    out = []
    for prefix, hit in zip(prefixes, hits, strict=True):
        data = prefix.tokens.tobytes()
        above: Any = (prefix.namespace, data[: hit * step])
        mine = []
        for at in range(hit * step, len(data), step):
            above = number.setdefault((above, data[at : at + step]), len(number))
            mine.append(above)
        out.append(mine)
    return out, len(number)
