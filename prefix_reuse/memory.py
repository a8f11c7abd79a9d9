"""What an engine will take, known before anything is allocated."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import jax

from prefix_reuse.config import EngineConfig
from prefix_reuse.errors import ConfigError
from prefix_reuse.geometry import StoreGeometry
from prefix_reuse.index_types import Readable

LOG = logging.getLogger("prefix_reuse")


@dataclass(frozen=True)
class MemoryPlan(Readable):
    """Bytes by place. `print` it.

    Attributes:
        weight_bytes: the model's parameters on the device.
        device_pages: pages of the device pool (of each layer group).
        device_bytes: the device pools.
        page_bytes: one page over all layer groups, on the host as on the device.
        host_pages: pages that the host store may hold, after both caps.
        host_bytes: those pages, when all are filled.
    """

    weight_bytes: int
    device_pages: int
    device_bytes: int
    page_bytes: int
    host_pages: int
    host_bytes: int


def plan_memory(model: Any, config: EngineConfig) -> MemoryPlan:
    """Looks at shapes only. Raises `ConfigError` when `max_host_bytes` has no room for one page."""
    page_bytes = StoreGeometry.of(model.kv_groups, config.page_size).page_bytes
    host_pages = config.num_host_pages
    if config.max_host_bytes is not None:
        host_pages = min(host_pages, config.max_host_bytes // page_bytes)
        if host_pages < 1:
            raise ConfigError(f"max_host_bytes={config.max_host_bytes} has no room for a page of {page_bytes} bytes")
    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(model.params))
    plan = MemoryPlan(
        weight_bytes=weights,
        device_pages=config.num_device_pages,
        device_bytes=config.num_device_pages * page_bytes,
        page_bytes=page_bytes,
        host_pages=host_pages,
        host_bytes=host_pages * page_bytes,
    )
    LOG.info("%s", plan)
    return plan
