"""Figures and invariants of the host page store, computed from scratch."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np

from prefix_reuse.errors import IntegrityError
from prefix_reuse.host_types import NO_INDEX, HostStats

if TYPE_CHECKING:
    from prefix_reuse.host_store import HostPageStore


def host_stats(store: HostPageStore) -> HostStats:
    """See `HostPageStore.stats`."""
    accounts = store.accounts
    in_rows = np.zeros(store.num_pages, bool)
    logical = 0
    for row in store._rows.values():
        in_rows[row.pages] = True
        logical += len(row.pages)
    physical = int(in_rows.sum())
    shared = int((in_rows & (accounts.pins > 0)).sum())
    index_only = int(((accounts.pins > 0) & (accounts.refs == 0)).sum())
    index = NO_INDEX if store.index is None else store.index.stats()
    return HostStats(
        num_pages=store.num_pages,
        free_pages=accounts.num_free,
        logical_pages=logical,
        physical_pages=physical,
        shared_pages=shared,
        private_pages=physical - shared,
        pages_saved=logical - physical,
        index_only_pages=index_only,
        reserved_pages=int(((accounts.refs > 0) & ~in_rows).sum()),
        in_flight_pages=int((accounts.copies > 0).sum()),
        partial_pages=store.num_partial,
        rows=len(store._rows),
        **asdict(store.counters),
        enabled=store.index is not None,
        active=store.index is not None,
        disabled_reason=store.disabled_reason,
        entries=index.entries,
        open_leases=store.open_leases,
        matched_tokens=index.matched_tokens,
        inserted_pages=index.inserted_pages,
        evicted_pages=index.evicted_pages,
        collision_checks=index.collision_checks,
        invalidations=index.invalidations,
    )


def check_store(store: HostPageStore) -> None:
    """See `HostPageStore.check_integrity`."""
    accounts = store.accounts
    accounts.check_integrity()
    expected = np.zeros(store.num_pages, np.int64)
    for name, row in store._rows.items():
        counts = np.bincount(row.pages, minlength=store.num_pages)
        if counts.max(initial=0) > 1:
            raise IntegrityError(f"row {name!r} names a page twice: {row.pages.tolist()[:16]}")
        expected += counts
    for holder in [lease.page_ids for lease in store._leases]:
        expected[holder] += 1
    for group in store._groups:
        for pages in (*group.followed_pages, *group.private_pages):
            expected[pages] += 1
    _compare("refs", accounts.refs, expected)
    pinned = np.zeros(store.num_pages, np.int64)
    if store.index is None:
        if accounts.refs.max() > 1:
            raise IntegrityError("a page is referenced twice although reuse is off")
    else:
        store.index.check_integrity()
        for run in store.index:
            pinned[run.page_ids] += 1
            if (accounts.filled[run.page_ids] != store.page_size).any() or accounts.copies[run.page_ids].any():
                raise IntegrityError(f"an index entry names an incomplete page among {run.page_ids.tolist()[:16]}")
    _compare("pins", accounts.pins, pinned)
    _check_parts(store)


def _check_parts(store: HostPageStore) -> None:
    """Which groups' bytes a page lacks is what its payload says; groups without a window lack none."""
    if not store.windows:
        return
    if store.num_partial != int(store.lacks.any(axis=0).sum()):
        raise IntegrityError(
            f"{store.num_partial} partial pages are counted, {store.lacks.any(axis=0).sum()} are there"
        )
    for group, window in enumerate(store.windows):
        for page in np.flatnonzero(store.lacks[group]).tolist():
            if window is None or not store.accounts.filled[page]:
                raise IntegrityError(f"host page {page} must not lack bytes of layer group {group} (window {window})")
    for page, payload in enumerate(store.payloads):
        if not store.accounts.filled[page] or not isinstance(payload, tuple) or len(payload) != len(store.windows):
            continue
        if [part is None for part in payload] != store.lacks[:, page].tolist():
            raise IntegrityError(f"host page {page} lacks other layer groups than {store.lacks[:, page].tolist()} says")


def _compare(name: str, counts: np.ndarray, expected: np.ndarray) -> None:
    wrong = np.flatnonzero(counts != expected)
    if wrong.size:
        page = int(wrong[0])
        raise IntegrityError(f"{name} of host page {page} is {counts[page]}, its holders are {expected[page]}")
