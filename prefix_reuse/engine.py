"""`Engine`: submit, step, generate, stream, score. It runs one loop and owns no policy.

    submit -> [waiting] -> admit (lookup, pages) -> prefill (suffix only) -> offload -> publish -> decode -> release
                           scheduler, host_store    runner, steps            transfer   host_store

One `step()` lands finished copies, admits, prefills one batch, decodes to the next boundary.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from prefix_reuse.binding import bind_store
from prefix_reuse.cache import PrefixCache
from prefix_reuse.capability import PrefixReuseCapability, check_model, get_prefix_reuse_capability
from prefix_reuse.config import EngineConfig, SamplingParams
from prefix_reuse.deterministic import deterministic_means
from prefix_reuse.errors import (
    ConfigError,
    InvalidRequestError,
    PrefixReuseError,
    SnapshotError,
    UnknownRequestError,
)
from prefix_reuse.geometry import StoreGeometry, canonical_device
from prefix_reuse.hashing import weight_fingerprint
from prefix_reuse.host_store import HostPageStore
from prefix_reuse.intake import Intake, Prompt, is_single_prompt
from prefix_reuse.memory import LOG, plan_memory
from prefix_reuse.offload import Offloader
from prefix_reuse.outputs import (
    RequestOutput,
    SampleOutput,
    cut_at_stop,
    find_stop,
)
from prefix_reuse.plan import Chunk
from prefix_reuse.prefetch import Prefetcher
from prefix_reuse.programs import Programs
from prefix_reuse.runner import DeviceRunner, check_refused, stop_ids_of
from prefix_reuse.samples import end_group, form_groups, members, start_followers
from prefix_reuse.scheduler import Scheduler
from prefix_reuse.sequence import Sequence as Row
from prefix_reuse.sequence import SequenceState
from prefix_reuse.snapshot_format import Identity, Refusal
from prefix_reuse.stats import EngineCounters, EngineStats, NumericsStats
from prefix_reuse.steps import PagedModel
from prefix_reuse.stream import TokenStream


@dataclasses.dataclass
class _Request:
    prompt: np.ndarray
    params: SamplingParams
    samples: list[Row]
    logits: list[np.ndarray] = dataclasses.field(default_factory=list)


class Engine:
    """Runs one model with paged KV and, where enabled, prefix reuse. Single-threaded: one caller at a time.

    Args:
      model: see `steps.PagedModel`; `models.load` gives ready ones.
      config: sizes and stages.
      device: a JAX device, its name, or a sharding of one device; default the first one.
      programs: jitted programs of another engine of this model, to compile them only once.
      store: a host store to share with other engines or to outlive this one; default one of its own. A store of another
        geometry is left alone: the engine then runs cold and `stats().disabled_reason` says why.
      clock: seconds, monotonic; replaceable in tests.

    Raises:
      ConfigError: sizes that cannot work. UnsupportedAttentionError: MLA or DSA models.
    """

    def __init__(
        self,
        model: PagedModel,
        config: EngineConfig | None = None,
        *,
        device: Any = None,
        programs: Programs | None = None,
        store: HostPageStore | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        config = config or EngineConfig()
        check_model(model)
        self.model, self.config, self._clock = model, config, clock
        self.max_context = min(config.max_context or model.max_context, model.max_context)
        device = canonical_device(device)
        self.memory = plan_memory(model, config, device)
        means = deterministic_means(model, config, device)
        geometry = StoreGeometry.of(model.kv_groups, config.page_size, device)
        capability = get_prefix_reuse_capability(model, config.page_size)
        self.store, self.capability = bind_store(store, config, self.memory.host_pages, geometry, capability)
        pool_tokens = min(config.num_device_pages, self.store.num_pages) * config.page_size
        if min(pool_tokens, self.max_context) < 2:
            raise ConfigError(
                f"pools of {pool_tokens} tokens and a context of {self.max_context} hold no prompt + 1 token"
            )
        self.pool_tokens = pool_tokens
        self.active = config.m1 and self.capability.supported
        self.counters = EngineCounters()
        if config.compilation_cache:
            enable_compilation_cache()
        self.programs = programs or Programs(model, config, device)
        staging_bytes = self.memory.staging_bytes if self.active else 0
        self.runner = DeviceRunner(model, config, self.max_context, device, self.programs, staging_bytes)
        self.store.listen(self._host_pages_freed)
        self.scheduler = Scheduler(config, self.store, self.runner, self.counters)
        self.offloader = Offloader(config, self.store, self.runner, self.scheduler, self.counters)
        self.prefetcher = Prefetcher(self.store, self.runner, self.scheduler, self.counters)
        fingerprint = weight_fingerprint(self.runner.params) if self.active else ""
        self.intake = Intake(model, config, self.capability, self.max_context, pool_tokens, fingerprint, means)
        platform = {"device": device.device_kind, "jaxlib": importlib.metadata.version("jaxlib")}
        self.cache = PrefixCache(
            self.store,
            self.intake,
            adopt=self.programs.transfer.adopt,
            land=self.offloader.land,
            identity=lambda: Identity(self.intake.base_namespace(), geometry, platform),
            counters=self.counters.snapshot,
            snapshot_dir=config.snapshot_dir,
        )
        self.copies_in_background = device.platform == "gpu"
        """Copies to the host go on while rows decode; a boundary waits for them only when somebody needs them."""
        self._requests: dict[int, _Request] = {}
        self._ids = self.store.ids
        self._finished: list[RequestOutput] = []
        if self.active and config.snapshot_dir is not None:
            self._load_snapshot()

    def _load_snapshot(self) -> None:
        """A snapshot that must not be used is no reason not to start: the engine starts cold and the stats say why."""
        try:
            LOG.info("%s", self.cache.load_snapshot())
        except (SnapshotError, OSError) as error:
            if getattr(error, "reason", "") != Refusal.NONE:
                LOG.warning("the snapshot is not used: %s", error)

    @classmethod
    def from_checkpoint(
        cls,
        path_or_name: Any,
        config: EngineConfig | None = None,
        *,
        progress: Any = None,
        device: Any = None,
        **load: Any,
    ) -> Engine:
        """Loads a checkpoint (folder, GGUF file or known name) with `models.load` and builds an engine around it.

        `load` goes to `models.load`: `dtype`, and `dequantise=True` to expand MXFP4 weights while loading.
        """
        from prefix_reuse.checkpoints import load_model

        return cls(load_model(path_or_name, progress=progress, **load), config, device=device)

    # ---- requests

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        salt: str = "",
        adapter: str = "",
        reuse: bool = True,
    ) -> int:
        """Queues a request and returns its id. Nothing is allocated before `step`.

        Args:
          prompt: text, or token ids.
          salt: requests share pages only with requests of the same salt (tenant isolation).
          adapter: name of the adapter that `params` were merged with, part of the namespace.
          reuse: False computes the request cold and publishes nothing of it.

        Raises:
          InvalidRequestError: empty prompt, token id out of range, wrong dtype, too many stop ids.
          CapacityError: prompt + 1 token does not fit the context or a page pool.
        """
        params = params or SamplingParams()
        try:
            tokens = self.intake.check(self.tokenize(prompt), params)
        except InvalidRequestError:
            self.counters.requests.refused += 1
            raise
        return self._queue(tokens, params, salt, adapter, reuse=reuse, scoring=False)

    def _queue(
        self, tokens: np.ndarray, params: SamplingParams, salt: str, adapter: str, *, reuse: bool, scoring: bool
    ) -> int:
        request_id = next(self._ids)
        namespace = self.namespace(salt, adapter)
        room = min(self.max_context, self.pool_tokens) - len(tokens)
        budget = 0 if scoring else min(params.max_tokens, room)
        answer = budget if budget else int(reuse)  # cold scoring needs no room for a token more
        samples = [
            Row(
                id=next(self._ids),
                request_id=request_id,
                prompt=tokens,
                params=params,
                namespace=namespace,
                stream=i,
                scoring=scoring,
                reuse=reuse,
                budget=budget,
                capacity_tokens=len(tokens) + answer,
                submitted_at=self._clock(),
            )
            for i in range(params.n)
        ]
        if reuse and self.scheduler.suffix_prefill and self.scheduler.share_device:
            num_pages = min(self.config.num_device_pages, self.store.num_pages)
            windows = [
                (w, account.num_pages) for w, account in zip(self.runner.windows, self.runner.accounts, strict=True)
            ]
            form_groups(samples, self.config.page_size, self.config.max_rows, num_pages, windows)
        self._requests[request_id] = _Request(tokens, params, samples)
        self.scheduler.waiting += samples
        self.counters.requests.submitted += 1
        self.prefetcher.look_at(samples[0])
        return request_id

    def tokenize(self, prompt: Prompt) -> np.ndarray:
        """Token ids of a prompt, int32. Raises `InvalidRequestError` for text without a tokenizer or a wrong dtype."""
        return self.intake.tokenize(prompt)

    def namespace(self, salt: str = "", adapter: str = "") -> bytes:
        """Digest of everything that makes pages interchangeable (B4)."""
        return self.intake.namespace(salt, adapter)

    def cancel(self, request_id: int) -> None:
        """Ends a request now and drops exactly what it holds; its output (`cancelled`) comes with the next `step`."""
        request = self._live(request_id)
        for row in request.samples:
            if row.is_live:
                self._complete(row, "cancelled")
        self.counters.requests.cancelled += 1
        self.prefetcher.look_ahead()

    def hold(self, request_id: int) -> None:
        """Takes a decoding request off the device: unfinished pages are copied to the host first, host pages are kept.

        Samples of the request that are not decoding are left as they are. Raises `TransferError`, and leaves the row where
        it is, when its pages cannot be copied.
        """
        for row in self._live(request_id).samples:
            if row.state is SequenceState.IN_DECODE:
                self.offloader.hold(row)
            elif row in self.scheduler.resuming:
                self.scheduler.resuming.remove(row)

    def resume(self, request_id: int) -> None:
        """Lets a held request back in as soon as pages are there."""
        for row in self._live(request_id).samples:
            if row.state is SequenceState.ON_HOLD and row not in self.scheduler.resuming:
                self.scheduler.resuming.append(row)

    def _live(self, request_id: int) -> _Request:
        if request_id not in self._requests:
            raise UnknownRequestError(f"request {request_id} is not live")
        return self._requests[request_id]

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do (requests on hold do not count)."""
        on_hold = sum(1 for r in self.scheduler.running if r.state is SequenceState.ON_HOLD)
        active = len(self.scheduler.running) - on_hold + len(self.scheduler.resuming) + len(self.scheduler.waiting)
        return bool(active or self.offloader.busy or self._finished)

    # ---- the loop

    def step(self) -> list[RequestOutput]:
        """One turn: land copies, admit, prefill one batch, decode to the next boundary. Returns finished requests."""
        self._turn()
        finished, self._finished = self._finished, []
        return finished

    def _turn(self, stream: Row | None = None) -> None:
        """One turn. `stream` is a row whose reader waits for its next token, see `_decode`."""
        self.offloader.land(wait=not self.copies_in_background or self._copies_are_missed())
        self.runner.transfer.tidy()
        for row in self.scheduler.running:
            self.offloader.give_back(row)
        if self.config.poison:
            self.runner.poison_lost_pages()
        try:
            self.scheduler.admit()
        except BaseException:
            self._recover_device()
            raise
        self.prefetcher.look_ahead()  # before anything is dispatched: a copy waits for what was dispatched before it
        try:
            self._prefill()
        except Exception:
            self._decode()  # what one row's prefill does must not stop the others
            raise
        self._decode(stream)

    def _copies_are_missed(self) -> bool:
        """Whether somebody could be let in, or hit, once copies have landed; or there is nothing else to do."""
        scheduler = self.scheduler
        if scheduler.resuming or (scheduler.waiting and (self.runner.accounts[0].free_rows or self.offloader.closing)):
            return True
        return not any(row.is_live and row.state is not SequenceState.ON_HOLD for row in scheduler.running)

    def _prefill(self) -> None:
        chunks, rows = self._next_chunks()
        if not chunks:
            return
        try:
            for chunk, row in zip(chunks, rows, strict=True):
                self.scheduler.slide(row, chunk.start, chunk.start + len(chunk.tokens))
            self._sync_tables()
            outputs = self.runner.prefill(chunks, rows)
            next_tokens, refused = jax.device_get((outputs.next_tokens, outputs.refused))
            check_refused(refused)
            leaders = [(i, row) for i, (chunk, row) in enumerate(zip(chunks, rows, strict=True)) if chunk.is_last]
            further = start_followers(self.runner, leaders, outputs, self.config.page_size)
        except Exception:
            self._prefill_failed(rows)
            raise
        self.counters.prefill.batches += 1
        scores = self.runner.unembed(outputs.hidden) if any(row.scoring for row in rows) else None
        first = 0
        for i, (chunk, row) in enumerate(zip(chunks, rows, strict=True)):
            here = slice(first, first + len(chunk.tokens))
            first = here.stop
            row.prefilled_tokens = chunk.start + len(chunk.tokens)
            row.computed_tokens += len(chunk.tokens)
            self.counters.prefill.computed_tokens += len(chunk.tokens)
            self.scheduler.commit(row, row.prefilled_tokens)
            self.offloader.flush_full_pages(row)
            if row.scoring and scores is not None:
                self._requests[row.request_id].logits.append(scores[here])
            if chunk.is_last:
                row.move_to(SequenceState.PREFILLED)
                end_group(row)
                if row.scoring:
                    self._complete(row, "length")
                else:
                    for sample, token in [(row, int(next_tokens[i])), *further.get(i, [])]:
                        self.scheduler.commit(sample, row.prefilled_tokens)
                        sample.first_token_at = sample.first_token_at or self._clock()
                        self._append(sample, [token])

    def _next_chunks(self) -> tuple[list[Chunk], list[Row]]:
        chunks: list[Chunk] = []
        rows: list[Row] = []
        left = self.config.max_prefill_tokens
        waiting = [r for r in self.scheduler.running if r.state is SequenceState.IN_PREFILL and r.leader is None]
        clean = [r for r in waiting if not r.failed_prefills]
        # A batch that failed is tried row by row, so that one bad row stops nobody else.
        for row in clean or sorted(waiting, key=lambda r: r.failed_prefills)[:1]:
            tokens, start, n = row.tokens, row.prefilled_tokens, row.num_tokens
            end = min(n, start + left)
            if end < n:  # chunks end at page borders, so that a page is computed in one piece
                end -= end % self.config.page_size
            if end <= start:
                break
            chunk = Chunk(row.row_index, tokens[start:end], start, not row.replays, end == n)
            chunks.append(chunk)
            rows.append(row)
            left -= len(chunk.tokens)
        return chunks, rows

    def _prefill_failed(self, rows: list[Row]) -> None:
        self.counters.requests.prefill_failures += 1
        for row in reversed(rows):
            row.failed_prefills += 1
            for sample in reversed(members(row)):
                self.offloader.detach(sample)
                self.scheduler.evict(sample)
        self._recover_device()

    def _recover_device(self) -> None:
        """After a step that failed with the pools donated: nothing on the device is left; rows start over."""
        if not self.runner.lost:
            return
        self.counters.faults.device_resets += 1
        try:
            for row in reversed(self.scheduler.running[:]):
                if row.state is SequenceState.ON_HOLD:
                    continue
                self.offloader.detach(row)
                if not row.is_live:  # completed, its copies had not landed: nothing of it is published
                    self.offloader.closing.remove(row)
                    self.scheduler.release(row)
                    continue
                if row.state is SequenceState.PREFILLED:
                    row.move_to(SequenceState.IN_DECODE)
                self.scheduler.evict(row)
        finally:
            self.runner.reset()

    def _decode(self, stream: Row | None = None) -> None:
        """Decodes to the next boundary; not when the first token of `stream` is there now and nobody else decodes."""
        rows = [r for r in self.scheduler.running if r.state in (SequenceState.PREFILLED, SequenceState.IN_DECODE)]
        if not rows:
            return
        hand_over = rows == [stream] and rows[0].state is SequenceState.PREFILLED
        for row in rows:
            if row.state is SequenceState.PREFILLED:
                self.offloader.share_device_pages(row)
                row.move_to(SequenceState.IN_DECODE)
        if hand_over:
            return
        try:
            for row in rows:
                self.scheduler.slide_to_decode(row)
            self._sync_tables()
            tokens, saved = self.runner.decode(rows, self.config.decode_steps)
        except Exception:
            self._recover_device()
            raise
        self.counters.decode.steps += len(tokens)
        if saved:
            self.counters.decode.shared_prefix_steps += len(tokens)
            self.counters.decode.shared_prefix_tokens_saved += len(tokens) * saved
        for i, row in enumerate(rows):
            new = tokens[:, i]
            new = new[new >= 0].tolist()
            self.counters.decode.tokens += len(new)
            self._append(row, new)
            if row.is_live:
                self.offloader.flush_full_pages(row)

    def _sync_tables(self) -> None:
        if self.config.poison:
            self.runner.poison_lost_pages()  # before a step writes to pages that were reclaimed for it
        context_lens = np.zeros(self.config.max_rows, np.int32)
        for row in self.scheduler.running:
            if row.row is not None:
                context_lens[row.row] = row.committed_kv_tokens
        self.runner.sync_tables(context_lens)

    def _append(self, row: Row, new: list[int]) -> None:
        """Adds sampled tokens, finds out whether they end the row. The last token never has KV yet."""
        num_old = len(row.generated)
        row.generated += new
        reason = None
        if new and new[-1] in stop_ids_of(self.model, row):
            reason = "stop"
        elif row.remaining <= 0:
            limited_by_pool = row.budget < min(row.params.max_tokens, self.max_context - len(row.prompt))
            reason = "capacity" if limited_by_pool else "length"
        if row.params.stop:
            keep = find_stop(self.intake.tokenizer(), row.generated, num_old, row.params.stop)
            if keep is not None:
                del row.generated[keep:]
                reason = "stop"
        self.scheduler.commit(row, row.num_tokens - 1)
        if reason:
            if self.config.publish_generated:
                self.offloader.flush_full_pages(row)
            self._complete(row, reason)

    def _complete(self, row: Row, reason: str) -> None:
        row.move_to(SequenceState.COMPLETED)
        row.finish_reason = reason
        if reason != "cancelled" and row.pending_copies:
            self.offloader.closing.append(row)  # its pages are published when their copies have landed
        else:
            self.offloader.detach(row)
            self.scheduler.release(row)
        request = self._requests[row.request_id]
        if not any(r.is_live for r in request.samples):
            self._finished.append(self._output(row.request_id, request))
            if not row.scoring:
                del self._requests[row.request_id]
            self.counters.requests.completed += reason != "cancelled"

    def _output(self, request_id: int, request: _Request) -> RequestOutput:
        first = request.samples[0]
        tokenizer = getattr(self.model, "tokenizer", None)
        samples = []
        for row in request.samples:
            text = cut_at_stop(tokenizer.decode(row.generated), row.params.stop) if tokenizer is not None else ""
            samples.append(SampleOutput(tuple(row.generated), text, row.finish_reason or ""))
        started = first.first_token_at
        return RequestOutput(
            request_id=request_id,
            prompt_token_ids=request.prompt,
            samples=tuple(samples),
            cached_tokens=first.cached_tokens,
            computed_tokens=len(request.prompt) - first.cached_tokens if first.admitted_before else 0,
            full_hit=first.full_hit,
            ttft_ms=math.nan if started is None else (started - first.submitted_at) * 1e3,
        )

    # ---- pages

    def _host_pages_freed(self, host_pages: np.ndarray) -> None:
        for account in self.runner.accounts:
            account.forget(np.asarray(host_pages).tolist())

    def drop_device_pages(self) -> int:
        """Forgets all cached device pages that no row uses; the next hit loads them from the host. Returns their number."""
        self.offloader.land()
        return sum(account.drop_reclaimable() for account in self.runner.accounts)

    def evict_host_entries(self, n: int) -> int:
        """Evicts up to n index entries that no row uses, by the index's policy. Returns how many pages went."""
        return self.cache.evict(n)

    def clear_cache(self) -> int:
        """Drops every index entry; pages in use are freed when their rows end. Returns the entries dropped."""
        return self.cache.clear()

    def update_params(self, params: Any) -> None:
        """Replaces the weights (same shapes). All cached pages are dropped: they belong to the old weights.

        Raises `PrefixReuseError` while requests are live, `ConfigError` when shapes or dtypes differ.
        """
        if self._requests:
            raise PrefixReuseError(f"{len(self._requests)} requests are live: finish or cancel them before new weights")
        old = jax.tree.map(lambda x: (x.shape, x.dtype), self.runner.params)
        if jax.tree.map(lambda x: (x.shape, x.dtype), params) != old:
            raise ConfigError("new params must have the structure, shapes and dtypes of the old ones")
        self.clear_cache()
        self.runner.params = jax.device_put(params, self.runner.device)
        self.intake.new_weights(weight_fingerprint(params) if self.active else "")

    # ---- whole requests

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        salt: str = "",
        adapter: str = "",
        reuse: bool = True,
    ) -> list[RequestOutput]:
        """Runs prompts to the end and returns their outputs in order. One prompt (text or flat ids) gives a list of one.

        All prompts are checked before any is queued; a bad one raises and nothing runs.
        """
        params = params or SamplingParams()
        batch: list[Any] = [prompts] if is_single_prompt(prompts) else list(prompts)
        checked = [self.intake.check(self.tokenize(p), params) for p in batch]
        ids = [self._queue(tokens, params, salt, adapter, reuse=reuse, scoring=False) for tokens in checked]
        done = self._run(set(ids))
        return [done[i] for i in ids]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        salt: str = "",
        adapter: str = "",
        reuse: bool = True,
    ) -> TokenStream:
        """An iterator over the tokens of one prompt (n = 1) as they come, in groups of up to `decode_steps`.

        The first token comes alone, before anything is decoded, unless other requests are decoding at the time.
        Closing it early (or leaving its `with` block) cancels the request.
        """
        params = params or SamplingParams()
        if params.n != 1:
            raise InvalidRequestError("stream gives one sample; use n=1")
        request_id = self.submit(prompt, params, salt=salt, adapter=adapter, reuse=reuse)
        row = self._requests[request_id].samples[0]

        def advance() -> None:
            self._step_for({request_id}, row)

        def close() -> None:
            if row.is_live:
                self.cancel(request_id)
            self._settle({request_id})

        return TokenStream(row, getattr(self.model, "tokenizer", None), advance, close)

    def score(self, token_ids: Prompt, *, reuse: bool = False, salt: str = "", adapter: str = "") -> Any:
        """Next-token logits of a text, fp32.

        With `reuse=False` the text is computed cold and no host page or index entry is read or changed (device pages that
        only cache something may be reclaimed): returns f32 [T, V].
        With `reuse=True` cached pages are used and new ones published: returns (f32 logits of the computed positions,
        position of the first of them).
        """
        tokens = self.intake.check(self.tokenize(token_ids), SamplingParams(), answer=int(reuse))
        request_id = self._queue(tokens, SamplingParams(), salt, adapter, reuse=reuse, scoring=True)
        try:
            self._run({request_id})
            logits = np.concatenate(self._requests[request_id].logits)
        finally:
            self._requests.pop(request_id, None)
        return (logits, len(tokens) - len(logits)) if reuse else logits

    def _run(self, ids: set[int]) -> dict[int, RequestOutput]:
        """Steps until the requests `ids` are finished and their copies have landed."""
        done: dict[int, RequestOutput] = {}
        try:
            while ids - done.keys():
                done.update(self._step_for(ids))
        except BaseException:
            for request_id in ids - done.keys():
                if any(r.is_live for r in self._live(request_id).samples):
                    self.cancel(request_id)
            raise
        finally:
            self._settle(ids)
        return done

    def _settle(self, ids: set[int]) -> None:
        """Lands what is pending, and drops outputs of `ids` that nobody else waits for."""
        self.offloader.land()
        self._finished = [o for o in self._finished if o.request_id not in ids]

    def _step_for(self, ids: set[int], stream: Row | None = None) -> dict[int, RequestOutput]:
        """One turn; outputs of other requests are kept for their own caller's next `step()`."""
        before = self._progress()
        self._turn(stream)
        done = {o.request_id: o for o in self._finished if o.request_id in ids}
        self._finished = [o for o in self._finished if o.request_id not in ids]
        if not done and self._progress() == before:
            held = sorted({r.request_id for r in self.scheduler.running if r.state is SequenceState.ON_HOLD})
            if held:
                raise PrefixReuseError(f"no room while requests {held} are on hold: resume or cancel one of them")
            raise PrefixReuseError("no request can make progress; this is a fault of the engine")
        return done

    def _progress(self) -> tuple[int, ...]:
        c = self.counters
        waiting = len(self.scheduler.waiting), len(self.scheduler.resuming)
        return (
            c.prefill.batches,
            c.decode.steps,
            c.requests.completed,
            len(self.offloader.pending),
            len(self.offloader.failed),
            len(self.offloader.landed),
            len(self.offloader.closing),
            *waiting,
        )

    # ---- what is going on

    def warmup(self, progress: Any = None) -> Mapping[str, int]:
        """Compiles every bucket, so that no later request compiles anything. Returns compilations by program.

        `progress`: None, True for a bar on the terminal, or a callable that gets each program's name.
        """
        from prefix_reuse.display import track

        if self.scheduler.running:
            raise PrefixReuseError("warm up before requests run: it rewrites the page tables")
        before = dict(self.programs.counter.counts)
        for _ in track(self.runner.warmup(), "compiling", progress, self.runner.num_programs):
            pass
        return {k: v - before.get(k, 0) for k, v in self.programs.counter.counts.items()}

    def get_prefix_reuse_capability(self) -> PrefixReuseCapability:
        """Whether this engine's model can reuse prefixes, and why not (B10)."""
        return self.capability

    @property
    def disabled_reason(self) -> str:
        """Why reuse is not active: `disabled`, or the capability's reason; empty when it is."""
        return "disabled" if not self.config.enable_prefix_reuse else self.capability.reason

    def stats(self) -> EngineStats:
        """A snapshot of all counters; printable."""
        counters = self.counters
        copy = dataclasses.replace
        return EngineStats(
            enabled=self.config.enable_prefix_reuse,
            active=self.active,
            disabled_reason=self.disabled_reason,
            stages={
                "M1": self.active and self.config.m1,
                "M2": self.scheduler.suffix_prefill,
                "M3": self.scheduler.share_device,
            },
            requests=copy(counters.requests),
            prefill=copy(counters.prefill),
            decode=copy(counters.decode),
            faults=copy(counters.faults),
            snapshot=copy(counters.snapshot),
            device=tuple(account.stats() for account in self.runner.accounts),
            host=self.store.stats(),
            compilations=dict(self.programs.counter.counts),
            numerics=NumericsStats.of(self.intake.means, self.programs.matmuls),
        )

    def check_integrity(self) -> None:
        """Raises `IntegrityError` when host store, accounts and live rows disagree (device arrays are not read)."""
        self.store.check_integrity()
        for account in self.runner.accounts:
            account.check_integrity()


def enable_compilation_cache() -> None:
    """Turns on JAX's persistent compilation cache in the user's cache folder, unless a folder is configured already."""
    if jax.config.jax_compilation_cache_dir is None:
        root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        jax.config.update("jax_compilation_cache_dir", os.path.join(root, "prefix_reuse", "xla"))
