"""Requests of one wave wait for the row that computes their common prefix, instead of computing it once each (X1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from prefix_reuse.sequence import Sequence as Row
from prefix_reuse.sequence import SequenceState


class Wave:
    """Rows that will publish pages which are not there yet, found by the page that somebody needs next.

    A question looks at the rows whose page in that place has the same tokens, not at every row: so asking for each of n
    waiting requests takes time in proportion to n. Lives for one admission, in which no row computes anything.

    Args:
      page_size: tokens.
      publishable_tokens: of a row, see `Scheduler.publishable_tokens`.
    """

    def __init__(self, page_size: int, publishable_tokens: Callable[[Row], int]):
        self._page_size, self._publishable_tokens = page_size, publishable_tokens
        self._rows: dict[bytes, list[Row]] = {}
        """By namespace and first page."""
        self._by_page: dict[bytes, dict[int, dict[bytes, list[Row]]]] = {}
        """By namespace and first page; then, for each end that was asked for, by the page that ends there."""

    def add(self, rows: Iterable[Row]) -> None:
        """Takes those of `rows` that still have something to publish."""
        for row in rows:
            if not row.reuse or row.state is SequenceState.ON_HOLD:  # nobody knows when a held row goes on
                continue
            full = self._publishable_tokens(row) // self._page_size
            if full and (row.offloaded_pages < full or row.pending_copies):
                first = self._first_page(row)
                self._rows.setdefault(first, []).append(row)
                for end, pages in self._by_page.get(first, {}).items():
                    self._sort_in(row, end, pages)

    def brings_next_page(self, sequence: Row, cached_pages: int) -> bool:
        """Whether one of the rows will publish the page that `sequence` needs after the `cached_pages` that are there."""
        first = self._first_page(sequence)
        if not sequence.reuse or first not in self._rows:
            return False
        end = (cached_pages + 1) * self._page_size
        tokens = sequence.tokens[:end]
        if len(tokens) < end:
            return False
        ends = self._by_page.setdefault(first, {})
        if end not in ends:
            ends[end] = {}
            for row in self._rows[first]:
                self._sort_in(row, end, ends[end])
        rows = ends[end].get(tokens[-self._page_size :].tobytes(), [])
        return any(np.array_equal(row.tokens[:end], tokens) for row in rows)

    def _sort_in(self, row: Row, end: int, pages: dict[bytes, list[Row]]) -> None:
        if self._publishable_tokens(row) >= end:
            pages.setdefault(row.tokens[end - self._page_size : end].tobytes(), []).append(row)

    def _first_page(self, sequence: Row) -> bytes:
        tokens = sequence.prompt if len(sequence.prompt) >= self._page_size else sequence.tokens
        return sequence.namespace + tokens[: self._page_size].tobytes()
