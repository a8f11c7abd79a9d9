"""Page movement between the device pool and pinned host memory.

A host page is one `HostPart` per layer group: written once, freed when the last holder lets go, never rewritten in place. So a
copy in flight can not see later changes, and a loaded page can not be changed under the device (JAX may alias host buffers).

Pages that leave the device together travel and live in bundles (`prefix_reuse.host_part`): on an H200 single pages of 1.6 MB
reached 78% of the link, bundles of 32 of them 95%. A part of a bundle is read by a `dynamic_slice` in host memory, which
copies those bytes only. A bundle has the same number of pages in every layer group, so that one jitted call takes the pages
of all groups, and of all rows whose pages became full in one turn.

What overlaps with what: within one call a bundle is on the link while the one before it is written into the pool. A call as a
whole takes its turn among the steps, since it donates the pool, so a prefill waits for the loads before it; only copies that
were started earlier, into memory of their own (`prefix_reuse.staging`), run beside other steps. The host waits for none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
"""Whole bundles of one call at most: one is gathered, or written into the pool, while another is on the link."""


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

    def part(self, first: int, end: int) -> PendingCopy:
        """The copy of the pages first..end-1 of these alone: it waits for, and fails with, what holds their bytes."""
        payloads = self.payloads[first:end]
        arrays = {id(p.bundle): p.bundle.array for page in payloads for p in page if p is not None}
        return replace(self, host_pages=self.host_pages[first:end], payloads=payloads, arrays=tuple(arrays.values()))


def split_powers_of_two(n: int) -> list[int]:
    """n as a sum of powers of two up to `LARGEST_COPY`: 11 -> [8, 2, 1]."""
    sizes = [LARGEST_COPY] * (n // LARGEST_COPY)
    rest = n % LARGEST_COPY
    sizes += [1 << bit for bit in range(rest.bit_length() - 1, -1, -1) if rest >> bit & 1]
    return sizes


def bundle_sizes(part_bytes: int) -> list[int]:
    """Pages of the bundles that parts of at most so many bytes are kept in, larger ones first; single pages not counted."""
    largest = min(LARGEST_COPY, 1 << max(0, (BUNDLE_BYTES // part_bytes).bit_length() - 1))
    return [size for size in dict.fromkeys((largest, min(SMALL_BUNDLE, largest))) if size > 1]


class PageTransfer:
    """Jitted copies of whole pages, all layers at once, for one engine. Replaceable, to inject delays and faults in tests."""

    def __init__(self, device: Any, counter: CompilationCounter):
        host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
        # Lets a bundle be gathered while the one before it is on the link.
        overlap = {"xla_gpu_enable_latency_hiding_scheduler": True}
        self._gather_bundles = jax.jit(
            counter.traced("offload_pages", _gather_bundles),
            out_shardings=host,
            static_argnums=2,
            compiler_options=overlap,
        )
        self._gather_singles = jax.jit(counter.traced("offload_pages", _gather_singles), out_shardings=host)
        self._load = jax.jit(counter.traced("load_pages", _load), donate_argnums=0)
        self._load_part = jax.jit(counter.traced("load_pages", _load_part), donate_argnums=0)
        self.pins_memory = device.platform == "gpu"
        """Whether host memory has to be pinned, which takes time: see `reserve`."""
        self._device = jax.sharding.SingleDeviceSharding(device)
        self.bundles = Bundles(host)

    def offload(
        self,
        pools: Sequence[jax.Array],
        device_pages: Sequence[np.ndarray],
        host_pages: np.ndarray,
        lengths: Sequence[int] | None = None,
    ) -> PendingCopy:
        """Starts copying pages to the host.

        The gathers are dispatched before the caller's next donated step, so they read the pools as they are now.

        Args:
          pools: `kv_pages` of each layer group.
          device_pages: int32 [N] for each group: the pages to copy; -1 where the group's page was given back: absent on the
            host too.
          host_pages: [N]: where they belong in the host store.
          lengths: pages of each row, where they are of several: bundles that a row fills are its own, the rest is shared.
        """
        ids = np.array(device_pages, np.int32)
        if (ids >= 0).all():
            arrays, order = self._gather(pools, ids, np.array([ids.shape[1]] if lengths is None else lengths))
            orders: list[np.ndarray] = [order] * len(pools)
        else:
            arrays, orders = self._gather_present(pools, ids)
        # Everything is on its way before parts are made of it.
        columns = [self._column(some, order, ids.shape[1]) for some, order in zip(arrays, orders, strict=True)]
        flat = tuple(array for some in arrays for array in some)
        return PendingCopy(np.array(host_pages), tuple(zip(*columns, strict=True)), flat)

    def _column(self, arrays: Sequence[jax.Array], order: np.ndarray, length: int) -> list[HostPart | None]:
        """The parts of `arrays`, each at the place in the column that `order` names."""
        column: list[HostPart | None] = [None] * length
        parts = (part for array in arrays for part in self.bundles.of(array))
        for place, part in zip(order.tolist(), parts, strict=True):
            column[place] = part
        return column

    def _gather(
        self, pools: Sequence[jax.Array], ids: np.ndarray, lengths: np.ndarray
    ) -> tuple[list[list[jax.Array]], np.ndarray]:
        """Host arrays `[N, L, *page_shape]` of the pages `ids` [G, N], for each group; and the order of the pages in them."""
        sizes = _sizes(pools)
        order, num_large = _bundle_order(lengths, sizes)
        calls = [(sizes[0], count, True) for count in (_calls(sizes[0], num_large // sizes[0]) if num_large else ())]
        calls += [(size, count, False) for size, count in _small_calls(len(order) - num_large, sizes)]
        out: list[list[jax.Array]] = [[] for _ in pools]
        ids, done = ids[:, order], 0
        for size, count, by_group in calls:
            here = ids[:, done : done + size * count]
            done += size * count
            for arrays, more in zip(out, self._gather_size(pools, here, size, by_group=by_group), strict=True):
                arrays += more
        return out, order

    def _gather_size(
        self, pools: Sequence[jax.Array], ids: np.ndarray, size: int, *, by_group: bool
    ) -> Sequence[Sequence[jax.Array]]:
        """Bundles of `size` of the pages `ids` [G, N]. `by_group`: large ones together would take much memory on their way."""
        if by_group:
            return [self._gather_bundles((pool,), ids[g : g + 1], size)[0] for g, pool in enumerate(pools)]
        return self._gather_bundles(tuple(pools), ids, size) if size > 1 else self._gather_singles(tuple(pools), ids)

    def _gather_present(
        self, pools: Sequence[jax.Array], ids: np.ndarray
    ) -> tuple[list[list[jax.Array]], list[np.ndarray]]:
        """As `_gather`, where some pages are absent: rare, so the programs that take as many pages of every group will do."""
        arrays, orders = [], []
        for g in range(len(pools)):
            present = np.flatnonzero(ids[g] >= 0)
            padded = np.zeros((len(pools), len(present)), np.int32)
            padded[g] = ids[g, present]
            some, order = self._gather(pools, padded, np.array([len(present)]))
            arrays.append(some[g])
            orders.append(present[order])
        return arrays, orders

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

    def reserve(self, num_bytes: int) -> None:
        """Has the allocator of pinned memory take so many bytes from the system, all of them free afterwards.

        It grows by doubling, and pinning takes half a second a gigabyte: on an H200 copies that came to the end of what there
        was waited for 0.2, 0.5, 0.9 and 2.0 s. The last doubling may take more than was asked for.

        Raises `TransferError` where there is not so much memory; what was taken stays with the allocator.
        """
        held = []
        try:
            piece = jax.device_put(np.zeros(min(BUNDLE_BYTES, num_bytes), np.uint8), self._device)
            for _ in range(-(-num_bytes // BUNDLE_BYTES)):
                held.append(jax.device_put(piece, self.bundles.host))
                jax.block_until_ready(held[-1])
        except Exception as error:
            raise TransferError(
                f"no pinned memory for {num_bytes / 1e9:.1f} GB of host pages: {error}; "
                "lower num_host_pages, or warm up with pin_host_pages=False"
            ) from error
        finally:
            held.clear()  # an error's traceback would keep it taken for as long as somebody has the error

    @property
    def sparse_bundles(self) -> int:
        """Bundles that `tidy` would look at."""
        return len(self.bundles.sparse)

    def tidy(self, most: int | None = 1) -> None:
        """Frees the memory of up to `most` bundles of which few pages are left (None = all); copies those pages.

        Raises `TransferError` where that is not possible now; nothing is lost, and the next call tries it again.
        """
        self.bundles.dissolve(most)

    def warmups(
        self, pools: Sequence[jax.Array], staging: Staging | None = None
    ) -> list[tuple[str, Callable[[Sequence[jax.Array]], tuple[jax.Array, ...]]]]:
        """What to run so that no later copy of pools of these shapes compiles, from `staging` included: (name, pools -> pools).

        Each donates the pools and copies page 0 out and in again, so that their bytes stay as they are.
        """
        sizes = _sizes(pools)
        singles = {1 << i for i in range(LARGEST_COPY.bit_length())} | set(range(1, sizes[-1] if sizes else 1))
        moves = [(f"copies of {n} in a bundle", partial(self._warmup_bundles, size=n, staging=staging)) for n in sizes]
        return moves + [
            (f"copies of {n}", partial(self._warmup_singles, count=n, staging=staging)) for n in sorted(singles)
        ]

    def _warmup_bundles(self, pools: Sequence[jax.Array], size: int, staging: Staging | None) -> tuple[jax.Array, ...]:
        """Whole ones, and every power of two of a bundle's pages."""
        ids = np.zeros((len(pools), size * WHOLE_BUNDLES), np.int32)
        large = size != _sizes(pools)[-1]
        for count in (1,) if large else range(1, WHOLE_BUNDLES):
            self._gather_size(pools, ids[:, : size * count], size, by_group=large)
        out = []
        for pool, arrays in zip(pools, self._gather_size(pools, ids, size, by_group=large), strict=True):
            parts = [part for array in arrays for part in self.bundles.of(array)]
            moves = [parts, parts[:size], *(parts[1 << i : 2 << i] for i in range((size // 2).bit_length()))]
            for some in moves:
                pool = self._load_runs(pool, _runs(some), ids[0, : len(some)])
            out.append(self._warmup_staged(pool, moves[:2], ids[0], staging))
        return tuple(out)

    def _warmup_singles(self, pools: Sequence[jax.Array], count: int, staging: Staging | None) -> tuple[jax.Array, ...]:
        ids = np.zeros((len(pools), count), np.int32)
        sizes = _sizes(pools)
        if not sizes or count < sizes[-1]:
            self._gather_singles(tuple(pools), ids)
        if count & (count - 1):
            return tuple(pools)  # loaded in powers of two
        some = [self._gather_singles(tuple(pools), ids[:, :1]) for _ in range(count)]
        out = []
        for g, pool in enumerate(pools):
            parts = [self.bundles.of(arrays[g][0])[0] for arrays in some]
            pool = self._load_runs(pool, _runs(parts), ids[g])
            out.append(self._warmup_staged(pool, [parts], ids[g], staging))
        return tuple(out)

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


def _sizes(pools: Sequence[jax.Array]) -> list[int]:
    """Sizes of bundles: the same for all groups, by the one whose pages are largest."""
    return bundle_sizes(max(pool.nbytes // pool.shape[1] for pool in pools))


def _bundle_order(lengths: np.ndarray, sizes: Sequence[int]) -> tuple[np.ndarray, int]:
    """The order in which pages are bundled, and how many of them go into large bundles, of two sizes.

    A row's whole bundles come first, so that they hold nothing else: only whole bundles are loaded in one piece, or staged.
    What is left of the rows follows side by side.
    """
    if len(lengths) == 1 or not sizes:
        total = int(lengths.sum())
        return np.arange(total), total - total % sizes[0] if len(sizes) > 1 else 0
    in_row = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    large, small = (np.repeat(lengths - lengths % size, lengths) for size in (sizes[0], sizes[-1]))
    order = np.argsort(np.where(in_row < large, 0, np.where(in_row < small, 1, 2)), kind="stable")
    return order, int(np.count_nonzero(in_row < large)) if len(sizes) > 1 else 0


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


def _small_calls(num_pages: int, sizes: Sequence[int]) -> list[tuple[int, int]]:
    """(size, arrays) of the jitted calls that copy pages in bundles of the smallest size, and singly what remains."""
    if not sizes:
        return [(1, count) for count in split_powers_of_two(num_pages)]
    whole, singles = divmod(num_pages, sizes[-1])
    counts = [WHOLE_BUNDLES] * (whole // WHOLE_BUNDLES) + [whole % WHOLE_BUNDLES]
    return [call for call in (*((sizes[-1], count) for count in counts), (1, singles)) if call[1]]


def _gather_bundles(pools: tuple[jax.Array, ...], ids: jax.Array, size: int) -> list[list[jax.Array]]:
    """For each pool arrays `[size, L, *page_shape]` of its pages `ids` [G, N]."""
    starts = range(0, ids.shape[1], size)
    return [[gather_pages(pool, ids[g, i : i + size]) for i in starts] for g, pool in enumerate(pools)]


def _gather_singles(pools: tuple[jax.Array, ...], ids: jax.Array) -> list[list[jax.Array]]:
    """For each pool arrays `[1, L, *page_shape]` of its pages `ids` [G, N]."""

    def one(pool: jax.Array, page: jax.Array) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(pool, page, axis=1, keepdims=False)[None]

    return [[one(pool, ids[g, i]) for i in range(ids.shape[1])] for g, pool in enumerate(pools)]


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
