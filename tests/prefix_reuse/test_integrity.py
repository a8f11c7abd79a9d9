"""Integrity mode: one changed byte of a published page is found and named."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_kernels.layout import page_shape
from prefix_reuse.errors import IntegrityError
from prefix_reuse.host_store import HostPageStore, PrefixRequest
from prefix_reuse.index import PrefixIndex

NS = b"ns"
LAYERS, PAGE, HEADS, DIM = (2, 3), 4, 2, 4


def payload(page: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(page)
    return tuple(rng.standard_normal((n, *page_shape(PAGE, HEADS, DIM))).astype(np.float32) for n in LAYERS)


def published_store() -> tuple[HostPageStore, list[int]]:
    store = HostPageStore(8, PAGE, index=PrefixIndex(PAGE), integrity=True)
    tokens = np.arange(8, dtype=np.int32)
    store.allocate_pages_for_sequences_with_prefix([PrefixRequest(1, tokens, 8, NS)])
    pages = store.pages(1)
    store.begin_copy(pages)
    store.finish_copy(pages, [payload(int(p)) for p in pages])
    store.publish(1, 8, NS)
    return store, pages.tolist()


@pytest.mark.parametrize(("group", "layer"), [(g, i) for g, n in enumerate(LAYERS) for i in range(n)])
def test_one_flipped_byte_is_reported_with_page_layer_and_half(group, layer):
    """N6: K and V of every layer of every group are covered."""
    store, pages = published_store()
    for half, name in enumerate("KV"):
        store.read(pages[1])
        numbers = store.payloads[pages[1]][group]
        # Whatever the layout of a page is, one element of K or V changes exactly one of the halves of `split_kv`.
        from pallas_kernels.layout import split_kv

        view = split_kv(numbers[layer])[half]
        old = view[3, 1, 2].copy()
        view[3, 1, 2] = np.nextafter(old, np.float32(9))
        with pytest.raises(IntegrityError, match=rf"page {pages[1]}, group {group}, layer {layer} .* {name}:"):
            store.read(pages[1])
        view[3, 1, 2] = old
        store.read(pages[1])
    store.read(pages[0])


def test_a_bad_page_can_be_dropped_and_computed_again():
    """N6, H31: the dropped page forgets its checksum, so that new bytes are not held against it."""
    store, pages = published_store()
    store.payloads[pages[0]][0][0] += 1
    with pytest.raises(IntegrityError):
        store.read(pages[0])
    assert store.drop_entry(pages[0]).tolist() == pages
    store.begin_copy(pages[:1])
    store.finish_copy(pages[:1], [payload(99)])
    store.read(pages[0])
    assert store.publish(1, 8, NS).tolist() == pages
    store.check_integrity()


def test_pages_without_bytes_are_left_alone():
    """N6: a simulation has nothing to check."""
    store = HostPageStore(8, PAGE, index=PrefixIndex(PAGE), integrity=True)
    store.allocate_pages_for_sequences_with_prefix([PrefixRequest(1, [1, 2, 3, 4], 4, NS)])
    store.begin_copy(store.pages(1))
    store.finish_copy(store.pages(1), None)
    page = int(store.publish(1, 4, NS)[0])
    assert store.read(page) is None
