"""One turn of an engine.

    (land copies -> admit -> prefetch -> prefill one batch -> offload, publish), as often as `prefill_calls` allows
    -> decode to the next boundary

A step that fails gives back what it took; where the pools are lost with it, all rows start over (`_recover_device`).
"""

from __future__ import annotations

import jax

from prefix_reuse.engine_rows import EngineRows
from prefix_reuse.plan import Chunk
from prefix_reuse.runner import check_refused
from prefix_reuse.samples import end_group, members, start_followers
from prefix_reuse.sequence import Sequence as Row
from prefix_reuse.sequence import SequenceState

MOST_SPARSE = 16
"""Bundles of host pages with few pages left that may wait for a turn in which nobody waits for a prefill."""


class EngineLoop(EngineRows):
    """The part of `Engine` that runs the loop; what to do is decided by scheduler and offloader, and done by the runner."""

    def _turn(self, stream: Row | None = None) -> None:
        """One turn. `stream` is a row whose reader waits for its next token, see `_decode`."""
        for _ in range(self.config.prefill_calls):
            self._let_in()
            try:
                prefilled = self._prefill()
            except Exception:
                self._decode()  # what one row's prefill does must not stop the others
                raise
            if not (prefilled and self._prefill_is_missed()):
                break
        self._decode(stream)

    def _let_in(self) -> None:
        """What comes before a prefill: copies land, pages are given back, rows are admitted."""
        self.offloader.land(wait=not self.copies_in_background or self._copies_are_missed())
        if not self._prefill_is_missed() or self.runner.transfer.sparse_bundles > MOST_SPARSE:
            self._tidy()  # takes milliseconds: not while somebody waits for a first token
        self.offloader.give_back()
        if self.config.poison:
            self.runner.poison_lost_pages()
        try:
            self.scheduler.admit()
        except BaseException:
            self._recover_device()
            raise
        self.prefetcher.look_ahead()  # before anything is dispatched: a copy waits for what was dispatched before it

    def _prefill_is_missed(self) -> bool:
        """Whether a row waits for its prefill, or could be let in."""
        scheduler = self.scheduler
        if scheduler.waiting and self.runner.accounts[0].free_rows:
            return True
        return any(row.state is SequenceState.IN_PREFILL for row in scheduler.running)

    def _copies_are_missed(self) -> bool:
        """Whether somebody could be let in, or hit, once copies have landed; or there is nothing else to do."""
        scheduler = self.scheduler
        if scheduler.resuming or (scheduler.waiting and (self.runner.accounts[0].free_rows or self.offloader.closing)):
            return True
        return not any(row.is_live and row.state is not SequenceState.ON_HOLD for row in scheduler.running)

    def _prefill(self) -> bool:
        """One call; whether there was anything to do."""
        chunks, rows = self._next_chunks()
        if not chunks:
            return False
        try:
            for chunk, row in zip(chunks, rows, strict=True):
                self.scheduler.slide(row, chunk.start, chunk.end)
            self._prepare_step()
            outputs = self.runner.prefill(chunks, rows)
            for array in (outputs.next_tokens, outputs.refused):
                array.copy_to_host_async()  # not behind the pages
            for chunk, row in zip(chunks, rows, strict=True):
                row.prefilled_tokens = chunk.end
                self.scheduler.commit(row, row.prefilled_tokens)
            self.offloader.flush_full_pages(rows)  # while the device computes: what fails now is never published
            next_tokens, refused = jax.device_get((outputs.next_tokens, outputs.refused))
            check_refused(refused)
            leaders = [(i, row) for i, (chunk, row) in enumerate(zip(chunks, rows, strict=True)) if chunk.is_last]
            further = start_followers(self.runner, leaders, outputs, self.config.page_size)
            scores = self.runner.unembed(outputs.hidden) if any(row.scoring for row in rows) else None
        except BaseException:  # an interrupt, too: rows that are further than what was seen of them would never go on
            self._prefill_failed(rows)
            raise
        self.counters.prefill.batches += 1
        for chunk, row in zip(chunks, rows, strict=True):
            row.computed_tokens += len(chunk.tokens)
            self.counters.prefill.computed_tokens += len(chunk.tokens)
        first, new, ended = 0, [], []
        for i, (chunk, row) in enumerate(zip(chunks, rows, strict=True)):
            here = slice(first, first + len(chunk.tokens))
            first = here.stop
            if row.scoring and scores is not None:
                self._requests[row.request_id].logits.append(scores[here])
            if not chunk.is_last:
                continue
            row.move_to(SequenceState.PREFILLED)
            end_group(row)
            if row.scoring:
                ended.append((row, "length"))
                continue
            for sample, token in [(row, int(next_tokens[i])), *further.get(i, [])]:
                self.scheduler.commit(sample, row.prefilled_tokens)
                sample.first_token_at = sample.first_token_at or self._clock()
                new.append((sample, [token]))
        self._append(new, ended)
        return True

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
            self._prepare_step()
            self.runner.sync_tables()
            tokens, saved = self.runner.decode(rows, self.config.decode_steps)
        except Exception:
            self._recover_device()
            raise
        self.counters.decode.steps += len(tokens)
        if saved:
            self.counters.decode.shared_prefix_steps += len(tokens)
            self.counters.decode.shared_prefix_tokens_saved += len(tokens) * saved
        new = [(row, column[column >= 0].tolist()) for row, column in zip(rows, tokens.T, strict=True)]
        self.counters.decode.tokens += sum(len(some) for _, some in new)
        self._append(new)

    def _prepare_step(self) -> None:
        """Before a step: pages that were lost are poisoned in poison mode, and the runner knows how far each row is."""
        if self.config.poison:
            self.runner.poison_lost_pages()  # before a step writes to pages that were reclaimed for it
        self.runner.context_lens[:] = 0
        for row in self.scheduler.running:
            if row.row is not None:
                self.runner.context_lens[row.row] = row.committed_kv_tokens
