"""Checksums of published pages: per page, per layer, for K and for V."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from prefix_reuse.errors import IntegrityError

Sums = list[int] | None
"""Of one layer group of a page; None = the page lacks its bytes."""


class PageChecksums:
    """Remembers the bytes of published pages as checksums and says which page, layer and half changed."""

    def __init__(self) -> None:
        self._sums: dict[int, list[Sums]] = {}

    def add(self, page_ids: np.ndarray, payloads: np.ndarray) -> None:
        """Record the payloads of newly published pages."""
        for page in page_ids.tolist():
            if payloads[page] is not None:
                self._sums[page] = [_sums(group, part) for group, part in enumerate(payloads[page])]

    def forget(self, page_ids: np.ndarray) -> None:
        for page in page_ids.tolist():
            self._sums.pop(page, None)

    def add_group(self, page: int, group: int, payload: Any) -> None:
        """A published page has got the bytes of a layer group that it lacked."""
        if page in self._sums:
            self._sums[page][group] = _sums(group, payload[group])

    def drop_group(self, page: int, group: int) -> None:
        """A published page has given up the bytes of a layer group."""
        if page in self._sums:
            self._sums[page][group] = None

    def verify(self, page: int, payload: Any) -> None:
        """Raise `IntegrityError` if a published page is not what it was."""
        sums = self._sums.get(page)
        if sums is None:
            return
        if len(payload) != len(sums):
            raise IntegrityError(f"host page {page} has {len(payload)} layer groups, {len(sums)} when it was published")
        for group, (part, expected) in enumerate(zip(payload, sums, strict=True)):
            if (part is None) != (expected is None):
                state = "are gone" if part is None else "have come from nowhere"
                raise IntegrityError(f"host page {page}, group {group}: its bytes {state} since the page was published")
            if part is None or expected is None:
                continue
            found = 0
            for (name, array), one in zip(_parts(group, part), expected, strict=False):
                found += 1
                if _checksum(array) != one:
                    raise IntegrityError(f"host page {page}, {name}: bytes changed since the page was published")
            if found != len(expected):
                raise IntegrityError(
                    f"host page {page}, group {group} has {found} parts, {len(expected)} when it was published"
                )


def _sums(group: int, part: Any) -> Sums:
    return None if part is None else [_checksum(array) for _, array in _parts(group, part)]


def _checksum(array: np.ndarray) -> int:
    import xxhash

    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(array).view(np.uint8).data)


def _parts(group: int, part: Any) -> Iterator[tuple[str, np.ndarray]]:
    """(name, bytes) of K and V of every layer of a layer group's [L, *page] array."""
    from pallas_kernels.layout import split_kv

    for layer, page in enumerate(np.asarray(part)):
        for name, half in zip("KV", split_kv(page), strict=True):
            yield f"group {group}, layer {layer} of the group, {name}", np.asarray(half)
