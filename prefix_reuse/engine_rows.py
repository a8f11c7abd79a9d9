"""How rows of an engine go on: sampled tokens, ends, outputs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from prefix_reuse.engine_state import EngineState, Request
from prefix_reuse.outputs import RequestOutput, SampleOutput, cut_at_stop, find_stop
from prefix_reuse.runner import stop_ids_of
from prefix_reuse.sequence import Sequence as Row
from prefix_reuse.sequence import SequenceState


class EngineRows(EngineState):
    """The part of `Engine` that takes sampled tokens, and ends rows and requests."""

    def _append(self, new: Sequence[tuple[Row, list[int]]], ended: Iterable[tuple[Row, str]] = ()) -> None:
        """Adds sampled tokens to rows, starts copying what became full to the host, and ends the rows that have ended.

        What raises, a tokenizer for instance, does so after all rows have their tokens.
        """
        ended, errors = list(ended), []
        for row, tokens in new:
            try:
                reason = self._extend(row, tokens)
            except Exception as error:
                errors.append(error)
                continue
            if reason:
                ended.append((row, reason))
        gone = set() if self.config.publish_generated else {row.id for row, _ in ended}
        self.offloader.flush_full_pages(row for row, _ in new if row.id not in gone)
        for row, reason in ended:
            try:
                self._complete(row, reason)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _extend(self, row: Row, new: list[int]) -> str | None:
        """Adds sampled tokens; says why they end the row, if they do. The last token never has KV yet."""
        row.generated += new
        self.scheduler.commit(row, row.num_tokens - 1)
        reason = None
        if new and new[-1] in stop_ids_of(self.model, row):
            reason = "stop"
        elif row.remaining <= 0:
            limited_by_pool = row.budget < min(row.params.max_tokens, self.max_context - len(row.prompt))
            reason = "capacity" if limited_by_pool else "length"
        if row.params.stop:
            keep = find_stop(self.intake.tokenizer(), row.generated, row.searched_tokens, row.params.stop)
            row.searched_tokens = len(row.generated)
            if keep is not None:
                del row.generated[keep:]
                self.scheduler.commit(row, row.num_tokens - 1)
                reason = "stop"
        return reason

    def _complete(self, row: Row, reason: str) -> None:
        row.move_to(SequenceState.COMPLETED)
        row.finish_reason = reason
        if reason != "cancelled" and row.pending_copies:
            self.offloader.closing.append(row)  # its pages are published when their copies have landed
        else:
            self.offloader.detach(row)
            self.scheduler.release(row)
        request = self._requests[row.request_id]
        if any(r.is_live for r in request.samples):
            return
        output, error = self._output(row.request_id, request)
        self._finished.append(output)
        if not row.scoring:
            del self._requests[row.request_id]
        self.counters.requests.completed += reason != "cancelled"
        if error is not None:
            raise error

    def _output(self, request_id: int, request: Request) -> tuple[RequestOutput, Exception | None]:
        """What the request gives back; and what a tokenizer raised, which leaves the text of that sample empty."""
        first, error = request.samples[0], None
        tokenizer = getattr(self.model, "tokenizer", None)
        samples = []
        for row in request.samples:
            text = ""
            try:
                if tokenizer is not None:
                    text = cut_at_stop(tokenizer.decode(row.generated), row.params.stop)
            except Exception as reason:
                error = error or reason
            samples.append(SampleOutput(tuple(row.generated), text, row.finish_reason or ""))
        started = first.first_token_at
        output = RequestOutput(
            request_id=request_id,
            prompt_token_ids=request.prompt,
            samples=tuple(samples),
            cached_tokens=first.cached_tokens,
            computed_tokens=len(request.prompt) - first.cached_tokens if first.admitted_before else 0,
            full_hit=first.full_hit,
            ttft_ms=math.nan if started is None else (started - first.submitted_at) * 1e3,
        )
        return output, error

    def _cancel(self, request_id: int) -> None:
        """See `Engine.cancel`."""
        request = self._live(request_id)
        self.counters.requests.cancelled += 1
        try:
            for row in request.samples:
                if row.is_live:
                    self._complete(row, "cancelled")
        finally:
            self.prefetcher.look_ahead()
