"""`prefix-reuse verify`: a sound model passes, a broken one is caught, named to the layer, and ends with exit code 2."""

from __future__ import annotations

import dataclasses
import json
import sys
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import prefix_reuse.checkpoints
from models.testing import tiny_hybrid, tiny_llama
from prefix_reuse import cli
from prefix_reuse.steps import PagedKV
from prefix_reuse.verify import RunResult, VerifyReport, _Judge, run_verify
from prefix_reuse.verify_layers import Section, Tapped, first_difference
from prefix_reuse.verify_runs import REUSING, Record, Runs, Score, make_prompts, verify_config


class Wrapped:
    """A model with another forward."""

    def __init__(self, inner: Any):
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class SuffixFromZero(Wrapped):
    """Counts the positions of each packed piece from 0: right for a whole prompt, wrong for what follows a hit."""

    def forward(self, params: Any, tokens: Any, positions: Any, kv: Any, attend: Any) -> Any:
        if isinstance(kv, PagedKV) and kv.q_offsets is not None:
            row = jnp.searchsorted(kv.q_offsets[1:], jnp.arange(tokens.shape[0]), side="right")
            start = kv.kv_lens - jnp.diff(kv.q_offsets)
            positions = positions - start.at[row].get(mode="fill", fill_value=0)
        return self._inner.forward(params, tokens, positions, kv, attend)


class MixesRows(Wrapped):
    """Adds a little of the batch's mean to the values of layer 1: rounding-sized, but not the row's own."""

    def forward(self, params: Any, tokens: Any, positions: Any, kv: Any, attend: Any) -> Any:
        def mixed(kv: Any, layer: int, q: Any, k: Any, v: Any, **options: Any) -> Any:
            return attend(kv, layer, q, k, v + 1e-6 * v.mean(0) if layer == 1 else v, **options)

        return self._inner.forward(params, tokens, positions, kv, mixed)


@cache
def model(**shape: Any) -> Any:
    """Without a tokenizer, for random prompts."""
    return dataclasses.replace(tiny_llama(max_context=256, **shape), tokenizer=None)


def result(report: VerifyReport, run: str) -> RunResult:
    return next(r for r in report.runs if r.run == run)


# ---- sound models


def test_deterministic_mode_passes_with_equal_bits_in_every_run() -> None:
    report = run_verify(tiny_hybrid(layers=2, max_context=256), deterministic=True, page_size=16)
    assert report.violations == ()
    assert (report.exit_code, report.first_layer, report.bar) == (0, "", 0.0)
    assert [r.run for r in report.runs] == ["cold", "disabled", *REUSING]
    for run in report.runs:
        assert run.same_bits
        assert run.max_logit_diff == 0
        assert run.flips == ()
        assert run.tokens_sha256 == run.cold_tokens_sha256
        assert run.logits_sha256 == run.cold_logits_sha256
        assert (run.cached_tokens > 0) == (run.run in REUSING)
        assert run.computed_tokens > 0
    # `shared` of 64 tokens, scored and answered: one token replayed each time.
    assert (result(report, "full hit").cached_tokens, result(report, "full hit").computed_tokens) == (126, 2)
    numbers = json.loads(json.dumps(report.to_json()))
    assert numbers["ok"]
    assert numbers["runs"][2]["run"] == "warm"


@pytest.mark.slow
def test_default_mode_passes_within_rounding() -> None:
    report = run_verify(model(), page_size=16)
    assert report.violations == ()
    assert result(report, "disabled").same_bits
    assert 0 < report.noise < 1e-4
    assert 0 < result(report, "warm").max_logit_diff < 1e-4
    assert {"cold: chunks", "cold: padding"} < {r.run for r in report.runs}


# ---- broken models


def test_suffix_positions_from_zero_are_caught_in_layer_0_with_exit_code_2(monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.setattr(prefix_reuse.checkpoints, "load_model", lambda name, **_: SuffixFromZero(model(layers=1)))
    arguments = ["verify", "broken", "--deterministic", "--page-size", "16", "--json", str(tmp_path / "v.json")]
    monkeypatch.setattr(sys, "argv", ["prefix-reuse", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert "violation: warm: logits are not the cold ones to the bit" in captured.err
    assert "layer 0 (queries)" in captured.err
    assert "every bit is equal" not in captured.out
    numbers = json.loads((tmp_path / "v.json").read_text())
    assert not numbers["ok"]
    assert numbers["first_layer"] == "layer 0 (queries)"


@pytest.mark.slow
def test_suffix_positions_from_zero_are_caught_in_default_mode_too() -> None:
    report = run_verify(SuffixFromZero(model(layers=1)), page_size=16)
    assert report.exit_code == 2
    assert report.first_layer == "layer 0 (queries)"
    assert any(v.startswith("warm: a logit differs by") for v in report.violations)
    assert any("no rounding" in v for v in report.violations)


def test_rounding_sized_dependence_on_the_batch_is_caught_in_its_layer() -> None:
    report = run_verify(MixesRows(model()), deterministic=True, page_size=16)
    assert report.exit_code == 2
    assert 0 < max(r.max_logit_diff for r in report.runs) < 1e-4
    assert report.first_layer == "layer 1 (values)"


# ---- the judge, without engines


def judge(
    name: str, values: np.ndarray, *, deterministic: bool, dtype: str = "float32", noise: float = 0.0
) -> list[str]:
    """What is said of a run whose logits of `first` are `values`; cold ones are 0, 1, 2, ... times 0.1."""
    tiny = model(dtype=dtype)
    config = verify_config(tiny, make_prompts(tiny, 16), 16, deterministic)
    runs = Runs(tiny, config, make_prompts(tiny, 16))
    cold = cold_logits()
    records = {
        "cold": Record([Score("first", cold, 0)], {}, 0, 4),
        name: Record([Score("first", values, 2)], {}, 2 if name in REUSING else 0, 2),
    }
    if noise:
        records["cold: chunks"] = Record([Score("first", cold + np.float32(noise), 0)], {}, 0, 4)
    judged = _Judge(runs, records)
    return judged._violations(judged._result(name))


def cold_logits() -> np.ndarray:
    return 0.1 * np.arange(20, dtype=np.float32).reshape(4, 5)


@pytest.mark.parametrize(("difference", "caught"), [(0.0, False), (9e-4, False), (1.1e-3, True)])
def test_float32_may_differ_by_a_thousandth(difference: float, caught: bool) -> None:
    found = judge("warm", cold_logits()[2:] + np.float32(difference), deterministic=False)
    assert bool(found) == caught


@pytest.mark.parametrize(("difference", "caught"), [(0.019, False), (0.021, True)])
def test_16_bits_may_differ_by_twice_the_noise(difference: float, caught: bool) -> None:
    found = judge("warm", cold_logits()[2:] + np.float32(difference), deterministic=False, dtype="bfloat16", noise=0.01)
    assert bool(found) == caught


def test_noise_as_large_as_the_logits_excuses_nothing() -> None:
    found = judge("warm", cold_logits()[2:] + np.float32(0.3), deterministic=False, dtype="bfloat16", noise=0.3)
    assert len(found) == 1
    assert "no rounding" in found[0]


@pytest.mark.parametrize("run", ["warm", "disabled"])
def test_one_bit_counts_in_deterministic_mode_and_always_without_reuse(run: str) -> None:
    values = cold_logits()[2:].copy()
    assert judge(run, values, deterministic=run == "warm") == []
    values[1, 3] = np.nextafter(values[1, 3], np.float32(9))
    (found,) = judge(run, values, deterministic=run == "warm")
    assert "to the bit" in found


def test_nan_is_a_difference() -> None:
    values = cold_logits()[2:].copy()
    values[0, 0] = np.nan
    assert judge("warm", values, deterministic=False)
    assert judge("warm", values, deterministic=True)


def test_a_run_without_hits_proves_nothing() -> None:
    tiny = model()
    runs = Runs(tiny, verify_config(tiny, make_prompts(tiny, 16), 16, True), make_prompts(tiny, 16))
    cold = Record([Score("first", cold_logits(), 0)], {}, 0, 4)
    judged = _Judge(runs, {"cold": cold, "warm": Record([Score("first", cold_logits(), 0)], {}, 0, 4)})
    assert judged._violations(judged._result("warm")) == ["no cached page was used, so this proves nothing"]


@pytest.mark.parametrize(("noise", "excused"), [(0.01, False), (0.2, True)])
def test_a_flip_is_excused_within_twice_the_noise(noise: float, excused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = model()
    runs = Runs(tiny, verify_config(tiny, make_prompts(tiny, 16), 16, False), make_prompts(tiny, 16))

    class Cold:
        def score(self, text: np.ndarray) -> np.ndarray:
            assert len(text) == 72 + 1
            return np.array([[0.0, 0.3, -1.0]], np.float32)

    monkeypatch.setattr(runs, "engine", Cold)
    cold, values = cold_logits(), cold_logits()[2:]
    records = {
        "cold": Record([Score("first", cold, 0)], {"first": (5, 1, 7)}, 0, 4),
        "warm": Record([Score("first", values, 2)], {"first": (5, 0, 7)}, 2, 2),
        "cold: chunks": Record([Score("first", cold + np.float32(noise), 0)], {}, 0, 4),
    }
    (flip,) = _Judge(runs, records)._result("warm").flips
    assert (flip.position, flip.cold_token, flip.other_token, flip.excused) == (1, 1, 0, excused)
    assert flip.margin == pytest.approx(0.3)


def test_first_difference_names_the_first_section_by_bits_or_by_size() -> None:
    sections = [Section("one", slice(2, 4)), Section("two", slice(4, 6)), Section("end", slice(0, 2))]
    cold = np.ones((3, 6), np.float32)
    other = cold.copy()
    assert first_difference(sections, [(cold, other)], 0) == ""
    other[2, 5] += 1e-3
    assert first_difference(sections, [(cold, other)], 0) == "two"
    assert first_difference(sections, [(cold, other)], 1e-2) == ""
    other[1, 2] = np.nan
    assert first_difference(sections, [(cold, cold), (cold, other)], 1e-2) == "one"


def test_tapped_model_has_a_section_for_each_stage_of_each_layer() -> None:
    tapped = Tapped(tiny_llama(layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8))
    widths = [s.columns.stop - s.columns.start for s in tapped.sections]
    assert widths == [32, 16, 16, 32, 32, 16, 16, 32, 32]
    assert tapped.sections[5].name == "layer 1 (keys)"
    assert tapped.sections[-1].columns == slice(0, 32)


# ---- prompts and bad input


def test_prompts_share_whole_pages_and_leave_8_of_72_tokens_at_page_16() -> None:
    for page_size in (1, 4, 16, 64):
        prompts = make_prompts(model(), page_size)
        shared = prompts["shared"]
        assert len(shared) % page_size == 0
        assert len(shared) >= 64
        for name in ("first", "second"):
            assert np.array_equal(prompts[name][: len(shared)], shared)
        assert prompts["first"][len(shared)] != prompts["second"][len(shared)]
        assert prompts["other"][0] != shared[0]
    assert [len(make_prompts(model(), 16)[name]) for name in ("shared", "first", "second")] == [64, 72, 65]
    text = make_prompts(tiny_llama(), 16)["shared"]
    assert tiny_llama().tokenizer is not None
    assert tiny_llama().tokenizer.decode(text.tolist()).strip()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-model"], "no-such-model"),
        (["tiny", "--page-size", "24"], "power of two"),
        (["tiny", "--page-size", "128"], "context"),
        (["skips a layer"], "incomplete-paged-layer-registry"),
        (["tiny", "--json", "/no/such/folder/v.json"], "/no/such/folder"),
        (["tiny", "--json", "/"], "is a folder"),
    ],
)
def test_bad_input_ends_with_one_line_and_exit_code_2(arguments: list[str], message: str, monkeypatch, capsys) -> None:
    class SkipsALayer(Wrapped):
        def forward(self, params: Any, tokens: Any, positions: Any, kv: Any, attend: Any) -> Any:
            def once(kv: Any, layer: int, q: Any, *rest: Any, **options: Any) -> Any:
                return (q, kv) if layer else attend(kv, layer, q, *rest, **options)

            return self._inner.forward(params, tokens, positions, kv, once)

    known = {"tiny": model(), "skips a layer": SkipsALayer(model())}
    load = prefix_reuse.checkpoints.load_model
    monkeypatch.setattr(
        prefix_reuse.checkpoints, "load_model", lambda name, **_: known[name] if name in known else load(name)
    )
    monkeypatch.setattr(sys, "argv", ["prefix-reuse", "verify", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_command_prints_a_line_per_run_and_says_what_is_wrong(monkeypatch) -> None:
    monkeypatch.setattr(prefix_reuse.checkpoints, "load_model", lambda name, **_: model())
    digest, other = "ab" * 32, "cd" * 32
    fine = RunResult("warm", 10, 3, 0.0, 0.0, 1.0, True, (), digest, digest, digest, digest)
    report = VerifyReport("tiny", "cpu", "float32", 16, True, 0.0, 0.0, (fine,), (), "")
    bad_run = dataclasses.replace(fine, run="reloaded", max_logit_diff=0.5, same_bits=False, logits_sha256=other)
    bad = dataclasses.replace(
        report, runs=(fine, bad_run), violations=("reloaded: wrong",), first_layer="layer 2 (keys)"
    )
    for given, code in ((report, 0), (bad, 2)):
        monkeypatch.setattr(cli, "run_verify", lambda *_, given=given, **__: given)
        ran = CliRunner().invoke(cli.app, ["verify", "tiny", "--deterministic"])
        assert ran.exit_code == code, ran.output
        assert "abababab=" in ran.stdout
    assert "cdcdcdcd=" not in ran.stdout
    assert "violation: reloaded: wrong" in ran.stderr
    assert "layer 2 (keys)" in ran.stderr
