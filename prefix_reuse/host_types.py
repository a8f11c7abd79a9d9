"""Values that go in and out of the host page store."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from prefix_reuse.index_types import IndexStats, Readable
from prefix_reuse.lease import LeaseState, PrefixLease

SequenceId = Hashable


@dataclass(frozen=True, slots=True)
class PrefixRequest:
    """One sequence that wants host pages.

    Attributes:
        sequence_id: any hashable; must not be live.
        tokens: int32 [T], the prompt.
        capacity_tokens: tokens the row must have room for, at least T.
        namespace: digest of the namespace.
        reuse: False = look nothing up and publish nothing.
        lease: a hold on this prompt's match, taken earlier by `acquire`; its pages are used instead of a lookup.
        counted: False = the lookup joins no hit or miss counter (a row that comes back after an eviction).
        follows: id of an earlier request of the same call with the same prompt, which computes it: this one shares every
            full page of the prompt with it and gets private pages for the rest only (n samples of one prompt).
    """

    sequence_id: SequenceId
    tokens: Any
    capacity_tokens: int
    namespace: bytes = b""
    reuse: bool = True
    lease: PrefixLease | None = None
    counted: bool = True
    follows: SequenceId | None = None


class PrefixEstimate(NamedTuple):
    """What an allocation would find and need now."""

    hit_pages: int
    new_pages: int
    miss_reason: str


class PrefixAllocation(NamedTuple):
    """The pages of one admitted sequence.

    Attributes:
        sequence_id: as requested.
        shared_pages: int32, attached index entries and pages of the row that it follows, in token order.
        private_pages: int32, pages that only this row holds (suffix and runway); all newly allocated.
        shared_tokens: tokens covered by `shared_pages`.
        private_start: token position of the first slot of the first private page.
        logical_pages: int32, shared then private.
        newly_allocated: number of pages taken from the pool.
        miss_reason: why the hit is no longer, a `MissReason`.
    """

    sequence_id: SequenceId
    shared_pages: np.ndarray
    private_pages: np.ndarray
    shared_tokens: int
    private_start: int
    logical_pages: np.ndarray
    newly_allocated: int
    miss_reason: str


@dataclass(frozen=True)
class HostRow:
    """A live sequence as the host store sees it.

    Attributes:
        sequence_id: as requested.
        shared_pages: int32, pages attached at admission.
        private_pages: int32, the row's own pages, in token order after the shared ones.
        logical_pages: int32, shared then private.
        shared_prefix_tokens: tokens covered by the shared pages.
        private_start: token position where the private pages begin.
        context_length: tokens of the sequence so far.
        capacity_tokens: tokens that fit the pages.
    """

    sequence_id: SequenceId
    shared_pages: np.ndarray
    private_pages: np.ndarray
    logical_pages: np.ndarray
    shared_prefix_tokens: int
    private_start: int
    context_length: int
    capacity_tokens: int


class PreparedGroup:
    """Pages held for several sequences until `commit_group` or `abort_group` ends it, exactly once."""

    __slots__ = ("followed_pages", "leases", "owner", "private_pages", "requests", "state")

    def __init__(
        self,
        requests: Sequence[PrefixRequest],
        leases: Sequence[PrefixLease],
        followed_pages: Sequence[np.ndarray],
        private_pages: Sequence[np.ndarray],
        owner: object,
    ) -> None:
        self.requests = tuple(requests)
        self.leases = tuple(leases)
        self.followed_pages = tuple(followed_pages)
        self.private_pages = tuple(private_pages)
        self.owner = owner
        self.state = LeaseState.PREPARED

    def __repr__(self) -> str:
        pages = sum(len(p) for p in self.private_pages)
        return f"PreparedGroup({self.state.value}, sequences={len(self.requests)}, private_pages={pages})"


@dataclass
class HostCounters:
    """Counters of a store that only grow; rolled back with a failed operation (except `rollbacks`)."""

    ref_increments: int = 0
    ref_decrements: int = 0
    pin_increments: int = 0
    pin_decrements: int = 0
    lookup_hits: int = 0
    lookup_misses: int = 0
    evictions: int = 0
    copies_started: int = 0
    copies_failed: int = 0
    copies_on_write: int = 0
    dropped_entries: int = 0
    imported_pages: int = 0
    dropped_parts: int = 0
    filled_parts: int = 0
    rollbacks: int = 0


@dataclass(frozen=True)
class HostStats(Readable):
    """Figures of a `HostPageStore`.

    Pages as of now: `logical` counts every page of every live row, `physical` the distinct ones, `saved` their
    difference; `shared` are physical pages that are index entries, `private` the others; `index_only` pages are held by
    the index alone; `reserved` by leases or unfinished groups alone; `partial` pages lack the bytes of a sliding layer
    group. The rest are counters since the start (`dropped_parts` and `filled_parts`: how often such bytes went and came
    back). N rows that share P pages and own q each: logical = N(P+q), physical = P+Nq, saved = (N-1)P.
    """

    num_pages: int
    free_pages: int
    logical_pages: int
    physical_pages: int
    shared_pages: int
    private_pages: int
    pages_saved: int
    index_only_pages: int
    reserved_pages: int
    in_flight_pages: int
    partial_pages: int
    rows: int
    ref_increments: int
    ref_decrements: int
    pin_increments: int
    pin_decrements: int
    lookup_hits: int
    lookup_misses: int
    rollbacks: int
    evictions: int
    copies_started: int
    copies_failed: int
    copies_on_write: int
    dropped_entries: int
    imported_pages: int
    dropped_parts: int
    filled_parts: int
    enabled: bool
    active: bool
    disabled_reason: str
    entries: int
    open_leases: int
    matched_tokens: int
    inserted_pages: int
    evicted_pages: int
    collision_checks: int
    invalidations: int

    @property
    def hits(self) -> int:
        return self.lookup_hits

    @property
    def misses(self) -> int:
        return self.lookup_misses


NO_INDEX = IndexStats(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
"""What the index of a store without index would report."""
