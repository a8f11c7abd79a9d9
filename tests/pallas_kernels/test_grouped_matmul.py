"""grouped_matmul: the shared properties of its implementations, the plan, the order of MXFP4 codes, CUDA lowering."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from models.mxfp4 import dequantise
from pallas_kernels.grouped_matmul import triton, triton_vector, unpack
from pallas_kernels.grouped_matmul.mxfp4 import CODES, code_of, mxfp4_bytes, value_of, word_of
from pallas_kernels.grouped_matmul.plan import plan_tiles
from pallas_kernels.testing import GroupedMatmulTests, random_mxfp4


class TestReference(GroupedMatmulTests):
    implementation = "reference"


class TestTriton(GroupedMatmulTests):
    implementation = "triton"


@pytest.mark.parametrize(
    ("blocks", "packed", "swap"),
    [
        pytest.param((16, 32, 64), False, 1, marks=pytest.mark.slow),
        pytest.param((128, 16, 256), False, 0, marks=pytest.mark.slow),
        ((32, 64, 128), True, 0),
        ((64, 32, 256), True, 1),
    ],
)
def test_launch_parameters_do_not_change_what_is_computed(blocks, packed, swap):
    rng = np.random.default_rng(0)
    codes, scales, true = random_mxfp4(rng, (5, 72, 160))
    weight = pk.Mxfp4.pack(codes, scales) if packed else jnp.asarray(true, jnp.float32)
    sizes = np.array([40, 0, 1, 33, 16], np.int32)
    x = rng.standard_normal((95, 160)).astype(np.float32)
    config = dict(zip(("block_m", "block_n", "block_k"), blocks, strict=True)) | {"swap": swap, "group_m": 3}
    config |= {"num_warps": 4, "num_stages": 2}
    y = triton.grouped_matmul(jnp.asarray(x), weight, jnp.asarray(sizes), bias=None, fixed_tile=False, config=config)
    GroupedMatmulTests().check(np.asarray(y), x, true, sizes, "float32")


@pytest.mark.parametrize("seed", range(8))
def test_the_plan_covers_every_row_once_and_mixes_no_groups(seed):
    rng = np.random.default_rng(seed)
    groups, block = int(rng.integers(1, 9)), int(rng.choice([1, 4, 16]))
    sizes = rng.integers(0, 20, groups) * rng.integers(0, 2, groups)
    rows = max(1, int(sizes.sum() + rng.integers(0, 9)))
    plan = jax.jit(plan_tiles, static_argnums=(1, 2))(jnp.asarray(sizes, jnp.int32), rows, block)
    of_row = np.full(rows, -1)
    used = 0
    for group, begin, end in zip(*map(np.asarray, (plan.group, plan.begin, plan.end)), strict=True):
        stop = min(begin + block, end)
        if begin < stop:
            used += int(group < groups)
            assert np.all(of_row[begin:stop] == -1)
            of_row[begin:stop] = group
    want = np.append(np.repeat(np.arange(groups), sizes), np.full(rows - sizes.sum(), groups))
    np.testing.assert_array_equal(of_row, want)
    assert used == int(plan.used) <= plan.group.size


def test_packed_weights_are_the_checkpoints_numbers_exactly():
    """All scales that give normal numbers (a CPU takes denormal ones for zero); all codes."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (127, 3, 2, 16), dtype=np.uint8)
    scales = np.broadcast_to(np.arange(2, 129, dtype=np.uint8)[:, None, None], (127, 3, 2))
    weight = jax.jit(pk.Mxfp4.pack)(blocks, scales)
    true = dequantise(blocks, scales)
    assert weight.shape == true.shape
    read = jax.jit(lambda weight: (weight.values(), weight.values(jnp.bfloat16).astype(jnp.float32)))
    for values in read(weight):
        np.testing.assert_array_equal(values, true)
    assert weight.nbytes == mxfp4_bytes(weight.shape) == 127 * 3 * (32 + 16)


def test_every_word_has_its_own_four_codes():
    words = np.arange(65536, dtype=np.uint16)
    codes = [code_of(words, place) for place in range(CODES)]
    np.testing.assert_array_equal(word_of(codes), words)
    assert np.unique(codes[0] | codes[1] << 4 | codes[2] << 8 | codes[3] << 12).size == words.size


@pytest.mark.parametrize("place", range(CODES))
def test_the_shifts_of_the_gpu_kernel_give_the_codes_values(place):
    """What its PTX does to a register of two words, in numpy."""
    low, high = np.arange(65536, dtype=np.uint32), np.random.default_rng(0).permutation(65536).astype(np.uint32)
    register = low | high << 16
    got = unpack.place_codes(register, place)
    for half, words in ((got & 0xFFFF, low), (got >> 16, high)):
        values = (half << 16).view(np.float32).astype(np.float64) * 2.0**126
        want = np.asarray(value_of(jnp.asarray(words, jnp.uint16), place).astype(jnp.float32))
        np.testing.assert_array_equal(values, want)
        np.testing.assert_array_equal(np.signbit(values), np.signbit(want))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("dense", "bfloat16"),
        ("mxfp4", "bfloat16"),
        pytest.param("dense", "float16", marks=pytest.mark.slow),
        pytest.param("dense", "float32", marks=pytest.mark.slow),
        pytest.param("mxfp4", "float32", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("rows", [1, 700])
def test_it_lowers_for_cuda_without_a_gpu(kind, dtype, rows, monkeypatch):
    for module in (triton, triton_vector):
        monkeypatch.setattr(module, "interpret_here", lambda: False)
    monkeypatch.setattr(triton, "tuned", lambda op, key, default: default)

    def shape(*dims, kind=dtype) -> Any:
        return jax.ShapeDtypeStruct(dims, jnp.dtype(kind))

    weight = shape(4, 200, 2880)
    if kind == "mxfp4":
        weight = pk.Mxfp4(shape(4, 200, 720, kind="uint16"), shape(4, 200, 96, kind="uint8"))
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=None)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        run = jax.jit(functools.partial(pk.grouped_matmul, implementation="triton"))
        traced = run.trace(shape(rows, 2880), weight, shape(4, kind="int32"), bias=shape(4, 200))
        assert "__gpu$xla.gpu.triton" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_what_does_not_fit_is_refused():
    x, weight, sizes = jnp.ones((4, 64)), jnp.ones((3, 8, 64)), jnp.ones(3, jnp.int32)
    packed = pk.Mxfp4.pack(np.zeros((3, 8, 2, 16), np.uint8), np.zeros((3, 8, 2), np.uint8))
    assert pk.grouped_matmul(x[:0], weight, sizes).shape == (0, 8)
    for call, message in (
        (lambda: pk.grouped_matmul(x[0], weight, sizes), "x must be"),
        (lambda: pk.grouped_matmul(x, weight[:, :, :32], sizes), r"weight must be \[E, out, 64\]"),
        (lambda: pk.grouped_matmul(x, weight.astype(jnp.bfloat16), sizes), "cast x"),
        (lambda: pk.grouped_matmul(x, weight, sizes[:2]), "group_sizes must be int32"),
        (lambda: pk.grouped_matmul(x, weight, sizes, bias=weight[0]), "bias must be"),
        (lambda: pk.grouped_matmul(x, weight, sizes, activation=lambda x: x[:, :32]), r"weight must be \[E, out, 32\]"),
        (lambda: pk.grouped_matmul(x, weight, sizes, activation=lambda x: x[:2]), "activation must make"),
        (lambda: pk.grouped_matmul(x, pk.Mxfp4(packed.blocks, packed.scales[..., :2]), sizes), "scales of"),
        (lambda: pk.grouped_matmul(x, pk.Mxfp4(packed.blocks, packed.scales.astype(jnp.int32)), sizes), "uint8 scales"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(NotImplementedError, match="float16"):
        pk.grouped_matmul(x.astype(jnp.float16), packed, sizes, implementation="triton")


@pytest.mark.parametrize(("rows", "fixed_tile", "vector"), [(8, False, True), (9, False, False), (1, True, False)])
def test_few_rows_leave_the_tensor_cores_unless_the_tile_is_fixed(rows, fixed_tile, vector, monkeypatch):
    calls, real = [], triton_vector.multiply
    monkeypatch.setattr(triton_vector, "multiply", lambda *args: calls.append(args) or real(*args))
    weight = pk.Mxfp4.pack(*random_mxfp4(np.random.default_rng(6), (2, 5, 64))[:2])
    sizes, options = jnp.asarray([rows, 0], jnp.int32), {"fixed_tile": fixed_tile, "implementation": "triton"}
    pk.grouped_matmul(jnp.ones((rows, 64)), weight, sizes, **options)
    assert bool(calls) == vector


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_arrays_of_numpy_are_taken(implementation):
    rng = np.random.default_rng(0)
    shapes = ((3, 16), (2, 8, 16), (2, 8))
    x, weight, bias = arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    given: list[Any] = [*arrays, np.array([1, 2], np.int32)]
    y = pk.grouped_matmul(given[0], given[1], given[3], bias=given[2], implementation=implementation)
    want = [x[row] @ weight[group].T + bias[group] for row, group in enumerate((0, 1, 1))]
    np.testing.assert_allclose(y, np.stack(want), rtol=1e-5, atol=1e-5)
