"""HostPageStore: the host pages, the rows that use them, and the index entries that keep them.

    free --take--> private (refs 1) --publish--> shared (refs, pin) --release--> held by the index alone (pin)
      ^                |                                                                   |
      `---- release ---'<------------------------ evict entry (pin -1) --------------------'

A page returns to the free list exactly when references, pins and copies in flight are all zero.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from prefix_reuse.errors import (
    ConfigError,
    HostPagesExhausted,
    InvalidRequestError,
    LeaseError,
    SharedPageWriteError,
    TransferError,
    UnknownRequestError,
)
from prefix_reuse.hashing import as_tokens
from prefix_reuse.host_accounts import PageAccounts
from prefix_reuse.host_check import check_store, host_stats
from prefix_reuse.host_types import (
    HostCounters,
    HostRow,
    HostStats,
    PrefixAllocation,
    PrefixEstimate,
    PrefixRequest,
    PreparedGroup,
    SequenceId,
)
from prefix_reuse.index import PrefixIndex, Undo
from prefix_reuse.index_tree import NO_PAGES
from prefix_reuse.integrity import PageChecksums
from prefix_reuse.lease import LeaseState, MissReason, PrefixLease, PrefixMatch

__all__ = ["HostPageStore", "PrefixAllocation", "PrefixEstimate", "PrefixRequest", "PreparedGroup"]


class Row:
    """Mutable record of a live sequence; `HostRow` is its public view."""

    __slots__ = ("capacity", "context", "namespace", "num_shared", "pages", "reuse", "tokens")

    def __init__(self, request: PrefixRequest, pages: np.ndarray, num_shared: int, capacity: int) -> None:
        self.tokens = request.tokens
        self.namespace = request.namespace
        self.reuse = request.reuse
        self.pages = pages
        self.num_shared = num_shared
        self.context = len(request.tokens)
        self.capacity = capacity


class HostPageStore:
    """A fixed number of host pages, shared page by page between sequences with a common beginning.

    Args:
        num_pages: pages in the store.
        page_size: token slots per page.
        index: the prefix index; None turns reuse off (no lookups, no pins, no reference above 1).
        on_free: told the ids of pages that became free, after the operation that freed them is complete.
        integrity: checksum each page per layer, K and V, when it is published; verify when it is read.
        poison: fills the payload of a freed page (returns what stays in the slot), so that a stale read shows.
        copy_payload: makes an independent copy of a payload, for copy on write.
        fault: called with the name of each step before it is taken; a test may raise from it.
        max_bytes: cap on payload bytes, with `page_bytes`; lowers `num_pages`.
        page_bytes: bytes of one page over all layer groups.
        disabled_reason: why reuse is off, for the stats.

    Raises:
        ConfigError: sizes that cannot work.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        index: PrefixIndex | None = None,
        on_free: Callable[[np.ndarray], None] | None = None,
        integrity: bool = False,
        poison: Callable[[Any], Any] | None = None,
        copy_payload: Callable[[Any], Any] = copy.deepcopy,
        fault: Callable[[str], None] | None = None,
        max_bytes: int | None = None,
        page_bytes: int | None = None,
        disabled_reason: str = "",
    ) -> None:
        if max_bytes is not None:
            if not page_bytes:
                raise ConfigError("max_bytes needs page_bytes, the bytes of one page over all layer groups")
            num_pages = min(num_pages, max_bytes // page_bytes)
        if num_pages < 1 or page_size < 1:
            raise ConfigError(f"a host store needs at least one page and one slot, got {num_pages} x {page_size}")
        if index is not None and index.page_size != page_size:
            raise ConfigError(f"index has pages of {index.page_size} tokens, the store of {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.page_bytes = page_bytes
        self.index = index
        self.disabled_reason = disabled_reason if index is None else ""
        self.geometry: Any = None
        self.accounts = PageAccounts(num_pages)
        self.payloads = np.empty(num_pages, object)
        self.checksums = PageChecksums() if integrity else None
        self.counters = HostCounters()
        self._on_free = on_free
        self._poison = poison
        self._copy_payload = copy_payload
        self._fault = fault
        self._rows: dict[SequenceId, Row] = {}
        self._leases: set[PrefixLease] = set()
        self._groups: set[PreparedGroup] = set()
        if index is not None:
            index.bind_busy(self.accounts.in_use)

    @property
    def memory_bytes(self) -> int | None:
        """Bytes of all pages when the store is full; None when the size of a page is not known."""
        return None if self.page_bytes is None else self.page_bytes * self.num_pages

    @property
    def num_free(self) -> int:
        return self.accounts.num_free

    @property
    def open_leases(self) -> int:
        return len(self._leases)

    # Admission

    def estimate(self, requests: Sequence[PrefixRequest]) -> list[PrefixEstimate]:
        """Hit and new pages of each request as of now, without any side effect (recency and counters included)."""
        out = []
        for request in requests:
            match = self._peek(request)
            out.append(PrefixEstimate(match.num_pages, self._new_pages(request, match), match.miss_reason))
        return out

    def allocate_pages_for_sequences_with_prefix(self, requests: Sequence[PrefixRequest]) -> list[PrefixAllocation]:
        """Give every request its row: hit pages attached, private pages for the rest. All or nothing.

        References on all hits are taken before any entry is evicted. On any failure references, pins, free list, rows,
        index entries and recency are exactly as before.

        Raises:
            HostPagesExhausted: even evicting every unused entry would not give enough pages.
            InvalidRequestError: an id that is live or repeated, or a capacity below the prompt.
        """
        owner = object()
        with _Transaction(self) as undo:
            group, freed = self._prepare(requests, owner, undo)
            allocations = self._commit(group)
            self._count_lookups(group)
        self._forget(freed)
        return allocations

    def prepare_group(self, requests: Sequence[PrefixRequest], owner: object) -> PreparedGroup:
        """Hold everything that a group of sequences needs, without creating a row. All or nothing, as above.

        Args:
            requests: the sequences of the group (n samples of one prompt, for example).
            owner: any object but None; only it may end the group.
        """
        if owner is None:
            raise LeaseError("a group needs an owner other than None")
        with _Transaction(self) as undo:
            group, freed = self._prepare(requests, owner, undo)
            self._count_lookups(group)
        self._forget(freed)
        return group

    def commit_group(self, group: PreparedGroup, owner: object) -> list[PrefixAllocation]:
        """Turn a prepared group into rows; its references become theirs without another retain."""
        self._check_group(group, owner, "commit")
        with _Transaction(self):
            return self._commit(group)

    def abort_group(self, group: PreparedGroup, owner: object) -> None:
        """Return everything that a prepared group holds."""
        self._check_group(group, owner, "abort")
        with _Transaction(self):
            self._step("abort")
        group.state = LeaseState.ABORTED
        self._groups.discard(group)
        for lease in group.leases:
            lease.abort(owner)
        for pages in group.private_pages:
            self._release_refs(pages)

    def acquire(self, tokens: Any, namespace: bytes) -> PrefixLease:
        """Look up `tokens` and hold the match: a request that waits keeps its hit."""
        tokens = as_tokens(tokens)
        if self.index is None:
            match = PrefixMatch(NO_PAGES, 0, MissReason.REUSE_OFF)
        else:
            match = self.index.lookup(tokens, namespace)
            self._count_match(match)
        self._retain(match.page_ids)
        return self._new_lease(match)

    def _new_lease(self, match: PrefixMatch) -> PrefixLease:
        lease = PrefixLease(match, self._release_refs, self._leases.discard)
        self._leases.add(lease)
        return lease

    def _peek(self, request: PrefixRequest) -> PrefixMatch:
        if request.lease is not None:
            return request.lease.match
        if self.index is None or not request.reuse:
            return PrefixMatch(NO_PAGES, 0, MissReason.REUSE_OFF)
        return self.index.peek(request.tokens, request.namespace)

    def _new_pages(self, request: PrefixRequest, match: PrefixMatch) -> int:
        return max(0, -(-request.capacity_tokens // self.page_size) - match.num_pages)

    def _check_requests(self, requests: Sequence[PrefixRequest]) -> list[PrefixRequest]:
        if len({request.sequence_id for request in requests}) != len(requests):
            raise InvalidRequestError(f"a sequence id is repeated in {[r.sequence_id for r in requests]}")
        checked = []
        for request in requests:
            if request.sequence_id in self._rows:
                raise InvalidRequestError(f"sequence {request.sequence_id!r} is live already; release it first")
            tokens = as_tokens(request.tokens)
            if len(tokens) == 0:
                raise InvalidRequestError(f"sequence {request.sequence_id!r} has an empty prompt")
            if request.capacity_tokens < len(tokens):
                raise InvalidRequestError(
                    f"sequence {request.sequence_id!r}: capacity of {request.capacity_tokens} tokens is below its "
                    f"prompt of {len(tokens)}"
                )
            if request.lease is not None and request.lease not in self._leases:
                raise LeaseError(f"sequence {request.sequence_id!r} brings {request.lease!r}, which holds nothing here")
            checked.append(request if tokens is request.tokens else replace(request, tokens=tokens))
        return checked

    def _prepare(
        self, requests: Sequence[PrefixRequest], owner: object, undo: Undo
    ) -> tuple[PreparedGroup, np.ndarray]:
        self._step("plan")
        requests = self._check_requests(requests)
        matches = [self._peek(request) for request in requests]
        pairs = list(zip(requests, matches, strict=True))
        leases = [self._lease_for(request, match, owner, undo) for request, match in pairs]
        needs = [self._new_pages(request, match) for request, match in pairs]
        total = sum(needs)
        self._step("evict")
        freed = self._make_room(total, undo)
        self._step("allocate")
        pages = self.accounts.take(total)
        undo.append(lambda: self.accounts.untake(pages))
        self.counters.ref_increments += total
        ends = np.cumsum(needs)
        private = [pages[end - need : end] for end, need in zip(ends, needs, strict=True)]
        group = PreparedGroup(requests, leases, private, owner)
        self._groups.add(group)
        undo.append(lambda: self._groups.discard(group))
        self._step("prepared")
        return group, freed

    def _lease_for(self, request: PrefixRequest, match: PrefixMatch, owner: object, undo: Undo) -> PrefixLease:
        self._step("lease")
        lease = request.lease
        if lease is None:
            self._retain(match.page_ids)
            lease = self._new_lease(match)

            def give_back(lease: PrefixLease = lease) -> None:
                self._leases.discard(lease)
                self.accounts.refs[match.page_ids] -= 1
                lease.state = LeaseState.ABORTED
        else:

            def give_back(lease: PrefixLease = lease) -> None:
                lease.state, lease.owner = LeaseState.OPEN, None

        undo.append(give_back)
        lease.prepare(owner)
        return lease

    def _make_room(self, needed: int, undo: Undo) -> np.ndarray:
        """Evict entries until `needed` pages are free; returns the pages that eviction freed."""
        short = needed - self.accounts.num_free
        if short <= 0:
            return NO_PAGES
        evicted = NO_PAGES if self.index is None else self.index.evict(short, undo=undo)
        if len(evicted) < short:
            raise HostPagesExhausted(
                f"{needed} new host pages needed, {self.accounts.num_free} are free and {len(evicted)} can be evicted "
                f"({self.num_pages} in all); wait for rows to finish or raise num_host_pages"
            )
        freed = self.accounts.unpin(evicted)

        def give_back() -> None:
            self.accounts.pins[evicted] += 1
            self.accounts.num_free -= len(freed)

        undo.append(give_back)
        self.counters.pin_decrements += len(evicted)
        self.counters.evictions += len(evicted)
        return freed

    def _commit(self, group: PreparedGroup) -> list[PrefixAllocation]:
        allocations, rows = [], {}
        for request, lease, private in zip(group.requests, group.leases, group.private_pages, strict=True):
            self._step("row")
            if request.sequence_id in self._rows:
                raise InvalidRequestError(f"sequence {request.sequence_id!r} became live after its group was prepared")
            shared = lease.page_ids
            pages = np.concatenate([shared, private]) if len(shared) else private.copy()
            rows[request.sequence_id] = Row(request, pages, len(shared), request.capacity_tokens)
            tokens = len(shared) * self.page_size
            reason = lease.match.miss_reason
            allocations.append(
                PrefixAllocation(
                    request.sequence_id, shared, private, tokens, tokens, pages.copy(), len(private), reason
                )
            )
        self._step("commit")
        for lease in group.leases:
            lease.commit(group.owner)
        self._rows.update(rows)
        group.state = LeaseState.COMMITTED
        self._groups.discard(group)
        return allocations

    def _check_group(self, group: PreparedGroup, owner: object, verb: str) -> None:
        if group.state is not LeaseState.PREPARED:
            raise LeaseError(f"cannot {verb} a group that is {group.state.value}")
        if owner != group.owner:
            raise LeaseError(f"{owner!r} cannot {verb} a group that is bound to {group.owner!r}")

    def _count_lookups(self, group: PreparedGroup) -> None:
        """Recency and counters, once nothing can fail any more."""
        for request, lease in zip(group.requests, group.leases, strict=True):
            if self.index is None or not request.reuse or request.lease is not None:
                continue
            self.index.touch(lease.match, request.tokens, request.namespace)
            self._count_match(lease.match)

    def _count_match(self, match: PrefixMatch) -> None:
        if match.num_pages:
            self.counters.lookup_hits += 1
        else:
            self.counters.lookup_misses += 1

    # Rows

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
        with _Transaction(self) as undo:
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
        with _Transaction(self) as undo:
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
            with _Transaction(self) as undo:
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
            self.payloads[page], self.accounts.filled[page] = payload, filled

    def release(self, sequence_id: SequenceId) -> np.ndarray:
        """Drop exactly the references that a sequence owns. Idempotent; pinned and in-flight pages live on.

        Returns:
            int32, pages that became free.
        """
        row = self._rows.pop(sequence_id, None)
        return NO_PAGES if row is None else self._release_refs(row.pages)

    def _row(self, sequence_id: SequenceId) -> Row:
        row = self._rows.get(sequence_id)
        if row is None:
            raise UnknownRequestError(f"sequence {sequence_id!r} has no host row")
        return row

    # Bytes

    def begin_copy(self, page_ids: Any) -> None:
        """Announce copies into private pages; they are neither freed nor published until the copies end.

        Raises:
            SharedPageWriteError: a page that is indexed, shared or not owned by any row.
            TransferError: a copy into the page is in flight already.
        """
        ids = self.accounts.check_ids(page_ids)
        writable = self._is_writable(ids)
        if not writable.all():
            bad = ids[~writable]
            raise SharedPageWriteError(
                f"host pages {bad.tolist()[:8]} must not be written: refs {self.accounts.refs[bad].tolist()[:8]}, "
                f"pins {self.accounts.pins[bad].tolist()[:8]}"
            )
        if self.accounts.copies[ids].any():
            raise TransferError(f"a copy into one of host pages {ids.tolist()[:8]} is in flight; let it end first")
        self.accounts.copies[ids] += 1
        self.accounts.filled[ids] = 0
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
        freed = self.accounts.end_copy(ids)
        alive = self.accounts.refs[ids] + self.accounts.pins[ids] > 0
        self.accounts.filled[ids] = np.where(alive, self.page_size if slots is None else slots, 0)
        if payloads is not None:
            for page, payload in zip(ids.tolist(), payloads, strict=True):
                self.payloads[page] = payload
        self._forget(freed)

    def fail_copy(self, page_ids: Any) -> None:
        """The copies were lost: the pages keep no bytes and cannot be published; nothing else is affected."""
        ids = self.accounts.check_ids(page_ids)
        freed = self.accounts.end_copy(ids)
        self.payloads[ids] = None
        self.counters.copies_failed += len(ids)
        self._forget(freed)

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

    def has_payload(self, page_id: Any) -> Any:
        """Whether the bytes of a page have landed; for an array of ids, a bool array."""
        ids = np.asarray(page_id)
        landed = (self.accounts.filled[ids] > 0) & (self.accounts.copies[ids] == 0)
        return bool(landed) if ids.ndim == 0 else landed

    def _is_writable(self, ids: np.ndarray) -> np.ndarray:
        return (self.accounts.refs[ids] == 1) & (self.accounts.pins[ids] == 0)

    # Index entries

    def publish(self, sequence_id: SequenceId, committed_tokens: Any, namespace: bytes) -> np.ndarray:
        """Make the row's full pages index entries, as far as tokens are committed and their bytes have landed.

        Idempotent. A page whose tokens are indexed under another page id stays private to the row.

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
        with _Transaction(self) as undo:
            self._step("publish")
            result = self.index.commit(tokens, own, namespace, accept=self._publishable, undo=undo)
            if self.checksums is not None:
                self.checksums.add(result.new_ids, self.payloads)
                undo.append(lambda: self._forget_checksums(result.new_ids))
            self._step("pin")
        self._unpin(result.evicted)
        self.counters.evictions += len(result.evicted)
        self.accounts.pin(result.new_ids)
        self.counters.pin_increments += len(result.new_ids)
        old = own[: len(result.entry_ids)]
        return np.concatenate([old[old == result.entry_ids], result.new_ids])

    def _publishable(self, ids: np.ndarray) -> int:
        """How many leading pages are complete, not being copied, and no entry yet."""
        accounts = self.accounts
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

    def _unpin(self, ids: np.ndarray) -> None:
        if len(ids):
            freed = self.accounts.unpin(ids)
            self.counters.pin_decrements += len(ids)
            self._forget_checksums(ids)
            self._forget(freed)

    # Counting

    def _retain(self, ids: np.ndarray) -> None:
        if len(ids):
            self.accounts.retain(ids)
            self.counters.ref_increments += len(ids)

    def _release_refs(self, ids: np.ndarray) -> np.ndarray:
        freed = self.accounts.release(ids)
        self.counters.ref_decrements += len(ids)
        self._forget(freed)
        return freed

    def _forget(self, freed: np.ndarray) -> None:
        """Pages have left their last holder: their bytes go, and whoever mirrors them is told."""
        if len(freed) == 0:
            return
        self.accounts.filled[freed] = 0
        if self._poison is None:
            self.payloads[freed] = None
        else:
            for page in freed.tolist():
                if self.payloads[page] is not None:
                    self.payloads[page] = self._poison(self.payloads[page])
        self._forget_checksums(freed)
        if self._on_free is not None:
            self._on_free(freed)

    def _forget_checksums(self, ids: np.ndarray) -> None:
        if self.checksums is not None:
            self.checksums.forget(ids)

    def _step(self, name: str) -> None:
        if self._fault is not None:
            self._fault(name)

    # Looking inside

    def stats(self) -> HostStats:
        """Page figures as of now and counters since the start."""
        return host_stats(self)

    def snapshot_counters(self) -> dict[str, Any]:
        """Everything that a failed operation must leave as it was, in a form that compares with `==`."""
        counters = asdict(self.counters)
        del counters["rollbacks"]
        arrays = {n: getattr(self.accounts, n).tolist() for n in ("refs", "pins", "copies", "filled")}
        rows = {k: (r.pages.tolist(), r.num_shared, r.context, r.capacity) for k, r in self._rows.items()}
        return {
            **arrays,
            "free": self.accounts.free_ids().tolist(),
            "rows": rows,
            "leases": {id(lease): (lease.state, lease.owner) for lease in self._leases},
            "groups": {id(group): group.state for group in self._groups},
            "payloads": [id(payload) for payload in self.payloads],
            "counters": counters,
            "index": None if self.index is None else replace(self.index.stats(), nodes=0, collision_checks=0),
            "recency": None if self.index is None else self.index.recency(),
            "eviction_order": None if self.index is None else self.index.eviction_order(),
        }

    def check_integrity(self) -> None:
        """Raise `IntegrityError` naming the first broken invariant of counts, rows, leases, free list or index."""
        check_store(self)


class _Transaction:
    """All or nothing: on an exception the undo steps run last to first and the counters go back."""

    __slots__ = ("_before", "_store", "_undo")

    def __init__(self, store: HostPageStore) -> None:
        self._store = store
        self._undo: Undo = []
        self._before = replace(store.counters)

    def __enter__(self) -> Undo:
        return self._undo

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            return
        for step in reversed(self._undo):
            step()
        self._before.rollbacks += 1
        self._store.counters = self._before
