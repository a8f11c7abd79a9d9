"""The runs of `prefix-reuse verify`: the same prompts, computed in every way that an engine can come to compute them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from prefix_reuse.config import EngineConfig, SamplingParams
from prefix_reuse.engine import Engine
from prefix_reuse.errors import ConfigError
from prefix_reuse.plan import next_power_of_two, pages_for
from prefix_reuse.programs import Programs

MAX_ROWS = 4
ANSWER = SamplingParams(max_tokens=8, ignore_eos=True)
REUSING = ("warm", "full hit", "reloaded", "mixed batch", "generated pages")
"""Runs that must hit cached pages, or they prove nothing."""

Text = np.ndarray
"""int32 [N] token ids."""


@dataclass(frozen=True)
class Score:
    """Logits f32 [N, V] (or what the programs' `unembed` gives instead) of a prompt from position `first` on."""

    prompt: str
    values: np.ndarray
    first: int


@dataclass
class Record:
    """What one run computed: scores in order, the answer of each prompt, and prompt tokens cached and computed."""

    scores: list[Score] = field(default_factory=list)
    answers: dict[str, tuple[int, ...]] = field(default_factory=dict)
    cached_tokens: int = 0
    computed_tokens: int = 0


def make_prompts(model: Any, page_size: int) -> dict[str, Text]:
    """Prompts by name: `first` and `second` begin with `shared` (whole pages, 64 tokens or more), `other` shares nothing.

    At page size 16, a hit leaves 8 tokens of 72 to compute in `first`, and 1 of 65 in `second`. Raises `ConfigError` for
    a context that is too short.
    """
    pages, own = max(2, 64 // page_size), max(1, page_size // 2)
    longest = _dialogue_tokens(pages * page_size + own, page_size) + ANSWER.max_tokens
    if longest > model.max_context:
        raise ConfigError(
            f"pages of {page_size} need {longest} tokens of context, {model.name} has {model.max_context}"
        )
    sizes = [pages * page_size, own, 1, page_size + own]
    shared, one, two, other = np.split(_token_ids(model, sum(sizes)), np.cumsum(sizes)[:-1])
    two[0] = _another(two[0], one[0], model.vocab_size)
    other[0] = _another(other[0], shared[0], model.vocab_size)
    return {
        "first": np.concatenate([shared, one]),
        "second": np.concatenate([shared, two]),
        "shared": shared,
        "other": other,
    }


def _another(token: int, than: int, vocab_size: int) -> int:
    return (token + 1) % vocab_size if token == than else token


def _token_ids(model: Any, n: int) -> Text:
    """n token ids, of a real text where there is a tokenizer."""
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        return np.random.default_rng(0).integers(0, model.vocab_size, n).astype(np.int32)
    from prefix_reuse.demo import document

    return np.resize(np.asarray(tokenizer.encode(document()), np.int32), n)


def _dialogue_tokens(num_tokens: int, page_size: int) -> int:
    """Tokens of a prompt of `num_tokens` that decoding completed to whole pages, and two more that it wrote no KV of."""
    return pages_for(num_tokens + 1, page_size) * page_size + 2


def verify_config(model: Any, prompts: dict[str, Text], page_size: int, deterministic: bool) -> EngineConfig:
    """An engine just large enough: any prompt is one chunk when it is computed alone."""
    longest = _dialogue_tokens(len(prompts["first"]), page_size)
    context = longest + ANSWER.max_tokens
    pages = pages_for(context, page_size)
    return EngineConfig(
        page_size=page_size,
        num_device_pages=2 * MAX_ROWS * pages,
        num_host_pages=4 * MAX_ROWS * pages,
        max_rows=MAX_ROWS,
        max_context=context,
        max_prefill_tokens=max(next_power_of_two(longest), page_size),
        min_prefill_tokens=min(16, page_size),
        decode_steps=4,
        deterministic=deterministic,
    )


class Runs:
    """Every run gets a fresh engine; the programs are one set, so that each shape is compiled once.

    Args:
      model: see `steps.PagedModel`.
      config: of all engines; a run switches reuse on by itself.
      prompts: see `make_prompts`; `dialogue` is added by `add_dialogue`.
      answers: False: only scores are wanted.
    """

    def __init__(self, model: Any, config: EngineConfig, prompts: dict[str, Text], *, answers: bool = True):
        self.model, self.config, self.prompts, self.answers = model, config, prompts, answers
        self.programs = Programs(model, config, jax.devices()[0])

    def engine(self, **changes: Any) -> Engine:
        return Engine(self.model, dataclasses.replace(self.config, **changes), programs=self.programs)

    def add_dialogue(self) -> None:
        """Adds the prompt `dialogue`: `first`, an answer that completes its last page, and one token more."""
        first = self.prompts["first"]
        tokens = _dialogue_tokens(len(first), self.config.page_size) - len(first)
        answer = self._complete(self.engine(), tokens - 1)
        self.prompts["dialogue"] = np.concatenate([first, answer, first[:1]]).astype(np.int32)

    def _complete(self, engine: Engine, num_tokens: int) -> tuple[int, ...]:
        return engine.generate(self.prompts["first"], dataclasses.replace(ANSWER, max_tokens=num_tokens))[0].token_ids

    # ---- the runs

    def disabled(self, **schedule: Any) -> Record:
        """Without reuse; `schedule` are changes of the config under which cold runs round differently."""
        record, engine = Record(), self.engine(**schedule)
        for name, tokens in self.prompts.items():
            record.scores.append(Score(name, engine.score(tokens), 0))
            record.computed_tokens += len(tokens)
            if not schedule:
                self._answer(record, engine, [name])
        return self._done(record, engine)

    def cold(self) -> Record:
        """With reuse, and nothing cached."""
        record, engine = Record(), self.engine(enable_prefix_reuse=True)
        for name in self.prompts:
            engine.clear_cache()
            self._score(record, engine, name)
            engine.clear_cache()
            self._answer(record, engine, [name])
        return self._done(record, engine)

    def warm(self) -> Record:
        """After hits of 1, 2, ... pages that leave something to compute."""
        record, engine = Record(), self.engine(enable_prefix_reuse=True)
        for name in ("first", "second", "other"):
            for pages in range(1, self._whole_pages(name) + 1):
                self._cache(engine, name, pages)
                self._score(record, engine, name)
            self._answer(record, engine, [name])
        return self._done(record, engine)

    def full_hit(self) -> Record:
        """Everything is cached: the last token is replayed."""
        record, engine = Record(), self.engine(enable_prefix_reuse=True)
        self._cache(engine, "shared")
        self._score(record, engine, "shared")
        self._answer(record, engine, ["shared"])
        return self._done(record, engine)

    def reloaded(self) -> Record:
        """The device forgets the cached pages, and they come back from the host."""
        record, engine = Record(), self.engine(enable_prefix_reuse=True)
        for name in self._fixed:
            self._cache(engine, name)
            engine.drop_device_pages()
            self._score(record, engine, name)
            engine.drop_device_pages()
            self._answer(record, engine, [name])
        return self._done(record, engine)

    def mixed_batch(self) -> Record:
        """Two hits, a full hit and a miss packed together."""
        record, engine = Record(), self.engine(enable_prefix_reuse=True)
        for name in self._fixed:
            self._cache(engine, "shared")
            for other in self._fixed:
                if other != name:
                    engine.submit(self.prompts[other], ANSWER)
            self._score(record, engine, name)
            while engine.has_work:
                engine.step()
        self._cache(engine, "shared")
        self._answer(record, engine, self._fixed)
        return self._done(record, engine)

    def generated_pages(self) -> Record:
        """A hit on a page that decoding completed."""
        record, engine = Record(), self.engine(enable_prefix_reuse=True, publish_generated=True)
        first = self.prompts["first"]
        self._complete(engine, len(self.prompts["dialogue"]) - len(first) - 1)
        self._score(record, engine, "dialogue")
        self._answer(record, engine, ["dialogue"])
        return self._done(record, engine)

    def by_name(self) -> dict[str, Callable[[], Record]]:
        """Every run that is compared with `cold`. Pages that decoding wrote are prefill's in deterministic mode only."""
        runs = {
            "disabled": self.disabled,
            "warm": self.warm,
            "full hit": self.full_hit,
            "reloaded": self.reloaded,
            "mixed batch": self.mixed_batch,
        }
        return {**runs, "generated pages": self.generated_pages} if self.config.deterministic else runs

    def other_schedules(self) -> dict[str, Callable[[], Record]]:
        """Cold runs that may round differently: chunks of one page, and one large padding."""
        size, largest = self.config.page_size, 2 * self.config.max_prefill_tokens
        return {
            "cold: chunks": lambda: self.disabled(max_prefill_tokens=size, min_prefill_tokens=1),
            "cold: padding": lambda: self.disabled(max_prefill_tokens=largest, min_prefill_tokens=largest),
        }

    # ---- parts of a run

    @property
    def _fixed(self) -> list[str]:
        """Prompts that do not depend on an answer."""
        return [name for name in self.prompts if name != "dialogue"]

    def _whole_pages(self, name: str) -> int:
        return len(self.prompts[name]) // self.config.page_size

    def _cache(self, engine: Engine, name: str, pages: int | None = None) -> None:
        """Leaves exactly the first `pages` pages (None = all whole ones) of a prompt in the cache."""
        pages = self._whole_pages(name) if pages is None else pages
        engine.clear_cache()
        engine.score(self.prompts[name][: pages * self.config.page_size], reuse=True)

    def _score(self, record: Record, engine: Engine, name: str) -> None:
        logits, first = engine.score(self.prompts[name], reuse=True)
        record.scores.append(Score(name, logits, first))
        record.cached_tokens += first
        record.computed_tokens += len(logits)

    def _answer(self, record: Record, engine: Engine, names: Sequence[str]) -> None:
        if not self.answers:
            return
        outputs = engine.generate([self.prompts[name] for name in names], ANSWER)
        for name, output in zip(names, outputs, strict=True):
            record.answers[name] = output.token_ids
            record.cached_tokens += output.cached_tokens
            record.computed_tokens += output.computed_tokens

    @staticmethod
    def _done(record: Record, engine: Engine) -> Record:
        engine.check_integrity()
        return record
