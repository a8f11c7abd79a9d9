"""Page movement between the device pool and pinned host memory.

A host page is one immutable JAX array per layer group, `[L, *page_shape]` in `pinned_host` memory: written once, freed when
the last holder lets go, never rewritten in place. So a copy in flight can not see later changes, and a loaded page can not be
changed under the device (JAX may alias host buffers).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from prefix_reuse.errors import TransferError
from prefix_reuse.steps import CompilationCounter

Payload = tuple[jax.Array | None, ...]
"""One page: for each layer group an array [L, *page_shape] in pinned host memory; None where a sliding group's is absent."""

LARGEST_COPY = 64
"""Pages moved by one jitted call at most; larger moves are split into powers of two, so that few shapes are compiled."""


@dataclass(frozen=True)
class PendingCopy:
    """A device-to-host copy that was dispatched: the host page ids it fills and the arrays that will hold the bytes."""

    host_pages: np.ndarray
    payloads: tuple[Payload, ...]

    @property
    def ready(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return all(page.is_ready() for page in jax.tree.leaves(self.payloads))

    def wait(self) -> None:
        """Blocks until the bytes have landed; raises `TransferError` when they never will."""
        try:
            jax.block_until_ready(self.payloads)
        except Exception as error:
            raise TransferError(f"copy of host pages {self.host_pages.tolist()} failed: {error}") from error


def split_powers_of_two(n: int, largest: int = LARGEST_COPY) -> list[int]:
    """n as a sum of powers of two up to `largest`: 11 -> [8, 2, 1]."""
    sizes = [largest] * (n // largest)
    rest = n % largest
    sizes += [1 << bit for bit in range(rest.bit_length() - 1, -1, -1) if rest >> bit & 1]
    return sizes


class PageTransfer:
    """Jitted copies of whole pages, all layers at once, for one engine. Replaceable, to inject delays and faults in tests."""

    def __init__(self, device: Any, counter: CompilationCounter):
        host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
        self._gather = jax.jit(counter.traced("offload_pages", _gather), out_shardings=host, static_argnums=2)
        self._load = jax.jit(counter.traced("load_pages", _load), donate_argnums=0)
        self._host = host

    def offload(
        self, pools: Sequence[jax.Array], device_pages: Sequence[np.ndarray], host_pages: np.ndarray
    ) -> PendingCopy:
        """Starts copying pages to the host.

        The gather is dispatched before the caller's next donated step, so it reads the pool as it is now.

        Args:
          pools: `kv_pages` of each layer group.
          device_pages: int32 [N] for each group: the pages to copy; -1 where the group's page was given back: absent on the
            host too.
          host_pages: [N]: where they belong in the host store.
        """
        payloads: list[Payload] = []
        start = 0
        for size in split_powers_of_two(len(host_pages)):
            ids = [np.ascontiguousarray(pages[start : start + size], np.int32) for pages in device_pages]
            copied = self._gather(tuple(pools), tuple(np.maximum(i, 0) for i in ids), size)
            payloads += [_without_absent(page, [i[n] for i in ids]) for n, page in enumerate(copied)]
            start += size
        return PendingCopy(np.array(host_pages), tuple(payloads))

    def load(
        self, pools: Sequence[jax.Array], parts: Sequence[Sequence[jax.Array]], device_pages: Sequence[np.ndarray]
    ) -> tuple[jax.Array, ...]:
        """Copies parts of host pages into the pools. Donates `pools`; returns the updated ones.

        Args:
          pools: `kv_pages` of each layer group.
          parts: for each group, the arrays to copy; the groups need not copy the same pages, nor as many.
          device_pages: int32 [N] for each group: where they go.

        Raises `TransferError` before anything is donated when a part does not have the shape of a page.
        """
        for group, (pool, some) in enumerate(zip(pools, parts, strict=True)):
            for part in some:
                check_part(part, pool, group)
        out = []
        for pool, some, pages in zip(pools, parts, device_pages, strict=True):
            start = 0
            for size in split_powers_of_two(len(some)):
                here = slice(start, start + size)
                pool = self._load(pool, np.ascontiguousarray(pages[here], np.int32), list(some[here]))
                start += size
            out.append(pool)
        return tuple(out)

    def adopt(self, payload: Sequence[np.ndarray | None]) -> Payload:
        """A page of numpy arrays (None = absent) as a host page.

        The caller must not write to the arrays any more: they may be aliased.
        """
        return tuple(None if part is None else jax.device_put(part, self._host) for part in payload)

    def warmup_sizes(self) -> list[int]:
        """Every number of pages that one jitted copy can move."""
        return [1 << i for i in range(LARGEST_COPY.bit_length())]


def check_part(part: Any, pool: jax.Array, group: int) -> None:
    """Raises `TransferError` unless `part` is the part of a host page that belongs into `pool`, in its dtype."""
    if part is None:
        raise TransferError(f"the host page has no bytes of layer group {group}, which are needed")
    expected = (pool.shape[0], *pool.shape[2:])
    if getattr(part, "shape", None) != expected or part.dtype != pool.dtype:
        got = f"{part.dtype}{list(part.shape)}" if hasattr(part, "dtype") else type(part).__name__
        raise TransferError(f"host page of group {group} is {got}, the pool needs {pool.dtype}{list(expected)}")


def _without_absent(page: Sequence[jax.Array], device_pages: Sequence[int]) -> Payload:
    return tuple(None if here < 0 else part for part, here in zip(page, device_pages, strict=True))


def _gather(pools: tuple[jax.Array, ...], ids: tuple[jax.Array, ...], size: int) -> list[Payload]:
    take = partial(jax.lax.dynamic_index_in_dim, axis=1, keepdims=False)
    return [tuple(take(pool, group_ids[i]) for pool, group_ids in zip(pools, ids, strict=True)) for i in range(size)]


def _load(pool: jax.Array, ids: jax.Array, parts: list[jax.Array]) -> jax.Array:
    """Donates `pool`. Page by page, so that one is written into the pool while the next is on the link."""
    for i, part in enumerate(parts):
        here = jax.device_put(part, jax.memory.Space.Device)
        pool = jax.lax.dynamic_update_index_in_dim(pool, here, ids[i], axis=1)
    return pool
