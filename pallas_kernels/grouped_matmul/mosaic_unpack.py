"""How the Mosaic GPU kernel makes a wgmma's left operand of MXFP4 words in registers (see `mxfp4.py`).

Thread t of the four that share a row of a wgmma's left operand holds columns 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t of 16, two in a
register. A pair of words of a block, words 2 t and 2 t + 1, holds those columns of 32: its four places are the thread's
registers of two wgmmas, in order. So a thread reads one 32-bit word for eight weights, and nothing moves between threads.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as mosaic
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.grouped_matmul.mxfp4 import BLOCK, CODES, Mxfp4
from pallas_kernels.grouped_matmul.unpack import WEIGHTS

plgpu: Any = mosaic  # its classes and exports confuse the type checker
OUTPUTS, COLUMNS = 64, 64
BLOCKS = COLUMNS // BLOCK
HALVES = 2  # a thread has a row and the one 8 further
_FACTOR_OF_ZERO = 126 << 7  # bits of bfloat16 2 ** (0 - 1)


def unpack(words: Any, scales: Any, part: int, block: jax.Array, *, columns: int, simulate: bool) -> jax.Array:
    """bf16 `[64, 64]` in the layout of a wgmma's operand.

    Args:
        words: shared uint16 `[64, columns / 4]`, swizzled over a whole row; `columns` 64, 128 or 256.
        scales: shared uint8 `[64, S]`.
        part: which 64 of the columns.
        block: of which scale on they are, an even number.
        columns: of a row of words.
        simulate: for the simulator, which does not know registers.
    """
    some = scales.at[:, pl.ds(block, BLOCKS)]
    if simulate:
        word = words[...][:, part * (COLUMNS // CODES) : (part + 1) * (COLUMNS // CODES)]
        return Mxfp4(word, some[...]).values(jnp.bfloat16)
    row_bytes = columns // 2
    inline = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType((plgpu.SwizzleTransform(row_bytes),)), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((OUTPUTS, COLUMNS), jnp.bfloat16, layout=plgpu.Layout.WGMMA),
    )
    return inline(lambda _, words, some: _unpack(words, some, part, row_bytes))(words, some)


def store_transposed(stage: Any, values: jax.Array, *, simulate: bool) -> None:
    """`stage[...] = values.T` for bf16 values `[64, N]` of an accumulator and a plain shared `[N, 64]`."""
    if simulate:
        stage[...] = values.T
        return
    inline = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))
    inline(lambda _, stage, values: _store_transposed(stage, values))(stage, values)


def word_offset(row: Any, thread: Any, block: int, row_bytes: int) -> Any:
    """Byte of a thread's word of a block, in rows of 32, 64 or 128 bytes whose chunks of 16 TMA has exchanged.

    It exchanges them by bits 7 to 9 of their address, as many as a row has chunks for; these are alike in rows 8 apart.
    """
    turned = (row * row_bytes >> 7 & row_bytes // 16 - 1) << 4
    return row * row_bytes + thread * 4 + (turned ^ 16 * block)


def _unpack(words: ir.Value, scales: ir.Value, part: int, row_bytes: int) -> Any:
    i16, i32 = (ir.IntegerType.get_signless(bits) for bits in (16, 32))
    row, thread = _place()
    stride = ir.MemRefType(scales.type).get_strides_and_offset()[0][0]
    first_word, first_scale = utils.memref_ptr(words), _plus(utils.memref_ptr(scales), row * stride)
    layout = fragmented_array.WGMMA_LAYOUT
    registers = np.empty(layout.registers_shape((OUTPUTS, COLUMNS)), dtype=object)
    for half in range(HALVES):
        both = _I32(arith.extui(i32, llvm.load(i16, _plus(first_scale, 8 * half * stride))))
        for block in range(BLOCKS):
            factor = (_asm(f"prmt.b32 $0, $1, 0, {0x4040 + 0x101 * block};", both) << 7) + _FACTOR_OF_ZERO * 0x10001
            offset = word_offset(row, thread, part * BLOCKS + block, row_bytes) + 8 * half * row_bytes
            word = _I32(llvm.load(i32, _plus(first_word, offset)))
            for place in range(CODES):
                registers[0, block * CODES + place, 0, 0, half] = _asm(WEIGHTS[place], word, factor).as_bf16()
    return fragmented_array.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def _store_transposed(stage: ir.Value, values: Any) -> None:
    row, thread = _place()
    stride, _ = ir.MemRefType(stage.type).get_strides_and_offset()[0]
    first = _plus(utils.memref_ptr(stage), row * 2 + thread * (2 * 2 * stride))
    _, tiles, _, _, halves, *_ = values.registers.shape
    for tile in range(tiles):
        for half in range(halves):
            pair = values.registers[0, tile, 0, 0, half].item()
            for one in range(2):
                value = vector.extract(pair, dynamic_position=[], static_position=[one])
                llvm.store(value, _plus(first, (8 * tile + one) * 2 * stride + 8 * half * 2))


class _I32:
    """A 32-bit number of the kernel, with operators."""

    def __init__(self, value: ir.Value) -> None:
        self.value = value

    def as_bf16(self) -> ir.Value:
        """Two bf16 numbers."""
        pair = vector.broadcast(ir.VectorType.get((1,), self.value.type), self.value)
        return vector.bitcast(ir.VectorType.get((2,), ir.BF16Type.get()), pair)

    def __add__(self, other: _I32 | int) -> _I32:
        return _I32(arith.addi(self.value, _value(other)))

    def __mul__(self, other: _I32 | int) -> _I32:
        return _I32(arith.muli(self.value, _value(other)))

    def __lshift__(self, other: int) -> _I32:
        return _I32(arith.shli(self.value, _value(other)))

    def __rshift__(self, other: int) -> _I32:
        return _I32(arith.shrui(self.value, _value(other)))

    def __and__(self, other: _I32 | int) -> _I32:
        return _I32(arith.andi(self.value, _value(other)))

    def __xor__(self, other: _I32 | int) -> _I32:
        return _I32(arith.xori(self.value, _value(other)))


def _value(number: _I32 | int) -> ir.Value:
    return number.value if isinstance(number, _I32) else utils.c(number, ir.IntegerType.get_signless(32))


def _place() -> tuple[_I32, _I32]:
    """Row of this thread in a wgmma's left operand (and 8 further), 0..63, and its number in the row, 0..3."""
    thread = _I32(utils.thread_idx()) & 127
    return ((thread >> 5) << 4) + (thread >> 2 & 7), thread & 3


def _plus(pointer: ir.Value, offset: _I32 | int) -> ir.Value:
    """Address so many bytes further."""
    index = offset if isinstance(offset, int) else offset.value
    return utils.getelementptr(pointer, [index], ir.IntegerType.get_signless(8))


def _asm(text: str, *operands: _I32) -> _I32:
    """One pure instruction or a few."""
    constraints = ",".join(["=r", *("r" for _ in operands)])
    values = [operand.value for operand in operands]
    return _I32(llvm.inline_asm(ir.IntegerType.get_signless(32), values, text, constraints, asm_dialect=0))
