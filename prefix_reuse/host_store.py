"""HostPageStore: the host pages, the rows that use them, and the index entries that keep them.

    free --take--> private (refs 1) --publish--> shared (refs, pin) --release--> held by the index alone (pin)
      ^                |                                                                   |
      `---- release ---'<------------------------ evict entry (pin -1) --------------------'

A page returns to the free list exactly when references, pins and copies in flight are all zero. Its payload has one part per
layer group; those of sliding groups may be absent (`host_windows.py`).
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from prefix_reuse.host_admission import HostAdmission
from prefix_reuse.host_archive import HostArchive
from prefix_reuse.host_check import check_store, host_stats
from prefix_reuse.host_copies import HostCopies
from prefix_reuse.host_entries import HostEntries
from prefix_reuse.host_rows import HostRows
from prefix_reuse.host_types import HostRow, HostStats, PrefixAllocation, PrefixEstimate, PrefixRequest, PreparedGroup

__all__ = [
    "HostPageStore",
    "HostRow",
    "HostStats",
    "PrefixAllocation",
    "PrefixEstimate",
    "PrefixRequest",
    "PreparedGroup",
]


class HostPageStore(HostAdmission, HostArchive, HostRows, HostCopies, HostEntries):
    """A fixed number of host pages, shared page by page between sequences with a common beginning.

    Args:
        num_pages: pages in the store.
        page_size: token slots per page.
        index: the prefix index; None turns reuse off (no lookups, no pins, no reference above 1).
        on_free: told the ids of pages that became free, after the operation that freed them is complete.
        integrity: checksum each page per layer, K and V, when it is published; verify when it is read.
        poison: fills the payload of a freed page (returns what stays in the slot), so that a stale read shows.
        copy_payload: makes an independent copy of a payload, for copy on write.
        fault: called with the name of each step before it is taken; a test may raise from it.
        max_bytes: cap on payload bytes, with `page_bytes`; lowers `num_pages`.
        page_bytes: bytes of one page over all layer groups.
        disabled_reason: why reuse is off, for the stats.

    Raises:
        ConfigError: sizes that cannot work.
    """

    def stats(self) -> HostStats:
        """Page figures as of now and counters since the start."""
        self.collect()
        return host_stats(self)

    def snapshot_counters(self) -> dict[str, Any]:
        """Everything that a failed operation must leave as it was, in a form that compares with `==`."""
        counters = asdict(self.counters)
        del counters["rollbacks"]
        arrays = {n: getattr(self.accounts, n).tolist() for n in ("refs", "pins", "copies", "filled")}
        rows = {k: (r.pages.tolist(), r.num_shared, r.context, r.capacity) for k, r in self._rows.items()}
        return {
            **arrays,
            "free": self.accounts.free_ids().tolist(),
            "rows": rows,
            "leases": {id(lease): (lease.state, lease.owner) for lease in self._leases},
            "groups": {id(group): group.state for group in self._groups},
            "payloads": [id(payload) for payload in self.payloads],
            "lacks": self.lacks.tolist(),
            "counters": counters,
            "index": None if self.index is None else replace(self.index.stats(), nodes=0, collision_checks=0),
            "recency": None if self.index is None else self.index.recency(),
            "eviction_order": None if self.index is None else self.index.eviction_order(),
        }

    def check_integrity(self) -> None:
        """Raise `IntegrityError` naming the first broken invariant of counts, rows, leases, free list or index."""
        self.collect()
        check_store(self)
