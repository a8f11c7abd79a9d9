"""Which host store an engine works on: bound to its geometry before anything else is made, or a cold one of its own (B16)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from prefix_reuse.capability import PrefixReuseCapability
from prefix_reuse.config import EngineConfig
from prefix_reuse.errors import GeometryError
from prefix_reuse.geometry import StoreGeometry
from prefix_reuse.host_store import HostPageStore
from prefix_reuse.index import PrefixIndex


def bind_store(
    given: HostPageStore | None,
    config: EngineConfig,
    num_pages: int,
    geometry: StoreGeometry,
    capability: PrefixReuseCapability,
) -> tuple[HostPageStore, PrefixReuseCapability]:
    """The store that the engine uses, and the capability with the reason if that is not the given one.

    Args:
        given: a store to share; None makes one of `num_pages` pages.
        config: stages, integrity and poison mode, `max_index_entries` (the last three are the given store's own).
        num_pages: pages of a store that is made here.
        geometry: of the model's pages on the engine's device.
        capability: of the model.
    """
    options: dict[str, Any] = {
        "integrity": config.integrity,
        "poison": nan_payload if config.poison else None,
        "page_bytes": geometry.page_bytes,
    }
    if config.m1 and capability.supported:
        store = given
        if store is None:
            index = PrefixIndex(config.page_size, max_entries=config.max_index_entries)
            store = HostPageStore(num_pages, config.page_size, index=index, **options)
        try:
            store.bind(geometry)
            return store, capability
        except GeometryError as error:
            capability = replace(capability, supported=False, reason=error.reason, detail=str(error))
    reason = capability.reason if config.enable_prefix_reuse else "disabled"
    return HostPageStore(num_pages, config.page_size, disabled_reason=reason, **options), capability


def nan_payload(payload: Any) -> Any:
    """What poison mode leaves in the slot of a freed host page: the same shape, all NaN."""
    return tuple(None if page is None else np.full(page.shape, np.nan, page.dtype) for page in payload)
