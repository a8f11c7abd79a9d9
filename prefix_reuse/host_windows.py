"""Windows: host pages that lack the bytes of a sliding layer group, and what a hit can be in spite of that (X3).

A sliding group needs the last pages of a hit only, so its bytes of other pages may be dropped (`drop_group`). The index keeps
its entries and a lookup walks over them; how much of the walk is a hit is decided here, by `windows.usable_pages`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from prefix_reuse.errors import InvalidRequestError
from prefix_reuse.hashing import as_tokens
from prefix_reuse.host_state import StoreState
from prefix_reuse.index_lookup import shorten
from prefix_reuse.index_tree import NO_PAGES
from prefix_reuse.index_types import Explanation
from prefix_reuse.lease import MissReason, PrefixMatch
from prefix_reuse.windows import first_page, usable_pages


class HostWindows(StoreState):
    """The part of `HostPageStore` that knows which layer groups' bytes a page holds."""

    def peek(self, tokens: Any, namespace: bytes) -> PrefixMatch:
        """The hit of a prompt now, without any side effect: the longest cached prefix that every layer group can use.

        Args:
            tokens: int32 [T]; other integer sequences are converted.
            namespace: digest of the namespace.
        """
        if self.index is None:
            return PrefixMatch(NO_PAGES, 0, MissReason.REUSE_OFF)
        tokens = as_tokens(tokens)
        match = self.index.peek(tokens, namespace)
        usable = self._usable(match.page_ids, len(tokens))
        return match if usable == match.num_pages else shorten(match, usable, MissReason.WINDOW)

    def _usable(self, page_ids: np.ndarray, num_tokens: int) -> int:
        """How many leading pages of an indexed chain a prompt of `num_tokens` can use."""
        if not self.num_partial or not len(page_ids):
            return len(page_ids)
        return usable_pages(self.lacks[:, page_ids], self.windows, num_tokens, self.page_size)

    def explain(self, tokens: Any, namespace: bytes) -> Explanation:
        """How far a prompt hits and why no further. No side effect; raises `InvalidRequestError` without an index."""
        if self.index is None:
            raise InvalidRequestError("a store without index has no hits to explain")
        tokens = as_tokens(tokens)
        walk, hit = self.index.explain(tokens, namespace), self.peek(tokens, namespace)
        if hit.num_pages == walk.hit_pages:
            return walk
        pages = self.index.peek(tokens, namespace).page_ids
        gaps = []
        for group, window in enumerate(self.windows):
            missing = np.flatnonzero(self.lacks[group, pages])
            if len(missing):
                gaps.append(f"layer group {group} (window {window}) lacks the bytes of {len(missing)}")
        detail = f"{walk.hit_pages} pages are cached, but {'; '.join(gaps)}: a hit can end after page {hit.num_pages}"
        return replace(
            walk,
            hit_pages=hit.num_pages,
            hit_tokens=hit.num_pages * self.page_size,
            reason=MissReason.WINDOW,
            first_different_token=None,
            detail=detail,
        )

    def lacking(self, page_ids: Any) -> np.ndarray:
        """bool [G, N]: whether page n holds no bytes of layer group g. [0, N] for a store that is not bound."""
        return self.lacks[:, self.accounts.check_ids(page_ids)].copy()

    def drop_group(self, page_ids: Any, group: int) -> np.ndarray:
        """Gives up the bytes of one sliding layer group in pages that only the index holds.

        Their entries stay: pages whose window lies behind them are hit as before, and a row that computes such a page again
        gives it its bytes back when it publishes. Pages that a row or a lease holds, or that are being copied, are passed
        over.

        Returns:
            int32, the pages that had bytes of this group and lack them now.

        Raises:
            InvalidRequestError: the group has no window (every hit needs all of its pages), or does not exist.
        """
        ids = self.accounts.check_ids(page_ids)
        self.collect()
        if not 0 <= group < len(self.windows) or self.windows[group] is None:
            raise InvalidRequestError(
                f"layer group {group} of windows {list(self.windows)} has no sliding window: its bytes are always needed"
            )
        accounts = self.accounts
        idle = (accounts.pins[ids] > 0) & (accounts.refs[ids] == 0) & (accounts.copies[ids] == 0)
        ids = ids[idle & ~self.lacks[group, ids]].astype(np.int32)
        ids = ids[[isinstance(self.payloads[page], tuple) for page in ids.tolist()]]
        for page in ids.tolist():
            payload = self.payloads[page]
            self._put(page, (*payload[:group], None, *payload[group + 1 :]))
            if self.checksums is not None:
                self.checksums.drop_group(page, group)
        self.counters.dropped_parts += len(ids)
        return ids

    def trim_windows(self, every: int | None = None) -> int:
        """Gives up the bytes of sliding groups that only unlikely hits would read, to save memory of the host.

        What stays is what hits need that end where a cached prompt ends, where prompts part, or where an earlier hit ended,
        and at each `every`-th page. A hit that would end elsewhere is shorter from now on. Pages in use are passed over.

        Returns:
            How often a page gave up the bytes of a group.
        """
        if every is not None and every < 1:
            raise InvalidRequestError(f"every must be at least 1 page, got {every}")
        if self.index is None:
            return 0
        self.collect()
        sliding = [(group, window) for group, window in enumerate(self.windows) if window is not None]
        keep = np.zeros(self.lacks.shape, bool)
        entries = np.flatnonzero(self.accounts.pins)
        for ids in self.index.run_ends():
            for end in {len(ids), *range(every or len(ids), len(ids), every or len(ids))}:
                for group, window in sliding:
                    # A prompt that ends here replays its last token, which reads one token more than any other would.
                    keep[group, ids[first_page(end * self.page_size - 1, window, self.page_size) : end]] = True
        return sum(len(self.drop_group(entries[~keep[group, entries]], group)) for group, _ in sliding)

    def _fill_parts(self, entries: np.ndarray, sources: np.ndarray) -> None:
        """Entries that lack bytes get them from pages of the same tokens (int32 [N] each; equal ids are left alone)."""
        for entry, source in zip(entries.tolist(), sources.tolist(), strict=True):
            if entry == source or not self.lacks[:, entry].any():
                continue
            if self.accounts.copies[source] or self.accounts.filled[source] != self.page_size:
                continue
            self._fill_from(entry, self.payloads[source])

    def _fill_from(self, entry: int, payload: Any) -> None:
        """What the page of an entry lacks and `payload`, of the same tokens, has."""
        if not self.lacks[:, entry].any() or not isinstance(payload, tuple):
            return
        mine = self.payloads[entry]
        new = [g for g, part in enumerate(mine) if part is None and payload[g] is not None]
        if not new:
            return
        self._put(entry, tuple(theirs if part is None else part for part, theirs in zip(mine, payload, strict=True)))
        if self.checksums is not None:
            for group in new:
                self.checksums.add_group(entry, group, self.payloads[entry])
        self.counters.filled_parts += len(new)
