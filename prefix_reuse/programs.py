"""`Programs`: everything that is jitted for one model, with a count of what was compiled.

Engines of one model (or of models that differ in weights only) can share it: `Engine(model, config, programs=other.programs)`;
the second engine then compiles nothing that the first has compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from pallas_kernels import RowInvariance, copy_within
from pallas_kernels.row_invariant_matmul.xla import COMPILER_OPTIONS as ROW_INVARIANT_OPTIONS
from prefix_reuse import device_pages
from prefix_reuse.config import EngineConfig
from prefix_reuse.deterministic import ROW_INVARIANT, RowInvariantModel, deterministic_means, prove
from prefix_reuse.errors import ConfigError
from prefix_reuse.packing import PackedCall
from prefix_reuse.sampling import SamplingState, sample
from prefix_reuse.steps import CompilationCounter, PagedModel, Pools, decode_steps, make_attend, prefill_step
from prefix_reuse.transfer import PageTransfer

PREFILL_OPTIONS: dict[str, Any] = {"xla_gpu_graph_min_graph_size": 1_000_000}
"""No CUDA graphs: a call's inputs lie elsewhere than those of the last one, so that all nodes of a graph are updated first,
7 ms for a Qwen3-8B whose kernels take 8. A decode call runs its graph many times, and gains 5%."""


class Programs:
    """Jitted steps of one model on one device; each compiles once per bucket and pool shape.

    Args:
      model: gives `forward`, `unembed` and the layer groups; its params are passed at each call.
      config: `attention`, `decode_steps` and the means of deterministic mode are compiled in.
      device: where host copies come from and go to.
    """

    def __init__(self, model: PagedModel, config: EngineConfig, device: Any):
        self.identity = self._identity(model, config, device)
        self.counter = CompilationCounter()
        count = self.counter.traced
        exact = deterministic_means(model, config, device) == ROW_INVARIANT
        self.matmuls = RowInvariance() if exact else None
        """What is known of the matmuls of row-invariant programs; None in any other mode."""
        self._model, self._device = model, device
        if self.matmuls is not None:
            wrapped: Any = RowInvariantModel(model, self.matmuls)
            model = wrapped
        options = ROW_INVARIANT_OPTIONS if exact else {}
        attend = make_attend(model.kv_groups, config.attention, row_invariant=exact)
        prefill, decode = (
            partial(prefill_step, model, attend),
            partial(decode_steps, model, attend, config.decode_steps, row_invariant=exact),
        )
        self.prefill = PackedCall(count("prefill_step", prefill), **step_options(**PREFILL_OPTIONS, **options))
        self.decode = PackedCall(count("decode_steps", decode), **step_options(**options))
        here = jax.sharding.SingleDeviceSharding(device)
        self._tables = PackedCall(count("rebuild_tables", _tables), static_argnums=0, out_shardings=here)
        self.unembed = jax.jit(count("unembed", model.unembed), compiler_options=options or None)
        self.sample = PackedCall(count("sample_rows", _sample_rows), compiler_options=options or None)
        self.copy_pages = jax.jit(count("copy_tails", copy_within), donate_argnums=0)
        self.poison = jax.jit(count("poison_pages", _poison), donate_argnums=0)
        self.transfer = PageTransfer(device, self.counter)

    def rebuild(self, pools: Pools, tables: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> Pools:
        """The pools with tables of the host's, as `device_pages.rebuild`, in one call; pages stay where they are.

        Args:
          tables: for each layer group page_table, shared_pages and context_lens; may be overwritten as soon as this returns.
        """
        new = self._tables(tuple(pool.num_pages for pool in pools), tuple(tables))
        return tuple(pool.replace(**fields) for pool, fields in zip(pools, new, strict=True))

    def prove_matmuls(self, batch_sizes: Iterable[int]) -> None:
        """In row-invariant programs, looks where XLA's matmuls may be used, before programs of these sizes are compiled."""
        if self.matmuls is not None:
            prove(self.matmuls, self._model, batch_sizes, self._device)

    def check(self, model: PagedModel, config: EngineConfig, device: Any) -> None:
        """Raises `ConfigError` when these programs were made for another kind of model, device or decode loop."""
        if self._identity(model, config, device) != self.identity:
            raise ConfigError(
                "these programs were compiled for another model, device, attention, decode_steps or means of deterministic mode"
            )

    @staticmethod
    def _identity(model: PagedModel, config: EngineConfig, device: Any) -> tuple[Any, ...]:
        shape = (type(model), getattr(model, "config", None), model.kv_groups, model.vocab_size)
        # Default mode and one program for everything compile the same programs.
        exact = deterministic_means(model, config, device) == ROW_INVARIANT
        return (*shape, config.attention, config.decode_steps, device, exact)


def jit_step(step: Callable[..., Any], **options: Any) -> Any:
    """`step(params, pools, inputs)` jitted, its pools donated; `options` are XLA's, beside the default ones."""
    return jax.jit(step, **step_options(**options))


def step_options(**options: Any) -> dict[str, Any]:
    """What `jax.jit` is given for a step: donated pools, and XLA's `options` beside the default ones.

    On a GPU XLA must not compute anything twice to save memory: it takes the pools, which it was given and returns, for
    memory that the step needs, and beside a pool that fills the card it recomputed every projection three times. Elsewhere
    it takes the options of GPUs, and ignores them.
    """
    return {"donate_argnums": 1, "compiler_options": {"xla_gpu_memory_limit_slop_factor": 10_000, **options}}


def _tables(
    num_pages: tuple[int, ...], tables: Sequence[tuple[jax.Array, jax.Array, jax.Array]]
) -> list[dict[str, jax.Array]]:
    return [
        device_pages.tables(page_table, shared_pages, context_lens, pages)
        for (page_table, shared_pages, context_lens), pages in zip(tables, num_pages, strict=True)
    ]


def _sample_rows(logits: jax.Array, batch: tuple[jax.Array, jax.Array, SamplingState, jax.Array]) -> jax.Array:
    """int32 [B]: a token for each of some rows of logits [N, V], by its own parameters and random stream.

    Args:
      batch: the rows (int32 [B]), and counts, sampling and index as in `DecodeInputs`.
    """
    rows, counts, sampling, index = batch
    return sample(logits[rows], counts, sampling, index)


def _poison(kv_pages: jax.Array, page: jax.Array) -> jax.Array:
    """Donates `kv_pages`. Fills one page, all layers, with NaN."""
    return kv_pages.at[:, page].set(float("nan"))
