"""row_invariant_matmul: its implementations, and the mode that sends the matmuls of models through it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from models.layers import linear
from pallas_kernels import pallas_gpu
from pallas_kernels.row_invariant_matmul import mode, proof, triton
from pallas_kernels.row_invariant_matmul.mode import MatmulShape, RowInvariance, matmul_shapes
from pallas_kernels.testing import RowInvariantMatmulTests
from pallas_kernels.testing.attention import assert_same_bits

CPU = jax.devices("cpu")[0]


class TestReference(RowInvariantMatmulTests):
    implementation = "reference"


class TestTritonInterpreted(RowInvariantMatmulTests):
    """In the interpreter tiles are XLA's own small matmuls, so bits can be held to calls within one class of rows only."""

    implementation = "triton"
    rows = (130, 140)


@pytest.mark.parametrize("weight_first", [0, 1])
def test_both_orders_of_the_operands_multiply_alike(weight_first: int) -> None:
    x, weight, bias = RowInvariantMatmulTests.operands(5, 40, 72, "float32")
    got = triton.row_invariant_matmul(
        x, weight, bias, out_dtype=jnp.dtype("float32"), config={"weight_first": weight_first}
    )
    np.testing.assert_allclose(np.asarray(got), np.asarray(x) @ np.asarray(weight).T + np.asarray(bias), atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "dtype", "weight_first"),
    [(1, "bfloat16", 1), (64, "bfloat16", 0), (128, "float16", 0), (300, "float32", 1), (1, "float32", 0)],
)
def test_the_kernel_lowers_for_cuda_without_a_gpu(
    rows: int, dtype: str, weight_first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "interpret_here", lambda: False)
    monkeypatch.setattr(triton, "tuned", lambda op, key, default: {**default, "weight_first": weight_first})
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=None)
    args: Any = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((rows, 576), (49152, 576), (49152,))]
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        traced = jax.jit(lambda *a: pk.row_invariant_matmul(*a, implementation="triton")).trace(*args)
        assert "__gpu$xla.gpu.triton" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_arguments_that_do_not_fit_are_refused() -> None:
    x, weight, bias = RowInvariantMatmulTests.operands(3, 8, 16, "float32")
    for arguments, message in (
        ((x[:, :8], weight), "weight must be float32"),
        ((x, weight.astype(jnp.bfloat16)), "weight must be float32"),
        ((x.astype(jnp.int32), weight), "x must be"),
        ((x, weight, bias[:4]), "bias must be"),
        ((x, weight, bias.astype(jnp.bfloat16)), "bias must be"),
    ):
        with pytest.raises(ValueError, match=message):
            pk.row_invariant_matmul(*arguments)
    large = jax.ShapeDtypeStruct((2, 1 << 16), jnp.float32), jax.ShapeDtypeStruct((1 << 15, 1 << 16), jnp.float32)
    with pytest.raises(NotImplementedError, match="64-bit"):
        jax.eval_shape(lambda x, w: pk.row_invariant_matmul(x, w, implementation="triton"), *large)


def test_linear_is_row_invariant_in_the_mode_only_and_jitted_functions_follow_it() -> None:
    x, weight, _ = RowInvariantMatmulTests.operands(3, 8, 16, "float32")
    step = jax.jit(linear)
    pk.reset_dispatch_report()
    for _ in range(2):
        step(x, weight)
        assert "row_invariant_matmul" not in pk.dispatch_report()
    with RowInvariance().active():
        got = step(x, weight)
    assert pk.dispatch_report()["row_invariant_matmul"]["reference"] == 1
    assert pk.row_invariance() is None
    assert_same_bits(got, pk.row_invariant_matmul(x, weight))


def test_xla_multiplies_where_it_was_proven_equal_and_nowhere_else() -> None:
    x, weight, bias = RowInvariantMatmulTests.operands(4, 8, 16, "float32")
    known = RowInvariance()
    known.equal.add(MatmulShape(4, 8, 16, "float32", "float32"))
    pk.reset_dispatch_report()
    with known.active():
        got = linear(x, weight, bias)
        linear(x[:3], weight, bias)
        linear(x, weight, out_dtype=jnp.float32)
    report = pk.dispatch_report()["row_invariant_matmul"]
    assert (report["xla"], report["reference"]) == (2, 1)
    np.testing.assert_allclose(np.asarray(got), np.asarray(x) @ np.asarray(weight).T + np.asarray(bias), atol=1e-5)
    assert {shape.rows for shape in known.seen} == {3, 4}


def test_shapes_are_found_without_computing_or_counting() -> None:
    def two(x: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
        return linear(linear(x, first), second, out_dtype=jnp.float32)

    pk.reset_dispatch_report()
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, 16), (8, 16), (5, 8))]
    assert matmul_shapes(two, *args) == {
        MatmulShape(2, 8, 16, "bfloat16", "bfloat16"),
        MatmulShape(2, 5, 8, "bfloat16", "float32"),
    }
    assert pk.dispatch_report() == {}


# ---- the comparison, by stand-ins for a card


SHAPES = {MatmulShape(rows, 8, 16, "float32", "float32") for rows in (4, 64, 128, 512)}


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A card whose XLA adds 1e-3 to the last result at calls of `wrong` rows, and whose tiles differ if `tiles` is False."""
    card = SimpleNamespace(wrong=(), tiles=True, compiled=0)
    real, compiled = proof.xla.matmul, proof._compiled

    def matmul(x: jax.Array, weight: jax.Array, *, out_dtype: Any) -> jax.Array:
        y = real(x, weight, out_dtype=out_dtype)
        return y.at[-1, -1].add(1e-3) if x.shape[0] in card.wrong else y

    def tile_results(dtype: str, launches: Any) -> list[jax.Array]:
        card.launches = {dict(launch)["block_m"] for launch in launches}
        return [jnp.zeros(3), jnp.zeros(3) if card.tiles else jnp.ones(3)]

    def counted(lowered: Any) -> Any:
        programs = compiled(lowered)
        card.compiled += len(programs)
        return programs

    monkeypatch.setattr(proof.xla, "matmul", matmul)
    monkeypatch.setattr(mode, "has_kernel", lambda device: True)
    monkeypatch.setattr(proof, "random", lambda seed, shape, dtype: jnp.ones(shape, dtype))  # sums have no order
    monkeypatch.setattr(proof, "_tile_results", tile_results)
    monkeypatch.setattr(proof, "_compiled", counted)
    proof.forget()
    yield card
    proof.forget()


def proven(shapes: set[MatmulShape]) -> RowInvariance:
    known = RowInvariance()
    known.prove(shapes, CPU)
    return known


def rows_of(shapes: set[MatmulShape]) -> set[int]:
    return {shape.rows for shape in shapes}


def test_on_a_cpu_nothing_is_compared() -> None:
    known = proven(SHAPES)
    assert not known.equal
    assert not known.different
    assert known.known == SHAPES


def test_large_calls_whose_bits_agree_are_xlas(card: SimpleNamespace) -> None:
    card.wrong = (512,)
    known = proven(SHAPES)
    assert rows_of(known.equal) == {128}
    assert rows_of(known.different) == {512}
    card.wrong = (128,)
    known.prove(SHAPES, CPU)  # what is known is not compared again
    assert rows_of(known.equal) == {128}


def test_a_process_compiles_one_comparison_a_weight_and_none_again(card: SimpleNamespace) -> None:
    others = {shape._replace(outputs=24) for shape in SHAPES}
    proven(SHAPES | others)
    assert card.compiled == 2
    assert rows_of(proven(SHAPES | others).equal) == {128, 512}
    assert card.compiled == 2
    assert rows_of(proven({shape._replace(rows=shape.rows + 1) for shape in SHAPES}).equal) == {65, 129, 513}
    assert card.compiled == 3


def test_tiles_of_every_call_of_the_kernel_are_compared_and_the_one_that_xla_is_held_to(card: SimpleNamespace) -> None:
    """At most 16 rows have tiles of 16; XLA's matmul of 8 outputs is compared with the kernel at 4096 rows, of tiles of 64."""
    proven({MatmulShape(rows, 8, 16, "float32", "float32") for rows in (1, 128)})
    assert card.launches == {16, 64}
    proof.forget()
    proven({MatmulShape(1, 8, 16, "float32", "float32")})
    assert card.launches == {16}


def test_tiles_that_disagree_are_replaced_by_one(card: SimpleNamespace) -> None:
    card.tiles = False
    known = proven(SHAPES)
    assert known.fixed_tile
    assert rows_of(known.equal) == {128, 512}
    assert card.compiled == 2  # the kernel's bits are other ones with the one tile
    sizes = (1, 64, 128, 4096)
    assert len({triton.launch(rows, 8, 16, "bfloat16")["block_m"] for rows in sizes}) > 1
    with known.active():
        assert len({triton.launch(rows, 8, 16, "bfloat16")["block_m"] for rows in sizes}) == 1


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The table of the card that runs."""
    table: dict[str, Any] = {}
    monkeypatch.setattr(pallas_gpu, "tuned_table", lambda kind: table)
    return table


def test_launches_of_a_measured_card_come_from_its_table(measured: dict[str, Any]) -> None:
    measured["row_invariant_matmul.triton"] = {
        "M16 N4096 bfloat16": {"block_n": 7},
        "M16 N4096 K16 bfloat16": {"block_k": 9},
        "M16 N8192 bfloat16": {"block_n": 128},
        "M N4096 float32": {"block_n": 5},
    }
    assert triton.launch(16, 4096, 16, "bfloat16")["block_k"] == 9
    assert triton.launch(16, 4096, 16, "bfloat16")["block_n"] == 7
    assert triton.launch(1, 4096, 32, "bfloat16")["block_k"] != 9
    assert triton.launch(1, 4096, 32, "bfloat16")["block_n"] == 7
    assert triton.launch(17, 4096, 16, "bfloat16")["block_n"] != 7
    assert triton.launch(500, 8, 16, "float32")["block_n"] == 5
    assert triton.launch(1, 8192, 32, "bfloat16")["block_n"] == 128


def test_few_rows_and_few_outputs_make_narrow_tiles(measured: dict[str, Any]) -> None:
    measured["row_invariant_matmul.triton"] = {
        "M16 N4096 bfloat16": {"block_n": 64},
        "M N4096 bfloat16": {"block_n": 64},
    }
    assert [triton.launch(4, n, 64, "bfloat16")["block_n"] for n in (4096, 2048, 1100, 32)] == [64, 32, 16, 16]
    assert triton.launch(64, 32, 64, "bfloat16")["block_n"] == 32
    assert triton.launch(500, 32, 64, "bfloat16")["block_n"] == 64
