"""Requests are queued, and turns are taken until those that somebody waits for are finished."""

from __future__ import annotations

import numpy as np

from prefix_reuse.config import SamplingParams
from prefix_reuse.engine_loop import EngineLoop
from prefix_reuse.engine_state import Request
from prefix_reuse.errors import PrefixReuseError
from prefix_reuse.outputs import RequestOutput
from prefix_reuse.samples import form_groups
from prefix_reuse.sequence import Sequence as Row
from prefix_reuse.sequence import SequenceState


class EngineRuns(EngineLoop):
    """The part of `Engine` that runs requests to the end."""

    def _queue(
        self, tokens: np.ndarray, params: SamplingParams, salt: str, adapter: str, *, reuse: bool, scoring: bool
    ) -> int:
        request_id = next(self._ids)
        namespace = self.intake.namespace(salt, adapter)
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
        self._requests[request_id] = Request(tokens, params, samples)
        self.scheduler.waiting += samples
        self.counters.requests.submitted += 1
        self.prefetcher.look_at(samples[0])
        return request_id

    def _run(self, ids: set[int]) -> dict[int, RequestOutput]:
        """Steps until the requests `ids` are finished and their copies have landed."""
        done: dict[int, RequestOutput] = {}
        try:
            while ids - done.keys():
                done.update(self._step_for(ids))
        except BaseException:
            for request_id in ids - done.keys():
                if any(r.is_live for r in self._live(request_id).samples):
                    self._cancel(request_id)
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
