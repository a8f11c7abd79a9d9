"""A `Sequence` (one sample of one request) and its life cycle. Transitions that are not in the table are errors."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np

from prefix_reuse.config import SamplingParams
from prefix_reuse.errors import StateTransitionError


class SequenceState(enum.Enum):
    QUEUEING = "queueing"
    """Waiting; holds nothing."""
    IN_PREFILL = "in_prefill"
    """Holds host pages and device pages; its prompt is being computed."""
    PREFILLED = "prefilled"
    """Prompt computed, first token sampled."""
    IN_DECODE = "in_decode"
    ON_HOLD = "on_hold"
    """Host pages kept, no device pages."""
    EVICTED = "evicted"
    """No pages at all; token ids kept, they become the prompt again."""
    COMPLETED = "completed"


S = SequenceState
TRANSITIONS: dict[SequenceState, frozenset[SequenceState]] = {
    S.QUEUEING: frozenset({S.IN_PREFILL, S.COMPLETED}),
    S.IN_PREFILL: frozenset({S.PREFILLED, S.QUEUEING, S.EVICTED, S.COMPLETED}),
    S.PREFILLED: frozenset({S.IN_DECODE, S.COMPLETED}),
    S.IN_DECODE: frozenset({S.ON_HOLD, S.COMPLETED, S.EVICTED}),
    S.ON_HOLD: frozenset({S.IN_DECODE, S.COMPLETED, S.EVICTED}),
    S.EVICTED: frozenset({S.IN_PREFILL, S.COMPLETED}),
    S.COMPLETED: frozenset(),
}

WAITING = frozenset({S.QUEUEING, S.EVICTED})


@dataclass(eq=False)
class Sequence:
    """One sample: its tokens, where it stands, and what it has committed. Mutable; the engine is its only writer."""

    id: int
    request_id: int
    prompt: np.ndarray
    """int32 [N]"""
    params: SamplingParams
    namespace: bytes
    stream: int = 0
    """Which of the request's n samples this is."""
    scoring: bool = False
    """Only the logits of the prompt are wanted; nothing is generated."""
    reuse: bool = True
    """May attach cached pages and publish its own."""
    leader: Sequence | None = None
    """The sample of the same request that computes the prompt for this one too, until it has (`samples.py`)."""
    followers: list[Sequence] = field(default_factory=list)
    """Samples that wait for this one's prompt; they are admitted, and go back to the line, together with it."""

    state: SequenceState = SequenceState.QUEUEING
    generated: list[int] = field(default_factory=list)
    searched_tokens: int = 0
    """Generated tokens in which no stop string ends."""
    row: int | None = None
    """Row of the device page table while it holds device pages."""
    committed_kv_tokens: int = 0
    """Tokens whose KV a successful forward wrote (or a hit supplied)."""
    prefilled_tokens: int = 0
    """Leading tokens of the current prefill that are done."""
    replays: bool = False
    """A full hit: its last prompt token is computed again as a query and writes no KV (A21)."""
    shared_tokens: int = 0
    """Tokens of the hit that this sequence attached."""
    offloaded_pages: int = 0
    """Leading full pages whose copy to the host was started (or that were attached)."""
    published_pages: int = 0
    """Leading full pages that were published, so that a boundary without a new full page has nothing to publish."""
    mirrored_pages: int = 0
    """Leading columns of its device row that were closed, or shared, since it got the row."""
    pending_copies: int = 0
    """Copies to the host that were started and have not landed."""
    epoch: int = 0
    """Raised when the row stops waiting for its copies; older ones then no longer concern it."""
    capacity_tokens: int = 0
    budget: int = 0
    """Tokens it may generate in all."""

    cached_tokens: int = 0
    """Prompt tokens that were not computed at the first admission."""
    computed_tokens: int = 0
    """Tokens computed by prefill, re-entries included."""
    full_hit: bool = False
    failed_prefills: int = 0
    """Prefill batches with this row that raised; such a row is run alone, after the others."""
    admitted_before: bool = False
    finish_reason: str | None = None
    submitted_at: float = 0.0
    first_token_at: float | None = None

    @property
    def tokens(self) -> np.ndarray:
        """int32: prompt and generated tokens. On re-entry all of them are the prompt."""
        if not self.generated:
            return self.prompt
        return np.concatenate([self.prompt, np.array(self.generated, np.int32)])

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.generated)

    @property
    def last_token(self) -> int:
        return self.generated[-1] if self.generated else int(self.prompt[-1])

    @property
    def row_index(self) -> int:
        """`row`, for code that runs only while device pages are held."""
        if self.row is None:
            raise StateTransitionError(f"sequence {self.id} ({self.state.name}) holds no device pages")
        return self.row

    @property
    def remaining(self) -> int:
        return self.budget - len(self.generated)

    @property
    def uses_host(self) -> bool:
        """Whether it keeps host pages; cold scoring leaves the cache alone."""
        return self.reuse or not self.scoring

    @property
    def is_live(self) -> bool:
        return self.state is not SequenceState.COMPLETED

    def move_to(self, state: SequenceState) -> None:
        """Raises `StateTransitionError` for an edge that the life cycle does not have."""
        if state not in TRANSITIONS[self.state]:
            raise StateTransitionError(f"sequence {self.id}: {self.state.name} -> {state.name} is not allowed")
        self.state = state

    def forget_progress(self) -> None:
        """After all pages were given back: nothing is committed, prefilled or offloaded any more."""
        self.row = None
        self.committed_kv_tokens = self.prefilled_tokens = self.shared_tokens = 0
        self.offloaded_pages = self.published_pages = self.mirrored_pages = 0
