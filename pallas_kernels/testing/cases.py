"""Inputs for tests of paged ops: a covering set of cases, and pools where everything unowned is poison."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import layout


@dataclass(frozen=True)
class PagedCase:
    """One attention problem: `rows` are `(query tokens, keys)`; `padding` tokens follow the last row."""

    name: str
    rows: tuple[tuple[int, int], ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    dtype: Any = jnp.float32
    window: int | None = None
    sinks: bool = False
    soft_cap: float | None = None
    scale: float | None = None
    padding: int = 0
    extra_columns: int = 2
    layers: int = 2
    layer: int = 1

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class PagedInputs:
    """Arrays of one case, on the host. Unowned pages and slots of `pool` hold the poison."""

    case: PagedCase
    q: np.ndarray  # [T, H, D]
    pool: np.ndarray  # [L, P, *page_shape]
    page_table: np.ndarray  # int32 [B, M]
    q_offsets: np.ndarray  # int32 [B + 1]
    kv_lens: np.ndarray  # int32 [B]
    sinks: np.ndarray | None  # f32 [H]
    owned: np.ndarray = field(repr=False)  # bool [P, S], slots that some row can see

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the op."""
        case = self.case
        sinks = None if self.sinks is None else jnp.asarray(self.sinks)
        return {"scale": case.scale, "window": case.window, "sinks": sinks, "soft_cap": case.soft_cap}

    def poisoned(self, value: float) -> np.ndarray:
        """The pool with `value` in every unowned page and slot, and in every other layer."""
        k, v = (np.array(part) for part in layout.split_kv(self.pool))
        keep = np.zeros((*k.shape[:3], 1, 1), bool)
        keep[self.case.layer, :, :, 0, 0] = self.owned
        k, v = np.where(keep, k, k.dtype.type(value)), np.where(keep, v, v.dtype.type(value))
        return np.asarray(layout.join_kv(jnp.asarray(k), jnp.asarray(v)))


def make_inputs(case: PagedCase, seed: int, *, poison: float = np.nan) -> PagedInputs:
    """Fresh random inputs. Pages are dealt in random order; the pool has 3 to 5 pages that nobody owns.

    Columns that the window of every query of a row has passed are -1, as an engine that frees them would leave them.
    """
    rng = np.random.default_rng(seed)
    size, batch = case.page_size, len(case.rows)
    pages = [-(-keys // size) for _, keys in case.rows]
    columns = max(pages, default=0) + case.extra_columns
    num_pages = sum(pages) + 3 + seed % 3
    dealt = rng.permutation(num_pages)
    table = np.full((batch, columns), -1, np.int32)
    owned = np.zeros((num_pages, size), bool)
    for row, (queries, keys) in enumerate(case.rows):
        table[row, : pages[row]], dealt = dealt[: pages[row]], dealt[pages[row] :]
        if case.window is not None:
            passed = max(0, keys - queries - case.window + 1) // size
            table[row, :passed] = -1
        for column in range(pages[row]):
            if table[row, column] >= 0:
                owned[table[row, column], : min(size, keys - column * size)] = True
    queries = sum(n for n, _ in case.rows)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32).astype(case.dtype)

    inputs = PagedInputs(
        case=case,
        q=normal(queries + case.padding, case.heads, case.head_dim),
        pool=normal(*layout.pool_shape(case.layers, num_pages, size, case.kv_heads, case.head_dim)),
        page_table=table,
        q_offsets=np.concatenate([[0], np.cumsum([n for n, _ in case.rows])]).astype(np.int32),
        kv_lens=np.array([keys for _, keys in case.rows], np.int32),
        sinks=rng.choice([-50.0, 0.0, 2.0, 10.0], case.heads).astype(np.float32) if case.sinks else None,
        owned=owned,
    )
    object.__setattr__(inputs, "pool", inputs.poisoned(poison))
    return inputs


def share_pages(inputs: PagedInputs, groups: Sequence[tuple[Sequence[int], int]]) -> PagedInputs:
    """The rows of each `(rows, tokens)` read the pages of the first of them for so many tokens; what they had is poison."""
    case, table = inputs.case, inputs.page_table.copy()
    for rows, tokens in groups:
        table[list(rows), : tokens // case.page_size] = table[rows[0], : tokens // case.page_size]
    owned = np.zeros_like(inputs.owned)
    for row, keys in enumerate(inputs.kv_lens):
        position = np.arange(keys)
        pages = table[row, position // case.page_size]
        owned[pages[pages >= 0], (position % case.page_size)[pages >= 0]] = True
    shared = dataclasses.replace(inputs, page_table=table, owned=owned)
    return dataclasses.replace(shared, pool=shared.poisoned(np.nan))


def fill_freed_memory(shape: tuple[int, ...], dtype: Any) -> None:
    """Leave NaN in memory that the next result of this shape is likely to get: an unwritten output then shows."""
    jax.block_until_ready(jnp.full(shape, jnp.nan, dtype)).delete()


BF16, F16 = jnp.bfloat16, jnp.float16
_EDGES = ((1, 16), (0, 0), (16, 32), (1, 1), (17, 17), (3, 33), (0, 20))  # page edges, empty rows, rows without queries

# Every value of every option appears; pairs that meet in one piece of code (window and -1 columns, sinks and empty
# rows, grouping and head size) appear together.
RAGGED_CASES = (
    PagedCase("edges", _EDGES, padding=5),
    PagedCase("edges_bf16_sinks", _EDGES, dtype=BF16, sinks=True, padding=1, heads=8, kv_heads=1),
    PagedCase("edges_window", _EDGES, window=7, sinks=True, padding=3),
    PagedCase("long_f16", ((70, 600), (5, 300)), dtype=F16, head_dim=80, heads=3, kv_heads=3),
    PagedCase("window_passed_pages", ((40, 700), (2, 290)), window=100, head_dim=128, layer=0),
    PagedCase("window_one", ((9, 40),), window=1, head_dim=96, soft_cap=20.0),
    PagedCase("soft_cap_sinks", ((33, 300), (1, 257)), soft_cap=5.0, sinks=True, scale=0.3),
    PagedCase("d256_page128", ((65, 300),), head_dim=256, page_size=128, heads=2, kv_heads=1, dtype=BF16),
    PagedCase("group16_page64", ((8, 72), (1, 64)), heads=16, kv_heads=1, page_size=64, dtype=BF16, window=50),
    PagedCase("smollm2", ((64, 320),), heads=9, kv_heads=3, layers=3, layer=2, extra_columns=0),
    PagedCase("no_rows_live", ((0, 0), (0, 0)), padding=4, sinks=True),
)
_ROWS = ((1, 1), (1, 0), (1, 16), (1, 17), (1, 600))
DECODE_CASES = (
    PagedCase("edges", _ROWS),
    PagedCase("bf16_sinks", _ROWS, dtype=BF16, sinks=True, heads=8, kv_heads=1),
    PagedCase("window", ((1, 600), (1, 30), (1, 0), (1, 255)), window=20, sinks=True),
    PagedCase("f16_d80", ((1, 300),), dtype=F16, head_dim=80, heads=3, kv_heads=3),
    PagedCase("soft_cap_d96", ((1, 40), (1, 257)), head_dim=96, soft_cap=5.0, scale=0.3),
    PagedCase("d256_page128", ((1, 300), (1, 128)), head_dim=256, page_size=128, heads=2, kv_heads=1, dtype=BF16),
    PagedCase("group16_page64_d128", ((1, 72), (1, 64)), heads=16, kv_heads=1, page_size=64, head_dim=128, dtype=BF16),
    PagedCase("smollm2", ((1, 1024),), heads=9, kv_heads=3, layers=3, layer=2, extra_columns=0),
    PagedCase("no_rows_live", ((1, 0), (1, 0)), sinks=True),
)
