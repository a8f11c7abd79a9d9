"""Checks and times prefill over cached pages on one GPU, beside FlashInfer on the same card in the same run.

Ours is timed as a loop inside one jitted call, rotating over layers of more than 250 MB of keys, so the L2 cache is
cold; the time of a short loop is subtracted, and the work list is built outside as FlashInfer's plan is.
FlashInfer is timed by Triton's do_bench, which flushes L2. Medians.

    python -m benchmarks.prefill --check --peer --json benchmarks/results/prefill_h200.json
    python -m benchmarks.prefill --variants variants.json     # {"case name or *": [config, ...]}
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import layout
from pallas_kernels.ragged_paged_attention import mosaic_gpu, reference

# name: rows, query heads, KV heads, head_dim, cached tokens, new tokens, page size
CASES: dict[str, tuple[int, int, int, int, int, int, int]] = {
    "B8 H32 K8 D128 8192+128": (8, 32, 8, 128, 8192, 128, 64),
    "B8 H32 K8 D128 8192+1024": (8, 32, 8, 128, 8192, 1024, 64),
    "B8 H64 K8 D64 8192+128": (8, 64, 8, 64, 8192, 128, 64),
    "B1 H32 K8 D128 32768+64": (1, 32, 8, 128, 32768, 64, 64),
    "B1 H32 K8 D128 0+8192": (1, 32, 8, 128, 0, 8192, 64),
}
COLD_BYTES = 250 << 20


def flops(case: tuple[int, ...]) -> float:
    rows, heads, _, dim, cached, new, _ = case
    return 4.0 * rows * heads * dim * (new * cached + new * (new + 1) / 2)


def inputs(case: tuple[int, ...], dtype: Any = jnp.bfloat16) -> dict[str, Any]:
    """Random pool and queries of one case, with enough layers to outgrow the L2 cache."""
    rows, heads, kv_heads, dim, cached, new, page = case
    length = cached + new
    columns = -(-length // page)
    pages = rows * columns
    layer_bytes = pages * kv_heads * 2 * page * dim * 2
    layers = max(1, -(-COLD_BYTES // layer_bytes))
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "q": jax.random.normal(keys[0], (rows * new, heads, dim), dtype),
        "kv": jax.random.normal(keys[1], layout.pool_shape(layers, pages, page, kv_heads, dim), dtype),
        "table": jax.random.permutation(keys[2], pages).astype(jnp.int32).reshape(rows, columns),
        "offsets": jnp.arange(rows + 1, dtype=jnp.int32) * new,
        "lens": jnp.full(rows, length, jnp.int32),
        "layers": layers,
    }


def options(dim: int, **overrides: Any) -> dict[str, Any]:
    base = {"scale": dim**-0.5, "window": None, "sinks": None, "soft_cap": None, "return_lse": False}
    return {**base, **overrides}


def time_ours(case: tuple[int, ...], config: dict[str, Any], *, repeats: int = 5, **overrides: Any) -> dict[str, Any]:
    """Milliseconds a call: median and spread of `repeats` differences of a long and a short loop."""
    data = inputs(case)
    layers, keywords = data.pop("layers"), options(case[3], **overrides)

    @jax.jit
    def loop(n: jax.Array, q: jax.Array, kv: jax.Array, table: Any, offsets: Any, lens: Any) -> Any:
        plan = mosaic_gpu.make_plan(q, kv, table, offsets, lens, window=keywords["window"], config=config)

        def body(i: jax.Array, carry: Any) -> Any:
            q, _ = carry
            out, _ = mosaic_gpu.ragged_paged_attention(
                q, kv, table, offsets, lens, layer=i % layers, config=config, plan=plan, **keywords
            )
            return jax.lax.optimization_barrier((q, out))

        return jax.lax.fori_loop(0, n, body, (q, jnp.zeros_like(q)))[1]

    start = time.perf_counter()
    jax.block_until_ready(loop(1, *data.values()))
    compile_s = time.perf_counter() - start

    def run(n: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(loop(n, *data.values()))
        return time.perf_counter() - start

    run(3)
    guess = max(run(11) - run(1), 1e-4) / 10
    steps = int(min(400, max(8, 0.06 / guess)))
    samples = [(run(steps + 2) - run(2)) / steps * 1e3 for _ in range(repeats)]
    ms = statistics.median(samples)
    tflops = flops(case) / ms / 1e9
    return {
        "ms": ms,
        "min": min(samples),
        "max": max(samples),
        "TFLOPs": tflops,
        "compile_s": compile_s,
        "config": config,
    }


def time_peer(case: tuple[int, ...]) -> dict[str, Any]:
    """FlashInfer's paged prefill, FA3 and FA2: milliseconds, plan not counted."""
    import flashinfer  # pyright: ignore[reportMissingImports]
    import torch  # pyright: ignore[reportMissingImports]
    from triton.testing import do_bench  # pyright: ignore[reportMissingImports]

    rows, heads, kv_heads, dim, cached, new, page = case
    columns = -(-(cached + new) // page)
    kv = torch.randn(rows * columns, 2, page, kv_heads, dim, dtype=torch.bfloat16, device="cuda")
    q = torch.randn(rows * new, heads, dim, dtype=torch.bfloat16, device="cuda")
    step = torch.arange(0, rows + 1, dtype=torch.int32, device="cuda")
    last = torch.full((rows,), (cached + new - 1) % page + 1, dtype=torch.int32, device="cuda")
    table = torch.randperm(rows * columns, device="cuda").int()
    result: dict[str, Any] = {"flashinfer": flashinfer.__version__, "torch": torch.__version__}
    for backend in ("fa3", "fa2") if dim == 128 else ("fa3",):
        try:
            space = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, "NHD", backend=backend)
            wrapper.plan(
                step * new, step * columns, table, last, heads, kv_heads, dim, page, causal=True,
                q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
            )  # fmt: skip
            result[backend] = do_bench(lambda w=wrapper: w.run(q, kv), return_mode="median")
        except Exception as error:  # a backend that does not exist here: say so in the table
            result[backend] = repr(error)[:200]
    return result


def distance(a: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(a - want) / np.linalg.norm(want))


def check() -> list[str]:
    """Ragged batches with NaN in every byte that is not a key, against a float64 oracle; bits of splits and chunks."""
    lines = []
    plain, capped, sunk = {}, {"window": 300, "soft_cap": 30.0}, {"window": 128, "sinks": True}
    shapes = (((128, 32, 8, 64), plain), ((64, 64, 8, 16), sunk), ((128, 8, 8, 128), capped), ((64, 14, 2, 32), plain))
    for (dim, heads, kv_heads, page), overrides in shapes:
        rng = np.random.default_rng(dim + page)
        lens = [(100, 2500), (1, 77), (0, 0), (257, 257), (33, 4133), (128, 2176)]
        q, kv, table, offsets, kl = ragged(rng, lens, heads, kv_heads, dim, page, jnp.bfloat16)
        o = {k: v for k, v in overrides.items() if k != "sinks"}
        sinks = jnp.asarray(rng.standard_normal(heads), jnp.float32) if "sinks" in overrides else None
        keywords = options(dim, return_lse=True, sinks=sinks, **o)
        results = {}
        for name, config in (("whole", {"split": False}), ("split", {"split": True}), ("one", {"chunk": 1 << 20})):
            run = jax.jit(
                lambda *a, c=config, k=keywords: mosaic_gpu.ragged_paged_attention(
                    *a, layer=jnp.int32(1), config=c, **k
                )
            )
            results[name] = [np.asarray(x, np.float64) for x in run(q, kv, table, offsets, kl)]
        ref = reference.ragged_paged_attention(q, kv, table, offsets, kl, layer=jnp.int32(1), **keywords)
        ref_out = np.asarray(ref[0], np.float64)
        want = oracle(q, kv, table, offsets, kl, 1, keywords)
        finite = np.isfinite(np.asarray(ref[1]))
        lse = np.abs(results["whole"][1][finite] - np.asarray(ref[1])[finite]).max()
        same = (results["whole"][0] == results["split"][0]).all()
        fraction = (results["whole"][0] != results["split"][0]).mean()
        named = {**{name: result[0] for name, result in results.items()}, "reference": ref_out}
        errors = " ".join(f"{name} {distance(value, want):.2e}" for name, value in named.items())
        lines.append(
            f"D{dim} H{heads} K{kv_heads} page{page} {overrides}: {errors} "
            f"lse {lse:.1e} same bits {same} ({fraction:.1e})"
        )
        print(lines[-1], flush=True)
    # One row alone, in a batch, and in two pieces cut at a page edge.
    rng = np.random.default_rng(9)
    q, kv, table, offsets, kl = ragged(rng, [(200, 3000), (333, 4000)], 32, 8, 128, 64, jnp.bfloat16)
    run = jax.jit(lambda *a: mosaic_gpu.ragged_paged_attention(*a, layer=jnp.int32(1), **options(128))[0])
    both = np.asarray(run(q, kv, table, offsets, kl), np.float32)
    alone = np.asarray(run(q[200:533], kv, table[1:], jnp.array([0, 333], jnp.int32), kl[1:]), np.float32)
    a = run(q[200:373], kv, table[1:], jnp.array([0, 173], jnp.int32), jnp.array([3840], jnp.int32))
    b = run(q[373:533], kv, table[1:], jnp.array([0, 160], jnp.int32), kl[1:])
    pieces = np.concatenate([np.asarray(a, np.float32), np.asarray(b, np.float32)])
    lines.append(f"bits: alone {(alone == both[200:533]).all()} pieces {(pieces == alone).all()}")
    print(lines[-1], flush=True)
    return lines


def ragged(
    rng: np.random.Generator, lens: list[tuple[int, int]], heads: int, kv_heads: int, dim: int, page: int, dtype: Any
) -> tuple[jax.Array, ...]:
    """A batch of `(new, total)` rows over a pool with NaN in all that is not owned; layer 1 of 2; 5 padding tokens."""
    counts = [-(-total // page) for _, total in lens]
    ids = rng.permutation(sum(counts) + 3)[: sum(counts)]
    kv = np.full(layout.pool_shape(2, sum(counts) + 3, page, kv_heads, dim), np.nan, np.float32)
    table = np.full((len(lens), max(counts) + 1), -1, np.int32)
    at = 0
    for row, ((_, total), count) in enumerate(zip(lens, counts, strict=True)):
        table[row, :count] = ids[at : at + count]
        at += count
        for column in range(count):
            used = min(page, total - column * page)
            kv[1, table[row, column], :, :, :used] = rng.standard_normal((kv_heads, 2, used, dim))
    q = rng.standard_normal((sum(new for new, _ in lens) + 5, heads, dim))
    offsets = np.concatenate([[0], np.cumsum([new for new, _ in lens])]).astype(np.int32)
    kl = np.array([total for _, total in lens], np.int32)
    return jnp.asarray(q, dtype), jnp.asarray(kv, dtype), jnp.asarray(table), jnp.asarray(offsets), jnp.asarray(kl)


def oracle(q: Any, kv: Any, table: Any, offsets: Any, lens: Any, layer: int, keywords: dict[str, Any]) -> np.ndarray:
    """Attention in float64 on the host."""
    q, table, offsets, lens = (np.asarray(x) for x in (q.astype(jnp.float32), table, offsets, lens))
    k_all, v_all = layout.split_kv(np.asarray(kv[layer].astype(jnp.float32)))
    out = np.zeros(q.shape, np.float64)
    group = q.shape[1] // k_all.shape[2]
    for row, total in enumerate(lens):
        begin, end = offsets[row], offsets[row + 1]
        if end == begin:
            continue
        pages = table[row, : -(-total // k_all.shape[1])]
        k, v = (x[pages].reshape(-1, *x.shape[2:])[:total].astype(np.float64) for x in (k_all, v_all))
        k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
        s = np.einsum("qhd,khd->hqk", q[begin:end].astype(np.float64), k) * keywords["scale"]
        if keywords["soft_cap"]:
            s = keywords["soft_cap"] * np.tanh(s / keywords["soft_cap"])
        position, key = np.arange(total - (end - begin), total)[:, None], np.arange(total)
        visible = key <= position
        if keywords["window"]:
            visible &= key > position - keywords["window"]
        s = np.where(visible, s, -np.inf)
        top = s.max(-1, keepdims=True)
        if keywords["sinks"] is not None:
            sink = np.asarray(keywords["sinks"], np.float64)[:, None, None]
            top = np.maximum(top, sink)
        p = np.exp(s - top)
        total_p = p.sum(-1, keepdims=True) + (np.exp(sink - top) if keywords["sinks"] is not None else 0)
        out[begin:end] = np.einsum("hqk,khd->qhd", p / total_p, v)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with a float64 oracle first")
    parser.add_argument("--peer", action="store_true", help="time FlashInfer too")
    parser.add_argument("--no-ours", action="store_true")
    parser.add_argument("--variants", help="JSON file: case name or * -> list of configs")
    parser.add_argument("--json", help="write results here")
    args = parser.parse_args()
    device = jax.devices()[0]
    record: dict[str, Any] = {"card": device.device_kind, "jax": jax.__version__, "rows": []}
    if args.check:
        record["check"] = check()
    variants = json.loads(pathlib.Path(args.variants).read_text()) if args.variants else {}
    for name, case in CASES.items():
        row: dict[str, Any] = {"name": name, "ours": []}
        for config in variants.get(name, variants.get("*", [{}])) if not args.no_ours else []:
            try:
                ours = time_ours(case, config)
            except Exception as error:  # a variant that does not fit: keep the others
                print(name, config, "failed:", repr(error)[:300], flush=True)
                continue
            row["ours"].append(ours)
            print(f"{name} {config}: {ours['ms']:.4f} ms {ours['TFLOPs']:.0f} TFLOP/s "
                  f"[{ours['min']:.4f} {ours['max']:.4f}] compile {ours['compile_s']:.0f} s", flush=True)  # fmt: skip
        if args.peer:
            row["peer"] = time_peer(case)
            print(name, "peer", row["peer"], flush=True)
        if args.peer and row["ours"]:
            best = min(ours["ms"] for ours in row["ours"])
            peers = [row["peer"][b] for b in ("fa3", "fa2") if isinstance(row["peer"].get(b), float)]
            if peers:
                row["ratio"] = best / min(peers)
                print(f"{name}: ratio to FlashInfer {row['ratio']:.3f}", flush=True)
        record["rows"].append(row)
        if args.json:
            with open(args.json, "w") as file:
                json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
