"""Float64 attention over pages in plain numpy: slow, obvious, and what every implementation is measured against."""

from __future__ import annotations

import numpy as np

from pallas_kernels import layout
from pallas_kernels.testing.cases import PagedInputs


def attention_oracle(inputs: PagedInputs) -> tuple[np.ndarray, np.ndarray]:
    """`(out [T, H, D], lse [T, H])` in float64, from the inputs as rounded to their dtype."""
    case = inputs.case
    tokens, heads, dim = inputs.q.shape
    out, lse = np.zeros((tokens, heads, dim)), np.full((tokens, heads), -np.inf)
    scale = dim**-0.5 if case.scale is None else case.scale
    for row, (queries, keys) in enumerate(case.rows):
        if not queries or not keys:
            continue
        k, v = _row_keys(inputs, row, keys)
        first = inputs.q_offsets[row]
        q = inputs.q[first : first + queries].astype(np.float64)
        logits = np.einsum("thd,nhd->thn", q, k) * scale
        if case.soft_cap is not None:
            logits = case.soft_cap * np.tanh(logits / case.soft_cap)
        position, key = np.arange(keys - queries, keys)[:, None], np.arange(keys)
        visible = key <= position
        if case.window is not None:
            visible &= key > position - case.window
        logits = np.where(visible[:, None], logits, -np.inf)
        top = logits.max(-1)
        if inputs.sinks is not None:
            top = np.maximum(top, inputs.sinks)
        weights = np.exp(logits - top[..., None])
        total = weights.sum(-1)
        if inputs.sinks is not None:
            total += np.exp(inputs.sinks - top)
        out[first : first + queries] = np.einsum("thn,nhd->thd", weights, v) / total[..., None]
        lse[first : first + queries] = top + np.log(total)
    return out, lse


def _row_keys(inputs: PagedInputs, row: int, keys: int) -> tuple[np.ndarray, np.ndarray]:
    """K and V `[keys, H, D]` of one row; zeros where no page is named (no query looks there)."""
    k, v = layout.split_kv(inputs.pool[inputs.case.layer])
    ids = inputs.page_table[row]
    parts = []
    for part in (k, v):
        dense = np.where((ids >= 0)[:, None, None, None], part[np.maximum(ids, 0)].astype(np.float64), 0.0)
        dense = dense.reshape(-1, *part.shape[-2:])[:keys]
        parts.append(np.repeat(dense, inputs.case.heads // inputs.case.kv_heads, axis=1))
    return parts[0], parts[1]
