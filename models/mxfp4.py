"""MXFP4: 4-bit floats in blocks of 32 that share a power of two (OCP Microscaling formats, 2023)."""

from __future__ import annotations

import numpy as np

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
