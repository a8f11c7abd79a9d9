"""The same workloads on SGLang's radix tree: its default Rust core, or its Python core. Run by `host_index.py --peer`.

It runs in an interpreter of its own, which has `sglang` (0.5.23 was measured), torch and numpy. No GPU, no KV memory:
the tree, its lock references and its allocator of paged slots are what a request costs there before any KV moves.
Reads a workload's name per line of standard input, writes one JSON object per line of standard output.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import json
import sys
from array import array
from typing import Any
from unittest.mock import MagicMock

import numpy as np

from benchmarks.index_workloads import PAGE, Workloads

UNUSED = ("torchvision", "partial_json_parser")
"""Imported by other parts of the package on the way to the tree, and not needed by it."""


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Lets modules that are not installed be imported, as mocks."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in UNUSED else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__name__ = [], spec, spec.name
        return module

    def exec_module(self, module: Any) -> None:
        pass


import transformers.models.auto.processing_auto  # noqa: E402, F401  it asks for torchvision itself, and must not find the mock

sys.meta_path.append(Absent())

import sglang  # noqa: E402
import torch  # noqa: E402
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType  # noqa: E402
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: E402


class RadixPool:
    """One request at a time through SGLang's cache, with the calls that its scheduler makes."""

    def __init__(self, pages: int, core: str) -> None:
        self.allocator = PagedTokenToKVPoolAllocator(pages * PAGE, PAGE, torch.float16, "cpu", None, need_sort=False)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE,
            tree_components=(ComponentType.FULL,),
            tree_core_backend=core,
        )
        self.cache = UnifiedRadixCache(params)
        got = type(self.cache.tree_core).__name__
        if ("Rust" in got) != (core == "rust"):
            raise RuntimeError(f"asked for the {core} core, got {got}")
        self.root = self.cache.root_node_handle()
        self.row = torch.zeros(1 << 17, dtype=torch.int32)  # a row of its `req_to_token` pool

    def match(self, prompt: array) -> int:
        """Match, lock, slot indices, unlock: admission and nothing else."""
        match, _, lock = self._match(RadixKey(prompt))
        self.cache.unlock(lock)
        return match.device_prefix_len // PAGE

    def request(self, prompt: array) -> int:
        """A whole life: admission, slots for the rest, and what `checkpoint_into_tree` does at the end, hit or not."""
        cache, row = self.cache, self.row
        match, slots, lock = self._match(RadixKey(prompt))
        hit = match.device_prefix_len
        full = len(prompt) // PAGE * PAGE
        row[:hit] = slots
        if full > hit:
            new = self.allocator.alloc(full - hit)
            if new is None:
                cache.evict(EvictParams(num_tokens=full - hit - self.allocator.available_size()))
                new = self.allocator.alloc(full - hit)
            row[hit:full] = new
        key = RadixKey(prompt[:]).page_aligned(PAGE)
        values = row[:full].to(dtype=torch.int64, copy=True)
        result = cache.insert(InsertParams(key=key, value=values, prev_prefix_len=hit))
        row[hit:full] = cache.path_device_indices(result.last_device_node)[hit:]
        cache.unlock(lock)
        cache.unlock(cache.lock(result.last_device_node))
        return hit // PAGE

    def _match(self, key: RadixKey) -> tuple[Any, torch.Tensor, Any]:
        match = self.cache.match_prefix(MatchPrefixParams(key=key))
        slots = self.cache.tree_core.collect_full_device_indices(match.last_device_node, self.root)
        return match, slots, self.cache.lock(match.last_device_node)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--core", choices=("rust", "python"), default="rust")
    parser.add_argument("--trace")
    args = parser.parse_args()
    torch.set_num_threads(1)
    workloads = Workloads(
        lambda pages: RadixPool(pages, args.core),
        lambda tokens: array("q", tokens.astype(np.int64).tobytes()),
        args.trace,
    )
    print(
        json.dumps({"name": f"SGLang {sglang.__version__}, {args.core} core", "torch": torch.__version__}), flush=True
    )
    for line in sys.stdin:
        times, hit_rate = workloads.run(line.strip())
        print(json.dumps({"us": times.tolist(), "hit_rate": hit_rate}), flush=True)


if __name__ == "__main__":
    main()
