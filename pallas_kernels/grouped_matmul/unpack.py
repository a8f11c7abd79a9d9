"""How Triton kernels make bfloat16 numbers of MXFP4 codes in registers, two codes at a time (see `mxfp4.py`)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.grouped_matmul.mxfp4 import BLOCK, CODES, WORDS, value_of


def factors_of(scales, shape):
    """bfloat16 `2 ** (scale - 1)` of each word [*shape], of its block's scale: weights over what `unpack` makes of codes."""
    factor = jax.lax.bitcast_convert_type((scales.astype(jnp.uint16) + 126) << 7, jnp.bfloat16)
    return jnp.broadcast_to(factor[:, :, None], (*factor.shape, WORDS)).reshape(shape)


def columns_of(word):
    """Column of each word's first code; that of place p is `WORDS * p` further."""
    # lax.div and lax.rem, not // and %: what those add for negative numbers hides that columns are neighbours.
    return jax.lax.div(word, WORDS) * BLOCK + jax.lax.rem(word, WORDS)


# The code at each place of two words, in register c. The compiler does what two of them share once.
_EXCHANGE = "prmt.b32 b, $1, $1, 0x2301;"
_PLACES = (
    "and.b32 c, $1, 0x81C081C0;",
    "shl.b32 c, $1, 4; lop3.b32 c, c, $1, 0x81C081C0, 0x28;",  # (c ^ $1) & mask
    f"{_EXCHANGE} shl.b32 c, b, 2; lop3.b32 c, c, b, 0x81C081C0, 0x28;",
    f"{_EXCHANGE} shl.b32 c, b, 6; lop3.b32 c, c, b, 0x81C081C0, 0x28;",
)
# The same, times the factors of both words.
WEIGHTS = tuple(f"{{ .reg .b32 b, c; {code} mul.rn.bf16x2 $0, c, $2; }}" for code in _PLACES)


def unpack(words, factor, place, interpret):
    """Weights of one place of each word, bf16 of the words' shape.

    A code's exponent and mantissa come to where bfloat16 has the lowest bits of its exponent and the highest of its mantissa
    (bits 8 to 6), the sign to bit 15: `2 ** -126` times the code's value. One half is then denormal, as it was: one rule for
    all.
    """
    if interpret:
        return value_of(words, place) * (factor * jnp.asarray(2.0**-126, factor.dtype))
    (weights,) = pltriton.elementwise_inline_asm(
        WEIGHTS[place],
        args=[words, factor],
        constraints="=r,r,r",
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(words.shape, jnp.bfloat16)],
    )
    return weights


def place_codes(register, place):
    """What the PTX of `unpack` does to a register of two words before it multiplies, in numpy, to be tested without a GPU."""
    if place > 1:
        register = (register & 0x00FF00FF) << 8 | register >> 8 & 0x00FF00FF
    return (register ^ register << (0, 4, 2, 6)[place] if place else register) & 0x81C081C0


def add_products(acc, words, factor, x, interpret):
    """`acc` plus the products of all four places with numbers x: f32 of the words' shape, as are acc and each of `x`."""
    if interpret:
        products = (unpack(words, factor, place, True).astype(jnp.float32) * x[place] for place in range(CODES))
        return functools.reduce(jnp.add, products, acc)
    (total,) = pltriton.elementwise_inline_asm(
        _ADD_PRODUCTS,
        args=[words, factor, *x, acc],
        constraints="=f,=f,r,r" + ",f" * (2 * CODES + 2),
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(words.shape, jnp.float32)],
    )
    return total


def _adding(place):
    """One place: operands 2 and 3 are two words and their factors, then come two numbers for each place and two sums."""
    code = _PLACES[place].replace("$1", "$2")
    first = 4 + 2 * place
    return (
        f"{code} mul.rn.bf16x2 c, c, $3; shl.b32 d, c, 16; and.b32 c, c, 0xFFFF0000; mov.b32 x, d; mov.b32 y, c; "
        f"fma.rn.f32 s, x, ${first}, s; fma.rn.f32 t, y, ${first + 1}, t; "
    )


_ADD_PRODUCTS = (
    "{ .reg .b32 b, c, d; .reg .f32 x, y, s, t; "
    f"mov.f32 s, ${4 + 2 * CODES}; mov.f32 t, ${5 + 2 * CODES}; "
    f"{''.join(map(_adding, range(CODES)))} mov.f32 $0, s; mov.f32 $1, t; }}"
)
