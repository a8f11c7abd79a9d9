"""Removal: eviction from the leaves, forced removal of subtrees, invalidation, and soft pins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from prefix_reuse.index_lookup import IndexLookup
from prefix_reuse.index_state import Undo
from prefix_reuse.index_tree import NO_PAGES, Node, is_leaf, subtree, unlink


class IndexRemoval(IndexLookup):
    """The part of `PrefixIndex` that drops entries."""

    def evict(self, n: int, *, keep: Node | None = None, undo: Undo | None = None) -> np.ndarray:
        """Drop up to `n` entries, coldest leaf first and from its tail; pages in use are passed over.

        Returns:
            int32, the page ids that lost their entry; fewer than `n` if the rest is in use or carries such pages.
        """
        out: list[np.ndarray] = []
        count, busy = 0, self._busy
        for leaves in (self._leaves, self._soft_leaves):
            passed: list[Node] = []  # stay in the order, but not in the way of this call
            if self._uses_time:
                leaves.start()
            while count < n and (node := leaves.first()) is not None:
                pages, want = node.num_pages, n - count
                if node.holds or node is keep:
                    want = 0
                elif busy is not None:
                    want = self._free_tail(node, min(want, pages))
                if want >= pages:
                    out.append(node.page_ids)
                    count += pages
                    self._drop(node, undo)
                    continue
                if want:
                    out.append(node.page_ids[pages - want :])
                    count += want
                    self._shorten(node, pages - want, undo)
                if count < n:
                    passed.append(node)
                    leaves.drop(node)
            for node in passed:
                leaves.add(node)
            if count == n:
                break
        return NO_PAGES if not out else out[0] if len(out) == 1 else np.concatenate(out)

    def _free_tail(self, node: Node, want: int) -> int:
        """How many of the last `want` pages may go: those behind the last page in use."""
        assert self._busy is not None
        in_use = self._busy(node.page_ids[node.num_pages - want :]).nonzero()[0]
        return want - (int(in_use[-1]) + 1 if in_use.size else 0)

    def _shorten(self, leaf: Node, pages: int, undo: Undo | None) -> None:
        """Keep the first `pages` pages of a leaf; its tokens stay as they are until it is used again."""
        if undo is not None:
            undo.append(self._undo_cut(leaf))
        gone = leaf.num_pages - pages
        self._evicted += gone
        if leaf.soft_pinned:
            self._soft_pinned -= gone
        leaf.num_pages, leaf.page_ids = pages, leaf.page_ids[:pages]
        leaf.cuts += 1

    def _drop(self, leaf: Node, undo: Undo | None) -> None:
        """Take a leaf off the tree."""
        if undo is not None:
            undo.append(self._undo_cut(leaf))
        self._evicted += leaf.num_pages
        if leaf.soft_pinned:
            self._soft_pinned -= leaf.num_pages
        leaf.num_pages, leaf.page_ids = 0, NO_PAGES
        self._bury(self._unlink(leaf).family, leaf.start, leaf.key)

    def _undo_cut(self, node: Node) -> Callable[[], None]:
        parent, ids, pages = node.parent, node.page_ids, node.num_pages
        assert parent is not None
        uses = parent.last_access, parent.hits, parent.touched_at

        def restore() -> None:
            back = pages - node.num_pages
            self._version += 1
            if node.num_pages == 0:
                self._tombstones.popitem()
                node.parent = parent
                parent.set_uses(*uses)
                if parent.children is None:
                    parent.children = {}
                parent.children[node.key] = node
                if parent.is_root:
                    self._roots[parent.tokens] = parent
            node.num_pages, node.page_ids = pages, ids
            self._evicted -= back
            if node.soft_pinned:
                self._soft_pinned += back
            if is_leaf(node):
                self._queue(node).renew(node)

        return restore

    def remove(self, page_id: int) -> np.ndarray:
        """Drop the entry that names `page_id` and everything that hangs below it, used or not.

        Returns:
            int32, the page ids that lost their entry; empty if no entry names the page.
        """
        for root in self._roots.values():
            for node in subtree(root):
                at = np.flatnonzero(node.page_ids == page_id)
                if at.size:
                    return self._remove_from(node, int(at[0]))
        return NO_PAGES

    def _remove_from(self, node: Node, left: int) -> np.ndarray:
        below = list(subtree(node))
        ids = np.concatenate([node.page_ids[left:], *(n.page_ids for n in below[1:])])
        soft = sum(n.num_pages for n in below[1:] if n.soft_pinned) + (node.num_pages - left) * node.soft_pinned
        for child in reversed(below[1:]):
            unlink(child)
        node.children = None
        node.page_ids, node.num_pages = node.page_ids[:left], left
        node.cuts += 1
        self._version += 1
        self._soft_pinned -= soft
        self._removed += len(ids)
        if left == 0:
            self._bury(self._unlink(node).family, node.start, node.key)
        else:
            self._compact(node)
            self._queue(node).add(node)
        return ids

    def clear(self, namespace: bytes | None = None) -> np.ndarray:
        """Drop every entry of a namespace, or of all; counts one invalidation.

        Returns:
            int32, the page ids that lost their entry.
        """
        names = list(self._roots) if namespace is None else [namespace] if namespace in self._roots else []
        ids = [NO_PAGES]
        for name in names:
            for node in list(subtree(self._roots.pop(name))):
                ids.append(node.page_ids)
                if node.soft_pinned:
                    self._soft_pinned -= node.num_pages
                node.parent, node.children, node.tokens = None, None, b""
        out = np.concatenate(ids)
        self._version += 1
        self._removed += len(out)
        self._invalidations += 1
        if namespace is None:
            self._leaves.clear()
            self._soft_leaves.clear()
            self._tombstones.clear()
        return out

    def soft_pin(self, tokens: Any, namespace: bytes, pinned: bool = True) -> int:
        """Let the cached beginning of `tokens` be evicted last (or, with `pinned=False`, in its turn again).

        A soft pin cannot wedge the pool: soft-pinned pages still go when nothing else can, and at most
        `max_soft_pinned` pages are pinned (from the front).

        Returns:
            Pages whose pin was changed by this call.
        """
        match = self.peek(tokens, namespace)
        nodes: list[Node] = []
        node = self._split_at(match.run, match.run_pages) if match.num_pages else None
        while node is not None and not node.is_root:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        changed = 0
        for node in nodes if pinned else reversed(nodes):
            if node.soft_pinned == pinned:
                continue
            if pinned and self.max_soft_pinned is not None:
                room = self.max_soft_pinned - self._soft_pinned
                if room <= 0:
                    break
                node = self._split_at(node, min(room, node.num_pages))
            node.soft_pinned = pinned
            changed += node.num_pages
            self._soft_pinned += node.num_pages if pinned else -node.num_pages
            if is_leaf(node):
                self._queue(node).renew(node)
            else:
                node.record = 0  # a record in the other queue is void
        return changed
