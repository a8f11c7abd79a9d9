"""`Prefix`: a cached prompt beginning as a value that one can hold, fork, pin, save and let go."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from prefix_reuse.display import html_table
from prefix_reuse.errors import LeaseError
from prefix_reuse.lease import PrefixLease

if TYPE_CHECKING:
    from prefix_reuse.cache import PrefixCache


class Prefix:
    """Pages that stay cached as long as somebody holds this value.

    It is made by `PrefixCache.hold` or `PrefixCache.load`. Its pages go back to the cache (where they live on until they are
    evicted) when `release` is called, at the end of a `with` block, or when the value is garbage collected.

    Attributes:
        tokens: int32 [N], read-only: the tokens that are held, whole pages only.
        requested_tokens: tokens of the prompt that was asked for.
        reason: why no more is held, a `MissReason`; empty when every full page of the prompt is.
        namespace: digest of the namespace of its pages.

    Example:
        >>> prefix = engine.cache.hold(document)                                    # doctest: +SKIP
        >>> engine.generate([np.append(prefix.tokens, q) for q in questions])       # doctest: +SKIP
    """

    def __init__(
        self, cache: PrefixCache, lease: PrefixLease, tokens: np.ndarray, namespace: bytes, requested_tokens: int
    ) -> None:
        self._cache = cache
        self._lease = lease
        self.tokens = tokens
        self.tokens.setflags(write=False)
        self.namespace = namespace
        self.requested_tokens = requested_tokens
        self.reason = str(lease.match.miss_reason)
        self._finalizer = weakref.finalize(self, cache.store.drop_later, lease)
        self._finalizer.atexit = False  # the whole store goes with the process

    def __len__(self) -> int:
        """Tokens that are held."""
        return len(self.tokens)

    @property
    def num_pages(self) -> int:
        return self._lease.num_pages

    @property
    def page_ids(self) -> np.ndarray:
        """int32 [num_pages]: host pages, in token order. Raises `LeaseError` after the release."""
        return self._held().page_ids.copy()

    @property
    def is_complete(self) -> bool:
        """Whether every full page of the prompt that was asked for is held."""
        return not self.reason

    @property
    def is_held(self) -> bool:
        """False once it was released."""
        return self._lease.is_live

    @property
    def is_pinned(self) -> bool:
        return self._cache.is_pinned(self.tokens, self.namespace)

    def fork(self) -> Prefix:
        """A second, independent hold on the same pages. Raises `LeaseError` after the release."""
        lease = self._cache.store.hold_again(self._held())
        return Prefix(self._cache, lease, self.tokens, self.namespace, self.requested_tokens)

    def pin(self) -> Prefix:
        """Lets its pages be evicted after all others, also when nobody holds them any more. Returns itself.

        A pin is soft: it never keeps an allocation from succeeding, and at most half of the index is pinned.
        """
        self._cache.pin(self.tokens, self.namespace)
        return self

    def unpin(self) -> Prefix:
        """Takes `pin` back; prefixes that overlap and are pinned themselves stay so. Returns itself."""
        self._cache.unpin(self.tokens, self.namespace)
        return self

    def save(self, path: Any) -> int:
        """Writes tokens and pages to the folder `path`, from which `PrefixCache.load` reads them. Returns the pages written.

        Raises:
            LeaseError: it was released. SnapshotError: the folder holds something else, or the model's identity is not known.
        """
        self._held()
        return self._cache.save_prefix(self, path)

    def release(self) -> None:
        """Gives the hold back. Idempotent."""
        self._finalizer.detach()
        if self._lease.is_live:
            self._lease.abort(self._lease.owner)

    def _held(self) -> PrefixLease:
        if not self._lease.is_live:
            raise LeaseError(f"{self!r} holds nothing any more: hold it again")
        return self._lease

    def __enter__(self) -> Prefix:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _lines(self) -> list[tuple[str, str]]:
        """(name, value) of everything worth showing."""
        size = self._cache.store.page_size
        full = self.requested_tokens // size
        if not self.is_held:
            held = "released"
        elif self.is_complete:
            held = "every full page of the prompt"
        else:
            held = f"{self.num_pages} of {full} full pages ({self.reason})"
        lines = [
            ("tokens", f"{len(self):,} of {self.requested_tokens:,}"),
            ("pages", f"{self.num_pages:,} of {size} tokens"),
            ("held", held),
        ]
        return [*lines, ("pinned", "yes")] if self.is_pinned else lines

    def __repr__(self) -> str:
        return "Prefix(" + ", ".join(f"{name}: {value}" for name, value in self._lines()) + ")"

    def _repr_html_(self) -> str:
        return html_table("Prefix", self._lines())
