"""The examples of the documentation run and are right."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np

from models.testing import reference_logits, tiny_llama

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"


def test_own_step_shares_two_pages_and_gives_the_logits_of_a_cold_run(capsys) -> None:
    names = runpy.run_path(str(EXAMPLES / "own_step.py"))
    prefix, one, two = (names[name].tolist() for name in ("prefix", "one", "two"))
    model = tiny_llama()
    np.testing.assert_allclose(names["logits_one"], reference_logits(model, prefix + one)[-1], atol=1e-5)
    np.testing.assert_allclose(names["logits_two"], reference_logits(model, prefix + two)[-1], atol=1e-5)
    (pool,) = names["pools"]
    assert pool.page_table.tolist() == [[0, 1, 2, -1], [0, 1, 5, -1]]
    assert pool.refcounts.tolist() == [2, 2, 1, 0, 0, 1, 0, 0]
    assert not pool.writable[:2].any()
    assert "page table" in capsys.readouterr().out


def test_own_step_fits_forty_lines_of_code() -> None:
    lines = (EXAMPLES / "own_step.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) <= 40


def test_prefixes_are_held_saved_and_found_again_after_a_restart(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["prefixes.py", str(tmp_path)])
    names = runpy.run_path(str(EXAMPLES / "prefixes.py"))
    full = len(names["engine"].tokenize(names["document"])) // 16 * 16
    assert [(a.cached_tokens, len(a.samples)) for a in names["answers"]] == [(full, 3), (full, 3)]
    assert (names["again"].cached_tokens, len(names["loaded"])) == (full, full)
    assert not names["prefix"].is_held
    assert names["engine"].store.open_leases == 0
    assert "every full page of the prompt" in capsys.readouterr().out
