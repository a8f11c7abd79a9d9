"""What benchmarks of whole engines do to one: a request timed to its first token, contexts laid down, an end."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from prefix_reuse import Engine, SamplingParams
from prefix_reuse.transfer import PendingCopy

ONE = SamplingParams(max_tokens=1, ignore_eos=True)


def first_token(engine: Engine, tokens: np.ndarray, *, cached: int | None = None) -> dict[str, Any]:
    """Milliseconds from submit until `step` has returned the one token, on an engine that has nothing else to do.

    `ttft_ms` is the engine's own figure. Copies of the new pages end after the clock has stopped. Raises `RuntimeError`
    when not exactly `cached` tokens were a hit.
    """
    start = time.perf_counter()
    engine.submit(tokens, ONE)
    outputs = []
    while not outputs:
        outputs = engine.step()
    ms = (time.perf_counter() - start) * 1e3
    drain(engine)
    (output,) = outputs
    if cached is not None and output.cached_tokens != cached:
        raise RuntimeError(f"{output.cached_tokens} of {len(tokens)} tokens were cached, expected {cached}")
    return {"ms": ms, "ttft_ms": output.ttft_ms}


def first_event(engine: Engine, tokens: np.ndarray) -> dict[str, Any]:
    """Milliseconds until a stream, which asks for more than one token, has given the first."""
    start = time.perf_counter()
    with engine.stream(tokens, SamplingParams(max_tokens=64, ignore_eos=True)) as stream:
        next(stream)
        ms = (time.perf_counter() - start) * 1e3
    drain(engine)
    return {"ms": ms}


def drain(engine: Engine) -> None:
    """Steps until nothing is left to do, copies to the host included."""
    while engine.has_work:
        engine.step()


def close(engine: Engine) -> None:
    """Frees the device pools at once: engines are in reference cycles."""
    for leaf in jax.tree.leaves(engine.runner.pools):
        leaf.delete()
    gc.collect()


@contextmanager
def without_host_copies(engine: Engine) -> Iterator[None]:
    """Every page that is computed meanwhile gets the bytes of one host page, so that long contexts take no host memory.

    The device pages are real. The pages must not be loaded from the host: clear the cache before the engine goes on.
    """
    transfer = engine.runner.transfer
    page = [np.zeros(1, np.int32) for _ in engine.runner.pools]
    one = transfer.offload([pool.kv_pages for pool in engine.runner.pools], page, np.zeros(1, np.int64))
    one.wait()
    engine.runner.transfer = _SamePage(transfer, one.payloads[0])  # type: ignore[assignment]
    try:
        yield
    finally:
        engine.runner.transfer = transfer


class _SamePage:
    """A `PageTransfer` whose copies to the host are all the same page, there already."""

    def __init__(self, transfer: Any, payload: Any):
        self._transfer, self._payload = transfer, payload

    def offload(self, pools: Any, device_pages: Any, host_pages: np.ndarray, lengths: Any = None) -> PendingCopy:
        return PendingCopy(np.array(host_pages), (self._payload,) * len(host_pages), ())

    def load(self, pools: Any, parts: Any, device_pages: Any, staged: Any = None) -> Any:
        raise RuntimeError("a page that was never copied to the host must not be loaded")

    @property
    def sparse_bundles(self) -> int:
        return self._transfer.sparse_bundles

    def tidy(self, most: int | None = 1) -> None:
        self._transfer.tidy(most)
