"""Hit rates of the host index on real traces, which must equal those of a plain count that shares no code with it.

    python -m benchmarks.hit_rates TRACE... [--capacity-tokens 1M,2M,4M,8M,16M,32M,64M] [--json FILE]

A `.jsonl` trace (Mooncake's format) is replayed at page 16 and each capacity beside `lru_hits`; an `.npz` token stream
at pages 16 and 64 with room for everything beside `ideal_hits`. Ends with exit code 1 if any count differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from prefix_reuse.simulate import parse_tokens, simulate

Chain = list[int]
"""The full pages of a prompt: equal numbers are equal pages behind equal histories."""


def lru_hits(chains: Iterable[Chain], capacity: int) -> int:
    """Hits in pages of a cache of `capacity` pages that drops the least recently used leaf.

    A page is used whenever one behind it is, so it is never colder; of pages last used by the same prompt the deepest is
    the leaf. So one line of pages is enough: each prompt moves its own to the end, deepest first, and the page in front
    is always the coldest leaf. Of a prompt beyond the capacity only the beginning is kept.
    """
    line: OrderedDict[int, None] = OrderedDict()
    total = 0
    for whole in chains:
        chain = whole[:capacity]
        hit = 0
        while hit < len(chain) and chain[hit] in line:
            hit += 1
        total += hit
        for page in reversed(chain[:hit]):
            line.move_to_end(page)
        while len(line) + len(chain) - hit > capacity:
            line.popitem(last=False)
        for page in reversed(chain[hit:]):
            line[page] = None
        for page in reversed(chain[:hit]):
            line.move_to_end(page)
    return total


def ideal_hits(chains: Iterable[Chain]) -> int:
    """Hits in pages of a cache that drops nothing."""
    seen: set[int] = set()
    total = 0
    for chain in chains:
        total += sum(page in seen for page in chain)
        seen.update(chain)
    return total


def mooncake_chains(path: str, page: int, block: int = 512) -> Iterator[tuple[Chain, int]]:
    """(pages, tokens) of each request of a Mooncake trace, from its hash ids alone."""
    numbers: dict[tuple[int, Any], int] = {}
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            request = json.loads(line)
            tokens, chain, parent = request["input_length"], [], -1
            for hash_id in request["hash_ids"]:
                parent = numbers.setdefault((parent, hash_id), len(numbers))
                chain.extend(range(parent * block, parent * block + block // page))
            if tokens:
                yield chain[: tokens // page], tokens


def stream_chains(path: str, page: int) -> Iterator[tuple[Chain, int]]:
    """(pages, tokens) of each prompt of a token stream."""
    numbers: dict[tuple[int, bytes], int] = {}
    with np.load(path) as data:
        tokens, offsets = data["tokens"], data["offsets"].tolist()
    for start, end in pairwise(offsets):
        chain, parent = [], -1
        for at in range(start, end - page + 1, page):
            parent = numbers.setdefault((parent, tokens[at : at + page].tobytes()), len(numbers))
            chain.append(parent)
        if end > start:
            yield chain, end - start


def compare(trace: str, page: int, capacities: list[int] | None) -> Iterator[dict[str, Any]]:
    """Rows with the index's figures and the counted ones; capacity None = room for everything."""
    make = stream_chains if trace.endswith(".npz") else mooncake_chains
    chains, lengths = zip(*make(trace, page), strict=True)
    pages, tokens = sum(map(len, chains)), sum(lengths)
    for capacity in capacities or [tokens + page * len(chains)]:
        counted = lru_hits(chains, capacity // page) if capacities else ideal_hits(chains)
        row = simulate(trace, capacity, "lru", page)
        yield {
            "trace": Path(trace).name,
            "page_size": page,
            **row,
            "counted_hit_rate_pages": counted / pages,
            "counted_hit_rate_tokens": counted * page / tokens,
            "hit_pages": round(row["hit_rate_pages"] * pages),
            "counted_hit_pages": counted,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", metavar="TRACE")
    parser.add_argument("--capacity-tokens", default="1M,2M,4M,8M,16M,32M,64M")
    parser.add_argument("--json", help="write the rows to this file")
    args = parser.parse_args()
    rows = []
    print(f"{'trace':<36}{'page':>5}{'capacity':>12}{'hit pages':>12}{'counted':>12}{'of pages':>10}{'of tokens':>10}")
    for trace in args.traces:
        capacities = [parse_tokens(part) for part in args.capacity_tokens.split(",")]
        unbounded = trace.endswith(".npz")
        for page in (16, 64) if unbounded else (16,):
            for row in compare(trace, page, None if unbounded else capacities):
                rows.append(row)
                print(
                    f"{row['trace']:<36}{page:>5}{'all' if unbounded else row['capacity_tokens']:>12}{row['hit_pages']:>12,}"
                    f"{row['counted_hit_pages']:>12,}{100 * row['hit_rate_pages']:>9.2f}%{100 * row['hit_rate_tokens']:>9.2f}%",
                    flush=True,
                )
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=2) + "\n")
    sys.exit(any(row["hit_pages"] != row["counted_hit_pages"] for row in rows))


if __name__ == "__main__":
    main()
