"""The benchmark of whole engines: its costs against counts by hand, and its sections on tiny models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks import engine_models
from benchmarks.model_costs import Costs, Rates, make_model
from models.testing import tiny_hybrid, tiny_llama

PAGE = 4


def test_a_step_reads_each_shared_byte_once_and_of_a_window_its_own_tokens():
    token = 2 * 2 * 8 * 4  # K and V, 2 KV heads of 8, float32
    llama = Costs(tiny_llama(), PAGE)
    assert llama.kv_bytes(100) == 2 * 100 * token
    assert llama.kv_bytes(100, rows=8, shared=60) == 2 * (60 + 8 * 40) * token
    hybrid = Costs(tiny_hybrid(window=16), PAGE)  # four layers, two of them see 16 tokens
    assert hybrid.kv_bytes(100, rows=8, shared=60) == (2 * (60 + 8 * 40) + 2 * 8 * 16) * token
    assert hybrid.kv_bytes(100, rows=8, shared=92) == (2 * (92 + 8 * 8) + 2 * (8 + 8 * 8)) * token
    assert hybrid.load_bytes(100) == (2 * 25 + 2 * 4) * PAGE * token
    assert hybrid.page_bytes == 4 * PAGE * token


def test_weights_that_are_read_and_flops_agree_with_xla():
    model = tiny_llama()
    costs = Costs(model, PAGE)
    table = model.params["embed"].nbytes
    assert costs.weight_bytes(1) == costs.weight_bytes(64) == costs.param_bytes - table
    # All tokens' logits and every pair of tokens: what a dense forward computes. XLA also counts norms, SwiGLU and softmax.
    from models.testing import dense_kv, dense_step

    n = 64
    tokens = jax.ShapeDtypeStruct((n,), "int32")
    analysis: Any = (
        jax.jit(dense_step, static_argnums=0).lower(model, model.params, tokens, dense_kv(model, n)).compile()
    )
    c = model.config
    dense = costs.prefill_flops(0, n) + 2 * c.hidden_size * c.vocab_size * (n - 1)
    dense += 4 * c.num_heads * c.head_dim * c.num_layers * (n * n - n * (n + 1) / 2)
    assert dense == pytest.approx(analysis.cost_analysis()["flops"], rel=0.1)


def test_experts_are_counted_by_how_many_a_batch_is_expected_to_choose():
    model = make_model("tiny-moe")
    costs = Costs(model, PAGE)
    experts = [layer[name].nbytes for layer in model.params["layers"] for name in ("gate_up", "down")]
    assert costs.expert_bytes == sum(experts)
    assert costs.experts(1) == pytest.approx(2)
    assert costs.experts(2) == pytest.approx(8 * (1 - 0.75**2))
    assert costs.weight_bytes(1) == pytest.approx(costs.dense_bytes + sum(experts) / 4)
    assert costs.weight_bytes(1000) == pytest.approx(costs.dense_bytes + sum(experts))
    assert costs.weight_bytes(1000, experts=3) == pytest.approx(costs.dense_bytes + 3 * sum(experts) / 8)
    slow = Rates(read=1e6, matmul=1e30, to_device=2e6, to_host=1e6)
    assert costs.decode_ms(slow, 10, 1) == pytest.approx((costs.weight_bytes(1) + costs.kv_bytes(10)) / 1e3)
    read = costs.weight_bytes(9, experts=2.5) + costs.kv_bytes(10, 9)
    assert costs.decode_ms(slow, 10, 9, experts=2.5) == pytest.approx(read / 1e3)
    assert costs.prefill_ms(slow, 8, 2) == pytest.approx((costs.weight_bytes(2) + costs.kv_bytes(8)) / 1e3)
    assert costs.load_ms(slow, 8) == pytest.approx(costs.load_bytes(8) / 2e3)


def sections(path: Path, *arguments: str) -> dict[str, Any]:
    engine_models.main(["--json", str(path), "--repeats", "1", "--decode-steps", "2", *arguments])
    return json.loads(path.read_text())


def test_a_run_that_is_cut_leaves_the_rows_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def cut(bench: engine_models.Bench) -> Any:
        yield {"case": "half"}
        raise KeyboardInterrupt

    monkeypatch.setitem(engine_models.SECTIONS, "host", cut)
    path = tmp_path / "out.json"
    with pytest.raises(KeyboardInterrupt):
        sections(path, "--model", "tiny-llama", "--scale", "32", "--only", "ttft,host")
    record = json.loads(path.read_text())["tiny-llama"]
    rows = {row["case"]: row for row in record["ttft"]["rows"]}
    assert {"cold", "warm", "warm, stream", "0% hits, reuse on / off", "memory"} <= rows.keys()
    assert rows["warm"]["cached"] == 256
    assert rows["warm"]["times_ideal"] == pytest.approx(rows["warm"]["ms"] / rows["warm"]["ideal_ms"])
    assert record["host"]["rows"] == [{"case": "half"}]
    assert "seconds" not in record["host"]


@pytest.mark.slow
def test_decode_and_the_workload_on_a_mixture_of_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "out.json"
    path.write_text(json.dumps({"another": {"ttft": {}}}))
    arguments = ["--model", "tiny-moe", "--scale", "32", "--only", "decode", "--workload", "--workload-rows", "4"]
    arguments += ["--rows", "2"]
    result = sections(path, *arguments, "--profile")
    assert "another" in result
    decode = result["tiny-moe"]["decode"]
    rows = [row for row in decode["rows"] if row["case"] == "decode"]
    assert [(row["rows"], row["shared"], row["own"]) for row in rows] == [(2, 0, 256), (2, 224, 32)]
    costs, rate = Costs(make_model("tiny-moe"), 2), decode["rates"]["read_TBps"] * 1e12
    for row in rows:
        assert row["ms_min"] <= row["ms_median"] <= row["ms_max"]
        assert row["experts_expected"] == pytest.approx(3.5)
        assert 2 <= row["experts_read"] <= 4
        read = costs.weight_bytes(2, row["experts_read"]) + costs.kv_bytes(256, 2, row["shared"])
        assert row["ideal_ms"] == pytest.approx(read / rate * 1e3)
    assert decode["compilations"]["chosen_experts"] == 1  # for both cases
    first, timed, _ = result["tiny-moe"]["workload"]["rows"]
    assert timed["computed_tokens"] == timed["least_computed_tokens"] == 128 + 15 * 8
    assert timed["compiled"] == 0 < first["compiled"]
    assert "wait for the device" in capsys.readouterr().out


@pytest.mark.slow
def test_a_case_that_does_not_fit_the_device_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = make_model("tiny-llama")
    room = 260 * Costs(model, 2).page_bytes  # two rows of 256 tokens need 144 pages each
    monkeypatch.setattr(engine_models.Bench, "free_bytes", lambda bench: room)
    arguments = ["--model", "tiny-llama", "--scale", "32", "--only", "decode", "--embed-std", "10"]
    decode = sections(tmp_path / "out.json", *arguments)["tiny-llama"]["decode"]
    left_out = [row for row in decode["rows"] if "left_out" in row]
    assert [(row["rows"], row["shared"]) for row in left_out] == [(2, 0)]
    assert "do not fit" in left_out[0]["left_out"]
    (two,) = [row for row in decode["rows"] if row.get("rows") == 2 and row["shared"]]
    assert 1 <= two["distinct_tokens"] <= 2
    assert "experts_read" not in two
    assert "chosen_experts" not in decode["compilations"]


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        engine_models.main(["--model", "tiny-llama,none", "--only", "nothing"])
    assert "none, nothing" in capsys.readouterr().err
    for rows in ("1,x", "0", ""):
        with pytest.raises(SystemExit):
            engine_models.main(["--model", "tiny-llama", f"--rows={rows}"])
        assert "--rows" in capsys.readouterr().err
    for std in ("-1", "0", "nan", "inf", "wide"):
        with pytest.raises(SystemExit):
            engine_models.main(["--model", "tiny-llama", f"--embed-std={std}"])
        assert "--embed-std" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["tiny-moe", "tiny-llama"])
def test_a_wider_embedding_changes_nothing_else(name: str):
    plain, wide = make_model(name).params, make_model(name, 10.0).params
    assert np.std(np.asarray(wide["embed"], np.float32)) == pytest.approx(10, rel=0.02)
    assert jax.tree.structure(plain) == jax.tree.structure(wide)
    for other in plain.keys() - {"embed"}:
        assert jax.tree.all(jax.tree.map(np.array_equal, plain[other], wide[other]))
