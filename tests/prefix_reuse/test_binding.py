"""A store and an engine agree on their pages before anything is allocated, or the engine runs cold and says why (B10, B16)."""

from __future__ import annotations

import gc
from typing import Any

import jax
import numpy as np
import pytest
from engine_helpers import GREEDY, check, drained, engine, model, programs, prompt
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from store_helpers import GROUPS, PAGE, geometry, make_store

from models.testing import tiny_llama
from pallas_kernels.layout import LayerGroup
from prefix_reuse import Engine, EngineConfig, engine_state
from prefix_reuse.errors import ConfigError, GeometryError
from prefix_reuse.geometry import StoreGeometry, canonical_device
from prefix_reuse.host_store import HostPageStore
from prefix_reuse.index import PrefixIndex
from prefix_reuse.memory import plan_memory

DEVICE = jax.devices()[0]
SIZES = EngineConfig(
    page_size=4, num_device_pages=48, num_host_pages=64, max_rows=4, max_context=128, max_prefill_tokens=32,
    decode_steps=4, poison=True, compilation_cache=False, enable_prefix_reuse=True,
)  # fmt: skip


def store(num_pages: int = 64, page_size: int = 4, **options: Any) -> HostPageStore:
    return HostPageStore(num_pages, page_size, index=PrefixIndex(page_size), **options)


def spellings() -> list[Any]:
    """The same device, as people write it."""
    mesh = Mesh(np.array([DEVICE]), ("x",))
    return [
        None,
        DEVICE,
        jax.local_devices()[0],
        DEVICE.platform,
        f"{DEVICE.platform}:0",
        SingleDeviceSharding(DEVICE),
        SingleDeviceSharding(DEVICE, memory_kind="pinned_host"),
        mesh,
        NamedSharding(mesh, PartitionSpec()),
        NamedSharding(mesh, PartitionSpec("x")),
    ]


@pytest.mark.parametrize("i", range(len(spellings())))
def test_an_equal_device_under_another_spelling_binds_and_reuse_is_active(i: int):
    """B16: the store is bound under the plain device first; every other spelling of it is the same pair."""
    shared = store()
    shared.bind(StoreGeometry.of(model().kv_groups, 4, DEVICE))
    e = Engine(model(), SIZES, device=spellings()[i], store=shared, programs=programs("llama", 4))
    assert (e.active, e.stats().active, e.disabled_reason) == (True, True, "")
    assert e.get_prefix_reuse_capability().supported
    assert e.store is shared
    assert e.get_prefix_reuse_capability().store_identity == shared.identity
    if i in (3, 8):
        tokens = prompt(9, seed=i)
        assert e.generate(tokens, GREEDY)[0].cached_tokens == 0
        assert e.generate(tokens, GREEDY)[0].cached_tokens == 8
        drained(e)


def test_no_device_or_several_are_refused():
    for bad in ("cpu:99", "abacus", 3, object()):
        with pytest.raises(ConfigError):
            canonical_device(bad)


def test_binding_the_same_pair_again_changes_nothing():
    """B16: whoever asks, as often as they ask."""
    bound = make_store()
    before = bound.snapshot_counters(), bound.geometry, bound.identity
    for _ in range(3):
        bound.bind(geometry())
    assert (bound.snapshot_counters(), bound.geometry, bound.identity) == before
    placed = StoreGeometry.of(GROUPS, PAGE, DEVICE)
    bound.bind(placed)  # the first that names a device
    bound.bind(StoreGeometry.of(GROUPS, PAGE, SingleDeviceSharding(DEVICE)))
    assert bound.geometry == placed
    assert bound.identity == before[2]  # where the pages are is no part of what they are


FULL, SLIDING = GROUPS


@pytest.mark.parametrize(
    ("groups", "page_size"),
    [
        ((FULL, SLIDING), 8),
        ((FULL,), 4),
        ((SLIDING, FULL), 4),
        ((LayerGroup((0, 1), 1, 2, np.float32), LayerGroup((2,), 2, 2, np.float16, window=8)), 4),
        ((LayerGroup((0, 2), 2, 2, np.float32), SLIDING), 4),
        ((LayerGroup((0, 2), 1, 4, np.float32), SLIDING), 4),
        ((LayerGroup((0, 2), 1, 2, np.float16), SLIDING), 4),
        ((FULL, LayerGroup((1,), 2, 2, np.float16, window=4)), 4),
    ],
)
def test_another_geometry_is_refused_whatever_differs(groups: tuple[LayerGroup, ...], page_size: int):
    """B16: page size, layers, groups, heads, head dim, dtype, window: one stable reason, nothing changed."""
    bound = make_store()
    before = bound.snapshot_counters(), bound.geometry
    with pytest.raises(GeometryError) as caught:
        bound.bind(StoreGeometry.of(groups, page_size))
    assert caught.value.reason == "store-geometry-mismatch"
    assert (bound.snapshot_counters(), bound.geometry) == before
    assert StoreGeometry.of(groups, page_size).identity != bound.identity


def test_another_device_another_page_size_and_no_index_have_their_own_reasons():
    bound = store()
    bound.bind(StoreGeometry(4, geometry().parts, device="gpu:1@0"))
    for other, reason in (
        (StoreGeometry(4, geometry().parts, device="gpu:0@0"), "store-device-mismatch"),
        (StoreGeometry(4, geometry().parts, layout="S,K,2,D", device="gpu:1@0"), "store-geometry-mismatch"),
    ):
        with pytest.raises(GeometryError) as caught:
            bound.bind(other)
        assert caught.value.reason == reason
    for unbound, reason in (
        (store(page_size=8), "store-geometry-mismatch"),
        (store(page_bytes=17), "store-geometry-mismatch"),
        (HostPageStore(4, 4), "store-without-index"),
    ):
        with pytest.raises(GeometryError) as caught:
            unbound.bind(geometry())
        assert caught.value.reason == reason
        assert unbound.geometry is None


def test_an_engine_with_a_store_of_another_geometry_runs_cold_and_says_why():
    """B16: the answer is the cold one, the foreign store is not touched, the reason is in the stats."""
    shared = store()
    shared.bind(StoreGeometry.of(tiny_llama(layers=3).kv_groups, 4, DEVICE))
    before = shared.snapshot_counters(), shared.geometry
    e = Engine(model(), SIZES, store=shared, programs=programs("llama", 4))
    capability = e.get_prefix_reuse_capability()
    assert (capability.supported, capability.reason) == (False, "store-geometry-mismatch")
    assert "layers [0, 1, 2]" in capability.detail
    tokens = prompt(9, seed=1)
    want = engine(on=False).generate(tokens, GREEDY)[0].token_ids
    for _ in range(2):
        out = e.generate(tokens, GREEDY)[0]
        assert (out.token_ids, out.cached_tokens) == (want, 0)
    stats = e.stats()
    assert (stats.enabled, stats.active, stats.disabled_reason) == (True, False, "store-geometry-mismatch")
    assert stats.host.disabled_reason == "store-geometry-mismatch"
    assert (shared.snapshot_counters(), shared.geometry) == before
    drained(e)


def test_the_store_is_bound_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch):
    """B16: at the time the pools are made, the store has its geometry, and the memory is known."""
    seen: list[Any] = []
    real = engine_state.DeviceRunner

    def runner(*args: Any) -> Any:
        (e,) = [o for o in seen if isinstance(o, Engine)]
        seen.append((e.store.geometry, e.memory.host_bytes, hasattr(e, "scheduler")))
        return real(*args)

    class Watched(Engine):
        def __init__(self, *args: Any, **options: Any):
            seen.append(self)
            super().__init__(*args, **options)

    monkeypatch.setattr(engine_state, "DeviceRunner", runner)
    e = Watched(model(), SIZES, programs=programs("llama", 4))
    assert seen[1] == (StoreGeometry.of(model().kv_groups, 4, DEVICE), e.memory.host_bytes, False)


def test_two_engines_on_one_store_share_its_pages_and_keep_one_copy():
    """B16: what one engine computed the other hits; on the host there is one array per page and group, and no other."""
    shared = store()
    one = Engine(model(), SIZES, store=shared, programs=programs("llama", 4))
    two = Engine(model(), SIZES, store=shared, programs=programs("llama", 4))
    already = host_pages_alive(one)
    tokens = prompt(13, seed=1)
    want = one.generate(tokens, GREEDY)[0].token_ids
    out = two.generate(tokens, GREEDY)[0]
    assert (out.cached_tokens, out.token_ids) == (12, want)
    ids = [one.submit(prompt(10, seed=2), GREEDY), two.submit(prompt(10, seed=3), GREEDY)]
    assert len(set(ids)) == 2
    while one.has_work or two.has_work:  # interleaved: both tell the store which pages they use
        for e in (one, two):
            e.step()
            check(e)
    kept = [p for p in shared.payloads if p is not None]
    assert len(kept) == len(shared.index or ()) == shared.stats().index_only_pages == 7
    assert host_pages_alive(one) == already + len(kept)
    one.evict_host_entries(64)  # the device mirrors of both are told
    assert all(not account.resident for e in (one, two) for account in e.runner.accounts)
    check(two)
    drained(one)
    drained(two)


def host_pages_alive(e: Engine) -> int:
    """Pages in arrays in host memory, bundles of one and more, whoever holds them."""
    gc.collect()
    shape = geometry_of(e).parts[0].shape
    arrays = [a for a in jax.live_arrays() if a.shape[1:] == shape and a.sharding.memory_kind == "pinned_host"]
    return sum(a.shape[0] for a in arrays)


def geometry_of(e: Engine) -> StoreGeometry:
    assert e.store.geometry is not None
    return e.store.geometry


def test_a_store_outlives_its_engine():
    """The listeners of a dropped engine go; the next engine hits what the first one left."""
    shared = store()
    first = Engine(model(), SIZES, store=shared, programs=programs("llama", 4))
    tokens = prompt(13, seed=1)
    first.generate(tokens, GREEDY)
    del first
    gc.collect()
    second = Engine(model(), SIZES, store=shared, programs=programs("llama", 4))
    assert second.generate(tokens, GREEDY)[0].cached_tokens == 12
    second.clear_cache()
    assert len(shared._listeners) == 1
    drained(second)


def test_memory_is_known_before_it_is_taken(monkeypatch: pytest.MonkeyPatch):
    """A cap in pages and one in bytes; both in the report, which looks at shapes only."""
    (group,) = model().kv_groups
    page = len(group.layers) * 2 * group.num_kv_heads * group.head_dim * 4 * np.dtype(group.dtype).itemsize
    assert plan_memory(model(), SIZES).page_bytes == page
    capped = engine(max_host_bytes=10 * page + 1)
    assert (capped.memory.host_pages, capped.memory.host_bytes) == (10, 10 * page)
    assert (capped.store.num_pages, capped.store.memory_bytes) == (10, 10 * page)
    assert capped.memory.device_bytes == sum(p.kv_pages.nbytes for p in capped.runner.pools)
    assert capped.memory.weight_bytes == sum(x.nbytes for x in jax.tree.leaves(model().params))
    assert "host bytes" in str(capped.memory)
    assert engine(max_host_bytes=10**9).memory.host_pages == 64
    taken: list[Any] = []
    monkeypatch.setattr(engine_state, "DeviceRunner", lambda *a: taken.append(a))
    with pytest.raises(ConfigError, match="no room for a page"):
        engine(max_host_bytes=page - 1)
    assert not taken
