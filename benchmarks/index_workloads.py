"""What the host index and its peers are timed on. Needs numpy alone, so that any interpreter can import it.

A workload is named; `run` does one round of it on a pool that the caller makes, and gives the microseconds of each
request. Whatever a side wants its prompts to be (an int32 array, an `array('q')`) is made before the clock starts.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import Any, Protocol

import numpy as np

PAGE, TOKENS = 16, 32_768
PAGES = TOKENS // PAGE
COLD_PROMPTS = 48
WORKLOADS = (
    "full hit, match only",
    "full hit",
    "64 pieces, match only",
    "64 pieces",
    "cold, evicts",
    "short prompts",
    "mooncake 8M",
)


class Pool(Protocol):
    """A cache and the pages it may use."""

    def match(self, prompt: Any) -> int:
        """Match, hold, page ids, let go; returns the hit in pages."""
        ...

    def request(self, prompt: Any) -> int:
        """Match, hold, page ids, pages for the rest (evicting if it must), index them, let go; returns the hit in pages."""
        ...


MakePool = Callable[[int], Pool]
"""From a number of pages to an empty pool."""
Convert = Callable[[np.ndarray], Any]
"""From int32 tokens to what the pool takes."""


def prompt(seed: int, tokens: int = TOKENS) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, tokens, dtype=np.int32)


def pieces(tokens: np.ndarray) -> Iterator[np.ndarray]:
    """64 prompts that leave `tokens` after 1/64, 2/64 .. of it, so that a tree has it in 64 pieces."""
    for cut in range(1, 64):
        other = tokens[: cut * TOKENS // 64 + PAGE].copy()
        other[-PAGE:] += 1
        yield other
    yield tokens


def short_prompts(count: int = 10_000) -> Iterator[np.ndarray]:
    """Prompts of 512 shared and 128..512 own tokens."""
    shared = prompt(1, 512)
    for i, own in enumerate(np.random.default_rng(0).integers(128, 513, count)):
        yield np.concatenate([shared, prompt(i, int(own))])


def mooncake_prompts(path: str, block: int = 512) -> Iterator[np.ndarray]:
    """The prompts of a Mooncake trace, cut to full pages; the last block may be partly filled."""
    offsets = np.arange(block, dtype=np.int32)
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            request = json.loads(line)
            blocks = np.asarray(request["hash_ids"], np.int32)
            full = request["input_length"] // PAGE * PAGE
            if full:
                yield (blocks[:, None] * block + offsets).reshape(-1)[:full]


class Workloads:
    """The workloads for one side. Prompts are made once and kept; pools are new in every round."""

    def __init__(self, make_pool: MakePool, convert: Convert, trace: str | None = None) -> None:
        self._make_pool = make_pool
        self._convert = convert
        self._trace = trace
        self._prompts: dict[str, list[Any]] = {}

    def with_pool(self, make_pool: MakePool) -> Workloads:
        """The same prompts for another pool."""
        other = Workloads(make_pool, self._convert, self._trace)
        other._prompts = self._prompts
        return other

    def run(self, name: str, repeats: int = 200) -> tuple[np.ndarray, float]:
        """One round: microseconds of each request, and the hit rate in pages over the timed requests."""
        if name.startswith("full hit"):
            return self._repeat(name, self._kept("full hit", lambda: [prompt(0)]), PAGES, repeats)
        if name.startswith("64 pieces"):
            return self._repeat(name, self._kept("64 pieces", lambda: [*pieces(prompt(0))]), 2 * PAGES, repeats)
        if name == "cold, evicts":
            prompts = self._kept(name, lambda: [prompt(seed) for seed in range(COLD_PROMPTS + 8)])
            pool = self._make_pool(4 * PAGES)
            for warm in prompts[:8]:
                pool.request(warm)
            return replay(pool.request, prompts[8:])
        if name == "short prompts":
            return replay(self._make_pool(2_000_000 // PAGE).request, self._kept(name, lambda: [*short_prompts()]))
        if name == "mooncake 8M" and self._trace is not None:
            trace = self._trace
            prompts = self._kept(name, lambda: [*mooncake_prompts(trace)])
            return replay(self._make_pool(8_000_000 // PAGE).request, prompts)
        raise ValueError(f"no workload {name!r}, or no trace for it")

    def _kept(self, name: str, make: Callable[[], list[np.ndarray]]) -> list[Any]:
        if name not in self._prompts:
            self._prompts[name] = [self._convert(tokens) for tokens in make()]
            gc.collect()
            gc.freeze()  # the prompts and the modules are not looked through at every collection
        return self._prompts[name]

    def _repeat(self, name: str, prompts: Sequence[Any], pages: int, repeats: int) -> tuple[np.ndarray, float]:
        """Serve `prompts` once, then the last one again and again."""
        pool = self._make_pool(pages)
        for one in prompts:
            pool.request(one)
        call = pool.match if name.endswith("match only") else pool.request
        return replay(call, [prompts[-1]] * repeats)


def replay(call: Callable[[Any], int], prompts: Sequence[Any]) -> tuple[np.ndarray, float]:
    """Microseconds of `call` for each prompt, and the hit rate in pages."""
    times, clock = np.empty(len(prompts)), time.perf_counter_ns
    hit = pages = 0
    for i, kept in enumerate(prompts):
        one = copy(kept)  # as a prompt comes from a tokenizer: in the processor's cache, and a new object
        start = clock()
        got = call(one)
        times[i] = clock() - start
        hit += got
        pages += len(one) // PAGE
    return times / 1e3, hit / pages
