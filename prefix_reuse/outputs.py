"""What a request gives back, and how token ids become text while they arrive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class SampleOutput:
    """One finished sample of a request."""

    token_ids: tuple[int, ...]
    text: str
    """Decoded text without the stop string; empty without a tokenizer, or where it raised, which the turn raised, too."""
    finish_reason: str
    """`stop` (an end id or stop string), `length` (max_tokens or the context), `capacity` (the page pool), `cancelled`."""


@dataclass(frozen=True)
class RequestOutput:
    """One finished request."""

    request_id: int
    prompt_token_ids: np.ndarray
    samples: tuple[SampleOutput, ...]
    cached_tokens: int
    """Prompt tokens that were not computed, in the first sample's first admission."""
    computed_tokens: int
    """Prompt tokens that were computed there."""
    full_hit: bool
    """The whole prompt was cached: only its last token was replayed."""
    ttft_ms: float
    """Time from submit to the first token, in milliseconds; NaN when there was none."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.samples[0].token_ids

    @property
    def text(self) -> str:
        return self.samples[0].text

    @property
    def finish_reason(self) -> str:
        return self.samples[0].finish_reason

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)


@dataclass(frozen=True)
class StreamEvent:
    """New tokens of a streamed request."""

    token_ids: tuple[int, ...]
    text: str
    """New text; characters that later tokens could still change are held back."""
    finished: bool
    finish_reason: str | None


UNFINISHED_CHARACTER = "�"


def find_stop(tokenizer: Tokenizer, generated: Sequence[int], num_old: int, stops: Sequence[str]) -> int | None:
    """How many tokens of `generated` to keep so that the first stop string is just completed, or None.

    Only text that the tokens from `num_old` on could have completed is looked at.
    """
    # A token is at least one byte of text, or none at all: special tokens are not decoded.
    start, before = num_old, max(len(s.encode()) for s in stops)
    while start and before:
        start -= 1
        before -= bool(tokenizer.decode(generated[start : start + 1]))
    for end in range(num_old + 1, len(generated) + 1):
        text = tokenizer.decode(generated[start:end])
        if any(stop in text for stop in stops):
            return end
    return None


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """`text` up to the first stop string."""
    ends = [text.find(stop) for stop in stops if stop in text]
    return text[: min(ends)] if ends else text


def safe_length(text: str, stops: Sequence[str]) -> int:
    """Characters of `text` that no later token can change: not half a character, not the beginning of a stop string."""
    end = len(text) - (len(text) - len(text.rstrip(UNFINISHED_CHARACTER)))
    for stop in stops:
        for length in range(min(len(stop) - 1, end), 0, -1):
            if text[:end].endswith(stop[:length]):
                end -= length
                break
    return end
