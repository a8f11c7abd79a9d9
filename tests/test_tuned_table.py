"""From a sweep to a table of launch parameters."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import tuned_table

SHAPES = [[64, 32, 8, 128, 8192, 16, 7168], [1, 32, 8, 128, 8192, 16, 0], [64, 64, 8, 64, 8192, 16, 7168]]


def row(op, shape, label, ms):
    return {"op": op, "shape": shape, "label": label, "kernel_ms": ms}


def decode(launch, *times):
    return [row("decode", shape, f"triton {json.dumps(launch)}", ms) for shape, ms in zip(SHAPES, times, strict=True)]


def test_the_default_is_best_over_all_shapes_and_decode_has_one_for_all():
    wide, narrow = {"split": 1024}, {"split": 512}
    rows = [*decode(wide, 1.0, 3.0, 1.0), *decode(narrow, 1.1, 1.0, 1.1)]
    assert tuned_table.choose(rows) == {"paged_decode_attention.triton": {"default": narrow}}


def test_shared_prefix_decode_may_differ_by_shape_key():
    rows = []
    for shape, times in ((SHAPES[0], (1.0, 1.2)), (SHAPES[2], (1.5, 1.0))):
        for block, ms in zip((32, 64), times, strict=True):
            rows.append(row("shared", shape, f"triton split 1024 rows 16 {json.dumps({'block': block})}", ms))
    rows.append(row("shared", SHAPES[0], "plain triton", 0.1))
    rows.append({"op": "shared", "shape": SHAPES[0], "label": 'triton split 1024 rows 16 {"block": 8}', "error": "no"})
    table = tuned_table.choose(rows)["shared_prefix_attention.triton"]
    assert table["default"] == {"block": 64}
    assert table["G4 D128 bfloat16"] == {"block": 32}
    assert "G8 D64 bfloat16" not in table


def test_the_table_keeps_what_the_sweep_did_not_cover(tmp_path, monkeypatch, capsys: pytest.CaptureFixture[str]):
    sweep, table = tmp_path / "sweep.json", tmp_path / "card.json"
    sweep.write_text(json.dumps({"rows": [*decode({"split": 1}, 2, 2, 2), *decode({"split": 2}, 1, 1, 1)]}))
    table.write_text(json.dumps({"other.triton": {"default": {"x": 1}}}))
    monkeypatch.setattr(sys, "argv", ["tuned_table", str(sweep), "--table", str(table)])
    tuned_table.main()
    assert json.loads(table.read_text()) == {
        "other.triton": {"default": {"x": 1}},
        "paged_decode_attention.triton": {"default": {"split": 2}},
    }
    assert "paged_decode_attention.triton" in capsys.readouterr().out
