"""Pure planning: numpy in, frozen dataclasses out. No plan changes any state; the engine carries them out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from prefix_reuse.errors import LengthsError


def next_power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def bucket(n: int, smallest: int, largest: int) -> int:
    """The power of two that holds n, at least `smallest`; `largest` caps it (and need not be a power of two)."""
    if n > largest:
        raise LengthsError(f"{n} does not fit the largest bucket, {largest}")
    return min(max(next_power_of_two(n), smallest), largest)


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // page_size)


def freeze(plan: Any) -> None:
    """Makes the arrays of a plan read-only, so that a kept plan is what really ran."""
    for value in vars(plan).values():
        if isinstance(value, np.ndarray):
            value.setflags(write=False)


@dataclass(frozen=True)
class PagedBatchLengths:
    """All lengths of a batch of B rows, int32; every other place takes its lengths from here (B11).

    Written `(query | kv)`: a row computes `query` tokens that come after `context` cached ones, and they attend over
    `kv = context + query` keys. `query_offsets` [B+1] are the rows' borders in the packed token array.
    """

    query_lengths: np.ndarray
    query_offsets: np.ndarray
    context_lengths: np.ndarray
    kv_seq_lengths: np.ndarray

    @classmethod
    def create(cls, query_lengths: Sequence[int], context_lengths: Sequence[int]) -> PagedBatchLengths:
        query, context = np.asarray(query_lengths, np.int32), np.asarray(context_lengths, np.int32)
        if query.shape != context.shape or query.ndim != 1:
            raise LengthsError(f"query lengths {query.shape} and context lengths {context.shape} must be equal vectors")
        return cls(query, np.concatenate([[0], np.cumsum(query)]).astype(np.int32), context, context + query)

    def __post_init__(self) -> None:
        freeze(self)
        if (self.query_lengths < 0).any() or (self.context_lengths < 0).any():
            raise LengthsError("lengths must not be negative")
        if self.query_offsets[0] != 0 or not np.array_equal(np.diff(self.query_offsets), self.query_lengths):
            raise LengthsError(f"query_offsets {self.query_offsets} are not the running sum of {self.query_lengths}")
        if not np.array_equal(self.context_lengths + self.query_lengths, self.kv_seq_lengths):
            raise LengthsError(
                f"kv {self.kv_seq_lengths} != context {self.context_lengths} + query {self.query_lengths}"
            )

    def page_counts(self, page_size: int) -> np.ndarray:
        """int32 [B]: pages that hold each row's keys."""
        return -(-self.kv_seq_lengths // page_size)

    def last_page_lengths(self, page_size: int) -> np.ndarray:
        """int32 [B]: keys in each row's last page (1..page_size; 0 for an empty row)."""
        return np.where(self.kv_seq_lengths > 0, (self.kv_seq_lengths - 1) % page_size + 1, 0).astype(np.int32)


@dataclass(frozen=True)
class PrefillPlan:
    """What one prompt still has to compute after a hit of `prefix_shared_tokens` tokens (A15)."""

    prefix_shared_tokens: int
    suffix_input_ids: np.ndarray
    suffix_start_pos: int
    suffix_length: int
    context_length: int
    """Tokens of the whole prompt."""

    @property
    def is_full_hit(self) -> bool:
        """Everything is cached: the last prompt token is replayed as a query and writes no KV (A21)."""
        return self.suffix_length == 0

    @property
    def query_start(self) -> int:
        """Position of the first computed token."""
        return self.context_length - 1 if self.is_full_hit else self.suffix_start_pos

    @property
    def computed_tokens(self) -> int:
        return max(self.suffix_length, 1)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that are not computed."""
        return self.context_length - self.computed_tokens

    @property
    def positions(self) -> np.ndarray:
        return np.arange(self.query_start, self.context_length, dtype=np.int32)


def plan_prefill(tokens: np.ndarray, prefix_shared_tokens: int, page_size: int) -> PrefillPlan:
    """Plans one prompt. Raises `LengthsError` for an empty prompt or a hit that is not whole pages inside the prompt."""
    n = len(tokens)
    if n == 0:
        raise LengthsError("an empty prompt has nothing to prefill")
    if not 0 <= prefix_shared_tokens <= n or prefix_shared_tokens % page_size:
        raise LengthsError(
            f"a hit of {prefix_shared_tokens} tokens is not whole pages of {page_size} inside {n} tokens"
        )
    return PrefillPlan(
        prefix_shared_tokens, tokens[prefix_shared_tokens:], prefix_shared_tokens, n - prefix_shared_tokens, n
    )


@dataclass(frozen=True)
class Chunk:
    """A piece of one row's prefill that goes into the next packed batch."""

    row: int
    tokens: np.ndarray
    start: int
    """Position of the first token."""
    writes_kv: bool
    """False only for the replayed token of a full hit."""
    is_last: bool

    @property
    def end(self) -> int:
        """Position behind the last token."""
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class PrefillBatch:
    """A token-packed batch in its bucket: T tokens, B rows; padding is marked so that it can never touch a page."""

    lengths: PagedBatchLengths
    tokens: np.ndarray
    """int32 [T]; padding 0."""
    positions: np.ndarray
    """int32 [T]; padding 0."""
    token_rows: np.ndarray
    """int32 [T]: index of the row in this batch; padding B."""
    writes_kv: np.ndarray
    """bool [T]; padding False."""
    rows: np.ndarray
    """int32 [B]: row of the page table; padding = number of rows (out of range)."""

    def __post_init__(self) -> None:
        freeze(self)


def pack_chunks(chunks: Sequence[Chunk], *, num_tokens: int, num_rows: int, table_rows: int) -> PrefillBatch:
    """Packs chunks of different rows into one batch of bucket [T=num_tokens, B=num_rows]; hits and misses mix freely."""
    total = sum(len(c.tokens) for c in chunks)
    if total > num_tokens or len(chunks) > num_rows or any(len(c.tokens) == 0 for c in chunks):
        raise LengthsError(f"{len(chunks)} chunks of {total} tokens do not fit a [{num_tokens}, {num_rows}] bucket")
    pad = num_rows - len(chunks)
    lengths = PagedBatchLengths.create(
        [len(c.tokens) for c in chunks] + [0] * pad, [c.start for c in chunks] + [0] * pad
    )
    tokens, positions = np.zeros(num_tokens, np.int32), np.zeros(num_tokens, np.int32)
    token_rows, writes_kv = np.full(num_tokens, num_rows, np.int32), np.zeros(num_tokens, bool)
    for i, chunk in enumerate(chunks):
        here = slice(lengths.query_offsets[i], lengths.query_offsets[i + 1])
        tokens[here] = chunk.tokens
        positions[here] = np.arange(chunk.start, chunk.start + len(chunk.tokens))
        token_rows[here] = i
        writes_kv[here] = chunk.writes_kv
    rows = np.array([c.row for c in chunks] + [table_rows] * pad, np.int32)
    return PrefillBatch(lengths, tokens, positions, token_rows, writes_kv, rows)
