"""Speed of the host index on one core, with a plain sha256 loop over the same pages beside it.

    python benchmarks/host_index.py [--trace mooncake_conversation_trace.jsonl] [--repeats 200] [--json FILE]

Medians and minima in microseconds; on a shared machine compare the ratios to the sha256 loop, which runs in between.
A prompt has 32,768 tokens in pages of 16. "match" is lookup, a reference on every page, page ids; "request" is a whole
life: allocate, publish, release.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from prefix_reuse.hashing import xxh3_digest
from prefix_reuse.host_store import HostPageStore, PrefixRequest
from prefix_reuse.index import PrefixIndex
from prefix_reuse.simulate import replay
from prefix_reuse.traces import mooncake_prompts

PAGE, TOKENS = 16, 32_768
PAGES = TOKENS // PAGE
NAMESPACE = b"benchmark"


def timed(run: Callable[[], object], repeats: int) -> np.ndarray:
    """Microseconds of each of `repeats` calls."""
    out = np.empty(repeats)
    for i in range(repeats):
        start = time.perf_counter_ns()
        run()
        out[i] = (time.perf_counter_ns() - start) / 1e3
    return out


def sha256_loop(tokens: np.ndarray) -> None:
    data, key = tokens.tobytes(), b""
    for at in range(0, len(data), 4 * PAGE):
        key = hashlib.sha256(key + data[at : at + 4 * PAGE]).digest()


def prompt(seed: int, tokens: int = TOKENS) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, tokens, dtype=np.int32)


class Pool:
    """The least that an index needs around it: reference counts and a stack of free pages."""

    def __init__(self, pages: int, digest: Callable[[bytes], bytes] | None = None) -> None:
        self.refs = np.zeros(pages, np.int32)
        self.free = np.arange(pages, dtype=np.int32)
        self.top = pages
        self.index = PrefixIndex(PAGE, digest=digest)
        self.index.bind_busy(lambda ids: self.refs[ids.astype(np.intp)])

    def match(self, tokens: np.ndarray) -> np.ndarray:
        ids = self.index.lookup(tokens, NAMESPACE).page_ids
        self.refs[ids.astype(np.intp)] += 1
        return ids

    def request(self, tokens: np.ndarray) -> int:
        """One prompt from lookup to release; returns its hit in pages."""
        ids = self.match(tokens)
        need = len(tokens) // PAGE - len(ids)
        if need:
            if need > self.top:
                out = self.index.evict(need - self.top)
                self.free[self.top : self.top + len(out)] = out
                self.top += len(out)
            self.top -= need
            self.index.commit(tokens, np.concatenate([ids, self.free[self.top : self.top + need]]), NAMESPACE)
        self.refs[ids.astype(np.intp)] -= 1
        return len(ids)


def store_request(store: HostPageStore, tokens: np.ndarray) -> None:
    """The same through the store, with its bookkeeping of rows, copies and pins."""
    store.allocate_pages_for_sequences_with_prefix([PrefixRequest(0, tokens, len(tokens), NAMESPACE)])
    row = store.row(0)
    if len(row.private_pages):
        store.begin_copy(row.private_pages)
        store.finish_copy(row.private_pages, None)
        store.publish(0, tokens, NAMESPACE)
    store.release(0)


def full_hit(repeats: int) -> dict[str, np.ndarray]:
    pool, tokens = Pool(PAGES), prompt(0)
    pool.request(tokens)

    pieces = Pool(2 * PAGES)
    for cut in range(1, 65):  # other prompts leave after 1/64, 2/64 ... of the prefix
        other = tokens[: cut * TOKENS // 64 + PAGE].copy()
        other[-PAGE:] += 1 if cut < 64 else 0
        pieces.request(other[:TOKENS])

    store = HostPageStore(PAGES, PAGE, index=PrefixIndex(PAGE))
    store_request(store, tokens)
    return {
        "full hit: whole request": timed(lambda: pool.request(tokens), repeats),
        "full hit: match, references, page ids": timed(lambda: pool.match(tokens), repeats),
        "full hit, prefix in 64 pieces": timed(lambda: pieces.match(tokens), repeats),
        "full hit: whole request through HostPageStore": timed(lambda: store_request(store, tokens), repeats),
    }


def cold(repeats: int) -> dict[str, np.ndarray]:
    out = {}
    for name, digest in (("cold, pool full (evicts)", None), ("cold, pool full, xxh3 digests", xxh3_digest)):
        pool = Pool(4 * PAGES, digest)
        prompts = iter([prompt(seed) for seed in range(repeats + 8)])
        for _ in range(8):
            pool.request(next(prompts))
        out[name] = timed(lambda pool=pool, prompts=prompts: pool.request(next(prompts)), repeats)
    store = HostPageStore(4 * PAGES, PAGE, index=PrefixIndex(PAGE))
    prompts = iter([prompt(seed) for seed in range(repeats + 8)])
    for _ in range(8):
        store_request(store, next(prompts))
    out["cold, pool full, through HostPageStore"] = timed(lambda: store_request(store, next(prompts)), repeats)
    return out


def short_prompts(count: int = 10_000) -> dict[str, float]:
    """10,000 prompts of 512 shared and 128..512 own tokens: requests a second."""
    rng = np.random.default_rng(0)
    shared = prompt(1, 512)
    prompts = [np.concatenate([shared, prompt(i, int(n))]) for i, n in enumerate(rng.integers(128, 513, count))]
    pool = Pool(2_000_000 // PAGE)
    start = time.perf_counter()
    for tokens in prompts:
        pool.request(tokens)
    return {"short prompts, requests/s": count / (time.perf_counter() - start)}


def p99_of_one_shape(count: int = 10_000) -> dict[str, float]:
    pool, tokens = Pool(PAGES), prompt(0, 4096)
    pool.request(tokens)
    times = timed(lambda: pool.request(tokens), count)
    return {"p99 / median of 10,000 repeats": float(np.percentile(times, 99) / np.median(times))}


def memory() -> dict[str, float]:
    """Bytes of the index beside its tokens, per cached page, for prompts of 640 tokens."""
    prompts = [prompt(seed, 640) for seed in range(2000)]
    ids = np.arange(2000 * 40, dtype=np.int32)
    tracemalloc.start()
    index = PrefixIndex(PAGE)
    for i, tokens in enumerate(prompts):
        index.commit(tokens, ids[40 * i : 40 * i + 40], NAMESPACE)
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return {"bytes a page beside its tokens": used / len(ids) - 4 * PAGE}


def mooncake(path: str) -> dict[str, float]:
    out = {}
    for name, digest in (("mooncake 8M", None), ("mooncake 8M, xxh3 digests", xxh3_digest)):
        pool = Pool(8_000_000 // PAGE, digest)
        result = replay(mooncake_prompts(path), pool.request, PAGE)
        out[f"{name}, requests/s"] = 1e6 / result["us_per_request"]
        out[f"{name}, page hit rate %"] = 100 * result["hit_rate_pages"]
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", help="mooncake_conversation_trace.jsonl")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()
    tokens = prompt(0)
    times: dict[str, np.ndarray] = {"sha256 loop over the pages": timed(lambda: sha256_loop(tokens), args.repeats // 4)}
    times |= full_hit(args.repeats) | cold(args.repeats)
    base = float(np.median(times["sha256 loop over the pages"]))
    rates = short_prompts() | p99_of_one_shape() | memory() | (mooncake(args.trace) if args.trace else {})
    rows: dict[str, dict[str, float]] = {}
    for name, us in times.items():
        median, least = float(np.median(us)), float(us.min())
        rows[name] = {"median_us": median, "min_us": least, "times_sha256": base / median}
        print(f"{name:<50} median {median:9.1f} us   min {least:9.1f} us   {base / median:6.1f} x sha256 loop")
    for name, value in rates.items():
        print(f"{name:<50} {value:12,.2f}")
    if args.json:
        Path(args.json).write_text(json.dumps({"times": rows, "rates": rates}, indent=2))


if __name__ == "__main__":
    main()
