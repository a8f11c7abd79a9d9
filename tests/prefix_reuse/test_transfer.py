"""Page copies: bundles, parts of bundles, single pages, numpy arrays; and the memory that bundles hold."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prefix_reuse import transfer as module
from prefix_reuse.errors import TransferError
from prefix_reuse.host_part import HostPart
from prefix_reuse.staging import Staging
from prefix_reuse.steps import CompilationCounter
from prefix_reuse.transfer import PageTransfer, bundle_sizes, split_powers_of_two, whole_bundles

PAGES, SHAPE = 96, (2, 2, 4, 8)  # pages in the pool; KV heads, K and V, slots, head_dim


def pool(layers: int = 3) -> jax.Array:
    """[L, P, ...] random numbers."""
    pages = jax.random.normal(jax.random.key(layers), (layers, PAGES, *SHAPE), jnp.float32)
    return jax.device_put(pages, jax.devices()[0])


@pytest.fixture(autouse=True)
def small_bundles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bundles of 8 and 4, so that less is compiled."""
    monkeypatch.setattr(module, "LARGEST_COPY", 8)
    monkeypatch.setattr(module, "SMALL_BUNDLE", 4)


def transfer() -> PageTransfer:
    return PageTransfer(jax.devices()[0], CompilationCounter())


def offload(t: PageTransfer, source: jax.Array, ids: Any) -> list[HostPart]:
    pending = t.offload([source], [np.asarray(ids, np.int32)], np.arange(len(ids)))
    pending.wait()
    assert pending.ready
    parts = [page[0] for page in pending.payloads]
    assert all(part is not None for part in parts)
    return parts  # type: ignore[return-value]


def test_sizes_of_bundles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert bundle_sizes(1_572_864) == [32, 8]  # gpt-oss-20b, one group, 64 tokens
    assert bundle_sizes(9_437_184) == [4]  # Qwen3-8B
    assert bundle_sizes(100 << 20) == []
    assert sum(split_powers_of_two(11)) == 11


@pytest.mark.parametrize("count", [1, 3, 4, 9, 45])
def test_pages_come_back_as_they_were(count: int) -> None:
    t, source = transfer(), pool()
    ids = np.random.default_rng(count).permutation(PAGES)[:count]
    parts = offload(t, source, ids)
    for part, page in zip(parts, ids, strict=True):
        assert np.array_equal(np.asarray(part), source[:, page])
        assert part.shape == source[:, page].shape
        assert part.nbytes == source[:, page].nbytes
    targets = np.random.default_rng(count + 1).permutation(PAGES)[:count]
    want = np.full(source.shape, np.nan, np.float32)
    want[:, targets] = np.asarray(source)[:, ids]
    (loaded,) = t.load([jnp.full(source.shape, jnp.nan)], [parts], [targets])
    assert np.array_equal(np.asarray(loaded), want, equal_nan=True)


@pytest.mark.parametrize("some", [slice(None), slice(0, None, 2), slice(0, 3)])
def test_whole_bundles_that_are_staged_are_taken_from_there(some: slice) -> None:
    """Staged ones come from their copy, here with other numbers so that it shows; all the rest from the host."""
    t, source, staging = transfer(), pool(), Staging(jax.devices()[0], 1 << 30)
    parts = offload(t, source, np.arange(45))
    del parts[2]  # this bundle is not whole here
    bundles = whole_bundles(parts)
    assert [bundle.array.shape[0] for bundle in bundles] == [8] * 4 + [4, 1]
    size = sum(bundle.array.nbytes for bundle in bundles[some])
    assert staging.start(bundles[some]) == staging.num_bytes == size
    assert staging.start(bundles[some]) == 0
    staging.arrays.update({bundle: array + 1 for bundle, array in staging.arrays.items()})
    pages = np.delete(np.arange(45), 2)
    (loaded,) = t.load([jnp.full(source.shape, jnp.nan)], [parts], [pages], staging.arrays)
    early = [part.bundle in staging.arrays for part in parts]
    want = np.full(source.shape, np.nan, np.float32)
    want[:, pages] = np.asarray(source)[:, pages] + np.array(early, np.float32)[None, :, None, None, None, None]
    assert np.array_equal(np.asarray(loaded), want, equal_nan=True)


@pytest.mark.parametrize("seed", range(4))
def test_any_choice_of_pages_in_any_order_is_loaded(seed: int) -> None:
    t, source, rng = transfer(), pool(), np.random.default_rng(seed)
    ids = rng.permutation(PAGES)[:60]
    parts = offload(t, source, ids)
    chosen = np.sort(rng.permutation(60)[:37]) if seed % 2 else rng.permutation(60)[:37]
    mixed: list[Any] = [parts[i] for i in chosen]
    mixed[5] = np.asarray(mixed[5])  # restored and imported pages are numpy arrays
    targets = rng.permutation(PAGES)[:37]
    (loaded,) = t.load([jnp.zeros_like(source)], [mixed], [targets])
    want = np.zeros(source.shape, np.float32)
    want[:, targets] = np.asarray(source)[:, ids[chosen]]
    assert np.array_equal(np.asarray(loaded), want)


def test_a_group_without_a_page_has_no_part_and_takes_no_room() -> None:
    t, pools = transfer(), [pool(3), pool(2)]
    ids = [np.arange(10, dtype=np.int32), np.where(np.arange(10) % 3, np.arange(10), -1).astype(np.int32)]
    pending = t.offload(pools, ids, np.arange(10))
    pending.wait()
    assert [page[1] is None for page in pending.payloads] == (ids[1] < 0).tolist()
    for page, (full, sliding) in enumerate(pending.payloads):
        assert full is not None
        assert np.array_equal(np.asarray(full), pools[0][:, page])
        if sliding is not None:
            assert np.array_equal(np.asarray(sliding), pools[1][:, page])
    assert sum(a.shape[0] for a in pending.arrays) == 10 + 6


def calls_of(t: PageTransfer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the gathers that `t` dispatches from now on."""
    calls: list[str] = []

    def count(name: str, real: Any) -> Any:
        return lambda *args: calls.append(name) or real(*args)

    for name in ("_gather_bundles", "_gather_singles"):
        monkeypatch.setattr(t, name, count(name, getattr(t, name)))
    return calls


def test_pages_of_several_rows_and_groups_leave_in_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small rows share bundles, and calls; a row's own whole bundles hold nothing else, so that they can be staged."""
    t, pools, lengths = transfer(), [pool(3), pool(2)], [1, 2, 20, 3, 6, 3]
    rng = np.random.default_rng(0)
    ids = [rng.permutation(PAGES)[: sum(lengths)] for _ in pools]
    calls = calls_of(t, monkeypatch)
    pending = t.offload(pools, ids, np.arange(sum(lengths)), lengths)
    # By group a call for each of two bundles of 8; for both groups one for four bundles of 4 and one for three pages.
    assert calls == ["_gather_bundles"] * 5 + ["_gather_singles"]
    pending.wait()
    ends = np.cumsum(lengths).tolist()
    for g, source in enumerate(pools):
        column = [page[g] for page in pending.payloads]
        for part, page in zip(column, ids[g], strict=True):
            assert np.array_equal(np.asarray(part), source[:, page])
        rows = [column[end - n : end] for end, n in zip(ends, lengths, strict=True)]
        whole = [[bundle.size for bundle in whole_bundles(row) if bundle.size > 1] for row in rows]  # type: ignore[arg-type]
        assert whole == [[], [], [8, 8, 4], [], [4], []]
        (loaded,) = t.load([jnp.zeros_like(source)], [column], [ids[g]])  # type: ignore[list-item]
        assert np.array_equal(loaded[:, ids[g]], source[:, ids[g]])
    assert [len(pending.part(end - n, end).payloads) for end, n in zip(ends, lengths, strict=True)] == lengths


def test_a_part_of_a_copy_fails_with_its_own_arrays_alone() -> None:
    t, pools, lengths = transfer(), [pool(3), pool(2)], [3, 5, 1]
    pending = t.offload(pools, [np.arange(9)] * 2, np.arange(9), lengths)
    parts = [pending.part(0, 3), pending.part(3, 8), pending.part(8, 9)]
    lost = pending.payloads[2][1]
    assert lost is not None
    lost.bundle.array.delete()
    shared = {i for i in range(9) if pending.payloads[i][1].bundle is lost.bundle}  # type: ignore[union-attr]
    assert 1 < len(shared) < 9
    for part in parts:
        if shared & set(part.host_pages.tolist()):
            with pytest.raises(TransferError, match="failed"):
                part.wait()
        else:
            part.wait()


def test_reserved_memory_is_asked_for_at_once_and_is_free_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUNDLE_BYTES", 1000)
    t, put = transfer(), jax.device_put
    alive: list[weakref.ref[Any]] = []
    most = 0

    def watched(array: Any, place: Any) -> Any:
        nonlocal most
        out = put(array, place)
        if place is t.bundles.host:
            alive.append(weakref.ref(out))
            most = max(most, sum(ref() is not None for ref in alive) * out.nbytes)
        return out

    monkeypatch.setattr(module.jax, "device_put", watched)
    t.reserve(4_500)
    assert most == 5000
    gc.collect()
    assert len(alive) == 5
    assert not any(ref() is not None for ref in alive)


@pytest.mark.parametrize("found", ["asking", "waiting"])
def test_memory_that_is_not_there_is_an_error_at_once(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUNDLE_BYTES", 1000)
    t, put, asked = transfer(), jax.device_put, 0

    def fail(*_: Any) -> Any:
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    def counted(array: Any, place: Any) -> Any:
        nonlocal asked
        if place is t.bundles.host:
            asked += 1
            if found == "asking":
                fail()
        return put(array, place)

    monkeypatch.setattr(module.jax, "device_put", counted)
    if found == "waiting":
        monkeypatch.setattr(module.jax, "block_until_ready", fail)
    with pytest.raises(TransferError, match=r"no pinned memory for 2\.0 GB of host pages: RESOURCE_EXHAUSTED"):
        t.reserve(2_000_000_000)
    assert asked == 1


@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_what_was_reserved_is_free_while_somebody_has_the_error(
    error: type[BaseException], at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who catches it and goes on without, or interrupts it, needs the memory for pages."""
    monkeypatch.setattr(module, "BUNDLE_BYTES", 1000)
    t, put = transfer(), jax.device_put
    alive: list[weakref.ref[Any]] = []

    def full(array: Any, place: Any) -> Any:
        if len(alive) == at:
            raise error("RESOURCE_EXHAUSTED")
        out = put(array, place)
        if place is t.bundles.host:
            alive.append(weakref.ref(out))
        return out

    monkeypatch.setattr(module.jax, "device_put", full)
    with pytest.raises(TransferError if error is RuntimeError else error, match="RESOURCE_EXHAUSTED") as raised:
        t.reserve(9_000)
    gc.collect()
    assert raised.value.__traceback__ is not None
    assert len(alive) == at
    assert not any(ref() is not None for ref in alive)


@pytest.mark.parametrize(
    "bundle_bytes", [module.BUNDLE_BYTES, 12_000, 1]
)  # bundles of 8 and 4; of 4; pages too large for any
@pytest.mark.parametrize("layers", [(3,), (3, 2)])
def test_warmup_leaves_nothing_to_compile_and_the_pools_as_they_were(
    layers: tuple[int, ...], bundle_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BUNDLE_BYTES", bundle_bytes)
    t, pools = transfer(), [pool(n) for n in layers]
    warm: Any = [pool(n) for n in layers]
    staging = Staging(jax.devices()[0], 1 << 30)
    for _, move in t.warmups(warm, staging):
        warm = move(warm)

    def unchanged() -> bool:
        return all(np.array_equal(a, b) for a, b in zip(warm, pools, strict=True))

    assert unchanged()
    programs: tuple[Any, ...] = t._gather_bundles, t._gather_singles, t._load, t._load_part
    before = [p._cache_size() for p in programs]
    for count in (1, 2, 3, 4, 5, 6, 7, 8, 13, 14, 21, 45, 90):
        rng = np.random.default_rng(count)
        ids = [rng.permutation(PAGES)[:count] for _ in pools]
        holes = [some.copy() for some in ids]
        holes[-1][::3] = -1
        for pages, lengths in ((ids, None), (ids, np.bincount(np.arange(count) * 3 // 7)), (holes, None)):
            payloads = t.offload(pools, pages, np.arange(count), lengths).payloads  # type: ignore[arg-type]
            for first in (0, 1, count // 3):
                kept = [[i for i in range(first, count) if some[i] >= 0] for some in pages]
                parts = [[payloads[i][g] for i in some] for g, some in enumerate(kept)]
                targets = [some[which] for some, which in zip(pages, kept, strict=True)]
                warm = t.load(warm, parts, targets)  # type: ignore[arg-type]
                bundles = [b for some in parts for b in whole_bundles(some)]  # type: ignore[arg-type]
                staging.start(bundles[::2] if count % 2 else bundles)
                warm = t.load(warm, parts, targets, staging.arrays)  # type: ignore[arg-type]
                staging.clear()
    singles = [t.offload(pools, [np.array([page])] * len(pools), np.arange(1)).payloads[0] for page in range(45)]
    warm = t.load(warm, list(zip(*singles, strict=True)), [np.arange(45)] * len(pools))  # type: ignore[arg-type]
    assert [p._cache_size() for p in programs] == before
    assert unchanged()


def test_a_misshapen_part_is_refused_before_anything_is_donated() -> None:
    t, source = transfer(), pool()
    parts: list[Any] = [*offload(t, source, range(3)), np.zeros((1, *SHAPE), np.float32)]
    with pytest.raises(TransferError, match="the pool needs"):
        t.load([source], [parts], [np.arange(4)])
    assert not source.is_deleted()


@pytest.mark.parametrize("at", [0, 5, 9])
@pytest.mark.parametrize("bad", ["a part of another pool", "absent"])
def test_every_part_of_every_group_is_checked_before_the_first_pool_is_donated(at: int, bad: str) -> None:
    t, pools = transfer(), [pool(3), pool(2)]
    full, sliding = (list(offload(t, source, range(10))) for source in pools)
    sliding[at] = full[at] if bad == "a part of another pool" else None  # type: ignore[call-overload]
    with pytest.raises(TransferError, match="group 1"):
        t.load(pools, [full, sliding], [np.arange(10)] * 2)
    assert not any(source.is_deleted() for source in pools)


def test_a_copy_waits_for_all_arrays_of_its_pages() -> None:
    t, pools = transfer(), [pool(3), pool(2)]
    pending = t.offload(pools, [np.arange(13), np.arange(13)], np.arange(13))
    bundles = {id(part.bundle.array) for page in pending.payloads for part in page if part is not None}
    assert {id(array) for array in pending.arrays} == bundles
    assert len(pending.arrays) == len(bundles)
    pending.arrays[-1].delete()
    with pytest.raises(TransferError, match="failed"):
        pending.wait()


def test_a_bundle_with_few_pages_left_is_dissolved() -> None:
    """Memory: at most twice the bytes of the pages that are alive, once `tidy` has had its turns."""
    t, source = transfer(), pool()
    parts = offload(t, source, range(8))
    bundle = parts[0].bundle
    want = [np.array(part) for part in parts]
    del parts[5:]
    t.tidy()
    assert parts[1].bundle is bundle  # more than half are alive
    kept = parts[1], parts[4]
    del parts
    gc.collect()
    assert bundle.live == 2
    t.tidy()
    assert bundle.live == 0
    for part, index in zip(kept, (1, 4), strict=True):
        assert part.bundle.array.shape[0] == 1
        assert np.array_equal(np.asarray(part), want[index])
    assert kept[0].bundle is not kept[1].bundle
    (loaded,) = t.load([jnp.zeros_like(source)], [kept], [np.array([1, 2])])
    assert np.array_equal(loaded[:, 1:3], source[:, [1, 4]])
    assert t.bundles.dissolve() == 0


def test_a_bundle_that_cannot_be_dissolved_now_is_dissolved_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory for the copies costs nobody's turn: bytes stay as they are, what has been moved has been moved."""
    t, source = transfer(), pool()
    parts = offload(t, source, range(8))
    bundle, want = parts[0].bundle, [np.array(part) for part in parts[:3]]
    del parts[3:]
    gc.collect()
    alone, left = t.bundles.alone, [1]

    def scarce(array: np.ndarray) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("RESOURCE_EXHAUSTED")
        return alone(array)

    with monkeypatch.context() as patch:
        patch.setattr(t.bundles, "alone", scarce)
        with pytest.raises(TransferError, match="2 of 8 pages left stays as it is: RESOURCE_EXHAUSTED"):
            t.tidy()
        assert bundle.live == 2
        with pytest.raises(TransferError):
            t.tidy(None)
    for part, expected in zip(parts, want, strict=True):
        assert np.array_equal(np.asarray(part), expected)
    assert t.bundles.dissolve() == 2
    assert bundle.live == 0
    assert [part.bundle.live for part in parts] == [1, 1, 1]
    for part, expected in zip(parts, want, strict=True):
        assert np.array_equal(np.asarray(part), expected)


def test_a_bundle_without_parts_is_freed_at_once() -> None:
    t, source = transfer(), pool()
    parts = offload(t, source, range(8))
    gone = weakref.ref(parts[0].bundle)
    del parts[4:]
    assert len(t.bundles.sparse) == 1
    del parts
    gc.collect()
    assert gone() is None
    assert t.bundles.dissolve() == 0


def test_a_copy_of_a_part_is_its_own_memory() -> None:
    t, source = transfer(), pool()
    parts = offload(t, source, range(8))
    (twin,) = copy.deepcopy((parts[4],))
    assert twin.bundle is not parts[4].bundle
    assert twin.bundle.array.shape[0] == 1
    assert np.array_equal(np.asarray(twin), np.asarray(parts[4]))
    assert np.array_equal(twin[1], np.asarray(parts[4])[1])
    assert not np.shares_memory(np.asarray(twin), np.asarray(parts[4]))


def test_parts_that_outlive_the_modules_end_in_silence() -> None:
    """What an engine in a script does: its pages die when the interpreter ends, after the modules that they might use."""
    code = (
        "import jax, jax.numpy as jnp\n"
        "from prefix_reuse.host_part import Bundles\n"
        "bundles = Bundles(jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind='pinned_host'))\n"
        "parts = bundles.of(jnp.zeros((8, 2)))\n"
        "keep = lambda: parts\n"
        "bundles.keep = keep\n"  # a cycle, as an engine has them: found by the last collection only
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
