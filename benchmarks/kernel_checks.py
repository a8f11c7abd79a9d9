"""Checks of the attention kernels against float64 on this machine's device: the bars are those of the test suite.

Inputs are fresh, unowned pages and slots past the end hold NaN. A case passes when the error is at most twice the XLA
reference's in the same dtype (f32: 1e-5).
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk

# H, K, D, S, options
CASES = [
    (32, 8, 128, 16, {}),
    (64, 8, 64, 16, {"window": 128, "sinks": True}),
    (8, 8, 80, 16, {"soft_cap": 20.0}),
    (16, 1, 96, 32, {}),
    (8, 2, 256, 64, {"sinks": True}),
    (14, 2, 64, 128, {"window": 200}),
    (24, 8, 128, 64, {"scale": 0.05}),
]
KV_LENS, Q_LENS = [0, 1, 16, 1500, 2048, 700], [0, 1, 3, 170, 256, 1]


def oracle(q, kv, table, offsets, lens, layer, window=None, sinks=None, soft_cap=None, scale=None):
    """Attention in float64, row by row."""
    T, H, D = q.shape
    K, S = kv.shape[2], kv.shape[4]
    out = np.zeros((T, H, D))
    for b, n in enumerate(lens):
        begin, stop = offsets[b], offsets[b + 1]
        if n == 0 or begin == stop:
            continue
        pages = kv[layer, table[b, : -(-n // S)]].astype(np.float64)  # [pages, K, 2, S, D]
        k, v = (np.moveaxis(pages[:, :, i], 1, 0).reshape(K, -1, D)[:, :n] for i in (0, 1))
        queries = q[begin:stop].astype(np.float64).reshape(-1, K, H // K, D)
        logits = np.einsum("tkgd,ksd->tkgs", queries, k) * (D**-0.5 if scale is None else scale)
        if soft_cap:
            logits = soft_cap * np.tanh(logits / soft_cap)
        i = n - (stop - begin) + np.arange(stop - begin)[:, None]
        j = np.arange(n)[None]
        seen = (j <= i) & (j > i - (window or n))
        logits = np.where(seen[:, None, None], logits, -np.inf)
        top = logits.max(-1, keepdims=True)
        weights = np.exp(logits - top)
        total = weights.sum(-1, keepdims=True)
        if sinks is not None:
            total = total + np.exp(sinks.reshape(1, K, H // K, 1) - top)
        out[begin:stop] = np.einsum("tkgs,ksd->tkgd", weights / total, v).reshape(-1, H, D)
    return out


def inputs(rng, H, K, D, S, dtype, q_lens):
    """Pool of two layers with a row per entry of KV_LENS; what no row owns is NaN."""
    B, M = len(KV_LENS), -(-max(KV_LENS) // S) + 2
    kv = np.full((2, B * M + 3, K, 2, S, D), np.nan, np.float32)
    order = rng.permutation(kv.shape[1])[: B * M].reshape(B, M)
    table = np.full((B, M), -1, np.int32)
    for b, n in enumerate(KV_LENS):
        for m in range(-(-n // S)):
            table[b, m] = order[b, m]
            used = min(S, n - m * S)
            kv[:, order[b, m], :, :, :used] = rng.normal(size=(2, K, 2, used, D))
    q = rng.normal(size=(sum(q_lens) + 5, H, D))
    return jnp.asarray(q, dtype), jnp.asarray(kv, dtype), table


def run(implementations, ops, report) -> bool:
    """All cases of `ops` ("decode", "shared", "prefill"): whether all passed. Cases without a kernel count as passed."""
    rng = np.random.default_rng(0)
    good = True
    for H, K, D, S, options in CASES:
        for dtype in (jnp.bfloat16, jnp.float32):
            q, kv, table = inputs(rng, H, K, D, S, dtype, Q_LENS)
            numbers = [np.asarray(a.astype(jnp.float32)) for a in (q, kv)]
            sinks = rng.normal(size=H) if options.get("sinks") else None
            opts = {**options, "sinks": None if sinks is None else jnp.asarray(sinks, jnp.float32)}
            lens = jnp.asarray(KV_LENS, jnp.int32)
            for op in ops:
                B = len(KV_LENS)
                offsets = np.cumsum([0, *Q_LENS]) if op == "prefill" else np.arange(B + 1)
                queries = numbers[0] if op == "prefill" else numbers[0][:B]
                pages = table.copy()
                if op == "shared":  # rows 3, 4 and 5 begin alike
                    pages[4, : 1024 // S] = pages[5, : 1024 // S] = pages[3, : 1024 // S]
                    pages[5, 700 // S + 1 :] = -1
                true = oracle(queries, numbers[1], pages, offsets, KV_LENS, 1, **{**options, "sinks": sinks})
                errors = {}
                for name in ("reference", *implementations):
                    try:
                        if op == "decode":
                            out = pk.paged_decode_attention(
                                q[:B], kv, jnp.asarray(table), lens, layer=1, implementation=name, **opts
                            )
                        elif op == "shared":
                            plan = pk.plan_shared_prefix(pages, np.asarray(KV_LENS), S)
                            assert plan is not None
                            out = pk.shared_prefix_attention(
                                q[:B], kv, jnp.asarray(pages), lens, plan, layer=1, implementation=name, **opts
                            )
                        else:
                            out = pk.ragged_paged_attention(
                                q, kv, jnp.asarray(table), jnp.asarray(offsets, jnp.int32), lens, layer=1,
                                implementation=name, **opts,
                            )  # fmt: skip
                        errors[name] = float(np.max(np.abs(np.asarray(out.astype(jnp.float32)) - true)))
                    except Exception as error:
                        errors[name] = f"{type(error).__name__}: {str(error)[:160]}"
                for name in implementations:
                    error = errors[name]
                    bar = 1e-5 if dtype == jnp.float32 else 2 * errors["reference"]
                    passed = error <= bar if isinstance(error, float) else error.startswith("NotImplementedError")
                    good &= passed
                    label = f"{name} {jnp.dtype(dtype).name} {options}"
                    report(f"check {op}", [H, K, D, S], label, {"error": error, "bar": bar, "passed": passed})
    return good
