"""`TokenStream`: the iterator that `Engine.stream` returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from prefix_reuse.outputs import StreamEvent, Tokenizer, cut_at_stop, safe_length
from prefix_reuse.sequence import Sequence


class TokenStream:
    """Yields a `StreamEvent` whenever its request has new tokens; steps the engine only when it has none.

    Other callers may step the engine meanwhile; nothing is lost. Closing it before the end cancels the request.
    """

    def __init__(
        self, row: Sequence, tokenizer: Tokenizer | None, advance: Callable[[], None], close: Callable[[], None]
    ):
        self._row, self._tokenizer, self._advance, self._close = row, tokenizer, advance, close
        self._sent_tokens = self._sent_text = 0
        self._done = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StreamEvent:
        if self._done:
            raise StopIteration
        row = self._row
        while row.is_live and len(row.generated) == self._sent_tokens:
            self._advance()
        finished = not row.is_live
        event = StreamEvent(
            tuple(row.generated[self._sent_tokens :]), self._new_text(finished), finished, row.finish_reason
        )
        self._sent_tokens = len(row.generated)
        if finished:
            self.close()
        return event

    def _new_text(self, finished: bool) -> str:
        if self._tokenizer is None:
            return ""
        stops = self._row.params.stop
        text = cut_at_stop(self._tokenizer.decode(self._row.generated), stops)
        end = len(text) if finished else max(safe_length(text, stops), self._sent_text)
        new, self._sent_text = text[self._sent_text : end], end
        return new

    def close(self) -> None:
        """Cancels the request unless it has ended. Idempotent."""
        if not self._done:
            self._done = True
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
