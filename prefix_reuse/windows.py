"""Sliding windows: which pages of a layer group a hit needs, and how many of them a row holds at once (X3).

A query at position p of a layer with a window of w tokens sees the keys p-w+1..p. Page 4, window 6, a hit of 12 tokens:

    page           0        1        2        3
    token        0..3     4..7     8..11    12..15
    first query                              12       sees 7..12: pages 1 and 2 of the hit, w - 1 = 5 cached tokens
    full hit                       11 (again)         sees 6..11: pages 1 and 2, w = 6 cached tokens

What lies before is neither loaded nor kept on the device: those columns of the group's page table are -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prefix_reuse.device_plan import PageDemand


def first_page(query: int, window: int | None, page_size: int) -> int:
    """The first page (column) that a query at position `query` reads; everything without a window."""
    return 0 if window is None else max(query - window + 1, 0) // page_size


def most_pages(tokens: int, page_size: int) -> int:
    """Pages that `tokens` consecutive tokens touch at most, wherever they begin."""
    return 0 if tokens < 1 else (tokens - 2) // page_size + 2


def usable_pages(lacks: np.ndarray, windows: Sequence[int | None], num_tokens: int, page_size: int) -> int:
    """How many leading pages of a cached chain a prompt can use: the largest boundary where no group lacks what it needs.

    Not the smallest over the groups: a page that is missing before a window is in nobody's way, so a longer boundary may
    be usable where a shorter one is not.

    Args:
        lacks: bool [G, N], whether page n of the chain lacks the bytes of layer group g.
        windows: of the G groups, in tokens; None = a group that reads everything.
        num_tokens: of the prompt; a hit of all of it replays the last token as a query.
    """
    ends = np.arange(lacks.shape[1] + 1)
    query = ends * page_size
    query[query == num_tokens] -= 1
    usable = np.ones(len(ends), bool)
    for lack, window in zip(lacks, windows, strict=True):
        last = np.where(lack, ends[1:], 0)  # behind the last page that is missing before each end
        last = np.concatenate([[0], np.maximum.accumulate(last)])
        first = 0 if window is None else np.maximum(query - window + 1, 0) // page_size
        usable &= last <= first
    usable[0] = True
    return int(np.flatnonzero(usable)[-1])


@dataclass(frozen=True)
class GroupWindow:
    """How the rows of one layer group hold device pages.

    A row of a sliding group holds `held` pages of its own at most from one decode call to the next. While its prompt is
    computed, a chunk needs more for the time of one call: that room is there once for all rows, since a call computes
    `chunk_tokens` tokens at most.

    Attributes:
        window: in tokens; None = the group keeps everything.
        chunk_tokens: tokens of one prefill call at most, over all rows.
        step_tokens: tokens that one decode call adds to a row at most.
    """

    window: int | None
    page_size: int
    chunk_tokens: int
    step_tokens: int

    def first(self, query: int) -> int:
        """See `first_page`."""
        return first_page(query, self.window, self.page_size)

    @property
    def held(self) -> int:
        """Pages that the window before a decode call and the tokens of the call touch at most."""
        assert self.window is not None
        return most_pages(self.window - 1 + self.step_tokens, self.page_size)

    @property
    def attached(self) -> int:
        """Pages of a hit that a row needs at most."""
        assert self.window is not None
        return most_pages(self.window, self.page_size)

    @property
    def chunk_pages(self) -> int:
        """Pages that the chunks of one prefill call need beyond what their rows hold anyway; chunks begin at page borders."""
        return 0 if self.window is None else self.chunk_tokens // self.page_size

    def pool_pages(self, num_pages: int, max_rows: int) -> int:
        """Pages with which this group never keeps a row waiting that fits a pool of `num_pages` of a group without window."""
        if self.window is None:
            return num_pages
        return min(num_pages, max_rows * (self.held + self.attached) + self.chunk_pages)

    def fewest_pages(self, num_pages: int) -> int:
        """Pages that one row by itself may need."""
        return self.pool_pages(num_pages, 1)

    def demand(
        self,
        host_pages: np.ndarray,
        num_sharable: int,
        query: int,
        capacity_tokens: int,
        *,
        prompt_tokens: int = 0,
        has_followers: bool = False,
    ) -> PageDemand:
        """What a row needs of this group.

        Args:
            host_pages: int [N], host pages of its cached tokens; the first `num_sharable` are index entries.
            query: position of the first token that it computes.
            capacity_tokens: tokens of the row in the end.
            prompt_tokens: of the prompt, if it still has to be computed.
            has_followers: whether other samples will share the pages of its prompt.
        """
        total = -(-capacity_tokens // self.page_size)
        if self.window is None:
            return PageDemand(host_pages, num_sharable, total - len(host_pages))
        own = total - num_sharable
        reserve = min(own, self.held)
        keeps_from = self.first(capacity_tokens - 1)
        extra = own - reserve if prompt_tokens else 0
        if has_followers:  # they keep pages that this row's window goes on to pass
            reserve += max(0, min(prompt_tokens // self.page_size, keeps_from) - self.first(prompt_tokens))
        first = min(self.first(query), len(host_pages))
        return PageDemand(host_pages, num_sharable, 0, first, reserve, extra, keeps_from)

    def follower_demand(self, prompt_tokens: int, capacity_tokens: int) -> PageDemand:
        """What a sample needs that is given the full pages of its prompt by the row it follows."""
        nothing = np.zeros(0, np.int32)
        full, rest = divmod(prompt_tokens, self.page_size)
        own = -(-capacity_tokens // self.page_size) - full
        if self.window is None:
            return PageDemand(nothing, 0, own)
        return PageDemand(nothing, 0, int(rest > 0), 0, min(own, self.held), 0, self.first(capacity_tokens - 1))

    def most_samples(self, prompt_tokens: int, capacity_tokens: int, num_pages: int, num_rows: int) -> int:
        """Samples of one prompt that an empty pool of `num_pages` takes together, `num_rows` at most; not below 1."""
        whole, full = -(-capacity_tokens // self.page_size), prompt_tokens // self.page_size
        own = whole - full
        if self.window is not None:
            own = min(own, self.held)
            if self.first(capacity_tokens - 1) > 0:
                whole = min(whole, self.held + self.chunk_pages) + 2 * min(full, self.attached)
        return num_rows if own == 0 else max(1, min(num_rows, 1 + (num_pages - whole) // own))
