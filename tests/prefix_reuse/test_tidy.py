"""When an engine copies the pages that are left of sparse bundles."""

from __future__ import annotations

import weakref

import pytest
from engine_helpers import GREEDY, engine, prompt, run_all

from prefix_reuse.engine_loop import MOST_SPARSE


@pytest.mark.parametrize(("sparse", "while_waiting"), [(1, False), (MOST_SPARSE, False), (MOST_SPARSE + 1, True)])
def test_not_while_somebody_waits_for_a_first_token_unless_there_are_many(
    sparse: int, while_waiting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    e = engine()
    asked: list[int] = []
    monkeypatch.setattr(e, "_tidy", lambda: asked.append(e.stats().prefill.batches))
    gone = [weakref.ref(prompt(1)) for _ in range(sparse)]
    monkeypatch.setattr(e.runner.transfer.bundles, "sparse", gone)
    e.submit(prompt(9), GREEDY)
    e.step()
    assert asked == ([0] if while_waiting else [])
    e.step()
    assert asked[-1] == 1
    run_all(e)
