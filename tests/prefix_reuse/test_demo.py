"""The demonstration: equal tokens, true numbers, and an exit code that tells a flip from noise."""

from __future__ import annotations

import dataclasses
import json
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import prefix_reuse.checkpoints
from models.testing import tiny_llama
from prefix_reuse import cli, demo
from prefix_reuse.errors import ConfigError
from prefix_reuse.outputs import RequestOutput, SampleOutput

KEYS = {
    "model",
    "device",
    "jax",
    "prompt_tokens",
    "computed_tokens_cold",
    "computed_tokens_warm",
    "ttft_cold_ms",
    "ttft_warm_ms",
    "host_pages_logical",
    "host_pages_physical",
    "gpu_pages_logical",
    "gpu_pages_physical",
    "h2d_pages_skipped",
    "tokens_equal",
    "max_logit_diff",
}
TEXT = "it was a dark night " * 4  # 80 tokens of the toy tokenizer


@pytest.fixture(scope="module")
def report() -> demo.DemoReport:
    model = tiny_llama(max_context=256)
    return demo.run_demo(model, text=TEXT, questions=("why", "who"), max_tokens=12, page_size=16)


def test_warm_and_batch_answers_are_the_cold_ones_with_fewer_computed_tokens(report: demo.DemoReport) -> None:
    assert report.tokens_equal
    assert report.exit_code == 0
    assert report.max_logit_diff < 1e-4
    for result in report.questions:
        assert result.computed_tokens_cold == result.prompt_tokens
        # Every full page of the document is found; the question and the rest of the last page are computed.
        assert 0 < result.computed_tokens_warm <= result.prompt_tokens - len(TEXT) // 16 * 16


def test_batch_shares_the_pages_of_the_document_on_host_and_device(report: demo.DemoReport) -> None:
    shared = len(TEXT) // 16
    assert report.gpu_pages_logical - report.gpu_pages_physical >= shared
    assert report.host_pages_logical - report.host_pages_physical >= shared
    assert report.h2d_pages_skipped >= shared


def test_json_has_the_documented_keys_and_plain_values(report: demo.DemoReport) -> None:
    numbers = json.loads(json.dumps(report.to_json()))
    assert numbers.keys() >= KEYS
    assert numbers["prompt_tokens"] == sum(result["prompt_tokens"] for result in numbers["questions"])
    assert numbers["computed_tokens_warm"] < numbers["computed_tokens_cold"] == numbers["prompt_tokens"]


def test_document_is_long_and_the_same_for_every_question() -> None:
    text = demo.document()
    assert len(text) > 2500
    prompts = demo.build_prompts(tiny_llama().tokenizer, text, ("a b", "c d"))
    assert prompts[0][: len(text)] == prompts[1][: len(text)]
    assert prompts[0] != prompts[1]


def test_prompt_that_does_not_fit_the_context_is_refused_before_any_engine_is_built() -> None:
    with pytest.raises(ConfigError, match="context"):
        demo.run_demo(tiny_llama(max_context=64), text=TEXT, questions=("why",))


# ---- flips


def output(*token_ids: int) -> RequestOutput:
    return RequestOutput(0, np.zeros(1, np.int32), (SampleOutput(token_ids, "", "length"),), 0, 1, False, 1.0)


class TwoLogits:
    """Stands for an engine whose cold logits have a given top-2 margin."""

    def __init__(self, margin: float) -> None:
        self.logits = np.array([[0.0, margin, -1.0]], np.float32)

    def score(self, token_ids: list[int]) -> np.ndarray:
        return self.logits


def flip(monkeypatch: pytest.MonkeyPatch, dtype: Any, margin: float, noise: float) -> demo.Flip | None:
    other = TwoLogits(margin)
    other.logits = other.logits + np.float32(noise)
    monkeypatch.setattr(demo, "Engine", lambda model, config: other)
    model = tiny_llama(dtype=dtype)
    config = demo.demo_config(model, [[1, 2]], 4, 16)
    cold_engine: Any = TwoLogits(margin)
    return demo.find_flip(model, config, cold_engine, [1, 2], 0, "warm", output(5, 6, 7), output(5, 8, 7))


def test_flip_in_fp32_is_never_excused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = flip(monkeypatch, "float32", margin=1e-6, noise=1.0)
    assert found is not None
    assert (found.position, found.cold_token, found.other_token, found.excused) == (1, 6, 8, False)


@pytest.mark.parametrize(("margin", "excused"), [(0.19, True), (0.21, False)])
def test_flip_in_bf16_is_excused_within_twice_the_noise(
    monkeypatch: pytest.MonkeyPatch, margin: float, excused: bool
) -> None:
    found = flip(monkeypatch, "bfloat16", margin=margin, noise=0.1)
    assert found is not None
    assert found.margin == pytest.approx(margin)
    assert found.noise == pytest.approx(0.1)
    assert found.excused is excused


def test_answer_that_is_cut_short_is_not_excused() -> None:
    model = tiny_llama(dtype="bfloat16")
    config = demo.demo_config(model, [[1, 2]], 4, 16)
    cold_engine: Any = TwoLogits(0.0)
    found = demo.find_flip(model, config, cold_engine, [1, 2], 0, "batch", output(5, 6), output(5))
    assert found is not None
    assert not found.excused


def test_exit_code_is_1_for_an_unexcused_flip_only(report: demo.DemoReport) -> None:
    excused = demo.Flip(0, "warm", 1, 6, 8, 0.1, 0.1, True)
    assert dataclasses.replace(report, flips=(excused,)).exit_code == 0
    assert dataclasses.replace(report, flips=(excused, dataclasses.replace(excused, excused=False))).exit_code == 1


# ---- the command line


def test_command_prints_tables_writes_json_and_reports_a_flip(report: demo.DemoReport, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(prefix_reuse.checkpoints, "load_model", lambda name, **_: tiny_llama())
    monkeypatch.setenv("COLUMNS", "200")
    bad = dataclasses.replace(report, flips=(demo.Flip(0, "warm", 1, 6, 8, 0.5, 0.1, False),))
    for result, code in ((report, 0), (bad, 1)):
        monkeypatch.setattr(cli, "run_demo", lambda *args, result=result, **options: result)
        ran = CliRunner().invoke(cli.app, ["demo", "--json", str(tmp_path / "numbers.json")])
        assert ran.exit_code == code, ran.output
        assert "Q: why" in ran.output
        assert "logical" in ran.output
        assert json.loads((tmp_path / "numbers.json").read_text()).keys() >= KEYS
    assert "not excused" in ran.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--json", "/no/such/folder/numbers.json"], "does not exist"),
        (["--json", "/"], "is a folder"),
        ([], "has no tokenizer"),
        (["--page-size", "24"], "has no tokenizer"),
    ],
)
def test_bad_input_ends_with_one_line_and_exit_code_2(arguments: list[str], message: str, monkeypatch, capsys) -> None:
    """Said before any question is asked."""
    speechless = dataclasses.replace(tiny_llama(), tokenizer=None)
    monkeypatch.setattr(prefix_reuse.checkpoints, "load_model", lambda name, **_: speechless)
    monkeypatch.setattr(sys, "argv", ["prefix-reuse", "demo", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_command_says_that_a_foreign_models_package_is_in_the_way(monkeypatch, capsys) -> None:
    foreign = ModuleType("models")
    foreign.__file__ = "/home/somebody/project/models/__init__.py"
    monkeypatch.setitem(sys.modules, "models", foreign)
    monkeypatch.setattr(sys, "argv", ["prefix-reuse", "demo"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert "/home/somebody/project/models/__init__.py" in message
    assert "Traceback" not in message


def test_command_names_a_checkpoint_that_does_not_exist(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["prefix-reuse", "demo", "--model", "no-such-model"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "no-such-model" in capsys.readouterr().err
