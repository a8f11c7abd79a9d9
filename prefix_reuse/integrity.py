"""Checksums of published pages: per page, per layer, for K and for V."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from prefix_reuse.errors import IntegrityError


class PageChecksums:
    """Remembers the bytes of published pages as checksums and says which page, layer and half changed."""

    def __init__(self) -> None:
        self._sums: dict[int, list[int]] = {}

    def add(self, page_ids: np.ndarray, payloads: np.ndarray) -> None:
        """Record the payloads of newly published pages."""
        for page in page_ids.tolist():
            if payloads[page] is not None:
                self._sums[page] = [_checksum(array) for _, array in _parts(payloads[page])]

    def forget(self, page_ids: np.ndarray) -> None:
        for page in page_ids.tolist():
            self._sums.pop(page, None)

    def verify(self, page: int, payload: Any) -> None:
        """Raise `IntegrityError` if a published page is not what it was."""
        sums = self._sums.get(page)
        if sums is None:
            return
        found = 0
        for (name, array), expected in zip(_parts(payload), sums, strict=False):
            found += 1
            if _checksum(array) != expected:
                raise IntegrityError(f"host page {page}, {name}: bytes changed since the page was published")
        if found != len(sums):
            raise IntegrityError(f"host page {page} has {found} parts, {len(sums)} when it was published")


def _checksum(array: np.ndarray) -> int:
    import xxhash

    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(array).view(np.uint8).data)


def _parts(payload: Any) -> Iterator[tuple[str, np.ndarray]]:
    """(name, bytes) of K and V of every layer; payload = tuple over layer groups of [L, *page] arrays."""
    from pallas_kernels.layout import split_kv

    for group, pages in enumerate(payload):
        for layer, page in enumerate(np.asarray(pages)):
            for name, half in zip("KV", split_kv(page), strict=True):
                yield f"group {group}, layer {layer} of the group, {name}", np.asarray(half)
