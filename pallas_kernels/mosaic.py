"""What differs between the versions of Pallas' Mosaic GPU that this package runs on: jax 0.11 and 0.12."""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as mosaic

_store: Any = getattr(mosaic, "store", None)  # since 0.12


def store_rows(ref: Any, value: jax.Array, *, simulate: bool) -> None:
    """`ref[...] = value` for a buffer in plain rows, whose columns of one accumulator share banks of shared memory.

    jax 0.12 refuses such an assignment, which 0.11 writes as it is, unless it is told that conflicts do not matter here;
    its simulator does not know that call.
    """
    if _store is None or simulate:
        ref[...] = value
    else:
        _store(ref, value, optimized=False)
