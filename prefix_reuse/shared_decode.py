"""Which decode batches read shared pages together (X2): the host side, between the page tables and the kernel's plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from pallas_kernels import (
    SPLIT,
    SharedPrefixPlan,
    crossover_tokens,
    empty_plan,
    plan_shared_prefix,
    rows_per_tile,
    saved_tokens,
)
from pallas_kernels.layout import LayerGroup
from pallas_kernels.shared_prefix_attention.plan import ROWS_PER_TILE
from prefix_reuse.config import EngineConfig
from prefix_reuse.device_pool import DevicePool
from prefix_reuse.sequence import Sequence as Row

Plans = tuple[SharedPrefixPlan | None, ...]


class SharedPrefixPlanner:
    """Makes the plans of decode batches; a plan's shape depends on the batch bucket alone, so each bucket has two programs.

    Args:
      groups: the model's layer groups; one whose window is no longer than a split never shares.
      config: `shared_prefix_decode`, `decode_page_sharing`, `page_size`.
      max_columns: columns of the page tables.
      device: on a GPU sharing starts at the card's measured crossover; forced on elsewhere, at the first shared split.
    """

    def __init__(self, groups: Sequence[LayerGroup], config: EngineConfig, max_columns: int, device: Any):
        self._page_size, self._columns = config.page_size, max_columns
        self._splits = max_columns * config.page_size // SPLIT
        wanted = config.shared_prefix_decode
        if config.deterministic:  # decode attends like prefill, row by row
            wanted = False
        if wanted is None:
            wanted = device.platform == "gpu" and config.attention in (None, "triton", "mosaic_gpu")
        self.active = tuple(
            wanted and config.m3 and self._splits > 0 and SPLIT % config.page_size == 0 and _sees_a_split(group)
            for group in groups
        )
        self._rows_per_tile: tuple[int, ...] = (ROWS_PER_TILE,) * len(groups)
        self._least = 1
        if any(self.active):  # only now GPU modules are loaded
            with jax.default_device(device):
                self._rows_per_tile = tuple(
                    rows_per_tile(group, config.page_size, implementation=config.attention) for group in groups
                )
                if not config.shared_prefix_decode:
                    self._least = crossover_tokens()
        self._last: tuple[Any, Plans | None, int] | None = None

    def plan(self, accounts: Sequence[DevicePool], rows: Sequence[Row], size: int) -> tuple[Plans | None, int]:
        """Plans for `rows` in a batch of `size`, and the tokens of one layer group's K and V that a step reads less.

        (None, 0) where sharing would not pay. A plan holds while the rows and their tables stay as they are.
        """
        if not any(self.active) or len(rows) < 2:
            return None, 0
        key = (size, tuple(row.row_index for row in rows), tuple(account.version for account in accounts))
        if self._last is None or self._last[0] != key:
            self._last = (key, *self._make(accounts, rows, size))
        return self._last[1:]

    def _make(self, accounts: Sequence[DevicePool], rows: Sequence[Row], size: int) -> tuple[Plans | None, int]:
        plans: list[SharedPrefixPlan | None] = []
        saved = 0
        lens = np.zeros(size, np.int32)
        lens[: len(rows)] = [row.committed_kv_tokens for row in rows]
        for account, active, lanes in zip(accounts, self.active, self._rows_per_tile, strict=True):
            plan = None
            if active:
                table = np.full((size, self._columns), -1, np.int32)
                table[: len(rows)] = account.page_table[[row.row_index for row in rows]]
                tiles = self._tiles(size)
                plan = plan_shared_prefix(table, lens, self._page_size, rows_per_tile=lanes, num_tiles=tiles)
                saved = max(saved, saved_tokens(plan))
            plans.append(plan)
        if saved < self._least:
            return None, 0
        return tuple(p or empty for p, empty in zip(plans, self._empty(size), strict=True)), saved

    def warmup_plans(self, size: int) -> list[Plans | None]:
        """What `plan` may return for a batch of `size`, by shape."""
        if not any(self.active) or size < 2:
            return [None]
        return [None, self._empty(size)]

    def _tiles(self, size: int) -> int:
        """Tiles of a batch: enough for groups of four rows and more in every split."""
        return self._splits * max(1, size // 4)

    def _empty(self, size: int) -> Plans:
        """Plans without tiles of the groups that may share."""
        tiles = self._tiles(size)
        return tuple(
            empty_plan(size, self._columns, self._page_size, tiles, rows_per_tile=lanes) if active else None
            for active, lanes in zip(self.active, self._rows_per_tile, strict=True)
        )


def _sees_a_split(group: LayerGroup) -> bool:
    return group.window is None or group.window > SPLIT
