"""Eviction policies, and the queue that keeps the leaves of the index in the order of a policy.

A policy is one method that returns a sortable key; the smallest goes first (as in SGLang's `evict_policy.py`).
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Protocol

from prefix_reuse.index_tree import is_leaf


class Evictable(Protocol):
    """What a policy may look at: one run of pages at the end of its branch."""

    last_access: int
    """Tick of the last use; one tick per index operation."""
    hits: int
    """Uses since the run was stored."""
    priority: int
    """Given at commit; 0 by default."""
    touched_at: float
    """Seconds on the index's clock of the last use (0 for policies that do not ask for time)."""


class EvictionPolicy:
    """Orders runs of pages. Keys may only grow while a run stays cached, except at its `deadline`."""

    mergeable: ClassVar[bool] = False
    """Whether a run may be extended in place by new pages (both would always have the same key)."""
    uses_time: ClassVar[bool] = False

    def key(self, entry: Evictable, now: float) -> Any:
        """A sortable key; the entry with the smallest is evicted first."""
        raise NotImplementedError

    def deadline(self, entry: Evictable) -> float | None:
        """When the key will fall without a use, in seconds on the index's clock; None = never."""
        return None


class LRU(EvictionPolicy):
    """Least recently used first."""

    mergeable = True

    def key(self, entry: Evictable, now: float) -> int:
        return entry.last_access


class LFU(EvictionPolicy):
    """Least often used first, then least recently used."""

    def key(self, entry: Evictable, now: float) -> tuple[int, int]:
        return entry.hits, entry.last_access


class PriorityTTL(EvictionPolicy):
    """Lowest priority first, then least recently used; a priority lasts `ttl` seconds after the last use.

    Source: TensorRT-LLM's retention priorities with a duration.

    Args:
        ttl: seconds after the last use until a run counts as priority 0.
    """

    uses_time = True

    def __init__(self, ttl: float) -> None:
        self.ttl = ttl

    def key(self, entry: Evictable, now: float) -> tuple[int, int]:
        expired = now >= entry.touched_at + self.ttl
        return (min(entry.priority, 0) if expired else entry.priority), entry.last_access

    def deadline(self, entry: Evictable) -> float | None:
        return entry.touched_at + self.ttl if entry.priority > 0 else None


class LeafQueue:
    """Leaves in the order of their keys, without sorting at eviction; each has at most one valid record.

    Records that come in order (with LRU, all new leaves) wait in a deque, the others in a heap. A use makes a key grow,
    which leaves its record stale; stale records are put right when they come up. Keys that fall (a deadline passes, a
    soft pin goes) get a new record, which makes the old one void.
    """

    def __init__(self, policy: EvictionPolicy, clock: Callable[[], float], serial: Iterator[int]) -> None:
        self._policy = policy
        self._key = policy.key
        self._uses_time = policy.uses_time
        self._clock = clock
        self._serial = serial  # shared by all queues of an index, so that a record names one entry of one queue
        self._line: deque[tuple[Any, int, Any]] = deque()
        self._heap: list[tuple[Any, int, Any]] = []
        self._deadlines: list[tuple[float, int, Any]] = []
        self._now = 0.0
        self._limit = 1024

    def key(self, node: Any) -> Any:
        return self._key(node, self._now)

    def add(self, node: Any) -> None:
        """A node has become a leaf."""
        if node.record == 0:
            self.renew(node)

    def renew(self, node: Any) -> None:
        """Write a new record for a leaf, whose key may have fallen."""
        node.record = record = next(self._serial)
        entry = (self._key(node, self._now), record, node)
        line = self._line
        if not line or line[-1] < entry:
            line.append(entry)
        else:
            heapq.heappush(self._heap, entry)
        if self._uses_time:
            self._watch(node)
        if len(line) + len(self._heap) > self._limit:
            self._forget_void()

    def _forget_void(self) -> None:
        """Void records pile up only where keys fall or subtrees are removed."""
        line = [entry for entry in self._line if entry[2].record == entry[1]]
        self._line.clear()
        self._line.extend(line)
        self._heap[:] = [entry for entry in self._heap if entry[2].record == entry[1]]
        heapq.heapify(self._heap)
        self._limit = 2 * (len(self._line) + len(self._heap)) + 1024

    def _watch(self, node: Any) -> None:
        deadline = self._policy.deadline(node)
        if deadline is not None and deadline > self._now:
            heapq.heappush(self._deadlines, (deadline, node.record, node))

    def first(self) -> Any | None:
        """The leaf with the smallest key, which stays in the queue; None if there is no leaf."""
        line, heap = self._line, self._heap
        while line or heap:
            lined = not heap or (line and line[0] < heap[0])
            key, record, node = line[0] if lined else heap[0]
            if node.record != record:
                leaf = False
            elif leaf := node.children is None and node.parent is not None:
                if self._key(node, self._now) == key:
                    return node
            else:
                node.record = 0
            if lined:
                line.popleft()
            else:
                heapq.heappop(heap)
            if leaf:
                self.renew(node)
        return None

    def drop(self, node: Any) -> None:
        """Take out a leaf; its record is void."""
        node.record = 0

    def start(self) -> None:
        """Begin an eviction: read the clock and renew the leaves whose deadline has passed."""
        if not self._uses_time:
            return
        self._now = self._clock()
        while self._deadlines and self._deadlines[0][0] <= self._now:
            _, _, node = heapq.heappop(self._deadlines)
            if node.record and is_leaf(node):
                self.renew(node)
            else:
                node.record = 0  # renewed when it becomes a leaf again

    def ordered(self) -> Iterator[Any]:
        """Leaves from first to last to go, without changing anything; sorts, for displays and checks."""
        entries = itertools.chain(self._line, self._heap)
        yield from sorted(
            (node for _, record, node in entries if node.record == record and is_leaf(node)), key=self.key
        )

    def clear(self) -> None:
        for _, _, node in itertools.chain(self._line, self._heap):
            node.record = 0
        self._line.clear()
        self._heap.clear()
        self._deadlines.clear()
