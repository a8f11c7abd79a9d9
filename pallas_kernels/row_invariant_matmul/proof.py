"""Whether matmuls have equal bits, seen on the card with random numbers: the kernel's tiles, and XLA beside them."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.pallas_gpu import tuned
from pallas_kernels.row_invariant_matmul import triton, xla
from pallas_kernels.row_invariant_matmul.mode import MatmulShape

TILE_ROWS, TILE_OUTPUTS, TILE_COLUMNS = 256, 1024, 2048
"""Size of the matmul at which tiles are compared: the sum of a result does not know of the other ones."""
COMPARED_NUMBERS = 1 << 18
"""Results compared at least; two orders of summation differ in one bfloat16 of 500, and in more of other dtypes."""
LEAST_ROWS = 64
WORKERS = 8


random = jax.random.normal


def xla_rows() -> int:
    """From how many rows on XLA's matmul is worth a comparison on this card."""
    return tuned("row_invariant_matmul", "", {"xla_rows": 512})["xla_rows"]


def tiles_agree(shapes: Iterable[MatmulShape], device: Any) -> bool:
    """Whether all tiles that the Triton kernel would use at these shapes give the same bits."""
    kinds: dict[tuple[str, str], set[tuple[tuple[str, int], ...]]] = {}
    for shape in shapes:
        launch = triton.launch(shape.rows, shape.outputs, shape.columns, shape.dtype)
        kinds.setdefault((shape.dtype, shape.out_dtype), set()).add(tuple(sorted(launch.items())))
    with jax.default_device(device):
        results = [_tile_results(*dtypes, sorted(launches)) for dtypes, launches in sorted(kinds.items())]
        return all(bool(jnp.array_equal(other, first)) for first, *others in results for other in others)


def _tile_results(dtype: str, out_dtype: str, launches: list[tuple[tuple[str, int], ...]]) -> list[jax.Array]:
    """The same matmul with each of `launches`."""
    keys = jax.random.split(jax.random.key(1))
    x = random(keys[0], (TILE_ROWS, TILE_COLUMNS), dtype)
    weight = random(keys[1], (TILE_OUTPUTS, TILE_COLUMNS), dtype)

    def run(launch: tuple[tuple[str, int], ...]) -> Any:
        def multiply(x: jax.Array, weight: jax.Array) -> jax.Array:
            return triton.row_invariant_matmul(x, weight, None, out_dtype=jnp.dtype(out_dtype), config=dict(launch))

        return jax.jit(multiply, compiler_options=xla.COMPILER_OPTIONS).lower(x, weight)

    return [program(x, weight) for program in _compiled([run(launch) for launch in launches])]


def _compiled(lowered: list[Any]) -> list[Any]:
    """Compiles several at a time."""
    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        return list(pool.map(lambda program: program.compile(), lowered))


def compare(shapes: Iterable[MatmulShape], device: Any, *, least_rows: int | None = None) -> dict[MatmulShape, bool]:
    """Whether XLA's matmul has the kernel's bits, for each shape of at least `least_rows` (default: `xla_rows()`) rows."""
    least_rows = xla_rows() if least_rows is None else least_rows
    wanted = sorted(shape for shape in shapes if shape.rows >= least_rows)
    with jax.default_device(device):
        compiled = _compiled([program for shape in wanted for program in _programs(shape)])
        # One after the other: each holds a weight and a result.
        return {shape: _same(shape, *compiled[2 * i : 2 * i + 2]) for i, shape in enumerate(wanted)}


def _programs(shape: MatmulShape) -> list[Any]:
    """XLA's matmul at `shape`, and the kernel at some of its rows, lowered."""
    x = jax.ShapeDtypeStruct((shape.rows, shape.columns), shape.dtype)
    some = jax.ShapeDtypeStruct((_compared_rows(shape), shape.columns), shape.dtype)
    weight = jax.ShapeDtypeStruct((shape.outputs, shape.columns), shape.dtype)
    out_dtype = jnp.dtype(shape.out_dtype)

    def by_xla(x: jax.Array, weight: jax.Array) -> jax.Array:
        return xla.matmul(x, weight, out_dtype=out_dtype)

    def by_kernel(x: jax.Array, weight: jax.Array) -> jax.Array:
        return dispatch.call("row_invariant_matmul", None, x, weight, None, out_dtype=out_dtype)

    options = xla.COMPILER_OPTIONS
    return [
        jax.jit(by_xla, compiler_options=options).lower(x, weight),
        jax.jit(by_kernel, compiler_options=options).lower(some, weight),
    ]


def _compared_rows(shape: MatmulShape) -> int:
    return min(shape.rows, max(LEAST_ROWS, -(-COMPARED_NUMBERS // shape.outputs)))


def _same(shape: MatmulShape, by_xla: Any, by_kernel: Any) -> bool:
    keys = jax.random.split(jax.random.key(0))
    x = random(keys[0], (shape.rows, shape.columns), shape.dtype)
    weight = random(keys[1], (shape.outputs, shape.columns), shape.dtype)
    picked = jnp.arange(_compared_rows(shape)) * shape.rows // _compared_rows(shape)
    return bool(jnp.array_equal(by_xla(x, weight)[picked], by_kernel(x[picked], weight)))
