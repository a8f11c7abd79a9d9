"""The demonstration: questions over one long document, cold, warm and as a batch, with the same tokens every time.

Cold is an engine without reuse, warm one with all three stages; both use the same weights. Greedy decoding, so that a
difference of one token is a finding: it must not happen in fp32; in bf16 it is excused only where the model itself
could not tell the two tokens apart (rounding noise, measured as cold against cold with another prefill chunk size).
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from prefix_reuse.config import EngineConfig, SamplingParams
from prefix_reuse.display import Progress, track
from prefix_reuse.engine import Engine
from prefix_reuse.errors import ConfigError
from prefix_reuse.outputs import RequestOutput

QUESTIONS = (
    "What is the with statement used for?",
    "When is the __exit__() method called?",
    "What does PEP 343 describe?",
    "What happens if the suite raises an exception?",
)
SYSTEM = "You answer questions about the document."
REHEARSAL = "rehearsal"
NOISE_FACTOR = 2.0
"""A flip is excused where the cold top-2 margin is within this many times the noise."""


def document() -> str:
    """A real text of about 900 tokens that every Python carries: the language reference on `with`."""
    from pydoc_data.topics import topics

    return topics["with"].strip()


def build_prompts(tokenizer: Any, text: str, questions: Sequence[str]) -> list[list[int]]:
    """Token ids of one prompt per question; all begin with the same document, the question comes last."""

    def chat(question: str) -> str:
        return (
            f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{text}\n\n"
            f"Question: {question}<|im_end|>\n<|im_start|>assistant\n"
        )

    def plain(question: str) -> str:
        return f"{text}\n\nQuestion: {question}\nAnswer:"

    knows_chat = len(tokenizer.encode("<|im_start|>")) == 1
    return [list(tokenizer.encode((chat if knows_chat else plain)(question))) for question in questions]


@dataclass(frozen=True)
class Flip:
    """The first token of an answer that differs from the cold one."""

    question: int
    run: str
    """`warm` or `batch`."""
    position: int
    """Index within the answer."""
    cold_token: int
    other_token: int
    margin: float
    """Between the two largest cold logits there."""
    noise: float
    """Largest difference between two cold schedules over the same text."""
    excused: bool


@dataclass(frozen=True)
class QuestionResult:
    """One question, asked cold and warm."""

    question: str
    answer: str
    prompt_tokens: int
    computed_tokens_cold: int
    computed_tokens_warm: int
    ttft_cold_ms: float
    ttft_warm_ms: float
    tokens_equal: bool
    """Warm and batch answers have exactly the cold tokens."""


@dataclass(frozen=True)
class DemoReport:
    """What the demonstration found; `to_json` has the keys that scripts read."""

    model: str
    device: str
    questions: tuple[QuestionResult, ...]
    host_pages_logical: int
    """Page-table entries of the batch, on the host; physical = distinct pages behind them."""
    host_pages_physical: int
    gpu_pages_logical: int
    gpu_pages_physical: int
    h2d_pages_skipped: int
    """Copies to the device that the batch did not need: duplicates within it, and pages that were resident."""
    max_logit_diff: float
    """Warm against cold, over all computed positions of all prompts."""
    flips: tuple[Flip, ...]

    @property
    def tokens_equal(self) -> bool:
        return all(result.tokens_equal for result in self.questions)

    @property
    def exit_code(self) -> int:
        """1 when tokens differ and noise does not excuse it."""
        return 0 if all(flip.excused for flip in self.flips) else 1

    def to_json(self) -> dict[str, Any]:
        """Token counts are sums over the questions, times medians."""
        results = self.questions
        return {
            "model": self.model,
            "device": self.device,
            "jax": jax.__version__,
            "prompt_tokens": sum(r.prompt_tokens for r in results),
            "computed_tokens_cold": sum(r.computed_tokens_cold for r in results),
            "computed_tokens_warm": sum(r.computed_tokens_warm for r in results),
            "ttft_cold_ms": round(statistics.median(r.ttft_cold_ms for r in results), 2),
            "ttft_warm_ms": round(statistics.median(r.ttft_warm_ms for r in results), 2),
            "host_pages_logical": self.host_pages_logical,
            "host_pages_physical": self.host_pages_physical,
            "gpu_pages_logical": self.gpu_pages_logical,
            "gpu_pages_physical": self.gpu_pages_physical,
            "h2d_pages_skipped": self.h2d_pages_skipped,
            "tokens_equal": self.tokens_equal,
            "max_logit_diff": self.max_logit_diff,
            "excused_flips": [dataclasses.asdict(flip) for flip in self.flips if flip.excused],
            "questions": [dataclasses.asdict(result) for result in results],
        }


def demo_config(model: Any, prompts: Sequence[Sequence[int]], max_tokens: int, page_size: int) -> EngineConfig:
    """An engine just large enough for the batch without any sharing, so that cold and warm both fit."""
    longest = max(map(len, prompts)) + max_tokens
    if longest > model.max_context:
        raise ConfigError(f"the demo needs {longest} tokens of context, {model.name} has {model.max_context}")
    pages = -(-longest // page_size) + 1
    rows = len(prompts)
    return EngineConfig(
        page_size=page_size,
        num_device_pages=pages * rows,
        num_host_pages=2 * pages * rows,
        max_rows=rows,
        max_context=longest,
        max_prefill_tokens=max(512, page_size),
        # Few steps between boundaries, so that the batch is seen while it decodes and not only after its last token.
        decode_steps=4,
    )


def run_demo(
    model: Any,
    *,
    text: str | None = None,
    questions: Sequence[str] = QUESTIONS,
    max_tokens: int = 32,
    page_size: int = 64,
    progress: Progress = None,
    say: Callable[[str], None] = lambda line: None,
) -> DemoReport:
    """Asks the questions cold, warm and as a batch, and compares.

    Args:
      model: a loaded model with a tokenizer.
      text: the document; default `document()`.
      max_tokens: tokens per answer.
      page_size: token slots per page.
      progress: for the compilation, see `display.Progress`.
      say: gets a line before each part.

    Raises:
      ConfigError: a model without a tokenizer or with too short a context, or a page size that is no power of two.
    """
    if model.tokenizer is None:
        raise ConfigError(f"the demo asks questions in words, and {model.name} has no tokenizer")
    prompts = build_prompts(model.tokenizer, document() if text is None else text, questions)
    config = demo_config(model, prompts, max_tokens, page_size)
    params = SamplingParams(max_tokens=max_tokens)

    say("cold: an engine without reuse")
    cold_engine = Engine(model, config)
    _rehearse(cold_engine, prompts, params, progress)
    cold = [cold_engine.generate(prompt, params)[0] for prompt in prompts]

    say("warm: an engine with reuse, which has seen the first question once")
    warm_engine = Engine(model, dataclasses.replace(config, enable_prefix_reuse=True))
    _rehearse(warm_engine, prompts, params, progress)
    warm_engine.generate(prompts[0], params)
    warm = [warm_engine.generate(prompt, params)[0] for prompt in prompts]

    say("batch: all questions at once, shared pages loaded from the host once")
    # Without this the pages would still be on the device, and nothing would show that the host copy works.
    warm_engine.drop_device_pages()
    skipped_before = _skipped(warm_engine)
    batch, pages = _run_batch(warm_engine, prompts, params)
    skipped = _skipped(warm_engine) - skipped_before

    say("logits: warm against cold")
    flips = [
        flip
        for run, outputs in (("warm", warm), ("batch", batch))
        for i, output in enumerate(outputs)
        if (flip := find_flip(model, config, cold_engine, prompts[i], i, run, cold[i], output)) is not None
    ]
    different = {flip.question for flip in flips}
    results = [
        QuestionResult(
            question=question,
            answer=cold[i].text.strip(),
            prompt_tokens=cold[i].prompt_tokens,
            computed_tokens_cold=cold[i].computed_tokens,
            computed_tokens_warm=warm[i].computed_tokens,
            ttft_cold_ms=cold[i].ttft_ms,
            ttft_warm_ms=warm[i].ttft_ms,
            tokens_equal=i not in different,
        )
        for i, question in enumerate(questions)
    ]
    return DemoReport(
        model=model.name,
        device=jax.devices()[0].device_kind,
        questions=tuple(results),
        h2d_pages_skipped=skipped,
        max_logit_diff=max(_logit_diff(cold_engine, warm_engine, prompt) for prompt in prompts),
        flips=tuple(flips),
        **pages,
    )


def _rehearse(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams, progress: Progress) -> None:
    """Runs once what will be measured, so that every shape of it is compiled, and no other (`warmup` compiles all).

    Under another salt, and cleared afterwards: nothing of it can be found by the measured run.
    """
    short = dataclasses.replace(params, max_tokens=min(params.max_tokens, engine.config.decode_steps + 1))
    parts: dict[str, Callable[[], Any]] = {
        f"question {i + 1}": partial(engine.generate, prompt, short, salt=REHEARSAL) for i, prompt in enumerate(prompts)
    }
    if engine.config.enable_prefix_reuse:
        parts["a cached question"] = partial(engine.generate, prompts[0], short, salt=REHEARSAL)
        # In full: rows end one after the other, and each number of rows has its own program.
        parts["batch"] = partial(_run_batch, engine, prompts, params, salt=REHEARSAL)
    for name in track(parts, "compiling, running", progress, len(parts)):
        if name == "batch":
            engine.drop_device_pages()
        parts[name]()
    engine.clear_cache()


def _run_batch(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams, salt: str = ""
) -> tuple[list[RequestOutput], dict[str, int]]:
    """Outputs of all prompts at once, and the page counts of the step that had the most pages in its tables."""
    ids = [engine.submit(prompt, params, salt=salt) for prompt in prompts]
    done: dict[int, RequestOutput] = {}
    pages = {"gpu_pages_logical": -1}
    while len(done) < len(ids):
        for output in engine.step():
            done[output.request_id] = output
        stats = engine.stats()
        logical = sum(pool.logical for pool in stats.device)
        if logical > pages["gpu_pages_logical"]:
            pages = {
                "gpu_pages_logical": logical,
                "gpu_pages_physical": sum(pool.physical for pool in stats.device),
                "host_pages_logical": int(stats.host.logical_pages),
                "host_pages_physical": int(stats.host.physical_pages),
            }
    return [done[i] for i in ids], pages


def _skipped(engine: Engine) -> int:
    decode = engine.stats().decode
    return decode.loads_skipped_duplicate + decode.loads_skipped_resident


def _logit_diff(cold_engine: Engine, warm_engine: Engine, prompt: Sequence[int]) -> float:
    cold = cold_engine.score(prompt)
    warm, first = warm_engine.score(prompt, reuse=True)
    return float(np.abs(cold[first:] - warm).max())


def find_flip(
    model: Any,
    config: EngineConfig,
    cold_engine: Engine,
    prompt: Sequence[int],
    question: int,
    run: str,
    cold: RequestOutput,
    other: RequestOutput,
) -> Flip | None:
    """Where `other` first differs from `cold`, and whether rounding noise explains it; None when it does not differ.

    Noise is only looked for with 16-bit weights: in fp32 the tokens must be equal.
    """
    if cold.token_ids == other.token_ids:
        return None
    length = min(len(cold.token_ids), len(other.token_ids))
    pairs = zip(cold.token_ids, other.token_ids, strict=False)
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), length)
    if position == length:  # one answer is the beginning of the other, which no rounding explains
        return Flip(question, run, position, -1, -1, float("inf"), 0.0, False)
    text = [*prompt, *cold.token_ids[:position]]
    logits = cold_engine.score(text)
    first, second = np.sort(logits[-1])[::-1][:2]
    margin, noise = float(first - second), 0.0
    if np.dtype(model.kv_groups[0].dtype).itemsize < 4:
        chunk = max(config.page_size, config.max_prefill_tokens // 2)
        other_schedule = Engine(model, dataclasses.replace(config, max_prefill_tokens=chunk))
        noise = float(np.abs(other_schedule.score(text) - logits).max())
    excused = margin <= NOISE_FACTOR * noise and noise > 0.0
    return Flip(question, run, position, cold.token_ids[position], other.token_ids[position], margin, noise, excused)
