"""PrefixIndex: which page holds the KV of which tokens, for every prompt beginning that is cached."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from prefix_reuse.errors import IntegrityError, InvalidRequestError
from prefix_reuse.hashing import as_tokens, root_key
from prefix_reuse.index_check import check_tree
from prefix_reuse.index_explain import explain
from prefix_reuse.index_removal import IndexRemoval
from prefix_reuse.index_resume import Cursor, resume
from prefix_reuse.index_state import Undo
from prefix_reuse.index_tree import NO_PAGES, Node, Path, compact, is_leaf, path_pages, prefix_of, split, subtree, walk
from prefix_reuse.index_types import CommitResult, Explanation, IndexRun, IndexStats
from prefix_reuse.lease import PrefixMatch

__all__ = ["PrefixIndex", "Undo"]


class PrefixIndex(IndexRemoval):
    """Exact index from token pages to page ids, with eviction from the leaves.

    The index names pages; it owns none. Whoever owns them counts one pin per entry and learns from `evict`, `remove`,
    `clear` and `CommitResult.evicted` which pins to drop.

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

    def lookup(self, tokens: Any, namespace: bytes) -> PrefixMatch:
        """Longest cached prefix; refreshes the recency of exactly the matched pages and counts a hit or a miss."""
        match = self.peek(tokens, namespace)
        self.touch(match, tokens, namespace)
        return match

    def touch(self, match: PrefixMatch, tokens: Any, namespace: bytes) -> None:
        """Count a `peek` as a lookup and refresh what it matched (of which the caller holds a reference since)."""
        self._lookup_tokens += len(tokens)
        if match.num_pages == 0:
            self._misses += 1
            return
        path: Path = match.path
        if path.version != self._splits:  # a split moved the borders of the runs since the peek
            path = self.peek(tokens, namespace).path
        self._hits += 1
        self._matched_tokens += match.num_pages * self.page_size
        self._compared += path.compared
        self._refresh(path, hits=1)

    def _refresh(self, path: Path, hits: int, undo: Undo | None = None) -> Node | None:
        """Mark what `path` matched as used now; returns its last node, cut so that it ends where the match ends."""
        self._tick += 1
        tick = self._tick
        now = self._clock() if self.policy.uses_time else 0.0
        nodes = path.nodes
        if path.partial is not None and path.partial_pages:
            if path.partial_pages < path.partial.num_pages:
                self._splits += 1
                last = split(path.partial, path.partial_pages, self._step)
            else:
                last = path.partial
            nodes = [*nodes, last]
        if undo is not None:
            before = [(n, n.last_access, n.hits, n.touched_at) for n in nodes]
            undo.append(lambda: _restore_access(before))
        for node in nodes:
            node.last_access = tick
            node.hits += hits
            node.touched_at = now
        return nodes[-1] if nodes else None

    def commit(
        self,
        tokens: Any,
        page_ids: np.ndarray,
        namespace: bytes,
        *,
        priority: int = 0,
        accept: Callable[[np.ndarray], int] | None = None,
        undo: Undo | None = None,
        after: Cursor | None = None,
    ) -> CommitResult:
        """Make the pages of a prompt entries. Entries that exist keep their own page and are refreshed.

        Args:
            tokens: int32, at least `len(page_ids)` full pages.
            page_ids: int32 [N], the pages that hold tokens 0 .. N * page_size - 1; the first N of the prompt.
            namespace: digest of the namespace.
            priority: for policies that ask for it; applies to new entries.
            accept: told the page ids about to become entries; says how many leading ones may.
            undo: receives the steps that take this commit back.
            after: `cursor` of an earlier commit of the same prompt: only pages behind it are compared.

        Returns:
            What became an entry. With `max_entries`, cold leaves go first; if what is in use leaves no room, only the
            leading pages that fit are inserted.
        """
        tokens = as_tokens(tokens)
        if type(page_ids) is not np.ndarray or page_ids.dtype != np.int32:
            page_ids = np.asarray(page_ids, np.int32)
        count = len(page_ids)
        if count * self.page_size > len(tokens):
            raise InvalidRequestError(f"{count} pages need {count * self.page_size} tokens, got {len(tokens)}")
        if count == 0:
            return CommitResult(slice(0, 0), NO_PAGES, NO_PAGES, NO_PAGES, [])
        data = memoryview(tokens).cast("B")
        root = self._roots.get(namespace)
        if root is None:
            root = self._new_root(namespace)
        path = resume(after, root, data, count, self._step, self._splits)
        path = path or walk(root, data, count, self._step, self._splits)
        self._compared += path.compared
        matched = path.num_pages
        entry_ids = path_pages(path)
        last = self._refresh(path, hits=0, undo=undo) or root
        new = count - matched
        if new and accept is not None:
            new = min(new, accept(page_ids[matched:]))
        evicted = NO_PAGES
        if new and self.max_entries is not None and self._entries + new > self.max_entries:
            evicted = self.evict(self._entries + new - self.max_entries, keep=last, undo=undo)
            new = min(new, self.max_entries - self._entries)
            self._roots[namespace] = root  # in case the eviction emptied this very namespace
        if new <= 0:
            if not root.children:
                self._roots.pop(namespace, None)
            cursor = Cursor(last, matched) if matched else None
            return CommitResult(slice(matched, matched), entry_ids, NO_PAGES, evicted, [], cursor)
        new_ids = page_ids[matched : matched + new].copy()
        new_ids.setflags(write=False)
        at = matched * self._step
        node = self._insert(last, bytes(data[at : at + new * self._step]), new_ids, matched, priority, undo)
        digests = [] if self._digest is None else self._add_digests(last, node, new, namespace)
        self._entries += new
        self._inserted += new
        cursor = Cursor(node, matched + new)
        return CommitResult(slice(matched, matched + new), entry_ids, new_ids, evicted, digests, cursor)

    def _insert(
        self, last: Node, data: bytes, page_ids: np.ndarray, start: int, priority: int, undo: Undo | None
    ) -> Node:
        if self.policy.mergeable and is_leaf(last) and not last.soft_pinned and last.priority == priority:
            return self._extend(last, data, page_ids, undo)
        step = self._step
        if last.parent is not None:
            compact(last, step, worth=1)
        node = Node(last, data if len(page_ids) == 1 else data[:step], data, page_ids, start)
        self._families += 1
        node.family = self._families
        node.last_access = self._tick
        node.touched_at = last.touched_at or (self._clock() if self.policy.uses_time else 0.0)
        node.priority = priority
        if last.children is None:
            last.children = {}
        last.children[node.key] = node
        self._leaves.add(node)
        if undo is not None:
            undo.append(lambda: self._take_back(node))
        return node

    def _extend(self, leaf: Node, data: bytes, page_ids: np.ndarray, undo: Undo | None) -> Node:
        """Lengthen a leaf in place: all its pages have the same recency, and one run is compared faster than two."""
        if undo is not None:
            pages, ids = leaf.num_pages, leaf.page_ids
            undo.append(lambda: self._take_back(leaf, pages, ids))
        leaf.tokens = leaf.tokens[: leaf.num_pages * self._step] + data
        if leaf.digests is not None:
            del leaf.digests[leaf.num_pages :]
        leaf.page_ids = np.concatenate([leaf.page_ids, page_ids])
        leaf.page_ids.setflags(write=False)
        leaf.num_pages = len(leaf.page_ids)
        return leaf

    def _take_back(self, node: Node, pages: int = 0, ids: np.ndarray = NO_PAGES) -> None:
        """Undo an insertion: shorten `node` to what it was, or unlink it."""
        new = node.num_pages - pages
        self._entries -= new
        self._inserted -= new
        node.num_pages, node.page_ids = pages, ids
        if pages == 0:
            self._unlink(node)

    def _add_digests(self, last: Node, node: Node, new: int, namespace: bytes) -> list[bytes]:
        digest, step = self._digest, self._step
        assert digest is not None
        if node is last or last.digests:
            assert last.digests is not None
            key = last.digests[-1]
        else:
            key = root_key(namespace, self.page_size)
        data, first = node.tokens, (node.num_pages - new) * step
        digests = []
        for at in range(first, first + new * step, step):
            key = digest(key + data[at : at + step])
            digests.append(key)
        if node.digests is None:
            node.digests = digests
        else:
            node.digests.extend(digests)
        return digests

    def __iter__(self) -> Iterator[IndexRun]:
        """Runs of pages, parents before children."""
        for namespace, root in self._roots.items():
            for node in subtree(root):
                if node.num_pages:
                    tokens = np.frombuffer(node.tokens, np.int32, node.num_pages * self.page_size)
                    children = len(node.children or ())
                    yield IndexRun(namespace, node.start, tokens, node.page_ids, node.last_access, node.hits, children)

    def prefixes(self) -> Iterator[tuple[bytes, np.ndarray, np.ndarray]]:
        """Each longest cached prefix as (namespace, tokens int32, page ids int32), hottest last."""
        leaves = [(n.last_access, ns, n) for ns, root in self._roots.items() for n in subtree(root) if is_leaf(n)]
        for _, namespace, node in sorted(leaves, key=lambda leaf: leaf[0]):
            data, ids = prefix_of(node, self._step)
            yield namespace, np.frombuffer(data, np.int32), ids

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
        check_tree(self._roots, self._step, [*self._leaves.ordered(), *self._soft_leaves.ordered()])
        entries = sum(n.num_pages for root in self._roots.values() for n in subtree(root))
        soft = sum(n.num_pages for root in self._roots.values() for n in subtree(root) if n.soft_pinned)
        if (entries, soft) != (self._entries, self._soft_pinned):
            raise IntegrityError(
                f"tree holds {entries} pages ({soft} soft-pinned), counters say {self._entries} ({self._soft_pinned})"
            )
        if self.max_entries is not None and entries > self.max_entries:
            raise IntegrityError(f"{entries} entries exceed max_entries={self.max_entries}")

    def stats(self) -> IndexStats:
        """Counters and sizes; walks the nodes, not the pages."""
        return IndexStats(
            entries=self._entries,
            nodes=sum(1 for root in self._roots.values() for n in subtree(root) if n.num_pages),
            namespaces=len(self._roots),
            soft_pinned=self._soft_pinned,
            hits=self._hits,
            misses=self._misses,
            lookup_tokens=self._lookup_tokens,
            matched_tokens=self._matched_tokens,
            inserted_pages=self._inserted,
            evicted_pages=self._evicted,
            removed_pages=self._removed,
            collision_checks=self._compared,
            invalidations=self._invalidations,
        )


def _restore_access(before: list[tuple[Node, int, int, float]]) -> None:
    for node, last_access, hits, touched_at in before:
        node.last_access, node.hits, node.touched_at = last_access, hits, touched_at
