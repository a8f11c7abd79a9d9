"""PrefixIndex: which page holds the KV of which tokens, for every prompt beginning that is cached."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from prefix_reuse.errors import IntegrityError
from prefix_reuse.hashing import as_tokens
from prefix_reuse.index_check import check_tree
from prefix_reuse.index_commit import IndexCommit
from prefix_reuse.index_explain import explain
from prefix_reuse.index_state import Undo
from prefix_reuse.index_tree import is_leaf, prefix_of, subtree, uses
from prefix_reuse.index_types import Explanation, IndexRun, IndexStats

__all__ = ["PrefixIndex", "Undo"]


class PrefixIndex(IndexCommit):
    """Exact index from token pages to page ids, with eviction from the leaves.

    The index names pages; it owns none. Whoever owns them counts one pin per entry and learns from `evict`, `remove`,
    `clear` and `CommitResult.evicted` which pins to drop. What is in use is kept by leases (`acquire`), by what the owner
    says (`bind_busy`), or both.

    Args:
        page_size: token slots per page.
        max_entries: pages indexed at most; None = no limit.
        policy: order of eviction.
        digest: chained digest computed for each new page (`CommitResult.digests`); matching never uses it.
        clock: seconds, for policies that use time.
        max_soft_pinned: pages that `soft_pin` may hold at most; None = half of `max_entries`, or no limit.

    Example:
        >>> index = PrefixIndex(page_size=2)
        >>> _ = index.commit([1, 2, 3, 4], np.array([7, 8]), b"ns")
        >>> index.lookup([1, 2, 9, 9], b"ns").page_ids
        array([7], dtype=int32)
    """

    def __iter__(self) -> Iterator[IndexRun]:
        """Runs of pages, parents before children."""
        for namespace, root in self._roots.items():
            for node, last_access, hits in reversed(list(uses(root))):
                if node.num_pages:
                    tokens = np.frombuffer(node.tokens, np.int32, node.num_pages * self.page_size)
                    children = len(node.children or ())
                    yield IndexRun(namespace, node.start, tokens, node.page_ids, last_access, hits, children)

    def prefixes(self) -> Iterator[tuple[bytes, np.ndarray, np.ndarray]]:
        """Each longest cached prefix as (namespace, tokens int32, page ids int32), hottest last."""
        leaves = [(n.last_access, ns, n) for ns, root in self._roots.items() for n in subtree(root) if is_leaf(n)]
        for _, namespace, node in sorted(leaves, key=lambda leaf: leaf[0]):
            data, ids = prefix_of(node, self._step)
            yield namespace, np.frombuffer(data, np.int32), ids

    def run_ends(self) -> Iterator[np.ndarray]:
        """Page ids int32 of the whole prefix down to the end of each run: where prompts end, part, or were hit."""
        for root in self._roots.values():
            for node in subtree(root):
                if node.num_pages:
                    yield prefix_of(node, self._step)[1]

    def eviction_order(self) -> list[int]:
        """Page ids of the present leaves, first to go first (a leaf's own pages from its tail)."""
        return [int(i) for q in (self._leaves, self._soft_leaves) for node in q.ordered() for i in node.page_ids[::-1]]

    def explain(self, tokens: Any, namespace: bytes) -> Explanation:
        """How far a prompt hits and why no further. No side effect. It looks into other namespaces: not for tenants."""
        return explain(self, as_tokens(tokens), namespace)

    def recency(self) -> dict[tuple[bytes, int], tuple[int, int]]:
        """(namespace, page id) -> (last access, hits) of every entry, to compare states."""
        return {(run.namespace, int(i)): (run.last_access, run.hits) for run in self for i in run.page_ids}

    def check_integrity(self) -> None:
        """Raise `IntegrityError` naming the first broken invariant; takes time in proportion to the entries."""
        check_tree(self._roots, self._step, [*self._leaves.ordered(), *self._soft_leaves.ordered()], self._digest_bytes)
        entries = sum(n.num_pages for root in self._roots.values() for n in subtree(root))
        soft = sum(n.num_pages for root in self._roots.values() for n in subtree(root) if n.soft_pinned)
        if (entries, soft) != (len(self), self._soft_pinned):
            raise IntegrityError(
                f"tree holds {entries} pages ({soft} soft-pinned), counters say {len(self)} ({self._soft_pinned})"
            )
        if self.max_entries is not None and entries > self.max_entries:
            raise IntegrityError(f"{entries} entries exceed max_entries={self.max_entries}")

    def stats(self) -> IndexStats:
        """Counters and sizes; walks the nodes, not the pages."""
        return IndexStats(
            entries=len(self),
            nodes=sum(1 for root in self._roots.values() for n in subtree(root) if n.num_pages),
            namespaces=len(self._roots),
            soft_pinned=self._soft_pinned,
            hits=self._hits,
            misses=self._misses,
            lookup_tokens=self._lookup_tokens,
            matched_tokens=self._matched_pages * self.page_size,
            inserted_pages=self._inserted,
            evicted_pages=self._evicted,
            removed_pages=self._removed,
            collision_checks=self._compared,
            invalidations=self._invalidations,
        )
