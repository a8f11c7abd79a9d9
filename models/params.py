"""Parameters of a model: where each comes from, how they are read, and random ones.

A family describes its parameters once, as a pytree of `Source` in the shape of its params. Loading, counting memory and
making random weights all walk that one tree.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.checkpoint import Checkpoint
from models.errors import CheckpointError
from models.mxfp4 import random_mxfp4
from pallas_kernels.grouped_matmul.mxfp4 import MAX_SCALE, Mxfp4, mxfp4_bytes

FLOATS = ("F32", "F16", "BF16")
BYTES = ("U8",)


@dataclass(frozen=True)
class Source:
    """One parameter and the tensors of a checkpoint that it is made of.

    Attributes:
        shape: shape of the parameter.
        tensors: (name, shape in the file) of what is read, in order.
        build: makes the parameter of the arrays read; for a packed one its blocks and scales, as in the file.
        stored: the dtypes that the tensors may have in the file.
        fan_in: random weights have variance 1 / fan_in; None: ones (a norm's weight).
        packed: stays MXFP4 in device memory: the leaf is a `pallas_kernels.Mxfp4` of this shape.
    """

    shape: tuple[int, ...]
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    build: Callable[[Sequence[np.ndarray]], Any] = lambda arrays: arrays[0]
    stored: tuple[str, ...] = FLOATS
    fan_in: int | None = None
    packed: bool = False

    def nbytes(self, dtype: Any) -> int:
        """Bytes of device memory of the parameter; one that is not packed has `dtype`."""
        return mxfp4_bytes(self.shape) if self.packed else math.prod(self.shape) * jnp.dtype(dtype).itemsize


def norm(name: str, size: int) -> Source:
    """A norm's weight [size]."""
    return Source((size,), ((name, (size,)),))


def vector(name: str, size: int) -> Source:
    """A bias or another vector [size]."""
    return Source((size,), ((name, (size,)),), fan_in=4)


def matrix(name: str, rows: int, columns: int) -> Source:
    """A weight [out, in]."""
    return Source((rows, columns), ((name, (rows, columns)),), fan_in=columns)


def stacked_rows(*parts: Source) -> Source:
    """One matrix (or vector) of several over each other: the outputs of one matmul instead of several."""
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    tensors = tuple(tensor for part in parts for tensor in part.tensors)
    return Source(shape, tensors, np.concatenate, fan_in=parts[0].fan_in)


@dataclass(frozen=True)
class LoadProgress:
    """Where a load stands. The first report has `done == 0`: it tells what will be needed before anything is read.

    Attributes:
        name: the parameter just loaded, "" in the first report.
        done, total: parameters loaded and all of them.
        bytes_done, bytes_total: bytes of device memory filled and needed.
    """

    name: str
    done: int
    total: int
    bytes_done: int
    bytes_total: int


def memory_needed(plan: Any, dtype: Any) -> int:
    """Bytes of device memory that the parameters of `plan` take in `dtype`."""
    return sum(source.nbytes(dtype) for source in jax.tree.leaves(plan))


def load_params(
    checkpoint: Checkpoint,
    plan: Any,
    dtype: Any,
    *,
    ignore: Sequence[str] = (),
    progress: Callable[[LoadProgress], None] | None = None,
) -> Any:
    """Reads the parameters of `plan`, one at a time, to the default device.

    Host memory holds one parameter at a time.

    Args:
        checkpoint: an opened checkpoint.
        plan: pytree of `Source`.
        dtype: dtype of the parameters that are not packed.
        ignore: patterns of tensor names that may be there and are not used.
        progress: called before the first tensor and after each parameter.

    Returns:
        The params: the tree of `plan` with arrays for leaves.

    Raises:
        CheckpointError: tensors are missing, unexpected, misshapen or of an unexpected dtype (all are named, before
            anything is read), the device has too little memory, or MXFP4 scales are too large to stay packed.
    """
    check_tensors(checkpoint, plan, ignore)
    leaves, tree = jax.tree_util.tree_flatten_with_path(plan)
    total = memory_needed(plan, dtype)
    check_memory(checkpoint.path, total)
    done_bytes = 0
    report = progress or (lambda _: None)
    report(LoadProgress("", 0, len(leaves), 0, total))
    arrays = []
    for done, (path, source) in enumerate(leaves, start=1):
        value = source.build([checkpoint.read(name) for name, _ in source.tensors])
        array = _pack(checkpoint, source, *value) if source.packed else jax.device_put(value).astype(dtype)
        if array.shape != source.shape:
            raise CheckpointError(f"{jax.tree_util.keystr(path)} was built as {array.shape}, expected {source.shape}")
        arrays.append(array)
        done_bytes += array.nbytes
        report(LoadProgress(jax.tree_util.keystr(path), done, len(leaves), done_bytes, total))
    return tree.unflatten(arrays)


def _pack(checkpoint: Checkpoint, source: Source, blocks: np.ndarray, scales: np.ndarray) -> Mxfp4:
    """Blocks and scales of a checkpoint, in the order of the kernels."""
    largest = int(scales.max(initial=0))
    if largest > MAX_SCALE:
        raise CheckpointError(
            f"{checkpoint.path}: {source.tensors[-1][0]} has a scale of {largest}; above {MAX_SCALE} weights cannot stay "
            "MXFP4: load with dequantise=True"
        )
    return _pack_on_device(blocks, scales)


_pack_on_device = jax.jit(Mxfp4.pack)


def check_tensors(checkpoint: Checkpoint, plan: Any, ignore: Sequence[str] = ()) -> None:
    """Compares names, shapes and dtypes of a checkpoint with a plan; reads no tensor. Raises CheckpointError."""
    found = checkpoint.tensors
    wanted = {name: (shape, s.stored) for s in jax.tree.leaves(plan) for name, shape in s.tensors}
    missing = [name for name in wanted if name not in found]
    extra = [name for name in found if name not in wanted and not any(fnmatch.fnmatch(name, p) for p in ignore)]
    present = [(name, *spec, found[name]) for name, spec in wanted.items() if name in found]
    misshapen = [f"{n} is {info.shape}, expected {shape}" for n, shape, _, info in present if info.shape != shape]
    retyped = [
        f"{n} is {info.dtype}, expected {' or '.join(dtypes)}"
        for n, _, dtypes, info in present
        if info.dtype not in dtypes
    ]
    problems = [
        f"{len(names)} {what}: {_some(names)}"
        for what, names in [
            ("tensors missing", missing),
            ("tensors not expected", extra),
            ("tensors misshapen", misshapen),
            ("tensors of an unsupported dtype", retyped),
        ]
        if names
    ]
    if problems:
        raise CheckpointError(f"{checkpoint.path} does not fit its config. " + "; ".join(problems))


def random_params(plan: Any, dtype: Any, seed: int = 0) -> Any:
    """Random parameters of `plan`, a function of the seed alone; large ones are made on the device."""
    leaves, tree = jax.tree.flatten(plan)

    def make(number: int, source: Source) -> jax.Array | Mxfp4:
        if source.fan_in is None:
            return jnp.asarray(np.ones(source.shape, dtype))
        if source.packed:
            return random_mxfp4(jax.random.fold_in(jax.random.key(seed), number), source.shape, source.fan_in)
        scale = source.fan_in**-0.5
        if math.prod(source.shape) < 1 << 20:  # numpy starts in microseconds, a jitted generator in a tenth of a second
            values = np.random.default_rng([seed, number]).standard_normal(source.shape, np.float32)
            return jnp.asarray((values * np.float32(scale)).astype(dtype))
        key = jax.random.fold_in(jax.random.key(seed), number)
        return _random_normal(key, source.shape, jnp.dtype(dtype), scale)

    return tree.unflatten([make(number, source) for number, source in enumerate(leaves)])


def _draw(key: jax.Array, shape: tuple[int, ...], dtype: Any, scale: float) -> jax.Array:
    return jax.random.normal(key, shape, dtype) * jnp.asarray(scale, dtype)


_random_normal = jax.jit(_draw, static_argnums=(1, 2, 3))


def check_memory(path: Path, needed: int) -> None:
    """Refuses a load that the default device cannot hold, where the device says how much it has (CPUs do not).

    Raises CheckpointError.
    """
    stats = jax.devices()[0].memory_stats() or {}
    limit = stats.get("bytes_limit")
    if limit is not None and needed > limit - stats.get("bytes_in_use", 0):
        free = limit - stats.get("bytes_in_use", 0)
        raise CheckpointError(f"{path} needs {needed / 1e9:.1f} GB of device memory, {free / 1e9:.1f} are free")


def _some(names: Iterable[str], most: int = 6) -> str:
    names = list(names)
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
