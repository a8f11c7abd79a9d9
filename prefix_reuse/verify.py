"""`prefix-reuse verify`: whether a hit changes an answer of a model, and if it does, in which layer it begins.

Every run of `verify_runs` is compared with the cold one. In deterministic mode the bits must be equal. In default mode
the same row may round differently in another batch: float32 logits must agree to 1e-3 (`FP32_BAR`), and in 16 bits to
twice the noise, which is cold against cold with other chunks and another padding. Off against cold is bitwise always.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from prefix_reuse.display import Progress, track
from prefix_reuse.engine import Engine
from prefix_reuse.errors import ConfigError
from prefix_reuse.verify_layers import Tapped, first_difference
from prefix_reuse.verify_runs import REUSING, Record, Runs, make_prompts, verify_config

FP32_BAR = 1e-3
"""Difference of a logit that is allowed in float32, and in 16 bits however small the noise."""
NOISE_FACTOR = 2.0
"""A 16-bit logit may differ by this many times the noise; so may a token whose cold top-2 margin is within it."""
IMPLAUSIBLE = 0.25
"""Mean difference, in standard deviations of the logits, that is no rounding; a wrong position makes it about 1."""
LAYER_TOLERANCE = {4: 1e-3, 2: 2e-2}
"""By bytes of an element: what counts as a difference of a layer in default mode, as a part of its largest value."""


@dataclass(frozen=True)
class Flip:
    """The first token of an answer that differs from the cold one."""

    prompt: str
    position: int
    """Index within the answer."""
    cold_token: int
    other_token: int
    margin: float
    """Between the two largest cold logits there."""
    excused: bool


@dataclass(frozen=True)
class RunResult:
    """One run beside the cold one, over the prompts that it has."""

    run: str
    cached_tokens: int
    """Prompt tokens that were not computed, over all requests of the run."""
    computed_tokens: int
    max_logit_diff: float
    """To cold, over all computed positions; the mean and the spread of the cold logits likewise."""
    mean_logit_diff: float
    logit_std: float
    same_bits: bool
    """Every computed logit has the bits of the cold one."""
    flips: tuple[Flip, ...]
    tokens_sha256: str
    """Of the answers, empty where none were asked for; `cold_*` are the digests of the cold run over the same prompts."""
    cold_tokens_sha256: str
    logits_sha256: str
    """Of the next-token logits of every score, f32."""
    cold_logits_sha256: str


@dataclass(frozen=True)
class VerifyReport:
    """What `run_verify` found."""

    model: str
    device: str
    dtype: str
    page_size: int
    deterministic: bool
    noise: float
    """Largest difference of a logit between cold schedules; 0 in deterministic mode, which does not look for it."""
    bar: float
    """Largest difference of a logit that was allowed."""
    runs: tuple[RunResult, ...]
    violations: tuple[str, ...]
    first_layer: str
    """Where the first differing run begins to differ, such as `layer 3 (queries)`; empty when nothing was to be found."""

    @property
    def exit_code(self) -> int:
        """2 when something differs that must not."""
        return 2 if self.violations else 0

    def to_json(self) -> dict[str, Any]:
        """All fields, the version of jax, and `ok`."""
        return {**dataclasses.asdict(self), "jax": jax.__version__, "ok": not self.violations}


def run_verify(
    model: Any, *, deterministic: bool = False, page_size: int = 64, progress: Progress = None
) -> VerifyReport:
    """Computes the same prompts in every way that an engine can, and compares with cold.

    Args:
      model: see `steps.PagedModel`. With a tokenizer the prompts are a real text, without one random ids.
      deterministic: hold `EngineConfig.deterministic` to equal bits, instead of default mode to its noise.
      page_size: token slots per page, a power of two.
      progress: see `display.Progress`.

    Raises:
      ConfigError: a page size that is no power of two, a context that is too short, a model that cannot reuse pages.
    """
    prompts = make_prompts(model, page_size)
    runs = Runs(model, verify_config(model, prompts, page_size, deterministic), prompts)
    probe = runs.engine(enable_prefix_reuse=True)
    if not probe.active:
        raise ConfigError(f"{model.name} cannot reuse pages: {probe.capability.reason}: {probe.capability.detail}")
    del probe
    if deterministic:
        runs.add_dialogue()
    parts = {"cold": runs.cold, **runs.by_name(), **({} if deterministic else runs.other_schedules())}
    records = {}
    for name in track(parts, "running", progress, len(parts)):
        records[name] = parts[name]()
    return _Judge(runs, records).report()


class _Judge:
    """Compares the runs with the cold one and says what must not be."""

    def __init__(self, runs: Runs, records: dict[str, Record]):
        self.runs, self.records = runs, records
        self.deterministic = runs.config.deterministic
        self.cold = records["cold"]
        self.cold_logits = {score.prompt: score.values for score in self.cold.scores}
        self.itemsize = np.dtype(runs.model.kv_groups[0].dtype).itemsize
        self.schedules = [name for name in records if name in runs.other_schedules()]
        self.noise = max((self._differences(name)[0] for name in self.schedules), default=0.0)
        self._engine: Engine | None = None

    @property
    def bar(self) -> float:
        if self.deterministic:
            return 0.0
        return FP32_BAR if self.itemsize == 4 else max(FP32_BAR, NOISE_FACTOR * self.noise)

    def report(self) -> VerifyReport:
        results = {name: self._result(name) for name in self.records}
        violations = {name: self._violations(result) for name, result in results.items()}
        suspects = [name for name in self.runs.by_name() if violations[name] and not results[name].same_bits]
        groups = self.runs.model.kv_groups
        return VerifyReport(
            model=self.runs.model.name,
            device=jax.devices()[0].device_kind,
            dtype=",".join(dict.fromkeys(np.dtype(group.dtype).name for group in groups)),
            page_size=self.runs.config.page_size,
            deterministic=self.deterministic,
            noise=self.noise,
            bar=self.bar,
            runs=tuple(results.values()),
            violations=tuple(f"{name}: {text}" for name, texts in violations.items() for text in texts),
            first_layer=self._first_layer(suspects[0]) if suspects else "",
        )

    def _differences(self, name: str) -> tuple[float, float, float, bool]:
        """Largest and mean difference of the logits to cold, the spread of the cold ones, and whether all bits are equal."""
        pairs = [(self.cold_logits[s.prompt][s.first :], s.values) for s in self.records[name].scores]
        cold, other = (np.concatenate(side) for side in zip(*pairs, strict=True))
        difference = np.nan_to_num(np.abs(other - cold), nan=np.inf)
        finite = np.minimum(difference, np.finfo(np.float32).max)  # a NaN is the largest difference there is
        return (
            float(finite.max()),
            float(finite.mean(dtype=np.float64)),
            float(cold.std()),
            cold.tobytes() == other.tobytes(),
        )

    def _result(self, name: str) -> RunResult:
        record = self.records[name]
        largest, mean, std, same = self._differences(name)
        return RunResult(
            run=name,
            cached_tokens=record.cached_tokens,
            computed_tokens=record.computed_tokens,
            max_logit_diff=largest,
            mean_logit_diff=mean,
            logit_std=std,
            same_bits=same,
            flips=tuple(f for prompt in record.answers if (f := self._flip(record, prompt)) is not None),
            tokens_sha256=_digest([np.array(answer, np.int32) for answer in record.answers.values()]),
            cold_tokens_sha256=_digest([np.array(self.cold.answers[p], np.int32) for p in record.answers]),
            logits_sha256=_digest([score.values[-1] for score in record.scores]),
            cold_logits_sha256=_digest([self.cold_logits[score.prompt][-1] for score in record.scores]),
        )

    def _flip(self, record: Record, prompt: str) -> Flip | None:
        cold, other = self.cold.answers[prompt], record.answers[prompt]
        if cold == other:
            return None
        position = next(i for i, (a, b) in enumerate(zip(cold, other, strict=True)) if a != b)
        self._engine = self._engine or self.runs.engine()
        text = np.concatenate([self.runs.prompts[prompt], np.array(cold[:position], np.int32)])
        second, first = np.sort(self._engine.score(text)[-1])[-2:]
        margin = float(first - second)
        excused = not self.deterministic and margin <= NOISE_FACTOR * self.noise
        return Flip(prompt, position, cold[position], other[position], margin, excused)

    def _violations(self, result: RunResult) -> list[str]:
        found = []
        if result.run in REUSING and not result.cached_tokens:
            found.append("no cached page was used, so this proves nothing")
        if result.run not in REUSING and result.cached_tokens:
            found.append(f"{result.cached_tokens} tokens came from the cache")
        exact = self.deterministic or result.run == "disabled"
        largest, mean, std = result.max_logit_diff, result.mean_logit_diff, result.logit_std
        is_noise = result.run in self.schedules and self.itemsize < 4
        if exact and not result.same_bits:
            found.append(f"logits are not the cold ones to the bit; the largest difference is {largest:.3g}")
        elif not is_noise and largest > self.bar and not exact:
            found.append(f"a logit differs by {largest:.3g} from cold; {self.bar:.3g} is allowed")
        if not exact and mean > IMPLAUSIBLE * std:
            found.append(f"logits differ by {mean:.3g} on average; their spread is {std:.3g}, so this is no rounding")
        found += [
            f"token {flip.position} of the answer to `{flip.prompt}` is {flip.other_token}, cold {flip.cold_token}; "
            f"the cold top-2 margin is {flip.margin:.3g}"
            for flip in result.flips
            if exact or not flip.excused
        ]
        return found

    def _first_layer(self, name: str) -> str:
        """Runs cold and `name` once more on a model that shows what every layer computes."""
        tapped = Tapped(self.runs.model)
        runs = Runs(tapped, self.runs.config, self.runs.prompts, answers=False)
        runs.programs.unembed = jax.jit(lambda params, hidden: hidden)  # scores are then what was tapped
        cold = {score.prompt: score.values for score in runs.cold().scores}
        pairs = [(cold[s.prompt][s.first :], s.values) for s in runs.by_name()[name]().scores]
        exact = self.deterministic or name == "disabled"
        return first_difference(tapped.sections, pairs, 0.0 if exact else LAYER_TOLERANCE[self.itemsize])


def _digest(arrays: Sequence[np.ndarray]) -> str:
    if not arrays:
        return ""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
