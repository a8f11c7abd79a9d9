"""`Engine`: submit, step, generate, stream, score. It runs one loop and owns no policy.

    submit -> [waiting] -> admit (lookup, pages) -> prefill (suffix only) -> offload -> publish -> decode -> release
                           scheduler, host_store    runner, steps            transfer   host_store

One `step()` lands finished copies, admits, prefills one batch, decodes to the next boundary.

    engine.py         what a caller sees            engine_rows.py    tokens, ends and outputs of rows
    engine_runs.py    requests, until they end      engine_state.py   the parts, put together
    engine_loop.py    one turn
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from prefix_reuse.capability import PrefixReuseCapability
from prefix_reuse.config import EngineConfig, SamplingParams
from prefix_reuse.engine_runs import EngineRuns
from prefix_reuse.errors import ConfigError, InvalidRequestError, PrefixReuseError
from prefix_reuse.hashing import weight_fingerprint
from prefix_reuse.intake import Prompt, is_single_prompt
from prefix_reuse.outputs import RequestOutput
from prefix_reuse.sequence import SequenceState
from prefix_reuse.stats import EngineStats, NumericsStats
from prefix_reuse.stream import TokenStream


class Engine(EngineRuns):
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

    def tokenize(self, prompt: Prompt) -> np.ndarray:
        """Token ids of a prompt, int32. Raises `InvalidRequestError` for text without a tokenizer or a wrong dtype."""
        return self.intake.tokenize(prompt)

    def namespace(self, salt: str = "", adapter: str = "") -> bytes:
        """Digest of everything that makes pages interchangeable (B4)."""
        return self.intake.namespace(salt, adapter)

    def cancel(self, request_id: int) -> None:
        """Ends a request now and drops exactly what it holds; its output (`cancelled`) comes with the next `step`."""
        self._cancel(request_id)

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

    def step(self) -> list[RequestOutput]:
        """One turn: land copies, admit, prefill one batch, decode to the next boundary. Returns finished requests."""
        self._turn()
        finished, self._finished = self._finished, []
        return finished

    # ---- pages

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

    # ---- what is going on

    def warmup(self, progress: Any = None, *, pin_host_pages: bool = True) -> Mapping[str, int]:
        """Does ahead what requests would wait for: afterwards none compiles anything, and none waits for memory to be pinned.

        Args:
          progress: None, True for a bar on the terminal, or a callable that gets the name of what comes next.
          pin_host_pages: on a GPU, take the memory of all free host pages from the system now (half a second a gigabyte).
            False: it grows with what is cached, by doubling, and a copy that meets a doubling takes up to seconds.

        Returns:
          Compilations by program.

        Raises:
          PrefixReuseError: requests run. TransferError: there is not so much host memory.
        """
        from prefix_reuse.display import track

        if self.scheduler.running:
            raise PrefixReuseError("warm up before requests run: it rewrites the page tables")
        before = dict(self.programs.counter.counts)
        pins = pin_host_pages and self.active and self.runner.transfer.pins_memory
        host_bytes = self.store.num_free * self.memory.page_bytes if pins else 0
        for _ in track(self.runner.warmup(host_bytes), "warming up", progress, self.runner.warmup_steps(host_bytes)):
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
