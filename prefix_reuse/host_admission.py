"""Admission: estimates, leases, and all-or-nothing allocation for one or several sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from prefix_reuse.errors import InvalidRequestError, LeaseError
from prefix_reuse.hashing import as_tokens
from prefix_reuse.host_state import Row, Transaction
from prefix_reuse.host_types import PrefixAllocation, PrefixEstimate, PrefixRequest, PreparedGroup
from prefix_reuse.host_windows import HostWindows
from prefix_reuse.index import Undo
from prefix_reuse.index_tree import NO_PAGES
from prefix_reuse.lease import LeaseState, MissReason, PrefixLease, PrefixMatch


class HostAdmission(HostWindows):
    """The part of `HostPageStore` that lets sequences in: plan, hold, evict, allocate, then create the rows."""

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
        with Transaction(self) as undo:
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
        with Transaction(self) as undo:
            group, freed = self._prepare(requests, owner, undo)
            self._count_lookups(group)
        self._forget(freed)
        return group

    def commit_group(self, group: PreparedGroup, owner: object) -> list[PrefixAllocation]:
        """Turn a prepared group into rows; its references become theirs without another retain."""
        self._check_group(group, owner, "commit")
        with Transaction(self):
            return self._commit(group)

    def abort_group(self, group: PreparedGroup, owner: object) -> None:
        """Return everything that a prepared group holds."""
        self._check_group(group, owner, "abort")
        with Transaction(self):
            self._step("abort")
        group.state = LeaseState.ABORTED
        self._groups.discard(group)
        for lease in group.leases:
            lease.abort(owner)
        for pages in (*group.followed_pages, *group.private_pages):
            self._release_refs(pages)

    def acquire(self, tokens: Any, namespace: bytes, *, counted: bool = True) -> PrefixLease:
        """Look up `tokens` and hold the match: a request that waits keeps its hit.

        `counted=False` refreshes the match but joins no hit or miss counter (a hold that is no request).
        """
        tokens = as_tokens(tokens)
        self.collect()
        match = self.peek(tokens, namespace)
        if self.index is not None and counted:
            self.index.touch(match, tokens, namespace)
            self._count_match(match)
        elif self.index is not None:
            self.index.commit(tokens, match.page_ids, namespace)  # nothing new in it: refreshes what is there
        self._retain(match.page_ids)
        return self._new_lease(match)

    def hold_again(self, lease: PrefixLease) -> PrefixLease:
        """A second, independent lease on the pages of a live one. Raises `LeaseError` when it is not live any more."""
        if not lease.is_live:
            raise LeaseError(f"{lease!r} holds nothing any more")
        self.collect()
        self._retain(lease.page_ids)
        return self._new_lease(lease.match)

    def _new_lease(self, match: PrefixMatch) -> PrefixLease:
        lease = PrefixLease(match, self._release_match, self._leases.discard)
        self._leases.add(lease)
        return lease

    def _release_match(self, match: PrefixMatch) -> None:
        self._release_refs(match.page_ids)

    def _peek(self, request: PrefixRequest) -> PrefixMatch:
        if request.lease is not None:
            return request.lease.match
        if self.index is None or not request.reuse:
            return PrefixMatch(NO_PAGES, 0, MissReason.REUSE_OFF)
        return self.peek(request.tokens, request.namespace)

    def _new_pages(self, request: PrefixRequest, match: PrefixMatch) -> int:
        shared = match.num_pages if request.follows is None else len(request.tokens) // self.page_size
        return max(0, -(-request.capacity_tokens // self.page_size) - shared)

    def _check_requests(self, requests: Sequence[PrefixRequest]) -> list[PrefixRequest]:
        if len({request.sequence_id for request in requests}) != len(requests):
            raise InvalidRequestError(f"a sequence id is repeated in {[r.sequence_id for r in requests]}")
        checked: list[PrefixRequest] = []
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
            if request.follows is not None and not self._may_follow(request, tokens, checked):
                raise InvalidRequestError(
                    f"sequence {request.sequence_id!r} follows {request.follows!r}, which is no earlier request of this call "
                    "with the same prompt, namespace and reuse"
                )
            checked.append(request if tokens is request.tokens else replace(request, tokens=tokens))
        return checked

    @staticmethod
    def _may_follow(request: PrefixRequest, tokens: np.ndarray, before: Sequence[PrefixRequest]) -> bool:
        if request.lease is not None:
            return False
        return any(
            r.sequence_id == request.follows
            and r.follows is None
            and r.lease is None
            and (r.namespace, r.reuse) == (request.namespace, True)
            and request.reuse
            and np.array_equal(r.tokens, tokens)
            for r in before
        )

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
        followed = self._follow(requests, matches, private, undo)
        group = PreparedGroup(requests, leases, followed, private, owner)
        self._groups.add(group)
        undo.append(lambda: self._groups.discard(group))
        self._step("prepared")
        return group, freed

    def _follow(
        self,
        requests: Sequence[PrefixRequest],
        matches: Sequence[PrefixMatch],
        private: Sequence[np.ndarray],
        undo: Undo,
    ) -> list[np.ndarray]:
        """References of each request on the full prompt pages that the row it follows will compute."""
        numbers = {request.sequence_id: i for i, request in enumerate(requests)}
        followed = []
        for request, match in zip(requests, matches, strict=True):
            pages = NO_PAGES
            if request.follows is not None:
                self._step("follow")
                pages = private[numbers[request.follows]][: len(request.tokens) // self.page_size - match.num_pages]
                self._retain(pages)
                undo.append(lambda pages=pages: self.accounts.refs.__setitem__(pages, self.accounts.refs[pages] - 1))
            followed.append(pages)
        return followed

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

    def _commit(self, group: PreparedGroup) -> list[PrefixAllocation]:
        allocations, rows = [], {}
        parts = zip(group.requests, group.leases, group.followed_pages, group.private_pages, strict=True)
        for request, lease, followed, private in parts:
            self._step("row")
            if request.sequence_id in self._rows:
                raise InvalidRequestError(f"sequence {request.sequence_id!r} became live after its group was prepared")
            shared = np.concatenate([lease.page_ids, followed]) if len(followed) else lease.page_ids
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
            if self.index is None or not request.reuse or request.lease is not None or not request.counted:
                continue
            self.index.touch(lease.match, request.tokens, request.namespace)
            self._count_match(lease.match)

    def _count_match(self, match: PrefixMatch) -> None:
        if match.num_pages:
            self.counters.lookup_hits += 1
        else:
            self.counters.lookup_misses += 1
