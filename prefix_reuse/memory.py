"""What an engine will take, known before anything is allocated."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from pallas_kernels.layout import LayerGroup
from prefix_reuse.config import EngineConfig
from prefix_reuse.errors import ConfigError
from prefix_reuse.geometry import StoreGeometry, canonical_device
from prefix_reuse.index_types import Readable
from prefix_reuse.windows import GroupWindow

LOG = logging.getLogger("prefix_reuse")
STAGING_BYTES = 512 << 20
"""By default, on a GPU: about 10 ms of a link of 53 GB/s."""


@dataclass(frozen=True)
class MemoryPlan(Readable):
    """Bytes by place. `print` it.

    Attributes:
        weight_bytes: the model's parameters on the device.
        device_pages: pages of the device pool of each layer group; a sliding group needs fewer.
        device_bytes: the device pools.
        staging_bytes: on the device beside the pools, for host pages whose row is not let in yet.
        page_bytes: one page over all layer groups, on the host as on the device.
        host_pages: pages that the host store may hold, after both caps.
        host_bytes: those pages, when all are filled.
    """

    weight_bytes: int
    device_pages: tuple[int, ...]
    device_bytes: int
    staging_bytes: int
    page_bytes: int
    host_pages: int
    host_bytes: int


def group_windows(groups: Sequence[LayerGroup], config: EngineConfig) -> tuple[GroupWindow, ...]:
    """How the rows of an engine hold pages of each layer group."""
    return tuple(
        GroupWindow(group.window, config.page_size, config.max_prefill_tokens, config.decode_steps) for group in groups
    )


def device_pages_of(windows: Sequence[GroupWindow], config: EngineConfig) -> tuple[int, ...]:
    """Pages of the device pool of each layer group. Raises `ConfigError` where a single row might not fit."""
    pages = []
    for window in windows:
        enough = window.pool_pages(config.num_device_pages, config.max_rows)
        fewest = window.fewest_pages(config.num_device_pages)
        if window.window is not None and config.num_window_pages is not None:
            enough = config.num_window_pages
        if enough < fewest:
            raise ConfigError(
                f"num_window_pages={enough} do not hold one row with a window of {window.window} tokens, which takes {fewest} "
                "pages; lower max_prefill_tokens or decode_steps, or give more pages"
            )
        pages.append(enough)
    return tuple(pages)


def staging_bytes_of(config: EngineConfig, device: Any = None) -> int:
    """Bytes that may be staged, where reuse is on."""
    if config.staging_bytes is not None:
        return config.staging_bytes
    return STAGING_BYTES if canonical_device(device).platform == "gpu" else 0


def plan_memory(model: Any, config: EngineConfig, device: Any = None) -> MemoryPlan:
    """Looks at shapes only. Raises `ConfigError` when `max_host_bytes` has no room for one page.

    Args:
      model: see `steps.PagedModel`.
      config: sizes and stages.
      device: in any spelling that `canonical_device` takes; default the first one.
    """
    geometry = StoreGeometry.of(model.kv_groups, config.page_size)
    page_bytes = geometry.page_bytes
    host_pages = config.num_host_pages
    if config.max_host_bytes is not None:
        host_pages = min(host_pages, config.max_host_bytes // page_bytes)
        if host_pages < 1:
            raise ConfigError(f"max_host_bytes={config.max_host_bytes} has no room for a page of {page_bytes} bytes")
    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(model.params))
    device_pages = device_pages_of(group_windows(model.kv_groups, config), config)
    plan = MemoryPlan(
        weight_bytes=weights,
        device_pages=device_pages,
        device_bytes=sum(n * part.num_bytes for n, part in zip(device_pages, geometry.parts, strict=True)),
        staging_bytes=min(staging_bytes_of(config, device), host_pages * page_bytes) if config.m1 else 0,
        page_bytes=page_bytes,
        host_pages=host_pages,
        host_bytes=host_pages * page_bytes,
    )
    LOG.info("%s", plan)
    return plan
