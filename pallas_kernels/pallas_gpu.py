"""What the Pallas-Triton kernels share: how a kernel is called, small arithmetic, tuned tables.

Pools are handed to kernels as `[L * P * K * 2 * S, D]`, a bitcast of `kv_pages`: row
`((layer * P + page) * K + head) * 2 * S + slot` holds a key, the row S further its value. Row numbers fit in 32 bits
where flat offsets would not, and one index array instead of six is left to the kernel.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import dispatch, layout

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)


def interpret_here() -> bool:
    """Whether kernels of this trace run in Pallas' interpreter, since there is no GPU."""
    return dispatch._platform() not in ("gpu", "cuda")


def triton_call(
    kernel: Callable[..., None],
    *,
    grid: tuple[int, ...],
    out_shape: Any,
    num_inputs: int,
    num_warps: int,
    num_stages: int,
    interpret: bool,
    name: str,
    aliases: dict[int, int] | None = None,
) -> Callable[..., Any]:
    """`pl.pallas_call` for the Triton backend where every operand is whole: kernels compute their own addresses."""
    outputs = [pl.BlockSpec() for _ in out_shape] if isinstance(out_shape, Sequence) else pl.BlockSpec()
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[pl.BlockSpec() for _ in range(num_inputs)],
        out_specs=outputs,
        out_shape=out_shape,
        input_output_aliases=aliases or {},
        compiler_params=pltriton.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name=name,
    )


def pool_rows(kv_pages: jax.Array) -> jax.Array:
    """The pool as `[L * P * K * 2 * S, D]`; no byte moves."""
    rows = math.prod(kv_pages.shape[:-1])
    if rows >= 2**31:
        raise NotImplementedError(f"pools of {rows} key and value vectors need 64-bit row numbers")
    return kv_pages.reshape(rows, layout.head_dim_of(kv_pages))


def dot(a: jax.Array, b: jax.Array, *, trans_b: bool = False) -> jax.Array:
    """Tile product with f32 accumulation; f32 operands are not rounded to TF32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((1,), (1 if trans_b else 0,)), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def softmax_step(state, q, k, v, visible, *, scale: float, soft_cap: float | None):
    """Running softmax `(top [M], total [M], values [M, D])`, in base 2, after one more tile of keys.

    Args:
        q: `[M, D]`; k, v: `[N, D]`, zero where no query may look, since 0 * NaN is NaN.
        visible: bool, broadcasts to `[M, N]`.
    """
    top, total, values = state
    logits = dot(q, k, trans_b=True)
    if soft_cap is None:
        logits = logits * (scale * LOG2E)
    else:
        logits = jnp.tanh(logits * (scale / soft_cap)) * (soft_cap * LOG2E)
    logits = jnp.where(visible, logits, -jnp.inf)
    new_top = jnp.maximum(top, jnp.max(logits, axis=1))
    finite = jnp.where(new_top == -jnp.inf, 0.0, new_top)  # no key so far: -inf minus -inf would be NaN
    weights = jnp.exp2(logits - finite[:, None])
    keep = jnp.exp2(top - finite)
    total = total * keep + jnp.sum(weights, axis=1)
    return new_top, total, values * keep[:, None] + dot(weights.astype(v.dtype), v)


def empty_softmax(rows: int, head_dim: int):
    """State of `softmax_step` that has seen no key."""
    return (
        jnp.full((rows,), -jnp.inf, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        jnp.zeros((rows, head_dim), jnp.float32),
    )


def softmax_mean(state):
    """Normalised values `[M, D]` and base-2 log-sum-exp `[M]`; zero and -inf where no key was seen."""
    top, total, values = state
    empty = total == 0
    safe = jnp.where(empty, 1.0, total)
    return values / safe[:, None], jnp.where(empty, -jnp.inf, top + jnp.log2(safe))


def power_of_two(n: int) -> int:
    """The least power of two that is at least n: the tile size that Triton wants."""
    return 1 << max(0, n - 1).bit_length()


def require_pages(page_size: int) -> None:
    """GPU kernels take pages of 16 slots and more."""
    if page_size < 16:
        raise NotImplementedError(f"GPU kernels need pages of at least 16 slots, got {page_size}")


def shape_key(num_heads: int, num_kv_heads: int, head_dim: int, dtype: Any) -> str:
    """Key of a shape in the tuned tables, such as "G4 D128 bfloat16": query heads a KV head, head_dim, dtype."""
    return f"G{num_heads // num_kv_heads} D{head_dim} {jnp.dtype(dtype).name}"


@functools.cache
def tuned_table(device_kind: str) -> dict[str, Any]:
    """Measured launch parameters of one card, `{}` for a card that was never measured."""
    name = device_kind.lower().replace(" ", "_") + ".json"
    file = resources.files("pallas_kernels") / "tuned" / name
    return json.loads(file.read_text()) if file.is_file() else {}


def tuned(op: str, key: str, default: dict[str, int]) -> dict[str, int]:
    """Launch parameters of `op` for a shape key such as "G4 D128 bfloat16"; entries of the table override `default`."""
    kind = "none" if interpret_here() else jax.devices()[0].device_kind
    table = tuned_table(kind).get(op, {})
    return {**default, **table.get("default", {}), **table.get(key, {})}
