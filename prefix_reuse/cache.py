"""`PrefixCache`: the host cache of an engine as one sees it from a notebook: hold, explain, evict, clear, save, load.

`engine.cache` is one. It owns nothing: pages, index and leases are the store's (`engine.store`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from prefix_reuse.display import html_table
from prefix_reuse.errors import SnapshotError
from prefix_reuse.hashing import as_tokens
from prefix_reuse.host_store import HostPageStore, HostStats
from prefix_reuse.index import PrefixIndex
from prefix_reuse.index_types import Explanation, IndexRun
from prefix_reuse.intake import Intake, Prompt
from prefix_reuse.lease import MissReason, PrefixMatch
from prefix_reuse.prefix import Prefix
from prefix_reuse.snapshot import SnapshotReport, read_snapshot, write_snapshot
from prefix_reuse.snapshot_format import Identity, Refusal
from prefix_reuse.stats import SnapshotCounters


class PrefixCache:
    """What one may ask of, and do to, the host pages of an engine.

    Args:
      store: the pages.
      intake: turns prompts into tokens and salts into namespaces.
      adopt: moves a page of numpy arrays to where the engine keeps host pages.
      land: waits for copies on their way to the host, so that what is asked for is there.
      tidy: frees memory that only few pages hold any more.
      identity: what a snapshot must agree with, now.
      counters: of snapshots.
      snapshot_dir: where `save_snapshot` and `load_snapshot` go by default.
    """

    def __init__(
        self,
        store: HostPageStore,
        intake: Intake,
        *,
        adopt: Callable[[Any], Any],
        land: Callable[[], None],
        tidy: Callable[[], None] = lambda: None,
        identity: Callable[[], Identity],
        counters: SnapshotCounters,
        snapshot_dir: Any = None,
    ) -> None:
        self.store = store
        self.snapshot_dir = snapshot_dir
        self._intake, self._adopt, self._land, self._tidy = intake, adopt, land, tidy
        self._identity, self._counters = identity, counters
        self._pinned: list[tuple[bytes, np.ndarray]] = []

    @property
    def index(self) -> PrefixIndex | None:
        """None where reuse is off."""
        return self.store.index

    # ---- prefixes as values

    def hold(self, prompt: Prompt, *, salt: str = "", adapter: str = "") -> Prefix:
        """Holds what is cached of a prompt: its pages are not evicted before the value is released.

        Computes nothing: of a prompt that is only partly cached the cached part is held, and the value says so
        (`is_complete`, `reason`). Joins no hit or miss counter.

        Args:
          prompt: text, or token ids.
          salt, adapter: as in `Engine.submit`.
        """
        tokens, namespace = self._intake.tokenize(prompt), self._intake.namespace(salt, adapter)
        self._land()
        return self._hold(tokens, namespace)

    def _hold(self, tokens: np.ndarray, namespace: bytes) -> Prefix:
        lease = self.store.acquire(tokens, namespace, counted=False)
        held = tokens[: lease.num_pages * self.store.page_size].copy()
        return Prefix(self, lease, held, namespace, len(tokens))

    def load(self, path: Any) -> Prefix:
        """Brings back what `Prefix.save` wrote, and holds it. Other entries may be evicted to make room.

        A damaged page is left out with all that follows it; the value then says that it is not complete.

        Raises:
          SnapshotError: no prefix is there, or one of another model, geometry or platform, or from a newer version.
          HostPagesExhausted: its pages do not fit beside what is in use; nothing has changed.
        """
        self._check_active("load")
        self._land()
        contents = self._read(path, num_pages=self.store.num_pages)
        if contents.kind != "prefix":
            raise SnapshotError(Refusal.NOT_A_SNAPSHOT, f"{path} is a whole cache: use load_snapshot")
        inserted = self.store.insert(contents.prefixes)
        self._counters.loaded_pages += inserted
        prefix = self._hold(contents.requested, contents.namespaces[0])
        return prefix

    def save_prefix(self, prefix: Prefix, path: Any) -> int:
        """See `Prefix.save`."""
        self._check_active("save")
        self._land()
        report = write_snapshot(
            path,
            self.store,
            self._identity(),
            [(prefix.namespace, prefix.tokens, prefix.page_ids)],
            kind="prefix",
            counters=self._counters,
        )
        return report.pages

    def pin(self, tokens: np.ndarray, namespace: bytes) -> None:
        """See `Prefix.pin`."""
        if self.index is not None and not self.is_pinned(tokens, namespace):
            self._pinned.append((namespace, tokens))
            self.index.soft_pin(tokens, namespace)

    def unpin(self, tokens: np.ndarray, namespace: bytes) -> None:
        """See `Prefix.unpin`."""
        if self.index is None or not self.is_pinned(tokens, namespace):
            return
        self._pinned = [p for p in self._pinned if not _is(p, tokens, namespace)]
        self.index.soft_pin(tokens, namespace, pinned=False)
        for other_namespace, others in self._pinned:
            if other_namespace == namespace:
                self.index.soft_pin(others, namespace)  # what it shared with the one that went

    def is_pinned(self, tokens: np.ndarray, namespace: bytes) -> bool:
        return any(_is(p, tokens, namespace) for p in self._pinned)

    @property
    def pinned(self) -> tuple[np.ndarray, ...]:
        """Tokens of every pinned prefix."""
        return tuple(tokens for _, tokens in self._pinned)

    def unpin_all(self) -> None:
        """Takes every pin back, whoever set it."""
        for namespace, tokens in self._pinned[:]:
            self.unpin(tokens, namespace)

    # ---- what is there

    def lookup(self, prompt: Prompt, *, salt: str = "", adapter: str = "") -> PrefixMatch:
        """The cached pages of a prompt now. No side effect: nothing is counted, refreshed or held."""
        tokens, namespace = self._intake.tokenize(prompt), self._intake.namespace(salt, adapter)
        if self.index is None:
            return PrefixMatch(np.zeros(0, np.int32), 0, MissReason.REUSE_OFF)
        return self.store.peek(tokens, namespace)

    def explain(self, prompt: Prompt, *, salt: str = "", adapter: str = "") -> Explanation:
        """How far a prompt hits and why no further (X5). No side effect."""
        tokens = self._intake.tokenize(prompt)
        if self.index is None:
            full = len(tokens) // self.store.page_size
            detail = f"reuse is off ({self.store.disabled_reason})"
            return Explanation(0, 0, full, MissReason.REUSE_OFF, None, detail)
        return self.store.explain(tokens, self._intake.namespace(salt, adapter))

    def __len__(self) -> int:
        """Pages indexed now."""
        return 0 if self.index is None else len(self.index)

    def __iter__(self) -> Iterator[IndexRun]:
        """Runs of pages, parents before children."""
        return iter(() if self.index is None else self.index)

    def stats(self) -> HostStats:
        """Figures of the store; `print` them."""
        return self.store.stats()

    def check_integrity(self) -> None:
        """Raises `IntegrityError` naming the first broken invariant."""
        self.store.check_integrity()

    def plot(self, ax: Any = None) -> Any:
        """The index as a picture, see `display.plot_index`; runs in use are darker."""
        from prefix_reuse.display import plot_index

        return plot_index(self, refs=self.store.accounts.refs, ax=ax)

    # ---- what goes

    def evict(self, n: int) -> int:
        """Evicts up to n index entries that nobody uses, by the index's policy. Returns how many pages went."""
        self._land()
        self.store.collect()
        return len(self.store.evict_entries(n))

    def clear(self, *, salt: str | None = None, adapter: str = "") -> int:
        """Drops every index entry, or those of one salt; pages in use are freed when they are let go. Returns the entries."""
        self._land()
        self.store.collect()
        if self.index is None:
            return 0
        return len(self.store.clear(None if salt is None else self._intake.namespace(salt, adapter)))

    def trim_windows(self, every: int | None = None) -> int:
        """Frees host memory of sliding layer groups where a hit is not likely to end; see `HostPageStore.trim_windows`.

        By default the host keeps the bytes of all groups of every page, so that a hit can end at any page.

        Args:
          every: also keep what hits need that end at each `every`-th page.
        """
        self._land()
        trimmed = self.store.trim_windows(every)
        self._tidy()
        return trimmed

    # ---- snapshots

    def save_snapshot(self, path: Any = None) -> SnapshotReport:
        """Writes every indexed page to the folder `path`: a new set beside the old one, which goes when the new one is whole.

        Raises:
          SnapshotError: reuse is off; the folder holds something else; the model's identity is not known, so that no later
            process could use the pages.
        """
        self._check_active("save")
        self._land()
        assert self.index is not None
        prefixes = list(self.index.prefixes())
        return write_snapshot(
            self._path(path), self.store, self._identity(), prefixes, kind="cache", counters=self._counters
        )

    def load_snapshot(self, path: Any = None) -> SnapshotReport:
        """Indexes what `save_snapshot` wrote, as far as there is room: hottest first, nothing else is evicted.

        Everything is checked before use. Damaged pages are left out with all that follows them, and counted.

        Raises:
          SnapshotError: nothing there, or a snapshot of another model, geometry or platform, or from a newer version; nothing
            has changed.
        """
        self._check_active("load")
        self._land()
        self.store.collect()
        assert self.index is not None
        room = self.store.num_free
        if self.index.max_entries is not None:
            room = min(room, self.index.max_entries - len(self.index))
        contents = self._read(self._path(path), num_pages=room)
        inserted = self.store.insert(contents.prefixes, may_evict=False)
        self._counters.loaded_pages += inserted
        return contents.report(inserted)

    def _read(self, path: Any, num_pages: int) -> Any:
        try:
            return read_snapshot(
                path, self._identity(), self.store, num_pages=num_pages, adopt=self._adopt, counters=self._counters
            )
        except SnapshotError as error:
            self._counters.refused = error.reason
            raise

    def _check_active(self, verb: str) -> None:
        if self.index is None:
            raise SnapshotError(
                Refusal.DISABLED, f"nothing to {verb}: reuse is not active ({self.store.disabled_reason})"
            )

    def _path(self, path: Any) -> Any:
        if path is None and self.snapshot_dir is None:
            raise SnapshotError(Refusal.NONE, "give a folder, or set EngineConfig.snapshot_dir")
        return self.snapshot_dir if path is None else path

    # ---- display

    def _lines(self) -> list[tuple[str, str]]:
        stats = self.stats()
        if not stats.active:
            return [("reuse", f"off ({stats.disabled_reason})")]
        return [
            ("pages", f"{stats.entries:,} indexed of {stats.num_pages:,}, {stats.free_pages:,} free"),
            ("page size", f"{self.store.page_size} tokens"),
            ("rows", f"{stats.rows:,}"),
            ("held", f"{stats.open_leases:,}"),
            ("hits", f"{stats.hits:,} of {stats.hits + stats.misses:,} lookups"),
        ]

    def __repr__(self) -> str:
        return "PrefixCache(" + ", ".join(f"{name}: {value}" for name, value in self._lines()) + ")"

    def _repr_html_(self) -> str:
        return html_table("PrefixCache", self._lines())


def _is(pinned: tuple[bytes, np.ndarray], tokens: np.ndarray, namespace: bytes) -> bool:
    return pinned[0] == namespace and np.array_equal(pinned[1], as_tokens(tokens))
