"""gather_pages, scatter_pages, copy_within: the shared properties."""

from __future__ import annotations

import jax
import pytest

from pallas_kernels.testing import CopyPagesTests


class TestReference(CopyPagesTests):
    implementation = "reference"


class TestTriton(CopyPagesTests):
    implementation = "triton"

    @pytest.mark.skipif(jax.default_backend() == "cpu", reason="Pallas' interpreter copies its operands")
    def test_donated_pool_is_updated_in_place(self) -> None:
        super().test_donated_pool_is_updated_in_place()
