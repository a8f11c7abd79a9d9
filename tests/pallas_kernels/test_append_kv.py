"""append_kv: the shared properties."""

from __future__ import annotations

from pallas_kernels.testing import AppendKVTests


class TestReference(AppendKVTests):
    implementation = "reference"
