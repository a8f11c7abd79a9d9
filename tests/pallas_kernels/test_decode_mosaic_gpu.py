"""Mosaic GPU decode without a GPU: simulated with race and bounds detection, lowered for CUDA, refused where it has no kernel.

The simulation runs in a process of its own, with more threads than a small machine has cores: see `simulator`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from simulator import run_simulator

import pallas_kernels as pk
from pallas_kernels.paged_decode_attention import mosaic_gpu
from pallas_kernels.testing import PagedCase, attention_oracle, make_inputs

BF16, F16 = jnp.bfloat16, jnp.float16
SMALL = {"split": 128, "block": 64, "num_blocks": 3, "stages": 2}
KEYS = (0, 1, 150, 256)  # with a window of 40 the third row looks across a border of splits


def paged(name: str, head_dim: int, page: int, heads: int = 8, kv_heads: int = 2, **options: Any) -> PagedCase:
    rows = tuple((1, n) for n in options.pop("keys", KEYS))
    return PagedCase(name, rows, heads, kv_heads, head_dim, page, **{"dtype": BF16, "extra_columns": 1, **options})


CASES = [
    paged("plain", 128, 16),
    paged("window_and_sinks", 64, 16, heads=16, window=40, sinks=True, scale=0.1),
    paged("soft_cap", 64, 32, soft_cap=3.0),
    paged("d80_page16_window_sinks", 80, 16, heads=16, window=40, sinks=True),
    paged("d256_page128_window", 256, 128, heads=4, kv_heads=1, window=40, keys=(1, 0, 129, 200)),
]
MORE_CASES = [
    paged("d96_page64_f16_soft_cap", 96, 64, kv_heads=1, dtype=F16, soft_cap=3.0),
    *(
        paged(f"d{head_dim}_page{page}", head_dim, page, heads=16, dtype=dtype, window=window, sinks=window is None)
        for head_dim in (80, 96, 256)
        for page, dtype, window in ((16, F16, None), (32, BF16, 40), (64, BF16, None), (128, BF16, 1))
    ),
]


def simulate(names: list[str]) -> None:
    """Runs cases in the simulator and prints errors against float64, and the reference's, as JSON."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    report = {}
    for case in CASES + MORE_CASES:
        if case.name not in names:
            continue
        inputs = make_inputs(case, 0)
        arrays = tuple(jnp.asarray(a) for a in (inputs.q, inputs.pool, inputs.page_table, inputs.kv_lens))
        options = {**inputs.options, "return_lse": True, "scale": case.scale or case.head_dim**-0.5}
        out, lse = mosaic_gpu.paged_decode_attention(
            *arrays,
            **options,
            layer=jnp.int32(case.layer),
            config=SMALL,
            interpret=plgpu.InterpretGPUParams(detect_races=True),
        )
        plain = pk.paged_decode_attention(*arrays, **options, layer=case.layer, implementation="reference")
        want, want_lse = attention_oracle(inputs)
        live = np.isfinite(want_lse)
        report[case.name] = {
            "out": float(np.abs(np.asarray(out, np.float64) - want).max()),
            "reference": float(np.abs(np.asarray(plain[0], np.float64) - want).max()),
            "lse": float(np.abs(np.asarray(lse, np.float64)[live] - want_lse[live]).max()),
            "same_empty": bool((np.isneginf(lse) == ~live).all() and not np.asarray(out)[~live].any()),
        }
    print(json.dumps(report))


def check_simulated(cases: list[PagedCase]) -> None:
    """Poison outside the rows, and columns of -1 that a window has passed, reach no output."""
    report = run_simulator(__file__, (case.name for case in cases), threads=16, timeout=600)
    assert list(report) == [case.name for case in cases]
    for name, result in report.items():
        assert result["out"] <= 2 * result["reference"] + 1e-6, (name, result)
        assert result["lse"] < 1e-4, (name, result)
        assert result["same_empty"], name


def test_simulated_kernel_agrees_with_float64_and_has_no_race() -> None:
    check_simulated(CASES)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [80, 96, 256])
def test_more_simulated_pages_agree_with_float64(head_dim: int) -> None:
    check_simulated([case for case in MORE_CASES if case.head_dim == head_dim])


@pytest.mark.parametrize(
    ("head_dim", "page", "dtype", "options"),
    [
        (64, 16, BF16, {}),
        (80, 16, BF16, {"window": 40, "sinks": True}),
        (80, 128, F16, {"soft_cap": 9.0}),
        (96, 32, BF16, {"sinks": True}),
        (128, 128, BF16, {"window": 40}),
        (256, 16, BF16, {"window": 40, "sinks": True}),
        (256, 64, F16, {"soft_cap": 9.0}),
    ],
)
def test_lowers_for_cuda_without_a_gpu(
    head_dim: int, page: int, dtype: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel passes Mosaic's checks (shared memory, layouts, bank conflicts) with its default sizes."""
    monkeypatch.setattr(mosaic_gpu, "interpret_here", lambda: False)

    def shape(*dims: int, kind: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(dims, kind)

    pool = shape(*pk.pool_shape(2, 64, page, 2, head_dim), kind=dtype)
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=None)

    def run(q: jax.Array, pool: jax.Array, table: jax.Array, lens: jax.Array) -> Any:
        return mosaic_gpu.paged_decode_attention(
            q, pool, table, lens, layer=jnp.int32(1), scale=0.1, window=options.get("window"), return_lse=True,
            sinks=jnp.zeros(8) if options.get("sinks") else None, soft_cap=options.get("soft_cap"),
        )  # fmt: skip

    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        arguments = shape(5, 8, head_dim, kind=dtype), pool, shape(5, 4096 // page), shape(5)
        text = jax.jit(run).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    assert text.count("__gpu$xla.gpu.triton") == 1  # the merge of splits


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page", "dtype"),
    [
        (8, 2, 112, 16, BF16),
        (8, 2, 64, 16, jnp.float32),
        (6, 2, 64, 16, BF16),
        (8, 2, 64, 48, BF16),
    ],
)
def test_cases_without_a_kernel_are_refused(heads, kv_heads, head_dim, page, dtype):
    pool = jax.ShapeDtypeStruct(pk.pool_shape(1, 9, page, kv_heads, head_dim), dtype)
    q, lens = jax.ShapeDtypeStruct((4, heads, head_dim), dtype), jax.ShapeDtypeStruct((4,), jnp.int32)
    table = jax.ShapeDtypeStruct((4, 4), jnp.int32)
    with pytest.raises(NotImplementedError, match="Mosaic GPU decode"):
        jax.eval_shape(
            lambda *a: pk.paged_decode_attention(*a, layer=0, implementation="mosaic_gpu"), q, pool, table, lens
        )


if __name__ == "__main__":
    simulate(sys.argv[1:])
