"""IndexState: the trees, the leaf queues and the counters of a prefix index, and the walk that changes nothing."""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from prefix_reuse.errors import InvalidRequestError
from prefix_reuse.eviction import LRU, EvictionPolicy, LeafQueue
from prefix_reuse.hashing import Digest, as_tokens
from prefix_reuse.index_tree import NO_PAGES, TOKEN_BYTES, Node, Path, path_pages, split, walk
from prefix_reuse.lease import MissReason, PrefixMatch

Undo = list[Callable[[], None]]
"""Steps that take back what an operation did, to be run last to first."""


class IndexState:
    """What every part of the index works on. See `PrefixIndex` for the arguments."""

    def __init__(
        self,
        page_size: int,
        *,
        max_entries: int | None = None,
        policy: EvictionPolicy | None = None,
        digest: Digest | None = None,
        clock: Callable[[], float] = time.monotonic,
        max_soft_pinned: int | None = None,
    ) -> None:
        if page_size < 1 or (max_entries is not None and max_entries < 1):
            raise InvalidRequestError(f"page_size={page_size} and max_entries={max_entries} must be at least 1")
        self.page_size = page_size
        self.max_entries = max_entries
        self.policy = policy if policy is not None else LRU()
        self.max_soft_pinned = max_entries // 2 if max_soft_pinned is None and max_entries else max_soft_pinned
        self._digest = digest
        self._clock = clock
        self._step = TOKEN_BYTES * page_size
        self._roots: dict[bytes, Node] = {}
        serial = itertools.count(1)
        self._leaves = LeafQueue(self.policy, clock, serial)
        self._soft_leaves = LeafQueue(self.policy, clock, serial)
        self._busy: Callable[[np.ndarray], np.ndarray] | None = None
        self._tick = 0
        self._splits = 0
        self._families = 0
        self._tombstones: OrderedDict[tuple[int, int, bytes], None] = OrderedDict()
        self._entries = self._soft_pinned = 0
        self._hits = self._misses = self._lookup_tokens = self._matched_tokens = 0
        self._inserted = self._evicted = self._removed = self._compared = self._invalidations = 0

    def __len__(self) -> int:
        """Pages indexed now."""
        return self._entries

    def bind_busy(self, busy: Callable[[np.ndarray], np.ndarray]) -> None:
        """Let the owner of the pages say which of them are in use (nonzero): those are never evicted.

        Raises:
            InvalidRequestError: another owner is bound already.
        """
        if self._busy is not None and self._busy != busy:
            raise InvalidRequestError("this index already belongs to another store; give each store its own")
        self._busy = busy

    def peek(self, tokens: Any, namespace: bytes) -> PrefixMatch:
        """Longest cached prefix, without any side effect (recency and counters included).

        Args:
            tokens: int32 [T]; other integer sequences are converted. Empty gives no match.
            namespace: digest of the namespace.
        """
        tokens = as_tokens(tokens)
        full = len(tokens) // self.page_size
        if full == 0:
            return PrefixMatch(NO_PAGES, 0, MissReason.TOO_SHORT if len(tokens) else MissReason.EMPTY)
        root = self._roots.get(namespace)
        if root is None:
            return PrefixMatch(NO_PAGES, 0, MissReason.NOT_CACHED)
        data = memoryview(tokens).cast("B")
        path = walk(root, data, full, self._step, self._splits)
        count = path.num_pages
        reason = MissReason.NONE if count == full else self._reason(root, path, data)
        return PrefixMatch(path_pages(path), count, reason, path)

    def _reason(self, root: Node, path: Path, data: memoryview) -> str:
        node = path.partial or (path.nodes[-1] if path.nodes else root)
        at = path.num_pages * self._step
        if self._tombstones and (node.family, path.num_pages, bytes(data[at : at + self._step])) in self._tombstones:
            return MissReason.EVICTED
        return MissReason.DIFFERENT if path.partial is not None or node.children else MissReason.NOT_CACHED

    def _new_root(self, namespace: bytes) -> Node:
        self._families += 1
        root = self._roots[namespace] = Node(None, b"", namespace, NO_PAGES, 0)  # a root's tokens are its name
        root.family = self._families
        return root

    def _split_at(self, node: Node, pages: int) -> Node:
        if pages == node.num_pages:
            return node
        self._splits += 1
        return split(node, pages, self._step)

    def _queue(self, node: Node) -> LeafQueue:
        return self._soft_leaves if node.soft_pinned else self._leaves

    def _unlink(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        assert parent.children is not None
        del parent.children[node.key]
        node.parent = None
        if parent.children:
            return
        parent.children = None
        if parent.is_root:
            self._roots.pop(parent.tokens, None)
        else:
            self._queue(parent).add(parent)
