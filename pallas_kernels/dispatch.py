"""Which implementation of an op runs, and a visible count of every choice.

Each op's package holds `reference.py` (XLA, any backend) and may hold `triton.py` and `mosaic_gpu.py`. A module offers
a function with the op's own name that takes the op's arguments, checked and with defaults filled in, and raises
`NotImplementedError("one clear sentence")` while tracing for a case it does not support. On CUDA the next
implementation of `PREFERENCE` is tried then, and the reason is counted. The choice is made while tracing: a compiled
step keeps it. GPU modules are imported only on CUDA or when named by the caller.

    >>> pallas_kernels.dispatch_report()
    {'append_kv': {'reference': 30, 'fallback_reasons': {}}, ...}
"""

from __future__ import annotations

import importlib
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax

logger = logging.getLogger("pallas_kernels")

# op -> (package, implementations on CUDA in order of preference). The one place where preference is stated.
PREFERENCE: dict[str, tuple[str, tuple[str, ...]]] = {
    "ragged_paged_attention": ("ragged_paged_attention", ("mosaic_gpu", "triton", "reference")),
    # Triton first: measured 2 to 16% faster than the Mosaic kernel on an H200 (benchmarks/KERNELS.md).
    "paged_decode_attention": ("paged_decode_attention", ("triton", "mosaic_gpu", "reference")),
    "shared_prefix_attention": ("shared_prefix_attention", ("mosaic_gpu", "triton", "reference")),
    # Triton first until the Mosaic kernels of appends and copies have measured faster.
    "append_kv": ("append_kv", ("triton", "mosaic_gpu", "reference")),
    "add_rms_norm": ("add_rms_norm", ("triton", "reference")),
    "qkv_rope": ("qkv_rope", ("triton", "reference")),
    "grouped_matmul": ("grouped_matmul", ("triton", "reference")),
    "route_experts": ("route_experts", ("triton", "reference")),
    "row_invariant_matmul": ("row_invariant_matmul", ("triton", "reference")),
    "gather_pages": ("copy_pages", ("triton", "mosaic_gpu", "reference")),
    "scatter_pages": ("copy_pages", ("triton", "mosaic_gpu", "reference")),
    "copy_within": ("copy_pages", ("triton", "mosaic_gpu", "reference")),
}
# (op, case) -> order of its own; a case is the last axis of the first argument, or what the op calls it.
PREFERENCE_OF_CASES: dict[tuple[str, int | str], tuple[str, ...]] = {
    # Mosaic reads heads of 256 at 1.02 ms where Triton takes 1.48 (benchmarks/KERNELS.md).
    ("paged_decode_attention", 256): ("mosaic_gpu", "triton", "reference"),
    # Mosaic unpacks while it multiplies: 1.4 to 1.9 times as fast (benchmarks/GROUPED_MATMUL.md).
    ("grouped_matmul", "mxfp4"): ("mosaic_gpu", "triton", "reference"),
}
NO_MOSAIC = "Mosaic GPU kernels need Hopper (compute capability 9.0) or later."
IMPLEMENTATIONS = ("reference", "triton", "mosaic_gpu")

_calls: Counter[tuple[str, str]] = Counter()
_fallbacks: Counter[tuple[str, str]] = Counter()


def dispatch_report() -> dict[str, dict[str, Any]]:
    """How often each implementation of each op was traced, and why a preferred one was passed over.

    Returns:
        `{op: {implementation: count, ..., "fallback_reasons": {"implementation: reason": count}}}`; only ops that ran.
    """
    report: dict[str, dict[str, Any]] = {}
    for (op, implementation), count in sorted(_calls.items()):
        report.setdefault(op, {})[implementation] = count
    for entry in report.values():
        entry["fallback_reasons"] = {}
    for (op, reason), count in sorted(_fallbacks.items()):
        report.setdefault(op, {"fallback_reasons": {}})["fallback_reasons"][reason] = count
    return report


def reset_dispatch_report() -> None:
    """Forget all counts of `dispatch_report`."""
    _calls.clear()
    _fallbacks.clear()


def available_implementations(op: str) -> tuple[str, ...]:
    """Names of the implementations of `op` whose module exists and can be imported here."""
    names = []
    for name in IMPLEMENTATIONS:
        try:
            load(op, name)
        except (ImportError, NotImplementedError):
            continue
        names.append(name)
    return tuple(names)


def load(op: str, implementation: str, function: str | None = None) -> Callable[..., Any]:
    """The function of one implementation, or another one of its module; imports the module.

    Raises:
        ValueError: no op or implementation has this name.
        NotImplementedError: the op has no such implementation.
    """
    if op not in PREFERENCE:
        raise ValueError(f"unknown op {op!r}; ops are {', '.join(PREFERENCE)}")
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"unknown implementation {implementation!r} of {op}; one of {', '.join(IMPLEMENTATIONS)}")
    path = f"pallas_kernels.{PREFERENCE[op][0]}.{implementation}"
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name != path:
            raise
        raise NotImplementedError(f"{op} has no {implementation} implementation") from None
    found = getattr(module, function or op, None)
    if found is None:
        raise NotImplementedError(f"{op} has no {implementation} implementation")
    return found


def call(op: str, implementation: str | None, *args: Any, case: str | None = None, **kwargs: Any) -> Any:
    """Trace `op` with the named implementation, or with the best one for the device the trace is for.

    `case`: a key of `PREFERENCE_OF_CASES`; None is the last axis of the first argument.

    Raises:
        NotImplementedError: the named implementation does not exist or does not support these arguments. Never raised
            for `implementation=None`: the reference supports every valid case.
    """
    if implementation is not None:
        result = load(op, implementation)(*args, **kwargs)
        _calls[op, implementation] += 1
        return result
    for name in _preferred(op, case or args[0].shape[-1]):
        if name == "reference":
            break
        try:
            if name == "mosaic_gpu" and _before_hopper():
                raise NotImplementedError(NO_MOSAIC)
            result = load(op, name)(*args, **kwargs)
        except (NotImplementedError, ImportError) as error:
            _count_fallback(op, name, error)
            continue
        _calls[op, name] += 1
        return result
    result = load(op, "reference")(*args, **kwargs)
    _calls[op, "reference"] += 1
    return result


def count(op: str, implementation: str) -> None:
    """Count a trace of `op` that went past `call`."""
    _calls[op, implementation] += 1


def candidates(op: str, implementation: str | None, head_dim: int) -> tuple[str, ...]:
    """What `call` would try on this device for heads of this size, in order: the first that supports the case runs."""
    if implementation is not None:
        return (implementation,)
    return tuple(name for name in _preferred(op, head_dim) if name != "mosaic_gpu" or not _before_hopper())


def _preferred(op: str, case: int | str) -> tuple[str, ...]:
    if _platform() not in ("gpu", "cuda"):
        return ("reference",)
    return PREFERENCE_OF_CASES.get((op, case), PREFERENCE[op][1])


def _count_fallback(op: str, name: str, error: Exception) -> None:
    reason = f"{name}: {error}"
    if not _fallbacks[op, reason]:
        logger.warning("%s falls back: %s", op, reason)
    _fallbacks[op, reason] += 1


def _before_hopper() -> bool:
    """Whether this process has a GPU, and it is older than Hopper."""
    if jax.default_backend() != "gpu":
        return False
    return float(getattr(jax.devices()[0], "compute_capability", 9.0)) < 9.0


def _platform() -> str:
    """Platform that the current trace is for: the default device if one is set, else the default backend."""
    device = jax.config.jax_default_device
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else device.platform
