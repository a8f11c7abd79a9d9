"""Speed of the host index on one core, beside a plain sha256 loop over the same pages and, if asked, SGLang's tree.

    python -m benchmarks.host_index [--trace mooncake_conversation_trace.jsonl] [--peer PYTHON] [--rounds 5] [--json FILE]

The sides take turns, round by round: a loop of chained sha256 over the pages of one prompt, the index, the index with
a chained xxh3_128 digest for each new page, and the peer in its own process (`host_index_peer.py`, by an interpreter
that has sglang). A prompt has 32,768 tokens in pages of 16. What is timed for the index is `SimulatedPool.request`:
lookup, a lease on the match, page ids, eviction, insertion, release; no bytes move. The line "through HostPageStore"
adds the rows, references, pins and copies of the store. Prompts are made before, and frozen for the garbage collector.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from benchmarks.index_workloads import PAGE, PAGES, WORKLOADS, Workloads, prompt
from prefix_reuse.hashing import Digest, xxh3_digest
from prefix_reuse.host_store import HostPageStore, PrefixRequest
from prefix_reuse.index import PrefixIndex
from prefix_reuse.simulate import NAMESPACE, SimulatedPool

DIGESTED = ("cold, evicts", "short prompts", "mooncake 8M")
STORED = ("full hit", "cold, evicts")
SHA256 = "sha256 loop over the pages of one prompt"
OURS, OURS_DIGESTS, STORE = "index", "index, xxh3_128 per new page", "through HostPageStore"


class IndexPool(SimulatedPool):
    """The pool that `prefix-reuse simulate` uses."""

    def __init__(self, pages: int, digest: Digest | None = None) -> None:
        super().__init__(pages, PAGE, digest=digest)

    def match(self, prompt: np.ndarray) -> int:
        lease = self.index.acquire(prompt, NAMESPACE)
        lease.abort()
        return len(lease.page_ids)


class StorePool:
    """A whole life through the store."""

    def __init__(self, pages: int) -> None:
        self.store = HostPageStore(pages, PAGE, index=PrefixIndex(PAGE))

    def match(self, prompt: np.ndarray) -> int:
        lease = self.store.acquire(prompt, NAMESPACE)
        lease.abort()
        return lease.num_pages

    def request(self, prompt: np.ndarray) -> int:
        store, tokens = self.store, len(prompt)
        got = store.allocate_pages_for_sequences_with_prefix([PrefixRequest(0, prompt, tokens, NAMESPACE)])[0]
        if got.newly_allocated:
            store.begin_copy(got.private_pages)
            store.finish_copy(got.private_pages, None)
            store.publish(0, tokens, NAMESPACE)
        store.release(0)
        return len(got.shared_pages)


class Peer:
    """The same workloads in another interpreter."""

    def __init__(self, python: str, trace: str | None) -> None:
        command = [
            python,
            "-m",
            "benchmarks.host_index_peer",
            *(["--trace", str(Path(trace).absolute())] if trace else []),
        ]
        root = Path(__file__).resolve().parent.parent
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, cwd=root, env=env
        )
        self.info = self._read()

    def run(self, name: str) -> tuple[np.ndarray, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(name + "\n")
        self._process.stdin.flush()
        answer = self._read()
        return np.array(answer["us"]), answer["hit_rate"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the peer ended with exit code {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def sha256_loop(tokens: np.ndarray) -> None:
    data, key = tokens.tobytes(), b""
    for at in range(0, len(data), 4 * PAGE):
        key = hashlib.sha256(key + data[at : at + 4 * PAGE]).digest()


def time_sha256(tokens: np.ndarray, repeats: int = 20) -> np.ndarray:
    out = np.empty(repeats)
    for i in range(repeats):
        start = time.perf_counter_ns()
        sha256_loop(tokens)
        out[i] = time.perf_counter_ns() - start
    return out / 1e3


def p99_of_one_shape(count: int = 10_000) -> float:
    """p99 over median of one prompt of 4096 tokens, again and again."""
    pool, tokens = IndexPool(PAGES), prompt(0, 4096)
    times = np.empty(count)
    for i in range(count):
        start = time.perf_counter_ns()
        pool.request(tokens)
        times[i] = time.perf_counter_ns() - start
    return float(np.percentile(times, 99) / np.median(times))


def bytes_a_page(digest: Digest | None) -> float:
    """Bytes of the index beside its tokens, per cached page, for 2000 prompts of 640 tokens."""
    prompts = [prompt(seed, 640) for seed in range(2000)]
    ids = np.arange(2000 * 40, dtype=np.int32)
    tracemalloc.start()
    index = PrefixIndex(PAGE, digest=digest)
    for i, tokens in enumerate(prompts):
        index.commit(tokens, ids[40 * i : 40 * i + 40], NAMESPACE)
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return used / len(ids) - 4 * PAGE


def summary(rounds: list[tuple[np.ndarray, float]]) -> dict[str, float]:
    """Figures of one side on one workload. Rounds are the same requests again, so each has a least time.

    `undisturbed_per_s` takes every request at its least time over the rounds: what the others on the machine cost falls
    out, on every side alike.
    """
    us = np.array([times for times, _ in rounds])
    return {
        "median_us": float(np.median(us)),
        "min_us": float(us.min()),
        "median_round_per_s": float(1e6 / np.median(us.mean(1))),
        "best_round_per_s": float(1e6 / us.mean(1).min()),
        "undisturbed_per_s": float(1e6 / us.min(0).mean()),
        "hit_rate_pages": rounds[0][1],
    }


def measure(sides: dict[str, Callable[[str], tuple[np.ndarray, float]]], workloads: list[str], rounds: int) -> Any:
    """({workload: {side: figures}}, figures of the sha256 loop, load of the machine after each round).

    Within a round every side does every workload that it takes part in.
    """
    tokens = prompt(0)
    sha: list[np.ndarray] = []
    loads: list[float] = []
    results: dict[str, dict[str, list[tuple[np.ndarray, float]]]] = {name: {} for name in workloads}
    for number in range(rounds):
        for name in workloads:
            sha.append(time_sha256(tokens))
            for side, run in sides.items():
                if (side == OURS_DIGESTS and name not in DIGESTED) or (side == STORE and name not in STORED):
                    continue
                results[name].setdefault(side, []).append(run(name))
                gc.collect()
        loads.append(os.getloadavg()[0])
        print(f"round {number + 1} of {rounds}, load {loads[-1]:.1f}", file=sys.stderr)
    out = {name: {side: summary(got) for side, got in by_side.items()} for name, by_side in results.items()}
    loop = np.concatenate(sha)
    return out, {"median_us": float(np.median(loop)), "min_us": float(loop.min())}, loads


def show(results: dict[str, dict[str, dict[str, float]]], sha: dict[str, float]) -> None:
    print(f"{SHA256}: median {sha['median_us']:.0f} us, min {sha['min_us']:.0f} us\n")
    heads = ("median us", "min us", "/s, median", "/s, best", "/s, least", "hit rate", "slower")
    print(f"{'':<23}{'':<30}" + "".join(f"{head:>12}" for head in heads))
    for name, sides in results.items():
        ours = sides[OURS]["undisturbed_per_s"]
        for side, row in sides.items():
            print(
                f"{name:<23}{side:<30}{row['median_us']:12.1f}{row['min_us']:12.1f}{row['median_round_per_s']:12,.0f}"
                f"{row['best_round_per_s']:12,.0f}{row['undisturbed_per_s']:12,.0f}{100 * row['hit_rate_pages']:11.2f}%"
                f"{ours / row['undisturbed_per_s']:11.1f}x"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", help="mooncake_conversation_trace.jsonl")
    parser.add_argument("--peer", metavar="PYTHON", help="an interpreter that has sglang, for host_index_peer.py")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()
    workloads = [name for name in WORKLOADS if args.trace or "mooncake" not in name]
    plain = Workloads(IndexPool, lambda tokens: tokens, args.trace)
    sides: dict[str, Callable[[str], tuple[np.ndarray, float]]] = {OURS: plain.run}
    for side, make in ((OURS_DIGESTS, lambda pages: IndexPool(pages, xxh3_digest)), (STORE, StorePool)):
        sides[side] = plain.with_pool(make).run
    peer = Peer(args.peer, args.trace) if args.peer else None
    if peer is not None:
        sides[peer.info["name"]] = peer.run
    results, sha, loads = measure(sides, workloads, args.rounds)
    if peer is not None:
        peer.close()
    show(results, sha)
    rest = {
        "p99 over median, 10,000 repeats of 4096 tokens": p99_of_one_shape(),
        "bytes a page beside its tokens": bytes_a_page(None),
        "bytes a page beside its tokens, with digests": bytes_a_page(xxh3_digest),
    }
    for name, value in rest.items():
        print(f"{name:<58}{value:10.2f}")
    if args.json:
        machine = {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "numpy": np.__version__,
            "xxhash": xxhash.VERSION,
            "peer": None if peer is None else peer.info,
            "rounds": args.rounds,
            "load_after_each_round": loads,
        }
        figures = {"machine": machine, "sha256_loop": sha, "workloads": results, "rest": rest}
        Path(args.json).write_text(json.dumps(figures, indent=2) + "\n")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
