"""Which sequences wait, run and finish, and who gets pages: admission and release.

Admission is first come, first served. A row gets its whole need at once, host and device (prompt + budget), so that rows can
never block each other half way; what does not fit waits with nothing held. Of a sliding layer group the whole need is what a
row holds at once (`windows.py`): it takes and gives back pages while it runs, and never waits for one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import Any

import numpy as np

from prefix_reuse.admission import Admission, AdmissionBatch
from prefix_reuse.config import EngineConfig
from prefix_reuse.device_plan import DevicePlan, PageDemand
from prefix_reuse.errors import HostPagesExhausted
from prefix_reuse.host_store import HostPageStore, PrefixRequest, PreparedGroup
from prefix_reuse.lease import LeaseState
from prefix_reuse.plan import pages_for, plan_prefill
from prefix_reuse.runner import DeviceRunner
from prefix_reuse.samples import members
from prefix_reuse.sequence import WAITING, SequenceState
from prefix_reuse.sequence import Sequence as Row
from prefix_reuse.stats import EngineCounters
from prefix_reuse.transfer import Payload, check_part
from prefix_reuse.wave import Wave


class Scheduler:
    """The waiting line, the running rows, and the page decisions about them. Used by one `Engine`."""

    def __init__(self, config: EngineConfig, cache: HostPageStore, runner: DeviceRunner, counters: EngineCounters):
        self.config, self.cache, self.runner, self.counters = config, cache, runner, counters
        self.reuse = cache.index is not None
        self.suffix_prefill = self.reuse and config.m2
        self.share_device = self.reuse and config.m3
        self.waiting: list[Row] = []
        self.running: list[Row] = []
        """Rows that hold pages (IN_PREFILL, PREFILLED, IN_DECODE, ON_HOLD), in order of admission."""
        self.resuming: list[Row] = []
        """Rows on hold that want back in."""

    # ---- admission

    def admit(self) -> None:
        """Moves as many waiting sequences as fit to IN_PREFILL, and resuming ones to IN_DECODE; loads their cached pages.

        All or nothing: when anything raises, everything that this call took is given back.
        """
        while True:
            batch = AdmissionBatch(self.runner.accounts, self.share_device)
            try:
                self._choose(batch)
                if not batch.admissions:
                    return
                plans = batch.plans()
                payloads, bad_pages = self._read_loads(plans)
                if not bad_pages:
                    self._carry_out(batch.admissions, plans, payloads)
                    return
            except BaseException:
                self._give_back(batch.admissions)
                raise
            self._drop_bad_pages(bad_pages, batch.admissions)

    def _choose(self, batch: AdmissionBatch) -> None:
        """Adds what fits now to `batch`, resuming rows first; waiting rows have their host pages then."""
        free_rows = len(self.runner.accounts[0].free_rows)
        for sequence in self.resuming:
            if len(batch) >= free_rows or not batch.try_add(Admission(sequence, self._resume_demands(sequence))):
                return
        wave = Wave(self.config.page_size, self.publishable_tokens)
        share = self.suffix_prefill and self.config.share_in_wave and bool(self.waiting)
        wave.add(self.running if share else ())
        computing = [r for r in self.running if r.state is SequenceState.IN_PREFILL and r.leader is None]
        ahead = sum(r.num_tokens - r.prefilled_tokens for r in computing)
        for sequence in self.waiting:
            if sequence.leader is not None:
                continue  # comes in with its leader
            if len(batch) + len(members(sequence)) > free_rows:
                return
            cached = self.cached_pages(sequence)
            if wave.brings_next_page(sequence, len(cached)):
                self.counters.requests.wave_waits += 1
                continue
            # Its prefill would not run in this turn: meanwhile its pages come over the link, beside what does run.
            must_load_nothing = ahead >= self.config.max_prefill_tokens and self.runner.staging.max_bytes > 0
            if not self._take_host_pages(sequence, cached, batch, must_load_nothing):
                return
            ahead += sequence.num_tokens - (sequence.shared_tokens if self.suffix_prefill else 0)
            wave.add(members(sequence) if share else ())

    def _give_back(self, admissions: list[Admission]) -> None:
        self.counters.decode.rollbacks += 1
        for admission in admissions:
            if admission.sequence.state in WAITING:
                self._release_host(admission)

    def _release_host(self, admission: Admission) -> None:
        if admission.group is not None and admission.group.state is LeaseState.PREPARED:
            self.cache.abort_group(admission.group, admission.sequence)
        self.cache.release(admission.sequence.id)

    def _take_host_pages(
        self, sequence: Row, cached: np.ndarray, batch: AdmissionBatch, must_load_nothing: bool = False
    ) -> bool:
        """Adds a row and its followers to `batch` and allocates their host pages, the hit (`cached`, as of now) attached.

        False, and nothing has changed, when device or host have no room for all of them, or host pages would have to be
        loaded that must not be now.
        """
        mark, first, loads = batch.mark(), len(batch), batch.num_loads
        # Looked at without side effects first, so that a request that has to wait counts and evicts nothing.
        if not batch.try_add(*self._admissions(sequence, cached)):
            return False
        if must_load_nothing and batch.num_loads > loads:
            batch.undo(mark)
            return False
        try:
            group, hit = self._allocate_host_pages(sequence)
        except HostPagesExhausted:
            batch.undo(mark)
            return False
        except BaseException:
            batch.undo(mark)
            raise
        if not np.array_equal(hit, cached):  # what was looked at is not what was taken
            batch.undo(mark)
            batch.add(*self._admissions(sequence, hit))
        if group is not None:
            batch.admissions[first] = replace(batch.admissions[first], group=group)
        return True

    def _admissions(self, sequence: Row, host_pages: np.ndarray) -> list[Admission]:
        """A row and its followers, with a hit of `host_pages`."""
        windows, prompt, room = self.runner.windows, sequence.num_tokens, sequence.capacity_tokens
        num, query = len(host_pages), min(len(host_pages) * self.config.page_size, prompt - 1)
        options: dict[str, Any] = {"prompt_tokens": prompt, "has_followers": bool(sequence.followers)}
        own = tuple(window.demand(host_pages, num, query, room, **options) for window in windows)
        tail = tuple(window.follower_demand(prompt, room) for window in windows) if sequence.followers else ()
        return [Admission(sequence, own), *(Admission(follower, tail) for follower in sequence.followers)]

    def _allocate_host_pages(self, sequence: Row) -> tuple[PreparedGroup | None, np.ndarray]:
        """Host pages of a row and its followers: the group that holds them, if any, and the hit that prefill uses.

        Raises `HostPagesExhausted`, changing nothing.
        """
        if not sequence.uses_host:
            return None, np.zeros(0, np.int32)
        group = None
        if sequence.followers:
            group = self.cache.prepare_group([self._request(row) for row in members(sequence)], sequence)
            hit = group.leases[0].page_ids
        else:
            hit = self.cache.allocate_pages_for_sequences_with_prefix([self._request(sequence)])[0].shared_pages
        for row in members(sequence):
            row.shared_tokens = len(hit) * self.config.page_size
        return group, hit if self.suffix_prefill else hit[:0]

    def cached_pages(self, sequence: Row) -> np.ndarray:
        """Host pages that a lookup would find for prefill now; no side effect."""
        if not (self.suffix_prefill and sequence.reuse and self.cache.index is not None):
            return np.zeros(0, np.int32)
        return self.cache.peek(sequence.tokens, sequence.namespace).page_ids

    def _request(self, sequence: Row) -> PrefixRequest:
        return PrefixRequest(
            sequence_id=sequence.id,
            tokens=sequence.tokens,
            capacity_tokens=sequence.capacity_tokens,
            namespace=sequence.namespace,
            reuse=sequence.reuse,
            counted=not sequence.admitted_before and sequence.leader is None,
            follows=None if sequence.leader is None else sequence.leader.id,
        )

    def demands(self, sequence: Row) -> tuple[PageDemand, ...]:
        """What a row in line would need on the device if it were let in now, by layer group; no side effect."""
        if sequence.state is SequenceState.ON_HOLD:
            return self._resume_demands(sequence)
        return self._admissions(sequence, self.cached_pages(sequence))[0].demands

    def _resume_demands(self, sequence: Row) -> tuple[PageDemand, ...]:
        context = sequence.committed_kv_tokens
        held = np.asarray(self.cache.pages(sequence.id))[: pages_for(context, self.config.page_size)]
        shared = self.num_indexed(held) if self.reuse else 0
        return tuple(w.demand(held, shared, context, sequence.capacity_tokens) for w in self.runner.windows)

    def num_indexed(self, host_pages: np.ndarray) -> int:
        """Leading pages of `host_pages` that are index entries."""
        indexed = np.asarray(self.cache.is_indexed(host_pages))
        return len(indexed) if indexed.all() else int(np.argmin(indexed))

    def _read_loads(self, plans: Sequence[DevicePlan]) -> tuple[dict[int, Payload], list[int]]:
        """The payloads that the plans load something of, and the host pages that could not be read."""
        payloads: dict[int, Payload] = {}
        bad: list[int] = []
        wanted: dict[int, list[int]] = {}
        for group, plan in enumerate(plans):
            for host_page, _ in plan.loads:
                wanted.setdefault(host_page, []).append(group)
        for host_page, groups in wanted.items():
            try:
                payload = self.cache.read(host_page)
                for group in groups:
                    check_part(payload[group], self.runner.pools[group].kv_pages, group)
                payloads[host_page] = payload
            except Exception as error:  # a page that cannot be read is dropped and recomputed, and counted
                self.counters.faults.failed_loads += 1
                self.counters.faults.last_error = f"{type(error).__name__}: {error}"
                bad.append(host_page)
        return payloads, bad

    def _drop_bad_pages(self, bad_pages: list[int], admissions: list[Admission]) -> None:
        """The bad pages and what hangs below them leave the index; rows that wanted them give everything back."""
        for admission in admissions:
            sequence = admission.sequence
            if sequence.state is SequenceState.ON_HOLD:
                if np.isin(admission.demands[0].host_pages, bad_pages).any():
                    self.evict(sequence)  # its own bytes are gone: it computes them again
            else:
                self._release_host(admission)
        for page in bad_pages:
            self.cache.drop_entry(page)

    def _carry_out(self, admissions: list[Admission], plans: list[DevicePlan], payloads: dict[int, Payload]) -> None:
        sequences = [a.sequence for a in admissions]
        rows = self.runner.accounts[0].free_rows[: len(sequences)]
        parts = [[payloads[h][group] for h, _ in plan.loads] for group, plan in enumerate(plans)]
        try:
            allocated = [a.carry_out(p, rows) for a, p in zip(self.runner.accounts, plans, strict=True)]
            if self.config.poison:
                self.runner.poison_lost_pages()
            if payloads:
                targets = [pages[[i for _, i in plan.loads]] for pages, plan in zip(allocated, plans, strict=True)]
                self.runner.load(parts, targets)  # type: ignore[arg-type]
            for admission in admissions:
                if admission.group is not None:
                    self.cache.commit_group(admission.group, admission.sequence)
        except BaseException:
            for account, plan in zip(self.runner.accounts, plans, strict=True):
                for row in rows:
                    account.release(row)
                account.forget(h for h, _ in plan.mirrors)  # nothing was loaded into them
            raise
        self._count_loads(plans, [sum(part.nbytes for part in some if part is not None) for some in parts])
        for sequence, row in zip(sequences, rows, strict=True):
            sequence.row = row
            if sequence.state is SequenceState.ON_HOLD:
                self.resuming.remove(sequence)
                sequence.move_to(SequenceState.IN_DECODE)
            else:
                self.waiting.remove(sequence)
                self.running.append(sequence)
                self._start_prefill(sequence)

    def _count_loads(self, plans: Sequence[DevicePlan], num_bytes: Sequence[int]) -> None:
        decode = self.counters.decode
        decode.host_pages_loaded += reduce(or_, (Counter(h for h, _ in plan.loads) for plan in plans)).total()
        most = max(plans, key=lambda plan: plan.skipped_resident + plan.skipped_duplicate + len(plan.loads))
        decode.loads_skipped_duplicate += most.skipped_duplicate
        decode.loads_skipped_resident += most.skipped_resident
        before = decode.host_bytes_loaded or (0,) * len(plans)
        decode.host_bytes_loaded = tuple(a + b for a, b in zip(before, num_bytes, strict=True))

    # ---- sliding windows

    def slide(self, sequence: Row, query: int, end_tokens: int | None = None) -> None:
        """Gives back the device pages that no query from position `query` on reads; maps pages for `end_tokens` tokens.

        Their bytes have been copied to the host, or their copy was started (`Offloader.give_back`).
        """
        for window, account in zip(self.runner.windows, self.runner.accounts, strict=True):
            if window.window is not None:
                end = None if end_tokens is None else pages_for(end_tokens, self.config.page_size)
                given = account.slide(sequence.row_index, window.first(query), end)
                self.counters.decode.window_pages_returned += given

    def slide_to_decode(self, sequence: Row) -> None:
        """Before a decode call: what its window has passed goes, and the pages of all its steps are there."""
        context = sequence.committed_kv_tokens
        self.slide(sequence, context, context + min(self.config.decode_steps, max(sequence.remaining, 0)))
        for account in self.runner.accounts:
            account.settle(sequence.row_index)

    def _start_prefill(self, sequence: Row) -> None:
        sequence.move_to(SequenceState.IN_PREFILL)
        if sequence.leader is not None:  # it waits for the prompt that its leader computes, and counts nothing
            sequence.admitted_before = True
            return
        hit = sequence.shared_tokens if self.suffix_prefill else 0
        plan = plan_prefill(sequence.tokens, hit, self.config.page_size)
        # Cached pages are on the host already: the offload starts behind them, whether or not they are computed again.
        sequence.offloaded_pages = sequence.shared_tokens // self.config.page_size
        sequence.prefilled_tokens = plan.query_start
        sequence.replays = plan.is_full_hit
        self.commit(sequence, hit)
        prefill = self.counters.prefill
        if sequence.admitted_before:
            prefill.resumed_tokens += sequence.num_tokens
            return
        sequence.admitted_before = True
        n = len(sequence.prompt)
        sequence.full_hit = plan.is_full_hit
        sequence.cached_tokens = plan.cached_tokens
        prefill.prompt_tokens += n
        prefill.cached_tokens += sequence.cached_tokens
        prefill.full_hits += sequence.full_hit
        prefill.hits += hit > 0
        prefill.misses += hit == 0

    def commit(self, sequence: Row, tokens: int) -> None:
        """KV of the first `tokens` tokens of the sequence is written."""
        sequence.committed_kv_tokens = tokens
        if sequence.uses_host:
            self.cache.set_context(sequence.id, tokens)

    def publishable_tokens(self, sequence: Row) -> int:
        """Tokens whose full pages may become index entries once computed: the prompt, or everything by option."""
        if not self.config.publish_generated or not sequence.generated:
            return len(sequence.prompt)
        return sequence.num_tokens - 1  # the last token has no KV yet

    # ---- release

    def release(self, sequence: Row) -> None:
        """Gives back everything that `sequence` holds; its published pages live on. Idempotent."""
        for account in self.runner.accounts:
            account.release(sequence.row)
        self.cache.release(sequence.id)
        sequence.forget_progress()
        for line in (self.running, self.resuming, self.waiting):
            if sequence in line:
                line.remove(sequence)

    def evict(self, sequence: Row) -> None:
        """Takes all pages from a running sequence; it waits at the head of the line with its tokens and budget kept."""
        target = SequenceState.EVICTED if sequence.generated or sequence.state is not SequenceState.IN_PREFILL else None
        self.release(sequence)
        sequence.move_to(target or SequenceState.QUEUEING)
        self.counters.requests.reentries += 1
        self.waiting.insert(0, sequence)

    def release_device(self, sequence: Row) -> None:
        """Gives back the device pages only (a row that goes on hold)."""
        for account in self.runner.accounts:
            account.release(sequence.row)
        sequence.row = None
