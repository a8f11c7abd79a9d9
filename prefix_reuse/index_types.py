"""What the index returns: small immutable values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NamedTuple

import numpy as np


class CommitResult(NamedTuple):
    """What a commit changed.

    Attributes:
        inserted: slice of the given `page_ids` that became entries; pages before it are duplicates of older entries.
        entry_ids: int32, page ids of the entries that existed before (one per page before `inserted.start`).
        new_ids: int32, page ids that became entries: `page_ids[inserted]`.
        evicted: int32, page ids that lost their entry because of `max_entries`.
        digests: one digest per new page if the index was given a digest function, else empty.
        run: private to the index: where the entries of the prompt end now.
    """

    inserted: slice
    entry_ids: np.ndarray
    new_ids: np.ndarray
    evicted: np.ndarray
    digests: list[bytes]
    run: Any = None


new_result: Callable[[tuple], CommitResult] = partial(tuple.__new__, CommitResult)
"""A `CommitResult` of all its fields in one tuple, at half the time: its constructor runs in Python."""


class IndexRun(NamedTuple):
    """One edge of the tree, as iteration shows it.

    Attributes:
        namespace: digest of the namespace.
        start_page: index of the first page of the run within its prompts.
        tokens: int32 [num_pages * page_size].
        page_ids: int32 [num_pages].
        last_access: tick of the last use.
        hits: uses since the run was stored.
        children: runs that continue this one.
    """

    namespace: bytes
    start_page: int
    tokens: np.ndarray
    page_ids: np.ndarray
    last_access: int
    hits: int
    children: int


@dataclass(frozen=True)
class Explanation:
    """Why a prompt hits as far as it does (`PrefixIndex.explain`).

    Attributes:
        hit_pages: leading full pages that are cached.
        hit_tokens: the same in tokens.
        full_pages: full pages of the prompt.
        reason: a `MissReason`.
        first_different_token: position of the first token that differs from the closest cached prompt, or None.
        detail: one sentence for people.
    """

    hit_pages: int
    hit_tokens: int
    full_pages: int
    reason: str
    first_different_token: int | None
    detail: str

    def __str__(self) -> str:
        return f"hit {self.hit_pages} of {self.full_pages} full pages ({self.hit_tokens} tokens): {self.detail}"


class Readable:
    """Mixin for frozen dataclasses of figures: one aligned line per field."""

    def __str__(self) -> str:
        items = [(f.name.replace("_", " "), getattr(self, f.name)) for f in fields(self)]  # type: ignore[arg-type]
        width = max(len(name) for name, _ in items)
        lines = [f"  {name:<{width}}  {_figure(value)}" for name, value in items]
        return "\n".join([type(self).__name__, *lines])


def _figure(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return str(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


@dataclass(frozen=True)
class IndexStats(Readable):
    """Figures of a `PrefixIndex`. Counters only grow; `entries`, `nodes` and `namespaces` are as of now.

    `collision_checks` counts exact comparisons of page runs: each is one that an index of bare digests would not make.
    """

    entries: int
    nodes: int
    namespaces: int
    soft_pinned: int
    hits: int
    misses: int
    lookup_tokens: int
    matched_tokens: int
    inserted_pages: int
    evicted_pages: int
    removed_pages: int
    collision_checks: int
    invalidations: int
