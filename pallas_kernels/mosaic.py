"""What differs between the versions of Pallas' Mosaic GPU that this package runs on: jax 0.11 and 0.12."""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as mosaic

_store: Any = getattr(mosaic, "store", None)  # since 0.12


def store_rows(ref: Any, value: jax.Array) -> None:
    """`ref[...] = value` for an accumulator that goes to a buffer in plain rows, where writes share banks of shared memory.

    0.11 makes such an assignment as it is; 0.12 refuses it ("avoids bank conflicts") unless told that conflicts do not matter.
    """
    if _store is None:
        ref[...] = value
    else:
        _store(ref, value, optimized=False)
