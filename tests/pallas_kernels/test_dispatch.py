"""Choice of implementation: counted, visible, and by the table."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from pallas_kernels import dispatch, layout

POOL = jnp.zeros(layout.pool_shape(1, 3, 16, 2, 64))
IDS = jnp.zeros(1, jnp.int32)


@pytest.fixture(autouse=True)
def _fresh_counts() -> Iterator[None]:
    dispatch.reset_dispatch_report()
    yield
    dispatch.reset_dispatch_report()


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_platform", lambda: "gpu")


def _install(monkeypatch: pytest.MonkeyPatch, function: Any, implementation: str = "triton") -> None:
    module = types.ModuleType(f"pallas_kernels.copy_pages.{implementation}")
    setattr(module, "gather_pages", function)  # noqa: B010
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="states what happens on CPU")
def test_on_cpu_the_reference_runs_without_a_fallback() -> None:
    pallas_kernels.gather_pages(POOL, IDS)
    assert pallas_kernels.dispatch_report() == {"gather_pages": {"reference": 1, "fallback_reasons": {}}}


def test_choice_is_made_once_per_trace() -> None:
    step = jax.jit(lambda pool: pallas_kernels.gather_pages(pool, IDS, implementation="reference"))
    for _ in range(2):
        step(POOL)
    assert pallas_kernels.dispatch_report()["gather_pages"]["reference"] == 1


@pytest.mark.usefixtures("on_cuda")
def test_on_cuda_the_preferred_implementation_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, lambda pool, ids: "from triton")
    assert pallas_kernels.gather_pages(POOL, IDS) == "from triton"
    assert pallas_kernels.dispatch_report() == {"gather_pages": {"triton": 1, "fallback_reasons": {}}}


@pytest.mark.usefixtures("on_cuda")
def test_an_unsupported_case_falls_back_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pool: Any, ids: Any) -> Any:
        raise NotImplementedError("pages of 16 slots are too small")

    _install(monkeypatch, refuse)
    _install(monkeypatch, refuse, "mosaic_gpu")
    pallas_kernels.gather_pages(POOL, IDS)
    pallas_kernels.gather_pages(POOL, IDS)
    reasons = {f"{name}: pages of 16 slots are too small": 2 for name in ("triton", "mosaic_gpu")}
    assert pallas_kernels.dispatch_report() == {"gather_pages": {"reference": 2, "fallback_reasons": reasons}}


def test_a_named_implementation_never_falls_back() -> None:
    x = jnp.ones((1, 64))
    with pytest.raises(NotImplementedError, match="add_rms_norm has no mosaic_gpu implementation"):
        pallas_kernels.add_rms_norm(x, x, x[0], eps=1e-5, implementation="mosaic_gpu")
    assert pallas_kernels.dispatch_report() == {}


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown implementation 'cuda'"):
        pallas_kernels.gather_pages(POOL, IDS, implementation="cuda")
    with pytest.raises(ValueError, match="unknown op 'attention'"):
        dispatch.load("attention", "reference")


def test_every_op_has_a_reference_that_is_the_last_choice() -> None:
    for op, (_, names) in dispatch.PREFERENCE.items():
        assert names[-1] == "reference"
        assert "reference" in dispatch.available_implementations(op)


def test_older_cards_pass_over_mosaic_with_a_counted_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_platform", lambda: "cuda")
    monkeypatch.setattr(dispatch, "_before_hopper", lambda: True)
    monkeypatch.setitem(dispatch.PREFERENCE, "append_kv", ("append_kv", ("mosaic_gpu", "reference")))
    pallas_kernels.reset_dispatch_report()
    pool = jnp.zeros(layout.pool_shape(1, 2, 16, 1, 8))
    one = jnp.zeros((1, 1, 8))
    ids = jnp.zeros(1, jnp.int32)
    pallas_kernels.append_kv(pool, one, one, ids, ids, jnp.ones(2, bool), jnp.ones(2, jnp.int32), layer=0)
    report = pallas_kernels.dispatch_report()["append_kv"]
    assert report["reference"] == 1
    assert any("Hopper" in reason for reason in report["fallback_reasons"])


def test_the_order_may_follow_the_size_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    op = "paged_decode_attention"
    monkeypatch.setattr(dispatch, "_platform", lambda: "cuda")
    for name in ("triton", "mosaic_gpu"):
        module = types.ModuleType(f"pallas_kernels.{op}.{name}")
        setattr(module, op, lambda q, *args, name=name, **options: (name, None))
        monkeypatch.setitem(sys.modules, module.__name__, module)

    def ran(head_dim: int, implementation: str | None = None) -> Any:
        pool = jnp.zeros(layout.pool_shape(1, 2, 16, 1, head_dim))
        table, lens = jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32)
        return pallas_kernels.paged_decode_attention(
            jnp.zeros((1, 4, head_dim)), pool, table, lens, layer=0, implementation=implementation
        )

    for before_hopper, best in ((False, "mosaic_gpu"), (True, "triton")):
        monkeypatch.setattr(dispatch, "_before_hopper", lambda old=before_hopper: old)
        assert [ran(head_dim) for head_dim in (64, 128, 256)] == ["triton", "triton", best]
        assert dispatch.candidates(op, None, 256)[0] == best
    assert ran(256, "triton") == "triton"
    assert dispatch.candidates(op, None, 64) == ("triton", "reference")
    assert dispatch.candidates(op, "triton", 256) == ("triton",)
