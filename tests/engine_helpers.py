"""What engine tests share: small engines, reference logits, and a whole-state check after every step."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

from models.testing import reference_logits, tiny_hybrid, tiny_llama
from prefix_reuse import Engine, EngineConfig, SamplingParams, device_pages
from prefix_reuse.index import PrefixIndex
from prefix_reuse.plan import PrefillBatch
from prefix_reuse.programs import Programs
from prefix_reuse.sequence import SequenceState

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)


@cache
def model(kind: str = "llama", seed: int = 0) -> Any:
    """A tiny model, built once per test run."""
    return {"llama": tiny_llama, "hybrid": tiny_hybrid}[kind](seed)


def engine(kind: str = "llama", *, on: bool = True, seed: int = 0, **config: Any) -> Engine:
    """An engine of pages of 4 tokens with NaN in every unwritten and freed page."""
    defaults: dict[str, Any] = {
        "page_size": 4,
        "num_device_pages": 48,
        "num_host_pages": 64,
        "max_rows": 4,
        "max_context": 128,
        "max_prefill_tokens": 32,
        "decode_steps": 4,
        "poison": True,
        "compilation_cache": False,
        "staging_bytes": 1 << 20,
        "enable_prefix_reuse": on,
    }
    sizes = EngineConfig(**{**defaults, **config})
    return Engine(model(kind, seed), sizes, programs=programs(kind, sizes.decode_steps))


@cache
def programs(kind: str, decode_steps: int) -> Programs:
    """Jitted programs that all engines of one kind share, so that tests compile once."""
    return Programs(model(kind), EngineConfig(decode_steps=decode_steps), jax.devices()[0])


def prompt(n: int, seed: int = 0, start: list[int] | np.ndarray | tuple[int, ...] = ()) -> np.ndarray:
    """int32 [n] random token ids that begin with `start`."""
    rest = np.random.default_rng(seed).integers(2, 128, n - len(start))
    return np.concatenate([np.asarray(start, np.int64), rest]).astype(np.int32)


def cold(tokens: Any, kind: str = "llama", seed: int = 0) -> np.ndarray:
    """f32 [T, V] logits of one dense forward without pages."""
    return np.asarray(reference_logits(model(kind, seed), np.asarray(tokens).tolist()))


def check(e: Engine) -> None:
    """Host store, accounts, rows and device arrays agree: refcounts are recomputed from the rows (A8, A24)."""
    e.check_integrity()
    live = [r for r in e.scheduler.running if r.row is not None]
    for account, pool in zip(e.runner.accounts, e.runner.pools, strict=True):
        expected = np.zeros(account.num_pages, int)
        for row in live:
            pages = account.pages(row.row_index)
            np.add.at(expected, pages[pages >= 0], 1)
        assert np.array_equal(account.refs, expected)
        if not account.dirty:
            assert np.array_equal(np.asarray(pool.page_table), account.page_table)
            assert np.array_equal(np.asarray(pool.refcounts), account.refs)
            device_pages.check_integrity(pool)
    for row in live:
        if row.state in (SequenceState.IN_DECODE, SequenceState.PREFILLED):
            assert row.committed_kv_tokens == row.num_tokens - 1


def drained(e: Engine) -> None:
    """After all requests: nobody holds anything, and after `clear_cache` every page is free (I6)."""
    check(e)
    assert not e.scheduler.running
    assert not e.scheduler.waiting
    assert not e._requests
    assert not e._finished
    assert all(not account.refs.any() for account in e.runner.accounts)
    e.clear_cache()
    check(e)
    assert e.store.stats().free_pages == e.config.num_host_pages
    for account in e.runner.accounts:
        assert account.stats().free == account.num_pages
        assert account.stats().reclaimable == 0


def page_bytes(e: Engine, host_page: int) -> list[np.ndarray]:
    """A copy of a host page's arrays."""
    return [np.array(jax.device_get(a)) for a in e.store.read(host_page)]


def index_of(e: Engine) -> PrefixIndex:
    """The index of an engine that has one."""
    assert e.store.index is not None
    return e.store.index


def last_batch(e: Engine) -> PrefillBatch:
    """The snapshot of the last prefill batch (B13)."""
    assert e.runner.last_prefill is not None
    return e.runner.last_prefill


def fail_call(patch: pytest.MonkeyPatch, owner: Any, name: str, call: int, error: type[BaseException]) -> None:
    """The `call`-th call of `owner.name`, counted from 1, raises `error("injected")`; all others go through."""
    calls, real = itertools.count(1), getattr(owner, name)

    def cut(*args: Any) -> Any:
        if next(calls) == call:
            raise error("injected")
        return real(*args)

    patch.setattr(owner, name, cut)


def run_all(e: Any) -> dict[int, Any]:
    """Steps until nothing is left; outputs by request id. The engine is checked after every turn."""
    outputs: dict[int, Any] = {}
    for _ in range(200):
        if not e.has_work:
            return outputs
        outputs.update((o.request_id, o) for o in e.step())
        check(e)
    raise AssertionError("the engine does not come to an end")
