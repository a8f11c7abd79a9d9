"""Matches and leases: the one place that defines what a lookup returns and what holds it until admission.

A lease is a temporary reference on the pages of a match, taken before anything may be evicted:

    acquire -> OPEN --prepare(owner)--> PREPARED --commit(owner)--> COMMITTED   the sequence now owns the references
                 \\                         \\
                  `------- abort ------------`--abort(owner)------> ABORTED     the references are returned

Source of the states: MoE-Infinity's prefix KV reuse.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, StrEnum
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from prefix_reuse.errors import LeaseError


class MissReason(StrEnum):
    """Why a match is no longer than it is."""

    NONE = ""
    """Every full page of the prompt matched."""
    EMPTY = "empty-prompt"
    TOO_SHORT = "shorter-than-a-page"
    NOT_CACHED = "not-cached"
    """Nothing was ever stored behind the match."""
    DIFFERENT = "different-token"
    """Other pages are stored behind the match; the tokens differ."""
    EVICTED = "evicted"
    """The next page was stored and has been evicted."""
    WINDOW = "window-hole"
    """More pages are cached, but a sliding layer group lacks bytes that a longer hit would need."""
    NAMESPACE = "other-namespace"
    """The pages exist under another namespace (salt, adapter, weights ...). Only `explain` looks there."""
    REUSE_OFF = "reuse-off"


class PrefixMatch(NamedTuple):
    """The leading full pages of a prompt that the index holds.

    Attributes:
        page_ids: int32 [num_pages], in order of the tokens.
        num_pages: matched pages; tokens = num_pages * page_size.
        miss_reason: why the match ended, a `MissReason`; empty if every full page matched.
        run, run_pages, compared, version: private to the index: where the match ends, how many runs it crosses, and the
            state of the tree that this refers to.
    """

    page_ids: np.ndarray
    num_pages: int
    miss_reason: str
    run: Any = None
    run_pages: int = 0
    compared: int = 0
    version: int = 0


new_match: Callable[[tuple], PrefixMatch] = partial(tuple.__new__, PrefixMatch)
"""A `PrefixMatch` of all its fields in one tuple, at half the time: its constructor runs in Python."""


class LeaseState(Enum):
    OPEN = "open"
    PREPARED = "prepared"
    COMMITTED = "committed"
    ABORTED = "aborted"


class PrefixLease:
    """One reference on each page of a match, handed on exactly once.

    Every terminal call (`commit`, `abort`) works once; a second one, or one by another owner, raises `LeaseError` and
    changes nothing. As a context manager an unfinished lease is aborted at the end of the block.

    Args:
        match: what was found; its references have been taken by the caller.
        release: called once with the match when the references are to be returned.
        closed: called once at the terminal state, whichever it is.
    """

    __slots__ = ("_closed", "_release", "match", "namespace", "owner", "state", "tokens")

    def __init__(
        self, match: PrefixMatch, release: Callable[[PrefixMatch], Any], closed: Callable[[PrefixLease], None]
    ) -> None:
        self.match = match
        self.state = LeaseState.OPEN
        self.owner: object = None
        self.tokens: Any = None  # private to the index: what was looked up; None once the lease has ended
        self.namespace = b""
        self._release = release
        self._closed = closed

    @property
    def page_ids(self) -> np.ndarray:
        return self.match.page_ids

    @property
    def num_pages(self) -> int:
        return self.match.num_pages

    @property
    def is_live(self) -> bool:
        """Whether the lease still holds references of its own."""
        return self.state is LeaseState.OPEN or self.state is LeaseState.PREPARED

    def prepare(self, owner: object) -> None:
        """Bind the lease to `owner` (any object, compared by equality). OPEN -> PREPARED."""
        if self.state is not LeaseState.OPEN:
            raise LeaseError(f"cannot prepare a lease that is {self.state.value} (owner {self.owner!r})")
        if owner is None:
            raise LeaseError("a lease needs an owner other than None")
        self.owner = owner
        self.state = LeaseState.PREPARED

    def commit(self, owner: object) -> np.ndarray:
        """Hand the existing references to the caller without another retain. PREPARED -> COMMITTED.

        Returns:
            The page ids whose references the caller now owns, int32 [num_pages].
        """
        self._check(owner, "commit", LeaseState.PREPARED)
        self.state = LeaseState.COMMITTED
        self.tokens = None
        self._closed(self)
        return self.match.page_ids

    def abort(self, owner: object = None) -> None:
        """Return the references. OPEN (no owner needed) or PREPARED (its owner) -> ABORTED."""
        if self.state is LeaseState.PREPARED:
            self._check(owner, "abort", LeaseState.PREPARED)
        elif self.state is not LeaseState.OPEN:
            raise LeaseError(f"cannot abort a lease that is already {self.state.value}")
        self.state = LeaseState.ABORTED
        self.tokens = None
        self._closed(self)
        self._release(self.match)

    def _check(self, owner: object, verb: str, state: LeaseState) -> None:
        if self.state is not state:
            raise LeaseError(f"cannot {verb} a lease that is {self.state.value}; it must be {state.value}")
        if owner != self.owner:
            raise LeaseError(f"{owner!r} cannot {verb} a lease that is bound to {self.owner!r}")

    def __enter__(self) -> PrefixLease:
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_live:
            self.abort(self.owner)

    def __repr__(self) -> str:
        return f"PrefixLease({self.state.value}, pages={self.num_pages}, owner={self.owner!r})"


class PrefixLeaseProvider(Protocol):
    """Whatever can find and hold the cached beginning of a prompt: `HostPageStore`, or a `PrefixIndex` by itself."""

    @property
    def open_leases(self) -> int:
        """Leases that are neither committed nor aborted."""
        ...

    def acquire(self, tokens: Any, namespace: bytes) -> PrefixLease:
        """Look up `tokens` and take one reference on every matched page before returning."""
        ...
