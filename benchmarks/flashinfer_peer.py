"""FlashInfer's paged kernels on the same shapes as `kernels.py`: the peer of the GPU kernels.

Runs in its own process, since two frameworks share the card badly. Needs torch with CUDA, nvcc, and the wheels
flashinfer-python 0.6.14, apache-tvm-ffi and cuda-tile. Its timer flushes the L2 before every call.

Usage: python benchmarks/flashinfer_peer.py OUT.json DECODE PREFILL [--compile]   (shapes as JSON lists)
"""

from __future__ import annotations

import json
import sys

import flashinfer  # pyright: ignore[reportMissingImports]
import torch  # pyright: ignore[reportMissingImports]
from triton.testing import do_bench  # pyright: ignore[reportMissingImports]

DEV = "cuda"


def bench(run) -> dict[str, float]:
    """Median, 20th and 80th percentile in milliseconds."""
    low, mid, high = do_bench(run, warmup=20, rep=100, quantiles=[0.2, 0.5, 0.8])
    return {"ms": mid, "ms_p20": low, "ms_p80": high}


def workspace():
    return torch.empty(512 << 20, dtype=torch.uint8, device=DEV)


def decode(B, H, K, D, ctx, S, shared):
    """Plain decode; with `shared` > 0 also over shared physical pages and through the cascade wrapper."""
    M = ctx // S
    kv = torch.randn(B * M, 2, S, K, D, dtype=torch.bfloat16, device=DEV)
    q = torch.randn(B, H, D, dtype=torch.bfloat16, device=DEV)
    table = torch.randperm(B * M, device=DEV).int().reshape(B, M)
    rows = torch.arange(0, B + 1, device=DEV, dtype=torch.int32)
    last = torch.full((B,), S, device=DEV, dtype=torch.int32)
    kinds = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}

    def plain(table):
        w = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), "NHD", use_tensor_cores=True)
        w.plan(rows * M, table.reshape(-1).contiguous(), last, H, K, D, S, **kinds)
        return bench(lambda: w.run(q, kv))

    out = {"plain": plain(table)}
    if shared:
        n0 = shared // S
        table[:, :n0] = table[0, :n0].clone()
        out["shared_pages"] = plain(table)
        c = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(), "NHD")
        one = lambda *a: torch.tensor(a, dtype=torch.int32, device=DEV)  # noqa: E731
        indices = [table[0, :n0].contiguous(), table[:, n0:].reshape(-1).contiguous()]
        c.plan(
            [one(0, B), rows], [one(0, n0), rows * (M - n0)], indices, [one(S), last], H, K, D, S,
            q_data_type=torch.bfloat16,
        )  # fmt: skip
        out["cascade"] = bench(lambda: c.run(q, kv))
    return out


def prefill(B, H, K, D, cached, new, S):
    """Suffix prefill over pages, both backends."""
    n = (cached + new + S - 1) // S
    kv = torch.randn(B * n, 2, S, K, D, dtype=torch.bfloat16, device=DEV)
    q = torch.randn(B * new, H, D, dtype=torch.bfloat16, device=DEV)
    rows = torch.arange(0, B + 1, dtype=torch.int32, device=DEV)
    last = torch.full((B,), (cached + new - 1) % S + 1, dtype=torch.int32, device=DEV)
    out = {}
    for backend in ("fa2", "fa3"):
        try:
            w = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), "NHD", backend=backend)
            w.plan(
                rows * new, rows * n, torch.randperm(B * n, device=DEV).int(), last, H, K, D, S, causal=True,
                q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
            )  # fmt: skip
            out[backend] = bench(lambda w=w: w.run(q, kv))
        except Exception as error:
            out[backend] = {"error": repr(error)[:200]}
    return out


def main() -> None:
    path, decode_shapes, prefill_shapes = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    if "--compile" in sys.argv:  # small inputs of the same head shapes, so that the timed process finds built kernels
        decode_shapes = [[2, H, K, D, 64, 16, 32 if sh else 0] for _, H, K, D, _, _, sh in decode_shapes]
        prefill_shapes = [[1, H, K, D, 64, 64, 64] for _, H, K, D, *_ in prefill_shapes]
        decode_shapes = list({a[3]: a for a in sorted(decode_shapes, key=lambda a: a[6])}.values())
        prefill_shapes = list({a[3]: a for a in prefill_shapes}.values())
    rows = [{"op": "decode", "shape": a, **decode(*a)} for a in decode_shapes]
    torch.cuda.empty_cache()
    rows += [{"op": "prefill", "shape": a, **prefill(*a)} for a in prefill_shapes]
    versions = {"flashinfer": flashinfer.__version__, "torch": torch.__version__, "gpu": torch.cuda.get_device_name()}
    with open(path, "w") as file:
        json.dump({**versions, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
