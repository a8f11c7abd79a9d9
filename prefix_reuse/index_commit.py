"""Commit: the pages of a prompt become entries, with a chained digest each if the index was given one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from prefix_reuse.errors import InvalidRequestError
from prefix_reuse.hashing import INT32, as_tokens, root_key
from prefix_reuse.index_removal import IndexRemoval
from prefix_reuse.index_resume import Cursor, resume
from prefix_reuse.index_state import Undo
from prefix_reuse.index_tree import NO_PAGES, Node, join_pages, walk
from prefix_reuse.index_types import CommitResult, new_result
from prefix_reuse.lease import PrefixLease, PrefixMatch


class IndexCommit(IndexRemoval):
    """The part of `PrefixIndex` that adds entries."""

    def commit(
        self,
        tokens: Any,
        page_ids: np.ndarray,
        namespace: bytes,
        *,
        priority: int = 0,
        lease: PrefixLease | None = None,
        accept: Callable[[np.ndarray], int] | None = None,
        undo: Undo | None = None,
        after: Cursor | None = None,
    ) -> CommitResult:
        """Make the pages of a prompt entries. Entries that exist keep their own page and are refreshed.

        Args:
            tokens: int32, at least as many full pages as are named.
            page_ids: int32 [N], the pages that hold tokens 0 .. N * page_size - 1; with `lease` the tokens after its match.
            namespace: digest of the namespace.
            priority: for policies that ask for it; applies to new entries.
            lease: what `acquire` returned for this prompt, still open; for the very same array nothing is compared again.
            accept: told the page ids about to become entries; says how many leading ones may.
            undo: receives the steps that take this commit back.
            after: where an earlier commit of the same prompt ended (its `run`, and how many pages): only pages behind it are
                compared.

        Returns:
            What became an entry. With `max_entries`, cold leaves go first; if what is in use leaves no room, only the
            leading pages that fit are inserted.
        """
        if type(page_ids) is not np.ndarray or page_ids.dtype is not INT32:
            page_ids = np.asarray(page_ids, np.int32)
        first, at, last, held = 0, 0, None, False
        if lease is not None:
            first = lease.match.num_pages
            if lease.tokens is tokens and lease.namespace == namespace:
                last = self._end_of(lease.match, tokens, namespace)
                held = True
        if last is None:
            tokens = as_tokens(tokens)
        size, named = self.page_size, len(page_ids)
        if (first + named) * size > len(tokens):
            raise InvalidRequestError(f"{first + named} pages need {(first + named) * size} tokens, got {len(tokens)}")
        entry_ids = evicted = NO_PAGES
        if named == 0:
            return CommitResult(slice(0, 0), entry_ids, NO_PAGES, evicted, [])
        if last is None:
            last, entry_ids = self._walk_to(tokens, first + named, namespace, undo, after)
            at, entry_ids = last.start + last.num_pages - first, entry_ids[first:]
            held = lease is not None and lease.match.run is last
        new = named - at if at >= 0 else 0
        if accept is not None and new:
            new = min(new, accept(page_ids[at:]))
        if self.max_entries is not None and len(self) + new > self.max_entries:
            evicted = self.evict(len(self) + new - self.max_entries, keep=last, undo=undo)
            new = min(new, self.max_entries - len(self))
            if last.parent is None:
                self._roots[namespace] = last  # in case the eviction has emptied this very namespace
        if new <= 0:
            if last.parent is None and not last.children:
                self._roots.pop(namespace, None)
            return CommitResult(slice(at, at), entry_ids, NO_PAGES, evicted, [], last)
        new_ids = (page_ids if new == named else page_ids[at : at + new]).copy()
        new_ids.setflags(write=False)
        start = first + at
        node = self._insert(
            last, tokens[start * size : (start + new) * size].tobytes(), new_ids, start, priority, held, undo
        )
        self._inserted += new
        digests = [] if self._digest is None else self._add_digests(last, node, new, namespace)
        return new_result((slice(at, at + new), entry_ids, new_ids, evicted, digests, node))

    def _end_of(self, match: PrefixMatch, tokens: np.ndarray, namespace: bytes) -> Node | None:
        """The run that ends where a held match ends, unless the prompt would match further, or no longer so far."""
        end = match.num_pages
        node = match.run if end else self._roots.get(namespace)
        if node is None or match.version == self._version:
            return node
        if end and (node.parent is None or node.start + node.num_pages != end):
            return None  # removed by force, or lengthened
        size = self.page_size
        if node.children and tokens[end * size : (end + 1) * size].tobytes() in node.children:
            return None  # another prompt has gone on in the same way since
        return node

    def _walk_to(
        self, tokens: np.ndarray, full_pages: int, namespace: bytes, undo: Undo | None, after: Cursor | None
    ) -> tuple[Node, np.ndarray]:
        """The run that ends where the entries of a prompt end, now marked as used, and the page ids of the entries."""
        root = self._roots.get(namespace)
        if root is None:
            root = self._new_root(namespace)
        if after is None or after.end > full_pages:
            run, pages, found, _ = walk(root, tokens, full_pages, self._step)
            self._compared += len(found)
        else:
            base, known = resume(after, root, tokens, self._step)
            end = base.start + base.num_pages
            run, pages, found, _ = walk(base, tokens[end * self.page_size :], full_pages - end, self._step)
            self._compared += len(found)
            found = known + found
        return root if run is root else self._refresh(run, pages, 0, undo), join_pages(found)

    def _insert(
        self, last: Node, data: bytes, page_ids: np.ndarray, start: int, priority: int, held: bool, undo: Undo | None
    ) -> Node:
        """Store new pages behind `last`; `held`: the lease of this commit is on `last`."""
        self._version = version = self._version + 1
        self._tick = tick = self._tick + 1
        now = self._clock() if self._uses_time else 0.0
        if last.parent is not None:
            # The run of a foreign lease keeps its end, so that the lease holds no more than its own pages.
            alone = self._mergeable and last.children is None and last.holds == held
            if alone and last.priority == priority and not last.soft_pinned:
                self._extend(last, data, page_ids, now, undo)
                return last
            if len(last.tokens) > last.num_pages * self._step:
                self._compact(last)  # only a leaf may have such a rest
        key = data if len(page_ids) == 1 else data[: self._step]
        node = Node(last, key, data, page_ids, start, version, tick, priority, now)
        if last.children is None:
            last.children = {key: node}
        else:
            last.children[key] = node
        self._leaves.renew(node)
        if undo is not None:
            undo.append(lambda: self._take_back(node))
        return node

    def _extend(self, leaf: Node, data: bytes, page_ids: np.ndarray, now: float, undo: Undo | None) -> None:
        """Lengthen a leaf in place: all its pages have the same recency, and one run is compared faster than two."""
        if undo is not None:
            pages, ids, uses = leaf.num_pages, leaf.page_ids, (leaf.last_access, leaf.hits, leaf.touched_at)
            undo.append(lambda: leaf.set_uses(*uses))
            undo.append(lambda: self._take_back(leaf, pages, ids))
        leaf.last_access, leaf.touched_at = self._tick, now
        leaf.tokens = leaf.tokens[: leaf.num_pages * self._step] + data
        leaf.digests = leaf.digests[: leaf.num_pages * self._digest_bytes]
        leaf.page_ids = np.concatenate([leaf.page_ids, page_ids])
        leaf.page_ids.setflags(write=False)
        leaf.num_pages = len(leaf.page_ids)

    def _take_back(self, node: Node, pages: int = 0, ids: np.ndarray = NO_PAGES) -> None:
        """Undo an insertion: shorten `node` to what it was, or unlink it."""
        new = node.num_pages - pages
        self._version += 1
        self._inserted -= new
        node.num_pages, node.page_ids = pages, ids
        node.cuts += 1
        if pages == 0:
            self._unlink(node)

    def _add_digests(self, last: Node, node: Node, new: int, namespace: bytes) -> list[bytes]:
        digest = self._digest
        assert digest is not None
        size = self._digest_bytes
        key = last.digests[-size:] if last.digests else root_key(namespace, self.page_size)
        first = (node.num_pages - new) * self._step
        pages: Any = np.frombuffer(node.tokens, self._page_bytes, new, first).tolist()  # bytes, one object a page
        digests = [key := digest(key + page) for page in pages]
        self._digest_bytes = len(key)
        node.digests += b"".join(digests)
        return digests
