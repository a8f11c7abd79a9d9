"""MXFP4 weights in the order that the kernels unpack: 4-bit floats in blocks of 32 that share a power of two.

A code is a sign, two bits of exponent and one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6 (OCP Microscaling formats, 2023).
In checkpoints a byte holds two neighbours. Here a block is eight 16-bit words; word j holds columns j, 8 + j, 16 + j and
24 + j, the first in its lowest bits. Two neighbouring words are one register, and each of its four pairs of codes becomes a
register of two bfloat16 without moving a bit from one half to the other.
"""

from __future__ import annotations

import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

BLOCK, CODES = 32, 4
"""Columns that share a scale; codes of a word."""
WORDS = BLOCK // CODES
MAX_SCALE = 128
"""Largest scale: the factor of GPU kernels is 2 ** (scale - 1), which must be a finite bfloat16."""
SCALES_MULTIPLE = 16
"""Scales of a row are padded to this many bytes, so that runs of them can be copied in words."""


@flax.struct.dataclass
class Mxfp4:
    """Weights `[..., out, in]` at 4.25 bits each.

    Attributes:
        blocks: uint16 `[..., out, in / 4]`, in the order above.
        scales: uint8 `[..., out, in / 32, rounded up to a multiple of 16]`; a block's factor is `2 ** (scale - 127)`.
    """

    blocks: jax.Array
    scales: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weights, `[..., out, in]`."""
        return (*self.blocks.shape[:-1], CODES * self.blocks.shape[-1])

    @property
    def ndim(self) -> int:
        """Axes of the weights."""
        return self.blocks.ndim

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return self.blocks.nbytes + self.scales.nbytes

    @classmethod
    def pack(cls, blocks: Any, scales: Any) -> Mxfp4:
        """From the order of checkpoints.

        Args:
            blocks: uint8 `[..., out, in / 32, 16]`; a byte holds two columns, the lower one in its low nibble.
            scales: uint8 `[..., out, in / 32]`; none above `MAX_SCALE` (the caller checks: here they may be traced).
        """
        blocks, scales = jnp.asarray(blocks), jnp.asarray(scales)
        codes = jnp.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], CODES, WORDS)
        places = 4 * jnp.arange(CODES, dtype=jnp.uint16)[:, None]
        words = jnp.sum(codes.astype(jnp.uint16) << places, axis=-2, dtype=jnp.uint16)
        spare = padded_scales(BLOCK * scales.shape[-1]) - scales.shape[-1]
        padding = [(0, 0)] * (scales.ndim - 1) + [(0, spare)]
        return cls(words.reshape(*blocks.shape[:-2], -1), jnp.pad(scales, padding))

    def values(self, dtype: Any = jnp.float32) -> jax.Array:
        """The weights `[..., out, in]`; exact in bfloat16 and float32."""
        words = self.blocks.reshape(*self.blocks.shape[:-1], -1, WORDS)
        codes = jnp.concatenate([value_of(words, i) for i in range(CODES)], axis=-1).astype(jnp.float32)
        exponents = self.scales[..., : words.shape[-2]].astype(jnp.int32) - 127
        return jnp.ldexp(codes, exponents[..., None]).reshape(self.shape).astype(dtype)


def padded_scales(columns: int) -> int:
    """Bytes of scales of a row of so many weights."""
    return -(-columns // BLOCK // SCALES_MULTIPLE) * SCALES_MULTIPLE


def mxfp4_bytes(shape: tuple[int, ...]) -> int:
    """Bytes of device memory of weights `[..., out, in]`."""
    return math.prod(shape[:-1]) * (shape[-1] // 2 + padded_scales(shape[-1]))


def value_of(words: jax.Array, place: int) -> jax.Array:
    """bfloat16 of the codes at one place, 0..3, of uint16 words, without their block's factor.

    No table, which a kernel could not hold, and no denormal number, which a CPU takes for zero.
    """
    codes = words >> (4 * place)
    normal = jax.lax.bitcast_convert_type(((codes & 7) << 6) + (126 << 7), jnp.bfloat16)
    small = (codes & 1).astype(jnp.bfloat16) * 0.5
    magnitude = jnp.where((codes & 6) == 0, small, normal)
    return jnp.where((codes & 8) == 0, magnitude, -magnitude)
