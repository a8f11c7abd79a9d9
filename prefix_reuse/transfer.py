"""Page movement between the device pool and pinned host memory.

A host page is one `HostPart` per layer group: written once, freed when the last holder lets go, never rewritten in place. So a
copy in flight can not see later changes, and a loaded page can not be changed under the device (JAX may alias host buffers).

Pages that leave the device together travel and live in bundles (`prefix_reuse.host_part`): on an H200 single pages of 1.6 MB
reached 78% of the link, bundles of 32 of them 95%. A part of a bundle is read by a `dynamic_slice` in host memory, which
copies those bytes only.

What overlaps with what: within one call a bundle is on the link while the one before it is written into the pool. A call as a
whole takes its turn among the steps, since it donates the pool, so a prefill waits for the loads before it; only copies that
were started earlier, into memory of their own (`prefix_reuse.staging`), run beside other steps. The host waits for none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from pallas_kernels import gather_pages, scatter_pages
from prefix_reuse.errors import TransferError
from prefix_reuse.host_part import Bundle, Bundles, HostPart
from prefix_reuse.staging import Staging
from prefix_reuse.steps import CompilationCounter

Payload = tuple[HostPart | None, ...]
"""One page: for each layer group its part; None where a sliding group's is absent."""

BUNDLE_BYTES = 48 << 20
"""Bytes of a bundle at most."""
SMALL_BUNDLE = 8
"""Pages that are bundled where there are too few for a whole bundle."""
LARGEST_COPY = 32
"""Pages in one bundle, and single pages in one jitted call, at most; larger moves are split: few shapes are compiled."""
WHOLE_BUNDLES = 4
"""Whole bundles of one call: one is gathered, or written into the pool, while another is on the link."""


@dataclass(frozen=True)
class PendingCopy:
    """A device-to-host copy that was dispatched."""

    host_pages: np.ndarray
    """The host page ids that it fills."""
    payloads: tuple[Payload, ...]
    arrays: tuple[Any, ...]
    """JAX arrays that will hold the bytes of the payloads."""

    @property
    def ready(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return all(array.is_ready() for array in self.arrays)

    def wait(self) -> None:
        """Blocks until the bytes have landed; raises `TransferError` when they never will."""
        try:
            jax.block_until_ready(self.arrays)
        except Exception as error:
            raise TransferError(f"copy of host pages {self.host_pages.tolist()} failed: {error}") from error


def split_powers_of_two(n: int) -> list[int]:
    """n as a sum of powers of two up to `LARGEST_COPY`: 11 -> [8, 2, 1]."""
    sizes = [LARGEST_COPY] * (n // LARGEST_COPY)
    rest = n % LARGEST_COPY
    sizes += [1 << bit for bit in range(rest.bit_length() - 1, -1, -1) if rest >> bit & 1]
    return sizes


def bundle_sizes(part_bytes: int) -> list[int]:
    """Pages of the bundles that parts of so many bytes are kept in, the larger ones first; single pages not counted."""
    largest = min(LARGEST_COPY, 1 << max(0, (BUNDLE_BYTES // part_bytes).bit_length() - 1))
    return [size for size in dict.fromkeys((largest, min(SMALL_BUNDLE, largest))) if size > 1]


class PageTransfer:
    """Jitted copies of whole pages, all layers at once, for one engine. Replaceable, to inject delays and faults in tests."""

    def __init__(self, device: Any, counter: CompilationCounter):
        host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
        # Lets a bundle be gathered while the one before it is on the link.
        overlap = {"xla_gpu_enable_latency_hiding_scheduler": True} if device.platform == "gpu" else None
        self._gather_bundles = jax.jit(
            counter.traced("offload_pages", _gather_bundles),
            out_shardings=host,
            static_argnums=2,
            compiler_options=overlap,
        )
        self._gather_singles = jax.jit(
            counter.traced("offload_pages", _gather_singles), out_shardings=host, static_argnums=2
        )
        self._load = jax.jit(counter.traced("load_pages", _load), donate_argnums=0)
        self._load_part = jax.jit(counter.traced("load_pages", _load_part), donate_argnums=0)
        self.bundles = Bundles(host)

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
        ids = [np.ascontiguousarray(pages, np.int32) for pages in device_pages]
        # Everything is on its way before parts are made of it.
        arrays = [self._gather(pool, pages[pages >= 0]) for pool, pages in zip(pools, ids, strict=True)]
        columns = [self._column(some, pages >= 0) for some, pages in zip(arrays, ids, strict=True)]
        flat = tuple(array for some in arrays for array in some)
        return PendingCopy(np.array(host_pages), tuple(zip(*columns, strict=True)), flat)

    def _column(self, arrays: Sequence[jax.Array], present: np.ndarray) -> list[HostPart | None]:
        """The parts of `arrays`, in order, where bool [N] `present` is set."""
        parts = [part for array in arrays for part in self.bundles.of(array)]
        if len(parts) == len(present):
            return list(parts)
        column: list[HostPart | None] = [None] * len(present)
        for place, part in zip(np.flatnonzero(present).tolist(), parts, strict=True):
            column[place] = part
        return column

    def _gather(self, pool: jax.Array, ids: np.ndarray) -> list[jax.Array]:
        """Host arrays `[N, L, *page_shape]` of the pages `ids`, in order."""
        arrays: list[jax.Array] = []
        done = 0
        for size in bundle_sizes(_part_bytes(pool)):
            for count in _calls(size, (len(ids) - done) // size):
                arrays += self._gather_bundles(pool, ids[done : done + size * count], size)
                done += size * count
        for size in split_powers_of_two(len(ids) - done):
            arrays += self._gather_singles(pool, ids[done : done + size], size)
            done += size
        return arrays

    def load(
        self,
        pools: Sequence[jax.Array],
        parts: Sequence[Sequence[HostPart | np.ndarray]],
        device_pages: Sequence[np.ndarray],
        staged: Mapping[Bundle, jax.Array] = MappingProxyType({}),
    ) -> tuple[jax.Array, ...]:
        """Copies parts of host pages into the pools. Donates `pools`; returns the updated ones. Waits for nothing.

        Of several whole bundles one is written into the pool while the next is on the link.

        Args:
          pools: `kv_pages` of each layer group.
          parts: for each group, the parts to copy; the groups need not copy the same pages, nor as many. Parts that are
            neighbours in a bundle and here are copied in one piece; numpy arrays do as well.
          device_pages: int32 [N] for each group: where they go.
          staged: bundles of which a copy is on the device, or on its way there; whole bundles are taken from it.

        Raises `TransferError` before anything is donated when a part does not have the shape of a page.
        """
        plans = [self._plan(some, pool, g) for g, (pool, some) in enumerate(zip(pools, parts, strict=True))]
        out = []
        for pool, runs, pages in zip(pools, plans, device_pages, strict=True):
            out.append(self._load_runs(pool, runs, np.ascontiguousarray(pages, np.int32), staged))
        return tuple(out)

    def _plan(self, parts: Sequence[HostPart | np.ndarray], pool: jax.Array, group: int) -> list[Run]:
        """The pieces in which parts are copied into `pool`, all checked: of a piece, which is of one bundle, one part."""
        if set(map(type, parts)) != {HostPart}:  # asked at C speed: page by page it would hold up the first copy
            parts = [self._as_part(part, pool, group) for part in parts]
        runs = _runs(parts)  # type: ignore[arg-type]
        for run in runs:
            check_part(parts[run.first], pool, group)
        return runs

    def _as_part(self, part: Any, pool: jax.Array, group: int) -> HostPart:
        if isinstance(part, HostPart):
            return part
        check_part(part, pool, group)
        return self.bundles.alone(np.array(part))

    def _load_runs(
        self,
        pool: jax.Array,
        runs: Sequence[Run],
        ids: np.ndarray,
        staged: Mapping[Bundle, jax.Array] = MappingProxyType({}),
    ) -> jax.Array:
        early: dict[int, list[tuple[jax.Array, np.ndarray]]] = {}
        whole: dict[int, list[tuple[jax.Array, np.ndarray]]] = {}
        for run in runs:
            if run.is_whole:
                arrays = early if run.bundle in staged else whole
                array = staged.get(run.bundle, run.bundle.array)
                arrays.setdefault(run.end - run.first, []).append((array, ids[run.first : run.end]))
        pool = self._load_whole(pool, early)  # what is there, or comes next, is written first
        for run in runs:
            if not run.is_whole:
                first, start = run.first, run.start
                for size in split_powers_of_two(run.end - first):
                    pool = self._load_part(pool, ids[first : first + size], run.bundle.array, np.int32(start))
                    first, start = first + size, start + size
        return self._load_whole(pool, whole)

    def _load_whole(self, pool: jax.Array, whole: Mapping[int, list[tuple[jax.Array, np.ndarray]]]) -> jax.Array:
        """Arrays and their page ids, by pages in an array."""
        for size, some in whole.items():
            at = 0
            for count in _calls(size, len(some)):
                arrays, pages = zip(*some[at : at + count], strict=True)
                pool = self._load(pool, np.concatenate(pages), arrays)
                at += count
        return pool

    def adopt(self, payload: Sequence[np.ndarray | None]) -> Payload:
        """A page of numpy arrays (None = absent) as a host page. They may be aliased: nobody may write to them any more."""
        return tuple(None if part is None else self.bundles.alone(part) for part in payload)

    def tidy(self, most: int | None = 1) -> None:
        """Frees the memory of up to `most` bundles of which few pages are left (None = all); copies those pages."""
        self.bundles.dissolve(most)

    def warmups(
        self, pool: jax.Array, staging: Staging | None = None
    ) -> list[tuple[str, Callable[[jax.Array], jax.Array]]]:
        """What to run so that no later copy of a pool of this shape compiles, from `staging` included: (name, pool -> pool).

        Each donates the pool and copies page 0 out and in again, so that its bytes stay as they are.
        """
        sizes = bundle_sizes(_part_bytes(pool))
        singles = [1 << i for i in range(LARGEST_COPY.bit_length())]
        moves = [(f"copies of {n} in a bundle", partial(self._warmup_bundles, size=n, staging=staging)) for n in sizes]
        return moves + [(f"copies of {n}", partial(self._warmup_singles, count=n, staging=staging)) for n in singles]

    def _warmup_bundles(self, pool: jax.Array, size: int, staging: Staging | None) -> jax.Array:
        """Whole ones, and every power of two of a bundle's pages."""
        ids = np.zeros(size * WHOLE_BUNDLES, np.int32)
        self._gather_bundles(pool, ids[:size], size)
        parts = [p for array in self._gather_bundles(pool, ids, size) for p in self.bundles.of(array)]
        moves = [parts, parts[:size], *(parts[1 << i : 2 << i] for i in range((size // 2).bit_length()))]
        for some in moves:
            pool = self._load_runs(pool, _runs(some), ids[: len(some)])
        return self._warmup_staged(pool, moves[:2], ids, staging)

    def _warmup_singles(self, pool: jax.Array, count: int, staging: Staging | None) -> jax.Array:
        ids = np.zeros(count, np.int32)
        self._gather(pool, ids)  # one by one where no bundle is so small
        parts = [self.bundles.of(*self._gather(pool, ids[:1]))[0] for _ in range(count)]
        return self._warmup_staged(self._load_runs(pool, _runs(parts), ids), [parts], ids, staging)

    def _warmup_staged(
        self, pool: jax.Array, moves: Sequence[Sequence[HostPart]], ids: np.ndarray, staging: Staging | None
    ) -> jax.Array:
        """Whole bundles once more, from staging. More than it may hold never come from there together."""
        if staging is None:
            return pool
        for parts in moves:
            bundles = whole_bundles(parts)
            if sum(bundle.array.nbytes for bundle in bundles) <= staging.max_bytes:
                staging.start(bundles)
                pool = self._load_runs(pool, _runs(parts), ids[: len(parts)], staging.arrays)
                staging.clear()
        return pool


def whole_bundles(parts: Sequence[HostPart]) -> list[Bundle]:
    """The bundles of which `parts` has all parts, side by side in order."""
    return [run.bundle for run in _runs(parts) if run.is_whole]


def check_part(part: Any, pool: jax.Array, group: int) -> None:
    """Raises `TransferError` unless `part` is the part of a host page that belongs into `pool`, in its dtype."""
    if part is None:
        raise TransferError(f"the host page has no bytes of layer group {group}, which are needed")
    expected = (pool.shape[0], *pool.shape[2:])
    if getattr(part, "shape", None) != expected or part.dtype != pool.dtype:
        got = f"{part.dtype}{list(part.shape)}" if hasattr(part, "dtype") else type(part).__name__
        raise TransferError(f"host page of group {group} is {got}, the pool needs {pool.dtype}{list(expected)}")


def _part_bytes(pool: jax.Array) -> int:
    return pool.nbytes // pool.shape[1]


class Run(NamedTuple):
    """Parts first..end-1 of a list that are neighbours in `bundle`, from its part `start` on."""

    bundle: Bundle
    start: int
    first: int
    end: int

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its bundle."""
        return self.end - self.first == self.bundle.size


def _runs(parts: Sequence[HostPart]) -> list[Run]:
    """The longest runs of `parts`. One plain pass: the first copy waits for it."""
    runs: list[Run] = []
    bundle, first, start, following = None, 0, 0, 0
    for i, part in enumerate(parts):
        if part.bundle is not bundle or part.index != following:
            if bundle is not None:
                runs.append(Run(bundle, start, first, i))
            bundle, first, start = part.bundle, i, part.index
            following = start
        following += 1
    if bundle is not None:
        runs.append(Run(bundle, start, first, len(parts)))
    return runs


def _calls(size: int, count: int) -> list[int]:
    """How many of `count` whole arrays of `size` pages each jitted call takes."""
    if size == 1:
        return split_powers_of_two(count)
    return [WHOLE_BUNDLES] * (count // WHOLE_BUNDLES) + [1] * (count % WHOLE_BUNDLES)


def _gather_bundles(pool: jax.Array, ids: jax.Array, size: int) -> list[jax.Array]:
    """Arrays `[size, L, *page_shape]`."""
    return [gather_pages(pool, ids[i : i + size]) for i in range(0, ids.shape[0], size)]


def _gather_singles(pool: jax.Array, ids: jax.Array, size: int) -> list[jax.Array]:
    """`size` arrays `[1, L, *page_shape]`."""
    return [jax.lax.dynamic_index_in_dim(pool, ids[i], axis=1, keepdims=False)[None] for i in range(size)]


def _load(pool: jax.Array, ids: jax.Array, arrays: tuple[jax.Array, ...]) -> jax.Array:
    """Donates `pool`. Array by array, so that one is written into the pool while the next is on the link."""
    each = arrays[0].shape[0]
    for i, array in enumerate(arrays):
        pool = _write(pool, ids[i * each : (i + 1) * each], array)
    return pool


def _load_part(pool: jax.Array, ids: jax.Array, array: jax.Array, start: jax.Array) -> jax.Array:
    """Donates `pool`. As many pages of a bundle as there are `ids`, from `start` on."""
    return _write(pool, ids, jax.lax.dynamic_slice_in_dim(array, start, ids.shape[0], axis=0))


def _write(pool: jax.Array, ids: jax.Array, pages: jax.Array) -> jax.Array:
    here = jax.device_put(pages, jax.memory.Space.Device)
    if ids.shape[0] == 1:
        return jax.lax.dynamic_update_index_in_dim(pool, here[0], ids[0], axis=1)
    return scatter_pages(pool, ids, here)
