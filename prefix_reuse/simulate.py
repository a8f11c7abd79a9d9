"""Replays a trace on the host index, without a model or a GPU: which hit rate would a cache of this size reach?

Traces: Mooncake's JSON lines (`hash_ids`, one per block of 512 tokens, and `input_length`), or an `.npz` with `tokens`
and `offsets` (all prompts one after another). A page counts when it is full; empty requests are skipped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from prefix_reuse.errors import InvalidRequestError
from prefix_reuse.eviction import LFU, LRU, EvictionPolicy, PriorityTTL
from prefix_reuse.host_store import HostPageStore, PrefixRequest
from prefix_reuse.index import PrefixIndex

POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": LRU,
    "lfu": LFU,
    "priority-ttl": lambda: PriorityTTL(ttl=60.0),
}
NAMESPACE = b"simulation"


def mooncake_prompts(path: str | Path, block: int = 512) -> Iterator[np.ndarray]:
    """Token ids (int32, invented: equal blocks get equal tokens) of each request of a Mooncake trace."""
    offsets = np.arange(block, dtype=np.int32)
    with open(path) as lines:
        for line in lines:
            if not line.strip():
                continue
            request = json.loads(line)
            ids = np.asarray(request["hash_ids"], np.int64)
            if ids.size and int(ids.max()) * block >= 2**31:
                raise InvalidRequestError(f"hash id {int(ids.max())} does not fit int32 tokens at block {block}")
            yield (ids.astype(np.int32)[:, None] * block + offsets).reshape(-1)[: request["input_length"]]


def token_prompts(path: str | Path) -> Iterator[np.ndarray]:
    """Token ids of each prompt of an `.npz` token stream."""
    with np.load(path) as data:
        tokens, offsets = data["tokens"].astype(np.int32), data["offsets"]
    for start, end in pairwise(offsets.tolist()):
        yield tokens[start:end]


def open_trace(path: str | Path, block: int = 512) -> Iterator[np.ndarray]:
    """Prompts of a trace file, by its suffix."""
    return token_prompts(path) if str(path).endswith(".npz") else mooncake_prompts(path, block)


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


class SimulatedStore:
    """A host store without bytes that serves one prompt at a time: allocate, publish, release."""

    def __init__(self, capacity_tokens: int, page_size: int, policy: EvictionPolicy) -> None:
        pages = capacity_tokens // page_size
        self.store = HostPageStore(pages, page_size, index=PrefixIndex(page_size, policy=policy))
        self.page_size = page_size

    def request(self, prompt: np.ndarray) -> int:
        """Serve one prompt; returns its hit in pages. Beyond the capacity only the beginning is kept."""
        kept = prompt[: self.store.num_pages * self.page_size]
        full = len(kept) // self.page_size * self.page_size
        if full == 0:
            return 0
        request = PrefixRequest(0, kept[:full], full, NAMESPACE)
        allocation = self.store.allocate_pages_for_sequences_with_prefix([request])[0]
        if allocation.newly_allocated:
            self.store.begin_copy(allocation.private_pages)
            self.store.finish_copy(allocation.private_pages, None)
            self.store.publish(0, full, NAMESPACE)
        self.store.release(0)
        return len(allocation.shared_pages)


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
        trace_path: `.jsonl` (Mooncake) or `.npz` (token stream).
        capacity_tokens: tokens that the cache holds.
        policy: "lru", "lfu", "priority-ttl", or a policy object.
        page_size: token slots per page.
        block: tokens per hash id of a Mooncake trace.
        progress: wraps the iterable of prompts (a progress bar).

    Returns:
        `{capacity_tokens, requests, hit_rate_pages, hit_rate_tokens, us_per_request, evicted_pages}`.

    Raises:
        InvalidRequestError: unknown policy, or a capacity below one page.
    """
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise InvalidRequestError(f"unknown policy {policy!r}; choose from {', '.join(POLICIES)}")
        policy = POLICIES[policy]()
    if capacity_tokens < page_size:
        raise InvalidRequestError(f"a capacity of {capacity_tokens} tokens is below one page of {page_size}")
    simulated = SimulatedStore(capacity_tokens, page_size, policy)
    prompts: Iterable[np.ndarray] = open_trace(trace_path, block)
    result = replay(progress(prompts) if progress else prompts, simulated.request, page_size)
    return {
        "capacity_tokens": capacity_tokens,
        **result,
        "evicted_pages": simulated.store.counters.evictions,
    }
