"""Checks of the attention kernels against float64 on this machine's device: the bars are those of the test suite.

Inputs are fresh, unowned pages and slots past the end hold NaN. A case passes when the error is at most twice the XLA
reference's in the same dtype (f32: 1e-5).
"""

from __future__ import annotations

import itertools

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
# Rows that share (rows, splits); the groups begin at places 0, 10 and 15 of the plan, the first has a nested one.
SHARED_LENS = [0, 1, 513, 300, 700, 175, *range(512, 612, 20), *range(512, 812, 30)]
GROUPS = [(range(11, 21), 1), (range(13, 17), 2), (range(6, 11), 2), ((3, 4), 1)]


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


def inputs(rng, H, K, D, S, dtype, q_lens, kv_lens):
    """Pool of two layers with a row per entry of `kv_lens`; what no row owns is NaN."""
    B, M = len(kv_lens), -(-max(kv_lens) // S) + 2
    kv = np.full((2, B * M + 3, K, 2, S, D), np.nan, np.float32)
    order = rng.permutation(kv.shape[1])[: B * M].reshape(B, M)
    table = np.full((B, M), -1, np.int32)
    for b, n in enumerate(kv_lens):
        for m in range(-(-n // S)):
            table[b, m] = order[b, m]
            used = min(S, n - m * S)
            kv[:, order[b, m], :, :, :used] = rng.normal(size=(2, K, 2, used, D))
    q = rng.normal(size=(sum(q_lens) + 5, H, D))
    return jnp.asarray(q, dtype), jnp.asarray(kv, dtype), table


def share(kv, table, S, split):
    """The rows of each of GROUPS read the pages of its first row; what they had before is NaN."""
    for rows, splits in GROUPS:
        head = splits * split // S
        dropped = [page for row in rows for page in table[row, :head] if page not in table[rows[0], :head]]
        table[list(rows), :head] = table[rows[0], :head]
        kv = kv.at[:, np.asarray(dropped)].set(jnp.nan)
    return kv


def run(implementations, ops, report) -> bool:
    """All cases of `ops` ("decode", "shared", "prefill"): whether all passed. Cases without a kernel count as passed."""
    rng = np.random.default_rng(0)
    good = True
    for (H, K, D, S, options), dtype, op in itertools.product(CASES, (jnp.bfloat16, jnp.float32), ops):
        kv_lens = SHARED_LENS if op == "shared" else KV_LENS
        q_lens = Q_LENS if op == "prefill" else [1] * len(kv_lens)
        q, kv, table = inputs(rng, H, K, D, S, dtype, q_lens, kv_lens)
        split = 128 if options.get("window") else 256  # a window shorter than a split shares nothing
        if op == "shared":
            kv = share(kv, table, S, split)
        queries = q if op == "prefill" else q[: len(kv_lens)]
        offsets = np.cumsum([0, *q_lens])
        sinks = rng.normal(size=H) if options.get("sinks") else None
        opts = {**options, "sinks": None if sinks is None else jnp.asarray(sinks, jnp.float32), "layer": 1}
        q_numbers, kv_numbers = (np.asarray(a.astype(jnp.float32)) for a in (queries, kv))
        true = oracle(q_numbers, kv_numbers, table, offsets, kv_lens, 1, **{**options, "sinks": sinks})
        lens, group = jnp.asarray(kv_lens, jnp.int32), pk.LayerGroup((0, 1), K, D, dtype, num_heads=H)
        errors = {}
        for name in ("reference", *implementations):
            arguments = (queries, kv, jnp.asarray(table))
            keywords = {**opts, "implementation": name}
            try:
                if op == "decode":
                    out = pk.paged_decode_attention(*arguments, lens, **keywords)
                elif op == "shared":
                    rows = pk.rows_per_tile(group, S, split=split, implementation=name)
                    plan = pk.plan_shared_prefix(table, np.asarray(kv_lens), S, split=split, rows_per_tile=rows)
                    assert plan is not None
                    out = pk.shared_prefix_attention(*arguments, lens, plan, **keywords)
                else:
                    out = pk.ragged_paged_attention(*arguments, jnp.asarray(offsets, jnp.int32), lens, **keywords)
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
