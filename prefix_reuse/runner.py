"""`DeviceRunner`: holds the device state of an engine and runs the jitted steps on it, in bucketed shapes.

It is told what to do by plans; it decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from prefix_reuse import device_pages
from prefix_reuse.config import EngineConfig
from prefix_reuse.deterministic import ONE_PROGRAM, deterministic_means
from prefix_reuse.device_pool import DevicePool
from prefix_reuse.errors import IntegrityError
from prefix_reuse.host_part import HostPart
from prefix_reuse.memory import device_pages_of, group_windows
from prefix_reuse.plan import Chunk, PrefillBatch, bucket, pack_chunks, pages_for
from prefix_reuse.programs import Programs
from prefix_reuse.sampling import SamplingState, sampling_state, token_counts
from prefix_reuse.sequence import Sequence as Row
from prefix_reuse.shared_decode import SharedPrefixPlanner
from prefix_reuse.staging import Staging
from prefix_reuse.steps import DecodeInputs, PagedModel, PrefillInputs, PrefillOutputs
from prefix_reuse.transfer import PendingCopy


class DeviceRunner:
    """Device pools (one `DevicePages` and one `DevicePool` per layer group), params, jitted steps and their buckets."""

    def __init__(
        self,
        model: PagedModel,
        config: EngineConfig,
        max_context: int,
        device: Any,
        programs: Programs,
        staging_bytes: int = 0,
    ):
        self.model, self.config, self.device = model, config, device
        self.max_columns = pages_for(max_context, config.page_size)
        self.params = jax.device_put(model.params, device)
        programs.check(model, config, device)
        self.programs = programs
        self._one_program = deterministic_means(model, config, device) == ONE_PROGRAM
        programs.prove_matmuls({*self.prefill_buckets, *self.decode_buckets, config.max_rows})
        self.transfer = programs.transfer
        self.windows = group_windows(model.kv_groups, config)
        self.accounts = tuple(
            DevicePool(pages, config.page_size, config.max_rows, self.max_columns, chunk_pages=window.chunk_pages)
            for window, pages in zip(self.windows, device_pages_of(self.windows, config), strict=True)
        )
        self.pools = self._create_pools()
        self.staging = Staging(device, staging_bytes)
        self.shared = SharedPrefixPlanner(model.kv_groups, config, self.max_columns, device)
        self.context_lens = np.zeros(config.max_rows, np.int32)
        """Tokens of each row whose KV is written; goes to the device with the tables."""
        self.last_prefill: PrefillBatch | None = None
        """Immutable snapshot of the last prefill batch (B13)."""
        self._no_counts: dict[int, jax.Array] = {}
        self._greedy: dict[int, SamplingState] = {}

    def _create_pools(self) -> tuple[device_pages.DevicePages, ...]:
        config = self.config
        with jax.default_device(self.device):
            pools = tuple(
                device_pages.create(
                    group,
                    num_pages=account.num_pages,
                    page_size=config.page_size,
                    max_rows=config.max_rows,
                    max_columns=self.max_columns,
                    fill=float("nan") if config.poison else 0.0,
                )
                for group, account in zip(self.model.kv_groups, self.accounts, strict=True)
            )
        # Committed from the start: a later host page would commit them, and every program would be compiled again.
        return jax.device_put(pools, self.device)

    # ---- buckets

    @property
    def prefill_buckets(self) -> list[int]:
        """Token counts of prefill programs; the row count is always `max_rows`. One only where it computes everything."""
        largest = self.config.max_prefill_tokens
        if self._one_program:
            return [largest]
        return _powers(min(self.config.min_prefill_tokens, largest), largest)

    @property
    def decode_buckets(self) -> list[int]:
        """Row counts of decode programs; none where the prefill program decodes, too."""
        if self._one_program:
            return []
        return _powers(min(self.config.min_decode_rows, self.config.max_rows), self.config.max_rows)

    # ---- tables

    def sync_tables(self) -> None:
        """Brings the device tables to what the accounts say, if they changed. A prefill brings them along by itself."""
        if any(account.dirty for account in self.accounts):
            self.pools = self.programs.rebuild(self.pools, self._tables())
            self._synced()

    def _tables(self) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], ...]:
        return tuple((account.page_table, account.shared_pages, self.context_lens) for account in self.accounts)

    def _synced(self) -> None:
        for account in self.accounts:
            account.dirty = False

    # ---- steps

    def prefill(self, chunks: Sequence[Chunk], rows: Sequence[Row]) -> PrefillOutputs:
        """Runs one packed prefill batch over the tables of now; chunk i belongs to sequence `rows[i]`. Writes K/V in place."""
        batch = self._pack(chunks)
        self.last_prefill = batch
        outputs = self._run_packed(batch)
        return self._drawn(outputs, rows) if any(chunk.is_last for chunk in chunks) else outputs

    def _pack(self, chunks: Sequence[Chunk]) -> PrefillBatch:
        buckets, num_rows = self.prefill_buckets, self.config.max_rows
        num_tokens = bucket(sum(len(c.tokens) for c in chunks), buckets[0], buckets[-1])
        return pack_chunks(chunks, num_tokens=num_tokens, num_rows=num_rows, table_rows=num_rows)

    def _run_packed(self, batch: PrefillBatch) -> PrefillOutputs:
        inputs = prefill_inputs(batch, self._tables())
        outputs, self.pools = self.programs.prefill(self.params, self.pools, inputs)
        self._synced()
        return outputs

    def decode(self, rows: Sequence[Row], num_steps: int) -> tuple[np.ndarray, int]:
        """Decodes up to `num_steps` tokens for each row.

        Returns tokens int32 [steps, B], -1 where the row had ended, and the tokens of K and V that shared reading saved each
        layer in each step. Raises `IntegrityError` when a write was refused.
        """
        config = self.config
        if self._one_program:
            return self._decode_packed(rows, num_steps), 0
        size = bucket(len(rows), min(config.min_decode_rows, config.max_rows), config.max_rows)
        pad = size - len(rows)

        def column(values: list[int], fill: int) -> np.ndarray:
            return np.array(values + [fill] * pad, np.int32)

        plans, saved = self.shared.plan(self.accounts, rows, size)
        stop_ids = np.full((size, config.max_stop_ids), -1, np.int32)
        for i, row in enumerate(rows):
            ids = stop_ids_of(self.model, row)
            stop_ids[i, : len(ids)] = ids
        inputs = DecodeInputs(
            rows=column([row.row_index for row in rows], config.max_rows),  # type: ignore[arg-type]
            tokens=column([row.last_token for row in rows], 0),  # type: ignore[arg-type]
            context_lens=column([row.committed_kv_tokens for row in rows], 0),  # type: ignore[arg-type]
            remaining=column([row.remaining for row in rows], 0),  # type: ignore[arg-type]
            stop_ids=stop_ids,  # type: ignore[arg-type]
            num_steps=np.int32(num_steps),  # type: ignore[arg-type]
            shared=plans,
            **self._sampling(rows, size),
        )
        outputs, self.pools = self.programs.decode(self.params, self.pools, inputs)
        tokens, steps, refused = jax.device_get((outputs.tokens, outputs.steps, outputs.refused))
        check_refused(refused)
        return tokens[: int(steps), : len(rows)], saved

    def _decode_packed(self, rows: Sequence[Row], num_steps: int) -> np.ndarray:
        """`decode` by the prefill program: in each step one query of every row that goes on. Tokens int32 [steps, B]."""
        out = np.full((num_steps, len(rows)), -1, np.int32)
        last = np.array([row.last_token for row in rows], np.int32)
        live = [i for i, row in enumerate(rows) if row.remaining > 0]
        step = 0
        while live and step < num_steps:
            chunks = [
                Chunk(rows[i].row_index, last[i : i + 1], rows[i].committed_kv_tokens + step, True, True) for i in live
            ]
            outputs = self._run_packed(self._pack(chunks))
            outputs = self._drawn(outputs, [rows[i] for i in live], [out[:step, i] for i in live])
            tokens, refused = jax.device_get((outputs.next_tokens, outputs.refused))
            check_refused(refused)
            out[step, live] = last[live] = tokens[: len(live)]
            step += 1
            live = [i for i in live if step < rows[i].remaining and last[i] not in stop_ids_of(self.model, rows[i])]
        return out[:step]

    def _drawn(self, outputs: PrefillOutputs, rows: Sequence[Row], new: Sequence[np.ndarray] = ()) -> PrefillOutputs:
        """`outputs` with the next token that each row's parameters ask for; `new` as in `_sampling`."""
        if is_greedy(rows):
            return outputs
        return outputs.replace(next_tokens=self._sample(outputs.logits, range(len(rows)), rows, new))

    def _sample(
        self, logits: jax.Array, places: Sequence[int], rows: Sequence[Row], new: Sequence[np.ndarray] = ()
    ) -> jax.Array:
        """int32 [max_rows]: a token for each of `rows`, after the logits at its place; `new` as in `_sampling`."""
        index = np.zeros(self.config.max_rows, np.int32)
        index[: len(places)] = places
        state = self._sampling(rows, len(index), new)
        return self.programs.sample(logits, (index, state["counts"], state["sampling"], state["index"]))

    def _sampling(self, rows: Sequence[Row], size: int, new: Sequence[np.ndarray] = ()) -> dict[str, Any]:
        """Sampling inputs of a batch of `size`; `new` are tokens of each row that it has not been given yet."""
        new = new or [np.zeros(0, np.int32)] * len(rows)
        if is_greedy(rows):
            state = self._greedy_state(size)
        else:
            state = sampling_state([r.params for r in rows], [r.stream for r in rows], size)
        index = np.zeros(size, np.int32)
        index[: len(rows)] = [len(r.generated) + len(n) for r, n in zip(rows, new, strict=True)]
        if any(r.params.uses_penalties for r in rows):
            texts = [np.concatenate([r.tokens, n]) for r, n in zip(rows, new, strict=True)]
            # On the device as below: packed with the small arrays they would make another program of each bucket.
            counts = jax.device_put(token_counts(texts, size, self.model.vocab_size), self.device)
        else:
            if size not in self._no_counts:
                self._no_counts[size] = jax.device_put(token_counts([], size, self.model.vocab_size), self.device)
            counts = self._no_counts[size]
        return {"sampling": state, "counts": counts, "index": index}

    def _greedy_state(self, size: int) -> SamplingState:
        """Of a batch whose rows are all greedy, so that nothing else about them is read; made once for each size."""
        if size not in self._greedy:
            self._greedy[size] = sampling_state([], [], size)
        return self._greedy[size]

    def sample_again(self, outputs: PrefillOutputs, batch_rows: Sequence[int], rows: Sequence[Row]) -> np.ndarray:
        """int32 [N]: first tokens of N further samples; sample i continues row `batch_rows[i]` of the last prefill batch."""
        return np.asarray(self._sample(outputs.logits, batch_rows, rows))[: len(rows)]

    def copy_tails(self, tails: Sequence[Sequence[tuple[int, int]]]) -> None:
        """Copies device pages within each pool: for each layer group (page, copy) pairs, at most one per row."""
        pools = []
        for pool, pairs in zip(self.pools, tails, strict=True):
            ids = np.full((2, self.config.max_rows), device_pages.UNUSED, np.int32)
            ids[:, : len(pairs)] = np.array(pairs, np.int32).reshape(-1, 2).T
            pools.append(pool.replace(kv_pages=self.programs.copy_pages(pool.kv_pages, ids[0], ids[1])))
        self.pools = tuple(pools)

    def unembed(self, hidden: jax.Array) -> np.ndarray:
        """f32 [N, V] logits on the host."""
        return np.asarray(self.programs.unembed(self.params, hidden))

    # ---- pages

    def offload(
        self, row_pages: Sequence[np.ndarray], host_pages: np.ndarray, lengths: Sequence[int] | None = None
    ) -> PendingCopy:
        """Starts copying device pages of rows (per group int32 [N]; -1 = the group has none; `lengths` of each row)."""
        return self.transfer.offload([p.kv_pages for p in self.pools], row_pages, host_pages, lengths)

    def load(self, parts: Sequence[Sequence[HostPart | np.ndarray]], pages: Sequence[np.ndarray]) -> None:
        """Copies parts of host pages (for each group [N]) into device pages (for each group int32 [N]); waits for nothing.

        What is staged comes from there. A failure drops it, so that the next try copies everything anew.
        """
        try:
            kv = self.transfer.load([p.kv_pages for p in self.pools], parts, pages, self.staging.arrays)
        except BaseException:
            self.staging.clear()
            raise
        self.pools = tuple(pool.replace(kv_pages=k) for pool, k in zip(self.pools, kv, strict=True))

    def poison_lost_pages(self) -> None:
        """Fills device pages that were freed or reclaimed with NaN (poison mode: their old contents must never be read)."""
        pools = []
        for pool, account in zip(self.pools, self.accounts, strict=True):
            kv_pages = pool.kv_pages
            for page in account.take_freed():
                kv_pages = self.programs.poison(kv_pages, np.int32(page))
            pools.append(pool.replace(kv_pages=kv_pages))
        self.pools = tuple(pools)

    @property
    def lost(self) -> bool:
        """A step failed after it had taken the pools: their contents are gone."""
        return any(leaf.is_deleted() for leaf in jax.tree.leaves(self.pools))

    def reset(self) -> None:
        """Fresh, empty pools and accounts; nothing is staged."""
        self.staging.clear()
        self.pools = self._create_pools()
        for account in self.accounts:
            account.reset()

    # ---- warm-up

    def warmup_steps(self, host_bytes: int = 0) -> int:
        """How many names `warmup` yields."""
        return (host_bytes > 0) + 1 + len(self.prefill_buckets) + len(self.decode_buckets) + len(self._page_moves())

    def warmup(self, host_bytes: int = 0) -> Iterator[str]:
        """Reserves pinned memory and compiles every bucket, yielding the name of what comes next. Only without live rows."""
        config = self.config
        if host_bytes > 0:
            yield f"{host_bytes / 1e9:.1f} GB of host pages"
            self.transfer.reserve(host_bytes)
        for account in self.accounts:
            account.dirty = True
        yield "page tables"
        self.sync_tables()
        for size in self.prefill_buckets:
            yield f"prefill {size} tokens"
            batch = pack_chunks([], num_tokens=size, num_rows=config.max_rows, table_rows=config.max_rows)
            outputs = self._run_packed(batch)
            self.unembed(outputs.hidden)
            self.sample_again(outputs, [], [])
        self.copy_tails([[] for _ in self.pools])
        for size in self.decode_buckets:
            yield f"decode {size} rows"
            self._warmup_decode(size)
        if config.poison:
            # Nothing lives in page 0 yet.
            self.pools = tuple(
                pool.replace(kv_pages=self.programs.poison(pool.kv_pages, np.int32(0))) for pool in self.pools
            )
        for name, move in self._page_moves():
            yield name
            kv = move([pool.kv_pages for pool in self.pools])
            self.pools = tuple(pool.replace(kv_pages=k) for pool, k in zip(self.pools, kv, strict=True))
        jax.block_until_ready(self.pools)

    def _page_moves(self) -> list[tuple[str, Any]]:
        pools = [pool.kv_pages for pool in self.pools]
        return self.transfer.warmups(pools, self.staging if self.staging.max_bytes else None)

    def _warmup_decode(self, size: int) -> None:
        config = self.config
        nothing = np.zeros(size, np.int32)
        for plans in self.shared.warmup_plans(size):
            inputs = DecodeInputs(
                rows=nothing + config.max_rows,  # type: ignore[arg-type]
                tokens=nothing,  # type: ignore[arg-type]
                context_lens=nothing,  # type: ignore[arg-type]
                remaining=nothing,  # type: ignore[arg-type]
                stop_ids=np.full((size, config.max_stop_ids), -1, np.int32),  # type: ignore[arg-type]
                num_steps=np.int32(config.decode_steps),  # type: ignore[arg-type]
                shared=plans,
                **self._sampling([], size),
            )
            _, self.pools = self.programs.decode(self.params, self.pools, inputs)


def prefill_inputs(batch: PrefillBatch, tables: Any = None) -> PrefillInputs:
    """The arrays of a packed batch, as the prefill step takes them; `tables` as in `PrefillInputs`."""
    return PrefillInputs(
        tokens=batch.tokens,  # type: ignore[arg-type]
        positions=batch.positions,  # type: ignore[arg-type]
        token_rows=batch.token_rows,  # type: ignore[arg-type]
        writes_kv=batch.writes_kv,  # type: ignore[arg-type]
        rows=batch.rows,  # type: ignore[arg-type]
        q_offsets=batch.lengths.query_offsets,  # type: ignore[arg-type]
        kv_lens=batch.lengths.kv_seq_lengths,  # type: ignore[arg-type]
        tables=tables,
    )


def is_greedy(rows: Sequence[Row]) -> bool:
    """Whether every row takes its likeliest token, so that nothing of `SamplingState` is read."""
    return all(row.params.temperature == 0 and not row.params.uses_penalties for row in rows)


def check_refused(refused: Any) -> None:
    """Raises `IntegrityError` when a step refused writes: the host's plan aimed at a shared page."""
    if int(refused):
        raise IntegrityError(
            f"{int(refused)} K/V writes were aimed at pages that are shared or not owned; none was made"
        )


def stop_ids_of(model: PagedModel, row: Row) -> tuple[int, ...]:
    """Token ids that end the row: its own and, unless ignored, the model's end ids."""
    eos = () if row.params.ignore_eos else tuple(model.eos_token_ids)
    return tuple(dict.fromkeys((*eos, *row.params.stop_token_ids)))


def _powers(smallest: int, largest: int) -> list[int]:
    """Powers of two from `smallest` up, ending with `largest` itself."""
    sizes = []
    while smallest < largest:
        sizes.append(smallest)
        smallest *= 2
    return [*sizes, largest]
