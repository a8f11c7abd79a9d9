"""The two jitted steps, prefill and decode, over pages. Nothing else runs on the device per request.

    prefill_step    token-packed: rows of different length, hits and misses, in one program
    decode_steps    several decode steps inside one `lax.while_loop`, sampling included

In deterministic mode either both run with row-invariant operations (see `deterministic.py`), or `prefill_step`, in one
shape, does the decoding too.

Both take the model as `forward(params, tokens, positions, kv, attend) -> (hidden, kv)`: the model calls
`attend(kv, layer, q, k, v)` once per layer; `attend` writes the new K/V through the page table and attends over the row's
pages. Pools are donated and updated in place. A write is refused, and counted, unless its page is writable and named by one
row only (A27).
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import struct

from pallas_kernels import (
    SharedPrefixPlan,
    append_kv,
    paged_decode_attention,
    ragged_paged_attention,
    shared_prefix_attention,
)
from pallas_kernels.layout import LayerGroup
from prefix_reuse.device_pages import UNUSED, DevicePages, rebuild
from prefix_reuse.sampling import SamplingState, add_counts, greedy, sample

Pools = tuple[DevicePages, ...]


class PagedModel(Protocol):
    """What a model has to offer; `models` has ready ones, your own needs only this.

    Read where a model has them, too: `tokenizer` (text in and out), `identity` (mapping: joins the namespace of its pages),
    `config` (hashable: models of equal ones share programs), `row_invariant_matmuls` (deterministic mode), `attention_kind`
    ("mla" and "dsa" are refused).
    """

    @property
    def name(self) -> str: ...

    @property
    def params(self) -> Any: ...

    @property
    def kv_groups(self) -> tuple[LayerGroup, ...]: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_context(self) -> int: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    def forward(
        self, params: Any, tokens: jax.Array, positions: jax.Array, kv: Any, attend: Callable[..., Any]
    ) -> tuple[jax.Array, Any]:
        """tokens, positions int32 [T] -> hidden [T, E] after the final norm, and the kv that `attend` returned last."""
        ...

    def unembed(self, params: Any, hidden: jax.Array) -> jax.Array:
        """hidden [N, E] -> f32 logits [N, V]."""
        ...


class CompilationCounter:
    """Counts how often each jitted function is traced, which is once per compiled shape."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()

    def traced(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, counting its traces under `name`."""

        def counted(*args: Any) -> Any:
            self.counts[name] += 1
            return function(*args)

        counted.__name__ = name
        return counted


class PagedKV(struct.PyTreeNode):
    """The `kv` that goes through a model's forward: pools, and where this batch's tokens go and look."""

    kv_pages: tuple[jax.Array, ...]
    """Per group [Lg, P, ...]."""
    tables: tuple[jax.Array, ...]
    """Per group int32 [B, M]: the batch rows' pages."""
    writable: tuple[jax.Array, ...]
    refcounts: tuple[jax.Array, ...]
    page_ids: tuple[jax.Array, ...]
    """Per group int32 [T]: page of each new token; -1 = not written."""
    slots: jax.Array
    """int32 [T]: slot of each new token in its page."""
    q_offsets: jax.Array | None
    """int32 [B+1] for prefill; None for decode (one query a row)."""
    kv_lens: jax.Array
    """int32 [B]"""
    refused: jax.Array
    """int32 scalar: writes refused so far, over all layers."""
    shared: tuple[SharedPrefixPlan | None, ...]
    """Per group, decode only: rows that read shared pages together; None = every row reads its own."""


def make_attend(
    groups: tuple[LayerGroup, ...], implementation: str | None = None, *, row_invariant: bool = False
) -> Callable[..., Any]:
    """The `attend` that a model calls in each layer, for these layer groups.

    `row_invariant`: decode rows go through the prefill kernel, one query each, so that a token has the same bits in both.
    """
    place = {layer: (g, i) for g, group in enumerate(groups) for i, layer in enumerate(group.layers)}

    def attend(
        kv: PagedKV, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, **options: Any
    ) -> tuple[jax.Array, PagedKV]:
        """Writes k, v [T, K, D] of `layer`, then attends with q [T, H, D] over the rows' pages -> [T, H, D].

        Options: scale, window, sinks [H], soft_cap, as in `pallas_kernels`.
        """
        if layer not in place:
            raise ValueError(f"layer {layer} is in no layer group; the model declares layers {sorted(place)}")
        g, index = place[layer]
        pages, out, refused = _write_and_attend(
            jnp.int32(index),
            kv.kv_pages[g],
            (q, k, v, options.pop("sinks", None)),
            (kv.page_ids[g], kv.slots, kv.writable[g], kv.refcounts[g]),
            (kv.tables[g], kv.q_offsets, kv.kv_lens, kv.shared[g]),
            options=tuple(sorted({**options, "implementation": implementation}.items())),
            row_invariant=row_invariant,
        )
        pools = (*kv.kv_pages[:g], pages, *kv.kv_pages[g + 1 :])
        return out, kv.replace(kv_pages=pools, refused=kv.refused + refused)

    return attend


@partial(jax.jit, static_argnames=("options", "row_invariant"))
def _write_and_attend(
    layer: jax.Array,
    kv_pages: jax.Array,
    qkv_sinks: tuple[jax.Array, jax.Array, jax.Array, jax.Array | None],
    target: tuple[jax.Array, ...],
    rows: tuple[jax.Array, jax.Array | None, jax.Array, SharedPrefixPlan | None],
    *,
    options: tuple[tuple[str, Any], ...],
    row_invariant: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One layer's append and attention, traced and lowered once for all layers that are alike (the layer is an operand)."""
    q, k, v, sinks = qkv_sinks
    page_ids, slots, writable, refcounts = target
    table, q_offsets, kv_lens, shared = rows
    pages, refused = append_kv(kv_pages, k, v, page_ids, slots, writable, refcounts, layer=layer)
    keywords: dict[str, Any] = {"layer": layer, "sinks": sinks, **dict(options)}
    if shared is not None:
        return pages, shared_prefix_attention(q, pages, table, kv_lens, shared, **keywords), refused
    if row_invariant:
        if q_offsets is None:
            q_offsets = jnp.arange(q.shape[0] + 1, dtype=jnp.int32)
        keywords["fixed_tile"] = True
    if q_offsets is None:
        return pages, paged_decode_attention(q, pages, table, kv_lens, **keywords), refused
    return pages, ragged_paged_attention(q, pages, table, q_offsets, kv_lens, **keywords), refused


def paged_kv(
    pools: Pools,
    rows: jax.Array,
    batch_rows: jax.Array,
    positions: jax.Array,
    writes: jax.Array,
    q_offsets: jax.Array | None,
    kv_lens: jax.Array,
    shared: tuple[SharedPrefixPlan | None, ...] | None = None,
) -> PagedKV:
    """Looks up where the new tokens of a batch go.

    Args:
      pools: one `DevicePages` per layer group.
      rows: int32 [B]: the batch rows' rows in the page table; out of range = padding.
      batch_rows: int32 [T]: index into `rows` of each token; B = padding.
      positions: int32 [T]: absolute position of each token.
      writes: bool [T]: whether the token's K/V is written.
      q_offsets: int32 [B+1], or None for decode.
      kv_lens: int32 [B]: keys of each row, the new ones included.
      shared: per group, for decode: see `PagedKV.shared`; None = no group has a plan.
    """
    tables, page_ids = [], []
    for pool in pools:
        table = pool.page_table.at[rows].get(mode="fill", fill_value=UNUSED)
        page = table.at[batch_rows, positions // pool.page_size].get(mode="fill", fill_value=UNUSED)
        tables.append(table)
        page_ids.append(jnp.where(writes, page, UNUSED))
    return PagedKV(
        kv_pages=tuple(p.kv_pages for p in pools),
        tables=tuple(tables),
        writable=tuple(p.writable for p in pools),
        refcounts=tuple(p.refcounts for p in pools),
        page_ids=tuple(page_ids),
        slots=positions % pools[0].page_size,
        q_offsets=q_offsets,
        kv_lens=kv_lens,
        refused=jnp.int32(0),
        shared=(None,) * len(pools) if shared is None else shared,
    )


def commit(pools: Pools, kv: PagedKV, rows: jax.Array, context_lens: jax.Array) -> Pools:
    """The pools after a forward: new pages, and the rows' new context lengths (int32 [B])."""
    return tuple(
        pool.replace(kv_pages=pages, context_lens=pool.context_lens.at[rows].set(context_lens, mode="drop"))
        for pool, pages in zip(pools, kv.kv_pages, strict=True)
    )


class PrefillInputs(struct.PyTreeNode):
    """Arrays of a `plan.PrefillBatch`."""

    tokens: jax.Array
    positions: jax.Array
    token_rows: jax.Array
    writes_kv: jax.Array
    rows: jax.Array
    q_offsets: jax.Array
    kv_lens: jax.Array
    tables: tuple[tuple[jax.Array, jax.Array, jax.Array], ...] | None = None
    """Per group page_table, shared_pages and context_lens of all rows, as in `device_pages.rebuild`, which they go through
    before anything else; None = the pools have the right ones."""


class PrefillOutputs(struct.PyTreeNode):
    next_tokens: jax.Array
    """int32 [B]: the likeliest token after each row's last one of this batch (meaningless for a chunk that is not the last);
    `DeviceRunner.prefill` puts what was drawn in its place. It is not drawn here: whether a batch draws is a condition, for
    whose answer the host would wait until the device has computed everything before it."""
    logits: jax.Array
    """f32 [B, V] of that last token."""
    hidden: jax.Array
    """[T, E] of every computed token, for `unembed`."""
    refused: jax.Array
    """int32: writes refused; anything but 0 is an engine fault."""


def prefill_step(
    model: PagedModel, attend: Callable[..., Any], params: Any, pools: Pools, batch: PrefillInputs
) -> tuple[PrefillOutputs, Pools]:
    """Donates `pools`. One forward over packed tokens; last-token logits are picked by query offsets (B14)."""
    if batch.tables is not None:
        pools = tuple(rebuild(pool, *tables) for pool, tables in zip(pools, batch.tables, strict=True))
    kv = paged_kv(pools, batch.rows, batch.token_rows, batch.positions, batch.writes_kv, batch.q_offsets, batch.kv_lens)
    hidden, kv = model.forward(params, batch.tokens, batch.positions, kv, attend)
    last = jnp.maximum(batch.q_offsets[1:] - 1, 0)
    logits = model.unembed(params, hidden[last])
    pools = commit(pools, kv, batch.rows, batch.kv_lens)
    return PrefillOutputs(greedy(logits), logits, hidden, kv.refused), pools


class DecodeInputs(struct.PyTreeNode):
    """A decode batch of B rows; padding rows are out of range in `rows` and have `remaining` 0."""

    rows: jax.Array
    """int32 [B]: rows of the page table."""
    tokens: jax.Array
    """int32 [B]: last token of each row; its KV is written by the first step."""
    context_lens: jax.Array
    """int32 [B]"""
    remaining: jax.Array
    """int32 [B]: tokens the row may still generate."""
    stop_ids: jax.Array
    """int32 [B, N]: ids that end the row; unused = -1."""
    sampling: SamplingState
    counts: jax.Array
    """int32 [B, V], read only with penalties."""
    index: jax.Array
    """int32 [B]: tokens generated so far."""
    num_steps: jax.Array
    """int32 scalar: steps to run, at most `max_steps`."""
    shared: tuple[SharedPrefixPlan | None, ...] | None = None
    """Per group: rows of this batch that read shared pages together (`plan_shared_prefix`); None = no group has a plan."""


class DecodeOutputs(struct.PyTreeNode):
    tokens: jax.Array
    """int32 [max_steps, B]; -1 where the row had ended."""
    steps: jax.Array
    """int32: steps run."""
    refused: jax.Array
    """int32: writes refused; anything but 0 is an engine fault."""


def decode_steps(
    model: PagedModel,
    attend: Callable[..., Any],
    max_steps: int,
    params: Any,
    pools: Pools,
    batch: DecodeInputs,
    *,
    row_invariant: bool = False,
) -> tuple[DecodeOutputs, Pools]:
    """Donates `pools`. Runs until `num_steps` steps are done or every row has ended; ended rows write nothing.

    `row_invariant`: random draws are made in a batch of all rows of the page table, like those after a prefill.
    """
    num_rows = batch.tokens.shape[0]
    draw_rows = pools[0].page_table.shape[0] if row_invariant else num_rows
    row_index = jnp.arange(num_rows, dtype=jnp.int32)

    def running(carry: Any) -> jax.Array:
        step, _, _, _, live, *_ = carry
        return (step < batch.num_steps) & jnp.any(live)

    def one_step(carry: Any) -> Any:
        step, pools, tokens, context, live, counts, out, refused = carry
        kv_lens = jnp.where(live, context + 1, 0)
        kv = paged_kv(pools, batch.rows, row_index, context, live, None, kv_lens, batch.shared)
        hidden, kv = model.forward(params, tokens, context, kv, attend)
        chosen = sample(model.unembed(params, hidden), counts, batch.sampling, batch.index + step, draw_rows)
        context = jnp.where(live, context + 1, context)
        pools = commit(pools, kv, batch.rows, context)
        counts = add_counts(counts, chosen, live, batch.sampling)
        out = out.at[step].set(jnp.where(live, chosen, -1))
        tokens = jnp.where(live, chosen, tokens)
        stopped = jnp.any(chosen[:, None] == batch.stop_ids, axis=1)
        live = live & ~stopped & (step + 1 < batch.remaining)
        return step + 1, pools, tokens, context, live, counts, out, refused + kv.refused

    live = batch.remaining > 0
    out = jnp.full((max_steps, num_rows), -1, jnp.int32)
    carry = (jnp.int32(0), pools, batch.tokens, batch.context_lens, live, batch.counts, out, jnp.int32(0))
    step, pools, _, _, _, _, out, refused = jax.lax.while_loop(running, one_step, carry)
    return DecodeOutputs(out, step, refused), pools
