"""`Programs`: everything that is jitted for one model, with a count of what was compiled.

Engines of one model (or of models that differ in weights only) can share it: `Engine(model, config, programs=other.programs)`;
the second engine then compiles nothing that the first has compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from pallas_kernels import copy_within
from prefix_reuse import device_pages
from prefix_reuse.config import EngineConfig
from prefix_reuse.errors import ConfigError
from prefix_reuse.sampling import SamplingState, sample
from prefix_reuse.steps import CompilationCounter, PagedModel, decode_steps, make_attend, prefill_step
from prefix_reuse.transfer import PageTransfer


class Programs:
    """Jitted steps of one model on one device; each compiles once per bucket and pool shape.

    Args:
      model: gives `forward`, `unembed` and the layer groups; its params are passed at each call.
      config: `attention` and `decode_steps` are compiled in.
      device: where host copies come from and go to.
    """

    def __init__(self, model: PagedModel, config: EngineConfig, device: Any):
        self.identity = self._identity(model, config, device)
        self.counter = CompilationCounter()
        count = self.counter.traced
        attend = make_attend(model.kv_groups, config.attention)
        prefill, decode = (
            partial(prefill_step, model, attend),
            partial(decode_steps, model, attend, config.decode_steps),
        )
        self.prefill = jit_step(count("prefill_step", prefill), device)
        self.decode = jit_step(count("decode_steps", decode), device)
        self.rebuild = jax.jit(count("rebuild_tables", device_pages.rebuild), donate_argnums=0)
        self.unembed = jax.jit(count("unembed", model.unembed))
        self.resample = jax.jit(count("sample_again", _sample_rows))
        self.copy_pages = jax.jit(count("copy_tails", copy_within), donate_argnums=0)
        self.poison = jax.jit(count("poison_pages", _poison), donate_argnums=0)
        self.transfer = PageTransfer(device, self.counter)

    def check(self, model: PagedModel, config: EngineConfig, device: Any) -> None:
        """Raises `ConfigError` when these programs were made for another kind of model, device or decode loop."""
        if self._identity(model, config, device) != self.identity:
            raise ConfigError("these programs were compiled for another model, device, attention or decode_steps")

    @staticmethod
    def _identity(model: PagedModel, config: EngineConfig, device: Any) -> tuple[Any, ...]:
        shape = (type(model), getattr(model, "config", None), model.kv_groups, model.vocab_size)
        return (*shape, config.attention, config.decode_steps, device)


def jit_step(step: Callable[..., Any], device: Any, **options: Any) -> Any:
    """`step(params, pools, inputs)` jitted, its pools donated; `options` are XLA's, beside the default ones.

    On a GPU XLA must not compute anything twice to save memory: it takes the pools, which it was given and returns, for
    memory that the step needs, and beside a pool that fills the card it recomputed every projection three times.
    """
    if device.platform == "gpu":
        options = {"xla_gpu_memory_limit_slop_factor": 10_000, **options}
    return jax.jit(step, donate_argnums=1, compiler_options=options or None)


def _sample_rows(
    logits: jax.Array, rows: jax.Array, counts: jax.Array, sampling: SamplingState, index: jax.Array
) -> jax.Array:
    """int32 [B]: a token for each of `rows` (int32 [B], into logits [N, V]), by its own parameters and random stream."""
    return sample(logits[rows], counts, sampling, index)


def _poison(kv_pages: jax.Array, page: jax.Array) -> jax.Array:
    """Donates `kv_pages`. Fills one page, all layers, with NaN."""
    return kv_pages.at[:, page].set(float("nan"))
