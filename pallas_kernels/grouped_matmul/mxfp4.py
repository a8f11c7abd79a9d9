"""MXFP4 weights in the order that the kernels unpack: 4-bit floats in blocks of 32 that share a power of two.

A code is a sign, two bits of exponent and one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6 (OCP Microscaling formats, 2023).
In checkpoints a byte holds two neighbours. Here a block is eight 16-bit words; word j holds columns j, 8 + j, 16 + j and
24 + j: places 0 to 3. With M = 0x81C0, the sign of a bfloat16, the lowest bits of its exponent and the highest of its mantissa,
and s the word w with its bytes exchanged, the codes are

    w & M,  (w ^ w << 4) & M,  (s ^ s << 2) & M,  (s ^ s << 6) & M

which a GPU makes of a register of two words in 8 instructions, one a code (`lop3`) and four shared ones; nothing that moves
from one half to the other gets under M. No order of codes that are only shifted and masked does with fewer than 11: 16 bits
cannot be covered by four places of M. The exclusive ors make up for that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
        words = word_of([codes[..., place, :].astype(jnp.uint16) for place in range(CODES)])
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


def word_of(codes: Sequence[Any]) -> Any:
    """uint16 words of the codes at places 0 to 3, uint16 0 to 15, NumPy's or JAX's: the opposite of `code_of`."""
    first, second, third, fourth = ((code & 8) << 12 | (code & 7) << 6 for code in codes)
    word = _exchanged(first | (first ^ second) >> 4)
    word = word | (fourth ^ word << 6) & 0x40
    word = word | (third ^ word << 2) & 0x100
    word = word | ((third ^ word) & 0x80C0) >> 2
    return _exchanged(word | ((fourth ^ word) & 0x8180) >> 6)


def code_of(words: Any, place: int) -> Any:
    """Codes, 0 to 15, at one place of uint16 words, NumPy's or JAX's."""
    words = words if place < 2 else _exchanged(words)
    placed = words ^ (words << (0, 4, 2, 6)[place]) if place else words
    return placed >> 12 & 8 | placed >> 6 & 7


def value_of(words: jax.Array, place: int) -> jax.Array:
    """bfloat16 of the codes at one place, 0 to 3, of uint16 words, without their block's factor.

    No table, which a kernel could not hold, and no denormal number, which a CPU takes for zero.
    """
    codes = code_of(words, place)
    normal = jax.lax.bitcast_convert_type(((codes & 7) << 6) + (126 << 7), jnp.bfloat16)
    small = (codes & 1).astype(jnp.bfloat16) * 0.5
    magnitude = jnp.where((codes & 6) == 0, small, normal)
    return jnp.where((codes & 8) == 0, magnitude, -magnitude)


def _exchanged(words: Any) -> Any:
    """With their two bytes exchanged."""
    return words << 8 | words >> 8
