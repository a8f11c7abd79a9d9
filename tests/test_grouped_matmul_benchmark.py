"""The benchmark of grouped_matmul times as many calls as it says."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp

from benchmarks import grouped_matmul


def test_xla_keeps_every_call_of_a_timed_chain():
    def call(x, weight, sizes):
        del sizes
        return jax.lax.dot_general(x, weight[0], (((1,), (1,)), ((), ())))

    x, weights = jnp.ones((8, 64)), [jnp.full((2, 512, 64), float(i)) for i in range(3)]
    sizes = jnp.ones((grouped_matmul.ROUTINGS, 2), jnp.int32)
    program = grouped_matmul.compile_chain(call, grouped_matmul.ROUTINGS, x, weights, sizes)
    assert len(re.findall(r"f32\[8,512\]\S* dot\(", program.as_text())) == len(weights)
    _, total = program(jnp.int32(2), x, weights, sizes)
    assert float(total[0]) == 2 * grouped_matmul.ROUTINGS * 64 * (0 + 1 + 2)
