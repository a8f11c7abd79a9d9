"""Any order of submit, step, cancel, hold, resume, drop, evict, clear: A8, A24, A26, A29, I1-I8 of the bug cases.

After every operation the references are recomputed from the rows, on host and device; every finished request must have
the tokens of a cold run; at the end every page is free.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import hypothesis.strategies as st
import pytest
from engine_helpers import check, drained, engine, index_of, prompt
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from prefix_reuse import SamplingParams
from prefix_reuse.sequence import SequenceState

BASES = [prompt(16, seed=1), prompt(12, seed=2)]
LENGTHS = (1, 4, 7, 8, 13, 16, 19)


def text(base: int, length: int, seed: int) -> Any:
    """Prompts that share beginnings of every length."""
    tokens = prompt(24, seed=100 + seed, start=BASES[base])
    return tokens[:length]


@cache
def expected(kind: str, base: int, length: int, seed: int, max_tokens: int) -> tuple[int, ...]:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return (
        engine(kind, on=False, num_device_pages=24, poison=False)
        .generate(text(base, length, seed), params)[0]
        .token_ids
    )


class EngineMachine(RuleBasedStateMachine):
    kind = "llama"

    @initialize(m2=st.booleans(), m3=st.booleans(), publish=st.booleans(), wave=st.booleans())
    def start(self, m2: bool, m3: bool, publish: bool, wave: bool) -> None:
        self.e = engine(
            self.kind,
            num_device_pages=24,
            num_host_pages=28,
            max_rows=3,
            suffix_prefill=m2,
            decode_page_sharing=m3,
            publish_generated=publish,
            share_in_wave=wave,
        )
        self.wanted: dict[int, tuple[int, ...]] = {}
        self.prefixes: list[Any] = []

    def finish(self, outputs: list[Any]) -> None:
        for output in outputs:
            want = self.wanted.pop(output.request_id)
            for sample in output.samples:  # greedy: all alike
                if sample.finish_reason == "cancelled":
                    assert sample.token_ids == want[: len(sample.token_ids)]
                else:
                    assert sample.token_ids == want
            assert 0 <= output.cached_tokens <= output.prompt_tokens - 1
        check(self.e)

    @rule(
        base=st.integers(0, 1),
        length=st.sampled_from(LENGTHS),
        seed=st.integers(0, 1),
        tokens=st.sampled_from([1, 3, 9]),
        n=st.sampled_from([1, 1, 2, 4]),
    )
    def submit(self, base: int, length: int, seed: int, tokens: int, n: int) -> None:
        if len(self.wanted) < 6:
            params = SamplingParams(max_tokens=tokens, ignore_eos=True, n=n)
            request = self.e.submit(text(base, length, seed), params)
            self.wanted[request] = expected(self.kind, base, length, seed, tokens)
            check(self.e)

    @rule()
    def step(self) -> None:
        self.finish(self.e.step())

    def live(self) -> list[int]:
        return [i for i in self.wanted if i in self.e._requests]

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        if self.live():
            self.e.cancel(data.draw(st.sampled_from(self.live())))
            check(self.e)

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def hold(self, data: Any) -> None:
        if self.live():
            self.e.hold(data.draw(st.sampled_from(self.live())))
            check(self.e)

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def resume(self, data: Any) -> None:
        if self.live():
            self.e.resume(data.draw(st.sampled_from(self.live())))
            check(self.e)

    @rule(base=st.integers(0, 1), length=st.sampled_from(LENGTHS))
    def hold_prefix(self, base: int, length: int) -> None:
        if len(self.prefixes) < 2:  # more could keep the small store from ever admitting the largest request
            self.prefixes.append(self.e.cache.hold(text(base, length, 0)[:8]))
            check(self.e)

    @precondition(lambda self: self.prefixes)
    @rule(explicit=st.booleans())
    def let_prefix_go(self, explicit: bool) -> None:
        prefix = self.prefixes.pop()
        if explicit:
            prefix.release()
        del prefix
        check(self.e)

    @rule()
    def drop_device_pages(self) -> None:
        self.e.drop_device_pages()
        check(self.e)

    @rule(n=st.integers(1, 4))
    def evict(self, n: int) -> None:
        self.e.evict_host_entries(n)
        check(self.e)

    @rule(data=st.data())
    def drop_parts(self, data: Any) -> None:
        """X3: idle pages give up the bytes of a sliding layer group."""
        pages = [run.page_ids for run in index_of(self.e)]
        if self.kind == "hybrid" and pages:
            self.e.store.drop_group(data.draw(st.sampled_from(pages)), 1)
            check(self.e)

    @rule()
    def clear(self) -> None:
        self.e.clear_cache()
        check(self.e)

    def teardown(self) -> None:
        if not hasattr(self, "e"):
            return
        self.prefixes.clear()
        for row in list(self.e.scheduler.running):
            if row.state is SequenceState.ON_HOLD:
                self.e.resume(row.request_id)
        for _ in range(200):
            if not self.e.has_work:
                break
            self.finish(self.e.step())
        assert not self.e.has_work
        assert not self.wanted
        drained(self.e)


def run_machine(kind: str, examples: int, steps: int) -> None:
    machine = type("Machine", (EngineMachine,), {"kind": kind})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
        ),
    )


@pytest.mark.parametrize("kind", [pytest.param("llama", marks=pytest.mark.slow), "hybrid"])
def test_any_order_of_operations_keeps_every_invariant(kind: str):
    run_machine(kind, examples=8, steps=25)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "hybrid"])
def test_long_runs_of_random_operations_keep_every_invariant(kind: str):
    run_machine(kind, examples=60, steps=60)
