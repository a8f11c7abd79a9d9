"""`StoreGeometry`: what a page of a host store looks like, and which device its bytes come from.

A store is bound to one geometry before anything is allocated. Binding the same again changes nothing, whatever spelling or
one-device sharding the device came in; another geometry is refused with a stable reason.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.layout import LAYOUT, LayerGroup, page_shape
from prefix_reuse.errors import ConfigError, GeometryError, TransferError

GEOMETRY_MISMATCH = "store-geometry-mismatch"
DEVICE_MISMATCH = "store-device-mismatch"
NO_INDEX = "store-without-index"
NOT_BOUND = "store-not-bound"


@dataclass(frozen=True)
class PagePart:
    """The part of a page that one layer group fills.

    Attributes:
        layers: layer numbers of the model, ascending.
        shape: of the part, `[L, *page_shape]`.
        dtype: its name.
        window: sliding window of the layers in tokens, or None.
    """

    layers: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    window: int | None = None

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        window = "" if self.window is None else f", window {self.window}"
        return f"{self.dtype}{list(self.shape)} for layers {list(self.layers)}{window}"


@dataclass(frozen=True)
class StoreGeometry:
    """Everything that two users of one store must agree on.

    Attributes:
        page_size: token slots per page.
        parts: one per layer group; a host page holds all of them, in this order.
        layout: name of the order of a page's axes.
        device: `platform:id@process` of the device that the pages belong to; empty = any.
    """

    page_size: int
    parts: tuple[PagePart, ...]
    layout: str = LAYOUT
    device: str = ""

    @classmethod
    def of(cls, groups: tuple[LayerGroup, ...], page_size: int, device: Any = None) -> StoreGeometry:
        """Geometry of a model's pages on a device (any spelling that `canonical_device` takes; None = any device)."""
        parts = tuple(
            PagePart(
                tuple(g.layers),
                (len(g.layers), *page_shape(page_size, g.num_kv_heads, g.head_dim)),
                jnp.dtype(g.dtype).name,
                g.window,
            )
            for g in groups
        )
        return cls(page_size, parts, LAYOUT, "" if device is None else device_name(canonical_device(device)))

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layer groups."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def identity(self) -> str:
        """A short process-independent name; equal for equal pages, whichever device they are on."""
        text = ";".join([f"{self.page_size}/{self.layout}", *map(str, self.parts)])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def difference(self, other: StoreGeometry) -> tuple[str, str]:
        """(reason, detail) of the first thing in which `other` differs; both empty when it does not."""
        for name in ("page_size", "layout", "parts"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                if name == "parts":
                    mine, theirs = "; ".join(map(str, mine)), "; ".join(map(str, theirs))
                return GEOMETRY_MISMATCH, f"{name} of the store is {mine}, not {theirs}"
        if self.device and other.device and self.device != other.device:
            return DEVICE_MISMATCH, f"the store holds pages of {self.device}, not of {other.device}"
        return "", ""

    def check_payload(self, payload: Any) -> None:
        """Raises `TransferError` unless `payload` is one page: every group, in its shape and dtype.

        Only a group with a sliding window may be absent, which is None and nothing else.
        """
        if not isinstance(payload, tuple) or len(payload) != len(self.parts):
            count = len(payload) if isinstance(payload, tuple) else type(payload).__name__
            raise TransferError(f"a host page needs {len(self.parts)} arrays, one per layer group, got {count}")
        for group, (part, array) in enumerate(zip(self.parts, payload, strict=True)):
            if array is None and part.window is not None:
                continue
            shape, dtype = getattr(array, "shape", None), getattr(array, "dtype", None)
            if shape != part.shape or dtype is None or jnp.dtype(dtype).name != part.dtype:
                raise TransferError(
                    f"layer group {group} of a host page is {dtype}{list(shape or ())}, the store holds {part}"
                )


def canonical_device(device: Any = None) -> Any:
    """The JAX device that is meant.

    Args:
      device: a device; its name (`cpu`, `gpu:1`, `cuda:0`); a sharding or mesh of exactly one device; None = the first one.

    Raises `ConfigError` when it names no device, or more than one.
    """
    if device is None:
        return jax.devices()[0]
    if isinstance(device, str):
        platform, _, number = device.partition(":")
        try:
            return jax.devices(platform)[int(number or 0)]
        except (RuntimeError, ValueError, IndexError) as error:
            raise ConfigError(f"no device is called {device!r}: {error}") from error
    devices = list(getattr(device, "device_set", ()))
    if isinstance(device, jax.sharding.Mesh):
        devices = list(device.devices.flat)
    if devices:
        if len(devices) > 1:
            raise ConfigError(f"pages live on one device, {device!r} spans {len(devices)}")
        return devices[0]
    if not isinstance(device, jax.Device):
        raise ConfigError(f"not a device: {device!r}; give a jax device, its name, or a sharding of one device")
    return device


def device_name(device: Any) -> str:
    """The same text for the same device, however it was spelt."""
    return f"{device.platform}:{device.id}@{device.process_index}"


def check_bindable(store: Any, geometry: StoreGeometry) -> None:
    """Raises `GeometryError`, with a stable reason, when pages of `geometry` must not go into `store`."""
    if store.index is None:
        raise GeometryError(NO_INDEX, "the store was made without an index: it can share nothing")
    bound = store.geometry
    if bound is None:
        if store.page_size != geometry.page_size:
            raise GeometryError(
                GEOMETRY_MISMATCH, f"page_size of the store is {store.page_size}, not {geometry.page_size}"
            )
        if store.page_bytes not in (None, geometry.page_bytes):
            raise GeometryError(
                GEOMETRY_MISMATCH, f"a page of the store has {store.page_bytes} bytes, not {geometry.page_bytes}"
            )
        return
    reason, detail = bound.difference(geometry)
    if reason:
        raise GeometryError(reason, detail)
