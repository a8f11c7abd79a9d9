"""Every GPU kernel once on a small case, for NVIDIA's compute-sanitizer:

    compute-sanitizer --tool memcheck  python scripts/sanitize_kernels.py
    compute-sanitizer --tool racecheck python scripts/sanitize_kernels.py

Results are compared with the XLA reference on the CPU. `--only NAMES` runs the cases whose name contains all words of one
of these comma-separated names, as in `--only "append mosaic,scatter mosaic"`.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk

HEADS, KV_HEADS, HEAD_DIM, PAGE = 8, 2, 64, 64
LENS, Q_LENS = np.array([1100, 1, 130, 1060], np.int32), np.array([70, 1, 130, 9], np.int32)


def cases() -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """(name, op that takes `implementation`, arguments)."""
    rng = np.random.default_rng(0)
    columns = -(-int(LENS.max()) // PAGE)
    table = rng.permutation(len(LENS) * columns).astype(np.int32).reshape(len(LENS), columns)
    table[3, :16] = table[0, :16]  # 1024 shared tokens
    table[np.arange(columns)[None] * PAGE >= LENS[:, None]] = -1
    shape = pk.pool_shape(2, len(LENS) * columns, PAGE, KV_HEADS, HEAD_DIM)
    pool = rng.normal(size=shape).astype(jnp.bfloat16)
    q = rng.normal(size=(int(Q_LENS.sum()), HEADS, HEAD_DIM)).astype(jnp.bfloat16)
    offsets = np.cumsum([0, *Q_LENS]).astype(np.int32)
    sinks = jnp.linspace(-1, 1, HEADS)
    rows = q[: len(LENS)]
    plan = pk.plan_shared_prefix(table, LENS, PAGE)
    for implementation in ("triton", "mosaic_gpu"):
        run = functools.partial(pk.paged_decode_attention, layer=1, implementation=implementation)
        yield f"decode {implementation}", run, (rows, pool, table, LENS)
        windowed = functools.partial(run, window=100, sinks=sinks)
        yield f"decode window {implementation}", windowed, (rows, pool, table, LENS)
        prefill = functools.partial(pk.ragged_paged_attention, layer=1, implementation=implementation)
        yield f"prefill {implementation}", prefill, (q, pool, table, offsets, LENS)
        shared = functools.partial(pk.shared_prefix_attention, layer=1, implementation=implementation)
        yield f"shared {implementation}", shared, (rows, pool, table, LENS, plan)
    for tokens, experts, k in ((100, 32, 4), (300, 128, 8)):
        logits = rng.normal(size=(tokens, experts)).astype(np.float32)
        route = functools.partial(_route, k=k, implementation="triton")
        yield f"route {tokens} tokens to {experts} experts triton", route, (logits,)
        yield (
            f"route in parts {tokens} tokens to {experts} experts triton",
            route,
            (np.stack([logits, -logits, logits]),),
        )
    yield from expert_cases(rng)
    for head_dim in (80, 96, 256):
        heads = rng.normal(size=(int(Q_LENS.sum()), HEADS, head_dim)).astype(jnp.bfloat16)
        other_pool = rng.normal(size=(*shape[:-1], head_dim)).astype(jnp.bfloat16)
        for implementation in ("triton", "mosaic_gpu"):
            run = functools.partial(pk.paged_decode_attention, layer=1, implementation=implementation)
            yield f"decode heads of {head_dim} {implementation}", run, (heads[: len(LENS)], other_pool, table, LENS)
            prefill = functools.partial(pk.ragged_paged_attention, layer=1, implementation=implementation)
            yield f"prefill heads of {head_dim} {implementation}", prefill, (heads, other_pool, table, offsets, LENS)
    kv = rng.normal(size=(5, KV_HEADS, HEAD_DIM)).astype(jnp.bfloat16)
    ids, slots = np.array([0, 3, -1, 7, 9], np.int32), np.array([1, 63, 0, 5, 2], np.int32)
    flags = np.ones(shape[1], bool), np.ones(shape[1], np.int32)
    pages = rng.normal(size=(5, 2, *shape[2:])).astype(jnp.bfloat16)
    narrow = pk.pool_shape(2, 10, 16, 3, 80)  # tokens that are no whole 128 bytes
    thin = rng.normal(size=(5, 3, 80)).astype(jnp.bfloat16)
    narrow_pool = rng.normal(size=narrow).astype(jnp.bfloat16)
    for implementation in ("triton", "mosaic_gpu"):
        append = functools.partial(pk.append_kv, layer=0, implementation=implementation)
        yield f"append {implementation}", append, (pool, kv, kv, ids, slots, *flags)
        few = ids, slots % 16, np.ones(10, bool), np.ones(10, np.int32)
        yield f"append of 3 heads of 80 {implementation}", append, (narrow_pool, thin, thin, *few)
        gather = functools.partial(pk.gather_pages, implementation=implementation)
        yield f"gather {implementation}", gather, (pool, ids)
        scatter = functools.partial(pk.scatter_pages, implementation=implementation)
        yield f"scatter {implementation}", scatter, (pool, ids, pages)
        copy = functools.partial(pk.copy_within, implementation=implementation)
        yield f"copy {implementation}", copy, (pool, ids[:2], ids[3:])


def expert_cases(rng: np.random.Generator) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """As `cases`: matmuls of experts of MXFP4 weights, for a few rows and for many, and the sum of their outputs in a norm."""
    blocks = rng.integers(0, 256, (4, 130, 10, 16), dtype=np.uint8)
    weight = pk.Mxfp4.pack(blocks, rng.integers(118, 122, (4, 130, 10), dtype=np.uint8))
    for sizes in ([0, 2, 0, 3], [40, 0, 3, 70]):
        x = rng.normal(size=(sum(sizes) + 2, 320)).astype(jnp.bfloat16)
        rows = rng.permutation(len(x)).astype(np.int32)
        run = functools.partial(pk.grouped_matmul, implementation="triton")
        yield f"experts of {len(x)} rows triton", run, (x, weight, np.array(sizes, np.int32))
        picked = functools.partial(_picked, implementation="triton")
        yield f"experts of {len(x)} picked rows triton", picked, (x, weight, np.array(sizes, np.int32), rows)
    x, rows = (rng.normal(size=(n, 130)).astype(jnp.bfloat16) for n in (9, 23))
    weights, place = rng.uniform(size=(9, 4)).astype(np.float32), rng.integers(0, 23, (9, 4)).astype(np.int32)
    delta = pk.ExpertSum(*map(jnp.asarray, (rows, weights, place)))
    norm = functools.partial(pk.add_rms_norm, eps=1e-5, implementation="triton")
    yield "experts added up triton", norm, (x, delta, np.ones(130, jnp.bfloat16))


def _picked(x: Any, weight: Any, sizes: Any, rows: Any, implementation: str) -> Any:
    return pk.grouped_matmul(x, weight, sizes, rows=rows, implementation=implementation)


def _route(logits: Any, k: int, implementation: str) -> Any:
    """Without the tiles, which the reference leaves to the matmul."""
    return pk.route_experts(logits, k, softmax_first=True, normalise=True, implementation=implementation)[:-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name contains all words of one of these")
    options = parser.parse_args()
    failed = False
    for name, op, arguments in cases():
        if not any(all(word in name for word in some.split()) for some in options.only.split(",")):
            continue
        try:
            got = jax.tree.leaves(jax.jit(op)(*arguments))
        except NotImplementedError as error:
            print(f"{name}: no such kernel ({error})", flush=True)
            continue
        with jax.default_device(jax.devices("cpu")[0]):
            want = jax.tree.leaves(jax.jit(functools.partial(op, implementation="reference"))(*arguments))
        error = max(float(jnp.max(jnp.abs(np.float32(g) - np.float32(w)))) for g, w in zip(got, want, strict=True))
        failed |= not error < 0.05
        print(f"{name}: largest difference from the reference {error:.3g}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
