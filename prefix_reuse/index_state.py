"""IndexState: the trees, the leaf queues and the counters of a prefix index."""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from prefix_reuse.errors import InvalidRequestError
from prefix_reuse.eviction import LRU, EvictionPolicy, LeafQueue
from prefix_reuse.hashing import Digest
from prefix_reuse.index_tree import NO_PAGES, TOKEN_BYTES, Node, split, unlink

MAX_TOMBSTONES = 4096

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
        self._uses_time, self._mergeable = self.policy.uses_time, self.policy.mergeable
        self._digest = digest
        self._digest_bytes = 0  # of one digest, once there is one
        self._clock = clock
        self._step = TOKEN_BYTES * page_size
        self._page_bytes = np.dtype((np.void, self._step))
        self._roots: dict[bytes, Node] = {}
        serial = itertools.count(1)
        self._leaves = LeafQueue(self.policy, clock, serial)
        self._soft_leaves = LeafQueue(self.policy, clock, serial)
        self._busy: Callable[[np.ndarray], np.ndarray] | None = None
        self._tick = 0
        self._version = 0  # rises whenever the borders of runs move
        self._tombstones: OrderedDict[tuple[int, int, bytes], None] = OrderedDict()
        self._soft_pinned = 0
        self.open_leases = 0
        self._hits = self._misses = self._lookup_tokens = self._matched_pages = 0
        self._inserted = self._evicted = self._removed = self._compared = self._invalidations = 0

    def __len__(self) -> int:
        """Pages indexed now."""
        return self._inserted - self._evicted - self._removed

    def bind_busy(self, busy: Callable[[np.ndarray], np.ndarray]) -> None:
        """Let the owner of the pages say which of them are in use (nonzero): those are never evicted.

        Raises:
            InvalidRequestError: another owner is bound already.
        """
        if self._busy is not None and self._busy != busy:
            raise InvalidRequestError("this index already belongs to another store; give each store its own")
        self._busy = busy

    def _new_root(self, namespace: bytes) -> Node:
        self._version += 1
        root = self._roots[namespace] = Node(None, b"", namespace, NO_PAGES, 0, self._version)
        return root  # a root's tokens are its name

    def _split_at(self, node: Node, pages: int) -> Node:
        if pages == node.num_pages:
            return node
        if len(node.tokens) > node.num_pages * self._step:
            self._compact(node)
        self._version += 1
        return split(node, pages, self._step)

    def _queue(self, node: Node) -> LeafQueue:
        return self._soft_leaves if node.soft_pinned else self._leaves

    def _unlink(self, node: Node) -> Node:
        """Take a node off the tree; returns the parent that it had, which may be a leaf now."""
        parent = unlink(node)
        if parent.children is None:
            if parent.parent is None:
                self._roots.pop(parent.tokens, None)
            else:
                self._queue(parent).add(parent)
        return parent

    def _bury(self, family: int, page: int, tokens: bytes) -> None:
        """Remember where an evicted page was, so that a later miss there can say so."""
        self._tombstones[family, page, tokens] = None
        if len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)

    def _compact(self, node: Node) -> None:
        """Give back the memory of tokens that eviction has cut off a run; the first page of them is remembered."""
        pages, step = node.num_pages, self._step
        end = pages * step
        self._bury(node.family, node.start + pages, node.tokens[end : end + step])
        node.tokens = node.tokens[:end]
        node.page_ids = node.page_ids.copy()
        if node.digests:
            node.digests = node.digests[: pages * self._digest_bytes]
