"""What tests of prefixes, archives and snapshots share: a bound host store with numpy pages, and a cache around it."""

from __future__ import annotations

from typing import Any

import numpy as np

from pallas_kernels.layout import LayerGroup
from prefix_reuse.cache import PrefixCache
from prefix_reuse.geometry import StoreGeometry
from prefix_reuse.hashing import Namespace, as_tokens
from prefix_reuse.host_store import HostPageStore, PrefixRequest
from prefix_reuse.index import PrefixIndex
from prefix_reuse.snapshot_format import Identity
from prefix_reuse.stats import SnapshotCounters

PAGE = 4
GROUPS = (LayerGroup((0, 2), 1, 2, np.float32), LayerGroup((1,), 2, 2, np.float16, window=8))
MODEL = Namespace(
    model_id="m", revision="1", weights="w", tokenizer="t", dtype="float32", page_size=PAGE, num_layers=3,
    num_kv_heads=1, head_dim=2, layout="K", position_config="rope",
)  # fmt: skip
PLATFORM = {"device": "cpu", "jaxlib": "1"}


def geometry(groups: tuple[LayerGroup, ...] = GROUPS) -> StoreGeometry:
    return StoreGeometry.of(groups, PAGE)


def seq(first: int, last: int) -> np.ndarray:
    """int32 token ids first..last."""
    return np.arange(first, last + 1, dtype=np.int32)


def payload(seed: int, groups: tuple[LayerGroup, ...] = GROUPS) -> tuple[np.ndarray, ...]:
    """A page of random bytes in the shapes of `groups`."""
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(p.shape).astype(p.dtype) for p in geometry(groups).parts)


def make_store(num_pages: int = 24, *, max_entries: int | None = None, bound: bool = True, **options: Any):
    store = HostPageStore(num_pages, PAGE, index=PrefixIndex(PAGE, max_entries=max_entries), **options)
    if bound:
        store.bind(geometry())
    return store


def fill(store: HostPageStore, tokens: np.ndarray, namespace: bytes = MODEL.digest) -> list[int]:
    """One whole life: admitted, its own bytes in every new page, published, released. Returns the indexed pages."""
    name = object()
    (got,) = store.allocate_pages_for_sequences_with_prefix([PrefixRequest(name, tokens, len(tokens), namespace)])
    store.begin_copy(got.private_pages)
    first = len(got.shared_pages)
    payloads = [
        payload(int(tokens[: (first + i + 1) * PAGE].sum()) * 1000 + first + i) for i in range(len(got.private_pages))
    ]
    store.finish_copy(got.private_pages, payloads)
    store.publish(name, tokens, namespace)
    pages = store.pages(name)[: len(tokens) // PAGE].tolist()
    store.release(name)
    return pages


class Tokens:
    """Stands in for `Intake`: prompts are ids, namespaces those of `MODEL` with a salt."""

    def __init__(self, model: Namespace = MODEL) -> None:
        self.model = model

    def tokenize(self, prompt: Any) -> np.ndarray:
        return as_tokens(prompt)

    def namespace(self, salt: str = "", adapter: str = "") -> bytes:
        return self.model.replace(tenant_salt=salt or None, adapter=adapter or None).digest


def make_cache(
    store: HostPageStore | None = None,
    *,
    model: Namespace = MODEL,
    groups: tuple[LayerGroup, ...] = GROUPS,
    platform: dict[str, str] | None = None,
) -> PrefixCache:
    identity = Identity(model, geometry(groups), platform or PLATFORM)
    tokens: Any = Tokens(model)
    return PrefixCache(
        make_store() if store is None else store,
        tokens,
        adopt=tuple,
        land=lambda: None,
        identity=lambda: identity,
        counters=SnapshotCounters(),
    )


def contents(store: HostPageStore) -> dict[tuple[bytes, bytes], bytes]:
    """Bytes of every indexed page by (namespace, tokens of the whole prefix)."""
    assert store.index is not None
    out = {}
    for namespace, tokens, pages in store.index.prefixes():
        for i, page in enumerate(pages.tolist()):
            parts = store.read(page)
            out[namespace, tokens[: (i + 1) * PAGE].tobytes()] = b"".join(np.asarray(p).tobytes() for p in parts)
    return out
