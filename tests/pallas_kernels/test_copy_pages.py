"""gather_pages, scatter_pages, copy_within: the shared properties."""

from __future__ import annotations

from pallas_kernels.testing import CopyPagesTests


class TestReference(CopyPagesTests):
    implementation = "reference"
