"""MXFP4: 4-bit floats in blocks of 32 that share a power of two (OCP Microscaling formats, 2023)."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_matmul.mxfp4 import CODES, Mxfp4, padded_scales

BLOCK = 32

# Code 0..7; bit 3 is the sign.
_MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
VALUES = np.array([*_MAGNITUDES, *(-m for m in _MAGNITUDES)], np.float32)


def dequantise(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The numbers that packed weights stand for.

    Args:
        blocks: uint8 [..., G, 16]; a byte holds two codes, the low nibble first.
        scales: uint8 [..., G]; the block's factor is 2 ** (scale - 127).

    Returns:
        float32 [..., G * 32].
    """
    values = np.empty((*blocks.shape[:-1], BLOCK), np.float32)
    values[..., 0::2] = VALUES[blocks & 0x0F]
    values[..., 1::2] = VALUES[blocks >> 4]
    np.ldexp(values, scales.astype(np.int32)[..., None] - 127, out=values)
    return values.reshape(*blocks.shape[:-2], -1)


@partial(jax.jit, static_argnums=(1, 2))
def random_mxfp4(key: jax.Array, shape: tuple[int, ...], fan_in: int) -> Mxfp4:
    """Random packed weights `[..., out, in]` of mean 0 and variance 1 / fan_in: all codes, under two neighbouring scales."""
    factor = fan_in**-0.5 / float(np.sqrt(np.mean(VALUES**2)))
    exponent = math.floor(math.log2(factor))
    larger = ((factor / 2**exponent) ** 2 - 1) / 3  # the part of the blocks that has twice the factor
    code_key, scale_key = jax.random.split(key)
    blocks = jax.random.bits(code_key, (*shape[:-1], shape[-1] // CODES), jnp.uint16)
    twice = jax.random.bernoulli(scale_key, larger, (*shape[:-1], padded_scales(shape[-1])))
    return Mxfp4(blocks, (127 + exponent + twice).astype(jnp.uint8))
