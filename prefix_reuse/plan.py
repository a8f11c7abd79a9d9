"""Pure planning: numpy in, frozen dataclasses out. No plan changes any state; the engine carries them out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


@dataclass(frozen=True)
class PageDemand:
    """What one row needs of one layer group on the device: host pages of its cached tokens, then fresh private pages.

    The row may own more pages later than it is given now: `reserve` at once from one call to the next, and up to `extra`
    more for the time of one prefill call.
    """

    host_pages: np.ndarray
    """int [N]: host pages in token order that must be readable on the device."""
    num_sharable: int
    """Leading host pages that are indexed and may be shared between rows; the others are loaded privately."""
    num_private: int
    """Fresh private pages behind them (suffix and runway)."""
    first: int = 0
    """Leading host pages that a sliding window has passed: they get no device page."""
    reserve: int | None = None
    """Pages that the row may own (not attach) at once; None = those that it is given now."""
    extra: int = 0
    keeps_from: int = 0
    """First column that no query of this row will ever have passed: what it owns from there on it holds to its end."""

    @property
    def num_owned(self) -> int:
        """Pages that the row counts for by itself."""
        if self.reserve is not None:
            return self.reserve
        return self.num_private + len(self.host_pages) - max(self.num_sharable, self.first)


@dataclass(frozen=True)
class DevicePlan:
    """Where each row's device pages come from. `-1 - i` in `row_pages` stands for the i-th page to allocate (A23)."""

    demands: tuple[PageDemand, ...]
    row_pages: tuple[np.ndarray, ...]
    """From column `first` of the row's demand on."""
    loads: tuple[tuple[int, int], ...]
    """(host page, allocation) pairs to copy, host to device: each needed host page once."""
    mirrors: tuple[tuple[int, int], ...]
    """The part of `loads` that becomes resident under its host page."""
    num_allocations: int
    num_attachments: int
    """Pages that rows attach and for which no live row counts yet: new copies, and resident pages that nobody keeps."""
    skipped_duplicate: int
    """Loads saved because another row of the same batch needs the same host page."""
    skipped_resident: int
    """Loads saved because the page is already on the device."""

    @property
    def row_shared(self) -> tuple[int, ...]:
        """Leading columns of each row that are shared."""
        # Without M3 the copies are the row's own, but they hold finished pages all the same: never written.
        return tuple(demand.num_sharable for demand in self.demands)

    @property
    def pages_needed(self) -> int:
        """Available pages that carrying out the plan uses up, `extra` ones apart."""
        return self.num_attachments + sum(demand.num_owned for demand in self.demands)


def plan_device_pages(
    demands: Sequence[PageDemand],
    resident_page: Callable[[int], int | None],
    is_counted: Callable[[int], bool],
    share: bool,
) -> DevicePlan:
    """Deduplicates the host pages of a batch: one device page per unique missing page, nothing resident is loaded.

    Args:
      demands: one per row of the batch, of one layer group.
      resident_page: device page that mirrors a host page, or None.
      is_counted: whether a live row counts for that device page already (`DevicePool.is_counted`).
      share: M3. False: every row gets its own copy of every page.
    """
    row_pages, loads, mirrors = [], [], []
    planned: dict[int, int] = {}
    attached: set[int] = set()
    allocations = copies = duplicates = residents = 0
    for demand in demands:
        pages = []
        for i, host_page in enumerate(demand.host_pages[demand.first :].tolist(), start=demand.first):
            if share and i < demand.num_sharable:
                page = resident_page(host_page)
                if page is not None:
                    residents += 1
                    if not is_counted(page):
                        attached.add(page)
                    pages.append(page)
                    continue
                if host_page in planned:
                    duplicates += 1
                    pages.append(planned[host_page])
                    continue
                planned[host_page] = -1 - allocations
                mirrors.append((host_page, allocations))
            copies += i < demand.num_sharable
            loads.append((host_page, allocations))
            pages.append(-1 - allocations)
            allocations += 1
        for _ in range(demand.num_private):
            pages.append(-1 - allocations)
            allocations += 1
        row_pages.append(np.array(pages, np.int64))
    return DevicePlan(
        tuple(demands),
        tuple(row_pages),
        tuple(loads),
        tuple(mirrors),
        allocations,
        copies + len(attached),
        duplicates,
        residents,
    )
