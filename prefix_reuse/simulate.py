"""Replays a trace on the host index, without a model or a GPU: which hit rate would a cache of this size reach?

A page counts when it is full; empty requests are skipped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prefix_reuse.errors import InvalidRequestError
from prefix_reuse.eviction import LFU, LRU, EvictionPolicy, PriorityTTL
from prefix_reuse.hashing import Digest
from prefix_reuse.index import PrefixIndex
from prefix_reuse.traces import open_trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": LRU,
    "lfu": LFU,
    "priority-ttl": lambda: PriorityTTL(ttl=60.0),
}
NAMESPACE = b"simulation"
FIRST_PAGES = 1 << 16
LARGEST_POOL = 2**31 - 1
"""Pages, whose ids are int32."""


class SimulatedPool:
    """A prefix index and a stack of free pages: all that serving prompts one after another needs, without bytes.

    Args:
        num_pages: pages in the pool.
        page_size: token slots per page.
        policy: order of eviction, LRU by default.
        digest: see `PrefixIndex`.
    """

    def __init__(
        self, num_pages: int, page_size: int, policy: EvictionPolicy | None = None, digest: Digest | None = None
    ) -> None:
        self.index = PrefixIndex(page_size, policy=policy, digest=digest)
        self.num_pages = num_pages
        self.page_size = page_size
        # Pages are named as they are needed first: a pool may be far larger than what a trace fills.
        self._named = self._num_free = min(num_pages, FIRST_PAGES)
        self._stack = np.arange(self._named, dtype=np.int32)

    def request(self, prompt: np.ndarray) -> int:
        """Serve one prompt: hold its hit, take pages for the rest (evicting if it must), index them, let go.

        Returns:
            The hit in pages. Of a prompt beyond the capacity only the beginning is kept.
        """
        lease = self.index.acquire(prompt, NAMESPACE)
        hit = lease.match.num_pages
        need = min(len(prompt) // self.page_size, self.num_pages) - hit
        if need > 0:
            self.index.commit(prompt, self._take(need), NAMESPACE, lease=lease)
        lease.abort()
        return hit

    def _take(self, n: int) -> np.ndarray:
        if n > self._num_free and self._named < self.num_pages:
            self._name_more(n)
        free = self._num_free
        if n > free:
            evicted = self.index.evict(n - free)
            if free == 0:
                return evicted
            self._stack[free : free + len(evicted)] = evicted
            free += len(evicted)
        self._num_free = free - n
        return self._stack[free - n : free]

    def _name_more(self, n: int) -> None:
        free, before = self._num_free, self._named
        self._named = min(self.num_pages, 2 * before + n)
        stack = np.empty(self._named, np.int32)
        self._num_free = free + self._named - before
        stack[:free], stack[free : self._num_free] = self._stack[:free], np.arange(before, self._named)
        self._stack = stack


def replay(prompts: Iterable[np.ndarray], request: Callable[[np.ndarray], int], page_size: int) -> dict[str, Any]:
    """Run every prompt through `request` (which returns its hit in pages); only `request` is timed.

    Returns:
        `requests`, `hit_rate_pages`, `hit_rate_tokens` (hit tokens over all prompt tokens) and `us_per_request`.
    """
    requests = pages = tokens = hit = 0
    spent = 0
    for prompt in prompts:
        if len(prompt) == 0:
            continue
        start = time.perf_counter_ns()
        hit += request(prompt)
        spent += time.perf_counter_ns() - start
        requests += 1
        pages += len(prompt) // page_size
        tokens += len(prompt)
    return {
        "requests": requests,
        "hit_rate_pages": hit / max(pages, 1),
        "hit_rate_tokens": hit * page_size / max(tokens, 1),
        "us_per_request": spent / 1e3 / max(requests, 1),
    }


def simulate(
    trace_path: str | Path,
    capacity_tokens: int,
    policy: str | EvictionPolicy = "lru",
    page_size: int = 16,
    block: int = 512,
    *,
    progress: Callable[[Iterable[np.ndarray]], Iterable[np.ndarray]] | None = None,
) -> dict[str, Any]:
    """Hit rates of a trace on a host cache of a given size.

    Args:
        trace_path: `.npz` (token stream) or JSON lines (Mooncake), see `open_trace`.
        capacity_tokens: tokens that the cache holds.
        policy: "lru", "lfu", "priority-ttl", or a policy object.
        page_size: token slots per page.
        block: tokens per hash id of a Mooncake trace.
        progress: wraps the iterable of prompts (a progress bar).

    Returns:
        `{capacity_tokens, requests, hit_rate_pages, hit_rate_tokens, us_per_request, evicted_pages}`. The time is that of
        the index alone: lookup, hold, eviction, insertion, release.

    Raises:
        InvalidRequestError: unknown policy, a capacity below one page, or a trace that cannot be read.
    """
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise InvalidRequestError(f"unknown policy {policy!r}; choose from {', '.join(POLICIES)}")
        policy = POLICIES[policy]()
    if page_size < 1 or capacity_tokens < page_size:
        raise InvalidRequestError(f"a capacity of {capacity_tokens} tokens is below one page of {page_size}")
    if capacity_tokens // page_size > LARGEST_POOL:
        raise InvalidRequestError(
            f"a capacity of {capacity_tokens:,} tokens has more than {LARGEST_POOL:,} pages of {page_size}"
        )
    pool = SimulatedPool(capacity_tokens // page_size, page_size, policy)
    prompts: Iterable[np.ndarray] = open_trace(trace_path, block)
    result = replay(progress(prompts) if progress else prompts, pool.request, page_size)
    return {"capacity_tokens": capacity_tokens, **result, "evicted_pages": pool.index.stats().evicted_pages}


def parse_tokens(text: str) -> int:
    """A number of tokens: `4096`, `400k`, `1M`, `1.5M`, `2G` (powers of ten)."""
    number, factor = text.strip(), 1
    if number[-1:] in "kKmMgG" and number:
        factor = {"k": 10**3, "m": 10**6, "g": 10**9}[number[-1].lower()]
        number = number[:-1]
    try:
        value = float(number) * factor
        tokens = int(value)
    except (ValueError, OverflowError):
        raise InvalidRequestError(f"{text!r} is no number of tokens; write 4096, 400k, 1M or 1.5M") from None
    if tokens < 1 or tokens != value:
        raise InvalidRequestError(f"{text!r} is no whole positive number of tokens")
    return tokens


def plot_hit_rates(rows: Sequence[dict[str, Any]], title: str = "") -> Figure:
    """Hit rate over capacity, one point a row of `simulate`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    rows = sorted(rows, key=lambda row: row["capacity_tokens"])
    capacities = [row["capacity_tokens"] / 1e6 for row in rows]
    for name, label in (("hit_rate_pages", "full pages"), ("hit_rate_tokens", "tokens")):
        axes.plot(capacities, [100 * row[name] for row in rows], marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(capacities, [f"{c:g}" for c in capacities])
    axes.set(xlabel="capacity, million tokens", ylabel="hit rate, %", title=title, ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    return figure
