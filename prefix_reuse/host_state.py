"""StoreState: what every part of the host page store works on, and how an operation is taken back."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections import deque
from collections.abc import Callable
from types import MethodType
from typing import Any

import numpy as np

from prefix_reuse.errors import ConfigError, GeometryError, HostPagesExhausted, UnknownRequestError
from prefix_reuse.geometry import NOT_BOUND, StoreGeometry, check_bindable
from prefix_reuse.host_accounts import PageAccounts
from prefix_reuse.host_types import HostCounters, PrefixRequest, PreparedGroup, SequenceId
from prefix_reuse.index import PrefixIndex, Undo
from prefix_reuse.index_resume import Cursor
from prefix_reuse.index_tree import NO_PAGES
from prefix_reuse.integrity import PageChecksums
from prefix_reuse.lease import PrefixLease


class Row:
    """Mutable record of a live sequence; `HostRow` is its public view."""

    __slots__ = ("capacity", "context", "cursor", "namespace", "num_shared", "pages", "reuse", "tokens")

    def __init__(self, request: PrefixRequest, pages: np.ndarray, num_shared: int, capacity: int) -> None:
        self.tokens = request.tokens
        self.namespace = request.namespace
        self.reuse = request.reuse
        self.pages = pages
        self.num_shared = num_shared
        self.context = len(request.tokens)
        self.capacity = capacity
        self.cursor: Cursor | None = None  # how far its pages were published


class StoreState:
    """Arrays, rows and leases of a store. See `HostPageStore` for the arguments."""

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
        self.geometry: StoreGeometry | None = None
        """What its pages look like, once bound."""
        self.windows: tuple[int | None, ...] = ()
        """Sliding window of each of the G layer groups in tokens, once bound."""
        self.lacks = np.zeros((0, num_pages), bool)
        """bool [G, P]: the page holds bytes, but none of this layer group."""
        self.num_partial = 0
        """Pages that lack the bytes of some group."""
        self.ids = itertools.count()
        """Sequence ids for whoever uses this store, so that two engines on one store never give the same id."""
        self.accounts = PageAccounts(num_pages)
        self.payloads = np.empty(num_pages, object)
        self.checksums = PageChecksums() if integrity else None
        self.counters = HostCounters()
        self._listeners: list[Callable[[], Callable[[np.ndarray], None] | None]] = []
        if on_free is not None:
            self.listen(on_free)
        self._dropped: deque[PrefixLease] = deque()
        self._poison = poison
        self._copy_payload = copy_payload
        self._fault = fault
        self._rows: dict[SequenceId, Row] = {}
        self._leases: set[PrefixLease] = set()
        self._groups: set[PreparedGroup] = set()
        if index is not None:
            index.bind_busy(self.accounts.in_use)

    def bind(self, geometry: StoreGeometry) -> None:
        """From now on the pages of this store have this geometry. Binding an equal one again changes nothing.

        Raises:
            GeometryError: another geometry or device, or a store without index; nothing has changed.
        """
        check_bindable(self, geometry)
        if self.geometry is None:
            self.windows = tuple(part.window for part in geometry.parts)
            self.lacks = np.zeros((len(self.windows), self.num_pages), bool)
        if self.geometry is None or not self.geometry.device:
            self.geometry = geometry
            self.page_bytes = geometry.page_bytes

    def listen(self, on_free: Callable[[np.ndarray], None]) -> None:
        """One more that is told which pages became free; a bound method is held weakly, and once."""
        if all(listener() != on_free for listener in self._listeners):
            weak = isinstance(on_free, MethodType)
            self._listeners.append(weakref.WeakMethod(on_free) if weak else lambda: on_free)

    def bound_geometry(self) -> StoreGeometry:
        """The geometry; raises `GeometryError` when the store was never bound: then nobody knows what a page must be."""
        if self.geometry is None:
            raise GeometryError(NOT_BOUND, "bind the store to the geometry of its pages first")
        return self.geometry

    @property
    def identity(self) -> str:
        """Names the geometry that the store is bound to; empty before."""
        return "" if self.geometry is None else self.geometry.identity

    def drop_later(self, lease: PrefixLease) -> None:
        """The holder of `lease` is gone. Safe at any moment, in any thread: the references go back with the next operation.

        Garbage collection may run in the middle of an operation on this store, whose undo steps rely on nobody else
        changing the counts.
        """
        self._dropped.append(lease)

    def collect(self) -> None:
        """Return the references of leases whose holders were garbage collected."""
        while self._dropped:
            lease = self._dropped.popleft()
            if lease.is_live:
                lease.abort(lease.owner)

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

    def _row(self, sequence_id: SequenceId) -> Row:
        row = self._rows.get(sequence_id)
        if row is None:
            raise UnknownRequestError(f"sequence {sequence_id!r} has no host row")
        return row

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

    def _is_writable(self, ids: np.ndarray) -> np.ndarray:
        return (self.accounts.refs[ids] == 1) & (self.accounts.pins[ids] == 0)

    def _unpin(self, ids: np.ndarray) -> None:
        if len(ids):
            freed = self.accounts.unpin(ids)
            self.counters.pin_decrements += len(ids)
            self._forget_checksums(ids)
            self._forget(freed)

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
        at = freed.astype(np.intp)
        self.accounts.filled[at] = 0
        self._forget_parts(at)
        if self._poison is None:
            self.payloads[at] = None
        else:
            for page in freed.tolist():
                if self.payloads[page] is not None:
                    self.payloads[page] = self._poison(self.payloads[page])
        self._forget_checksums(freed)
        for listener in self._listeners[:]:
            on_free = listener()
            if on_free is None:
                self._listeners.remove(listener)  # its engine is gone
            else:
                on_free(freed)

    def _put(self, page: int, payload: Any) -> None:
        """The bytes of a page, and which layer groups they lack."""
        self.payloads[page] = payload
        if isinstance(payload, tuple) and len(payload) == len(self.windows):
            lacks = [part is None for part in payload]
            self.num_partial += any(lacks) - bool(self.lacks[:, page].any())
            self.lacks[:, page] = lacks

    def _forget_parts(self, ids: np.ndarray) -> None:
        if self.num_partial:
            self.num_partial -= int(self.lacks[:, ids].any(axis=0).sum())
            self.lacks[:, ids] = False

    def _forget_checksums(self, ids: np.ndarray) -> None:
        if self.checksums is not None:
            self.checksums.forget(ids)

    def _step(self, name: str) -> None:
        if self._fault is not None:
            self._fault(name)


class Transaction:
    """All or nothing: on an exception the undo steps run last to first and the counters go back."""

    __slots__ = ("_before", "_store", "_undo")

    def __init__(self, store: StoreState) -> None:
        self._store = store
        self._undo: Undo = []

    def __enter__(self) -> Undo:
        self._store.collect()
        self._before = vars(self._store.counters).copy()
        return self._undo

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            return
        for step in reversed(self._undo):
            step()
        vars(self._store.counters).update(self._before)
        self._store.counters.rollbacks += 1
