"""Lookup: the longest cached prefix of a prompt, and leases that keep it cached."""

from __future__ import annotations

from typing import Any

import numpy as np

from prefix_reuse.errors import RefcountError
from prefix_reuse.hashing import as_tokens
from prefix_reuse.index_state import IndexState, Undo
from prefix_reuse.index_tree import NO_PAGES, Node, join_pages, walk
from prefix_reuse.lease import MissReason, PrefixLease, PrefixMatch, new_match

NOT_CACHED, DIFFERENT, EVICTED = (
    MissReason.NOT_CACHED,
    MissReason.DIFFERENT,
    MissReason.EVICTED,
)  # faster than attributes


class IndexLookup(IndexState):
    """The part of `PrefixIndex` that finds entries and marks them as used."""

    def peek(self, tokens: Any, namespace: bytes) -> PrefixMatch:
        """Longest cached prefix, without any side effect (recency and counters included).

        Args:
            tokens: int32 [T]; other integer sequences are converted. Empty gives no match.
            namespace: digest of the namespace.
        """
        return self._find(as_tokens(tokens), namespace)

    def _find(self, tokens: np.ndarray, namespace: bytes) -> PrefixMatch:
        full = len(tokens) // self.page_size
        root = self._roots.get(namespace)
        if full == 0 or root is None:
            reason = MissReason.NOT_CACHED if full else MissReason.TOO_SHORT if len(tokens) else MissReason.EMPTY
            return PrefixMatch(NO_PAGES, 0, reason)
        run, run_pages, found, missed = walk(root, tokens, full, self._step)
        count = run.start + run_pages
        reason = "" if count == full else self._reason(run, run_pages, missed)
        ids = found[0] if len(found) == 1 else join_pages(found)
        return new_match((ids, count, reason, run, run_pages, len(found), self._version))

    def _reason(self, run: Node, run_pages: int, missed: bytes) -> str:
        """Why the match ends after `run_pages` pages of `run`, whose next page would have had the tokens `missed`."""
        if (run.family, run.start + run_pages, missed) in self._tombstones:
            return EVICTED
        if run_pages < run.num_pages or run.children:
            return DIFFERENT
        # A run that eviction has shortened has its old tokens until it is used again.
        cut = run.parent is not None and run.tokens.startswith(missed, run_pages * self._step)
        return EVICTED if cut else NOT_CACHED

    def lookup(self, tokens: Any, namespace: bytes) -> PrefixMatch:
        """Longest cached prefix; refreshes the recency of exactly the matched pages and counts a hit or a miss."""
        tokens = as_tokens(tokens)
        return self._use(self._find(tokens, namespace), len(tokens))

    def touch(self, match: PrefixMatch, tokens: Any, namespace: bytes) -> None:
        """Count a `peek` as a lookup and refresh what it matched (of which the caller holds a reference since)."""
        if match.num_pages and match.version != self._version:  # the borders of the runs may have moved
            match = shorten(self.peek(tokens, namespace), match.num_pages, match.miss_reason)
        self._use(match, len(tokens))

    def _use(self, match: PrefixMatch, length: int) -> PrefixMatch:
        """Count a lookup and mark its match as used; returns the match, whose run ends now where it ends."""
        self._lookup_tokens += length
        ids, count, reason, run, pages, compared, _ = match
        if count == 0:
            self._misses += 1
            return match
        self._hits += 1
        self._matched_pages += count
        self._compared += compared
        if len(run.tokens) > pages * self._step:  # the match ends inside the run, or eviction has shortened it
            run = self._refresh(run, pages, 1)
            return new_match((ids, count, reason, run, pages, compared, self._version))
        self._tick = run.last_access = self._tick + 1
        run.hits += 1
        if self._uses_time:
            run.touched_at = self._clock()
        return match

    def _refresh(self, run: Node, pages: int, hits: int, undo: Undo | None = None) -> Node:
        """Mark a match that ends after `pages` pages of `run` as used now; returns the run, cut so that it ends there."""
        if pages < run.num_pages:
            run = self._split_at(run, pages)
        if undo is not None:
            before = run.last_access, run.hits, run.touched_at
            undo.append(lambda: run.set_uses(*before))
        elif len(run.tokens) > pages * self._step:
            self._compact(run)
        self._tick = run.last_access = self._tick + 1
        run.hits += hits
        if self._uses_time:
            run.touched_at = self._clock()
        return run

    def acquire(self, tokens: Any, namespace: bytes) -> PrefixLease:
        """Look up `tokens` and hold the match: its pages stay cached until the lease ends.

        `abort` ends the hold. `commit` hands it to its owner, who ends it by `release(lease.match)`. Only the last run of
        a match is marked, since a run is evicted only when nothing hangs below it. `remove` and `clear` heed no lease.
        """
        tokens = as_tokens(tokens)
        match = self._use(self._find(tokens, namespace), len(tokens))
        if match.num_pages:
            match.run.holds += 1
        self.open_leases += 1
        lease = PrefixLease(match, self.release, self._close)
        lease.tokens, lease.namespace = tokens, namespace
        return lease

    def release(self, match: PrefixMatch) -> None:
        """End the hold that a lease had on `match`.

        Raises:
            RefcountError: nobody holds it.
        """
        if match.num_pages:
            if match.run.holds == 0:
                raise RefcountError(f"nobody holds {match.run}; a match is released once")
            match.run.holds -= 1

    def _close(self, lease: PrefixLease) -> None:
        self.open_leases -= 1


def shorten(match: PrefixMatch, pages: int, reason: str) -> PrefixMatch:
    """The first `pages` pages of `match`, at most; it ends there for `reason`."""
    if pages >= match.num_pages:
        return match
    if pages == 0:
        return PrefixMatch(NO_PAGES, 0, reason)
    run = match.run
    while run.start >= pages:
        run = run.parent
    return new_match((match.page_ids[:pages], pages, reason, run, pages - run.start, match.compared, match.version))
