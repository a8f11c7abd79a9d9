"""Float64 attention over pages in plain numpy: slow, obvious, and what every implementation is measured against."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from pallas_kernels import layout
from pallas_kernels.testing.cases import PagedInputs

F32_BAR = 1e-5


def attention_oracle(inputs: PagedInputs) -> tuple[np.ndarray, np.ndarray]:
    """`(out [T, H, D], lse [T, H])` in float64, from the inputs as rounded to their dtype."""
    return attention_oracle_and_bar(inputs)[:2]


def attention_oracle_and_bar(inputs: PagedInputs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`attention_oracle`, and the error `[T, H, D]` that each number of `out` may have.

    In f32 it is `F32_BAR`. Half precision rounds twice: weights before they meet V, and the result. That is worth at most
    `unit * (sum of weight * |v| + |out|)`. A multiple of another implementation's error is no bar: where a query sees one key,
    weights relative to the exact maximum are exact and those relative to a power of two are not.
    """
    case = inputs.case
    tokens, heads, dim = inputs.q.shape
    out, lse = np.zeros((tokens, heads, dim)), np.full((tokens, heads), -np.inf)
    size = np.zeros_like(out)
    scale = dim**-0.5 if case.scale is None else case.scale
    for row, (queries, keys) in enumerate(case.rows):
        if not queries or not keys:
            continue
        k, v = _row_keys(inputs, row, keys)
        first = inputs.q_offsets[row]
        q = inputs.q[first : first + queries].astype(np.float64)
        logits = (q.swapaxes(0, 1) @ k.transpose(1, 2, 0)).swapaxes(0, 1) * scale  # einsum takes thrice as long
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
        weights = (weights / total[..., None]).swapaxes(0, 1)
        out[first : first + queries] = (weights @ v.swapaxes(0, 1)).swapaxes(0, 1)
        size[first : first + queries] = (weights @ np.abs(v).swapaxes(0, 1)).swapaxes(0, 1)
        lse[first : first + queries] = top + np.log(total)
    dtype = jnp.dtype(case.dtype)
    unit = 0.0 if dtype == jnp.float32 else float(jnp.finfo(dtype).eps) / 2
    return out, lse, unit * (size + np.abs(out)) + F32_BAR


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
