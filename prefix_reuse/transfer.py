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

Payload = tuple[jax.Array, ...]
"""One page: for each layer group an array [L, *page_shape] in pinned host memory."""

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
          device_pages: int32 [N] for each group: the pages to copy.
          host_pages: [N]: where they belong in the host store.
        """
        payloads: list[Payload] = []
        start = 0
        for size in split_powers_of_two(len(host_pages)):
            ids = [np.ascontiguousarray(pages[start : start + size], np.int32) for pages in device_pages]
            payloads += self._gather(tuple(pools), tuple(ids), size)
            start += size
        return PendingCopy(np.array(host_pages), tuple(payloads))

    def load(
        self, pools: Sequence[jax.Array], payloads: Sequence[Payload], device_pages: Sequence[np.ndarray]
    ) -> tuple[jax.Array, ...]:
        """Copies host pages into the pools. Donates `pools`; returns the updated ones.

        Raises `TransferError` before anything is donated when a payload does not have the shape of a page.
        """
        kv_pages = tuple(pools)
        for payload in payloads:
            check_payload(payload, kv_pages)
        start = 0
        for size in split_powers_of_two(len(payloads)):
            ids = tuple(np.ascontiguousarray(pages[start : start + size], np.int32) for pages in device_pages)
            kv_pages = self._load(kv_pages, ids, list(payloads[start : start + size]))
            start += size
        return kv_pages

    def adopt(self, payload: Sequence[np.ndarray]) -> Payload:
        """A page of numpy arrays as a host page. The caller must not write to the arrays any more: they may be aliased."""
        return tuple(jax.device_put(part, self._host) for part in payload)

    def warmup_sizes(self) -> list[int]:
        """Every number of pages that one jitted copy can move."""
        return [1 << i for i in range(LARGEST_COPY.bit_length())]


def check_payload(payload: Any, pools: Sequence[jax.Array]) -> None:
    """Raises `TransferError` unless `payload` is one whole page for each pool, in its dtype."""
    if not isinstance(payload, tuple) or len(payload) != len(pools):
        raise TransferError(f"a host page needs {len(pools)} arrays, one per layer group")
    for group, (page, pool) in enumerate(zip(payload, pools, strict=True)):
        expected = (pool.shape[0], *pool.shape[2:])
        if page.shape != expected or page.dtype != pool.dtype:
            raise TransferError(
                f"host page of group {group} is {page.dtype}{list(page.shape)}, the pool needs {pool.dtype}{list(expected)}"
            )


def _gather(pools: tuple[jax.Array, ...], ids: tuple[jax.Array, ...], size: int) -> list[Payload]:
    take = partial(jax.lax.dynamic_index_in_dim, axis=1, keepdims=False)
    return [tuple(take(pool, group_ids[i]) for pool, group_ids in zip(pools, ids, strict=True)) for i in range(size)]


def _load(pools: tuple[jax.Array, ...], ids: tuple[jax.Array, ...], payloads: list[Payload]) -> tuple[jax.Array, ...]:
    """Donates `pools`. Page by page, so that one is written into the pool while the next is on the link."""
    out = list(pools)
    for i, payload in enumerate(payloads):
        for group, page in enumerate(payload):
            here = jax.device_put(page, jax.memory.Space.Device)
            out[group] = jax.lax.dynamic_update_index_in_dim(out[group], here, ids[group][i], axis=1)
    return tuple(out)
