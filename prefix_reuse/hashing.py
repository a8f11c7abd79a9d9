"""Namespaces, chained page keys and the weight fingerprint: everything whose bytes may leave the process.

The index itself compares tokens and needs no digest. Keys are for what outlives or leaves a process (snapshots,
events, other workers), so they depend on nothing but their inputs: little-endian int32 tokens, length-prefixed fields,
sha256. Python's `hash()` is seeded per process and appears nowhere here.

    root  = sha256(domain | namespace | page_size)
    key_i = sha256(key_{i-1} | i | tokens of page i)         one pass: every token is hashed exactly once
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash

from prefix_reuse.errors import InvalidRequestError

KEY_DOMAIN = b"prefix-reuse page key 1"
NAMESPACE_DOMAIN = b"prefix-reuse namespace 1"
RUNTIME_EPOCH = "1"
"""Version of kernels, page layout and numerics. Raise it when KV bytes of equal inputs change."""
INT32 = np.dtype("<i4")

Digest = Callable[[bytes], bytes]
"""Maps bytes to a digest of fixed length; injectable, so that a test can force every digest equal."""

_OPTIONAL_FIELDS = frozenset({"adapter", "tenant_salt", "extra"})


def _process_identity(secret: str = secrets.token_hex(16)) -> str:
    """Stands in for missing identity: equal within this process, different in every other one."""
    return f"unidentified:{secret}"


def _frame(*parts: bytes) -> bytes:
    """Length-prefixed concatenation: no two different tuples of parts give the same bytes."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


@dataclass(frozen=True)
class Namespace:
    """Who may share KV: pages match only between requests whose namespaces are equal in every field.

    `None` in an identity field means *unknown*, which is unique to this process and never a wildcard; `None` as
    adapter or salt means *none*. Fields follow vLLM's extra keys and MoE-Infinity's cache identity.

    Example:
        >>> a = Namespace.from_identity({"model_id": "m", "revision": "1"}, page_size=16)
        >>> a.digest == a.replace(tenant_salt="t2").digest
        False
    """

    model_id: str | None = None
    revision: str | None = None
    weights: str | None = None
    """`weight_fingerprint(params)`."""
    tokenizer: str | None = None
    dtype: str | None = None
    page_size: int | None = None
    num_layers: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    layout: str | None = None
    """Name of the kernels' page layout."""
    position_config: str | None = None
    """RoPE parameters, scaling and windows, as text."""
    adapter: str | None = None
    tenant_salt: str | None = None
    runtime_epoch: str | None = RUNTIME_EPOCH
    extra: tuple[tuple[str, str], ...] = field(default=())
    """Further identity that the model reports; sorted pairs."""

    @classmethod
    def from_identity(cls, identity: Mapping[str, Any], **values: Any) -> Namespace:
        """Build from a model's `identity` mapping; keys that are no field join `extra`, so nothing is dropped."""
        names = {f.name for f in fields(cls)} - {"extra"}
        merged = {**identity, **values}
        known: dict[str, Any] = {
            k: (_text(v) if k in _TEXT_FIELDS and v is not None else v) for k, v in merged.items() if k in names
        }
        extra = tuple(sorted((k, _text(v)) for k, v in merged.items() if k not in names))
        return cls(**known, extra=extra)

    def replace(self, **changes: Any) -> Namespace:
        """A copy with some fields changed."""
        return replace(self, **changes)

    @cached_property
    def digest(self) -> bytes:
        """sha256 over all fields, the same in every process as long as every identity field is given."""
        parts = [NAMESPACE_DOMAIN]
        for f in fields(self):
            value = getattr(self, f.name)
            if value is None:
                value = "none" if f.name in _OPTIONAL_FIELDS else _process_identity()
                kind = b"missing"
            else:
                kind = type(value).__name__.encode()
            parts += [f.name.encode(), kind, _text(value).encode()]
        return hashlib.sha256(_frame(*parts)).digest()

    @property
    def is_portable(self) -> bool:
        """Whether another process with the same inputs gets the same digest."""
        return all(getattr(self, f.name) is not None for f in fields(self) if f.name not in _OPTIONAL_FIELDS)


_TEXT_FIELDS = frozenset(
    f.name for f in fields(Namespace) if f.name not in {"page_size", "num_layers", "num_kv_heads", "head_dim", "extra"}
)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


def as_tokens(tokens: Any) -> np.ndarray:
    """Token ids as a contiguous little-endian int32 array; ids that do not fit 31 bits are refused.

    Raises:
        InvalidRequestError: not one-dimensional integers in [0, 2**31).
    """
    if type(tokens) is np.ndarray and tokens.dtype is INT32 and tokens.ndim == 1 and tokens.flags.c_contiguous:
        return tokens  # the common case, first
    array = np.asarray(tokens)
    if array.size == 0 and array.ndim == 1:
        return np.zeros(0, "<i4")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidRequestError(f"token ids must be one-dimensional integers, got {array.dtype}{list(array.shape)}")
    if array.dtype.itemsize > 4 or array.dtype.kind == "u":
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= 2**31:
            raise InvalidRequestError(f"token ids must lie in [0, 2**31), got {low}..{high}")
    return np.ascontiguousarray(array, "<i4")


def root_key(namespace: Namespace | bytes, page_size: int) -> bytes:
    """The key that stands before page 0."""
    digest = namespace.digest if isinstance(namespace, Namespace) else namespace
    return hashlib.sha256(_frame(KEY_DOMAIN, digest, page_size.to_bytes(8, "little"))).digest()


def page_keys(
    tokens: Any,
    page_size: int,
    namespace: Namespace | bytes,
    *,
    parent: bytes | None = None,
    first_page: int = 0,
    digest: Digest | None = None,
) -> list[bytes]:
    """Chained sha256 keys of the full pages of `tokens`.

    Args:
        tokens: token ids, any integer type; the last partial page is ignored.
        page_size: token slots per page.
        namespace: a `Namespace` or its digest.
        parent: key of the page before `tokens[0]`, to continue a chain without hashing it again; None = root.
        first_page: page index of `tokens[0]`, with `parent`.
        digest: replaces sha256.

    Returns:
        One key per full page. Equal keys mean equal namespace, page size, position, history and tokens.
    """
    data = as_tokens(tokens).tobytes()
    step = 4 * page_size
    key = root_key(namespace, page_size) if parent is None else parent
    keys = []
    for index in range(len(data) // step):
        message = key + (first_page + index).to_bytes(8, "little") + data[index * step : (index + 1) * step]
        key = hashlib.sha256(message).digest() if digest is None else digest(message)
        keys.append(key)
    return keys


xxh3_digest: Digest = xxhash.xxh3_128_digest
"""128-bit xxh3: faster than sha256, but not safe against chosen tokens; for events within one trust domain."""


@partial(jax.jit, static_argnames="num_sums")
def _leaf_sums(leaf: jax.Array, num_sums: int = 2) -> jax.Array:
    if leaf.dtype == jnp.bool_ or (jnp.issubdtype(leaf.dtype, jnp.integer) and leaf.dtype.itemsize == 1):
        words = leaf.astype(jnp.uint8)
    elif jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        words = jax.lax.bitcast_convert_type(jnp.stack([leaf.real, leaf.imag]), jnp.uint32)
    else:
        unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[leaf.dtype.itemsize]
        words = jax.lax.bitcast_convert_type(leaf, unsigned)
    words = words.astype(jnp.uint32)
    index = jnp.zeros(words.shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(words.ndim)):
        position = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        index = index + position * jnp.uint32(stride % 2**32)
        stride *= words.shape[axis]
    sums = []
    for seed in range(num_sums):
        # An odd factor per position: a change of one element always changes the sum modulo 2**32, and a swap of two
        # elements changes it unless their factors collide.
        mixed = (index + jnp.uint32(0x9E3779B9 * (seed + 1) % 2**32)) * jnp.uint32(0x85EBCA6B)
        mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0xC2B2AE35)
        factor = (mixed ^ (mixed >> 13)) | jnp.uint32(1)
        sums.append(jnp.sum(words * factor, dtype=jnp.uint32))
    return jnp.stack(sums)


def weight_fingerprint(params: Any) -> str:
    """A fingerprint of every parameter: one pass over the weights on the device, 8 bytes a leaf to the host.

    A change of any single element of a leaf always changes it. It tells checkpoints apart; it is no signature.

    Args:
        params: pytree of arrays.

    Returns:
        Hex sha256 over path, shape, dtype and two 32-bit weighted sums of each leaf.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    arrays = [leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf) for _, leaf in leaves]
    sums = jax.device_get([_leaf_sums(array) for array in arrays])
    digest = hashlib.sha256(b"prefix-reuse weights 1")
    for (path, _), array, leaf_sums in zip(leaves, arrays, sums, strict=True):
        name = jax.tree_util.keystr(path)
        digest.update(_frame(name.encode(), str(array.shape).encode(), str(array.dtype).encode(), leaf_sums.tobytes()))
    return digest.hexdigest()
