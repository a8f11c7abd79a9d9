"""ragged_paged_attention: the shared properties for every implementation that runs on this machine."""

from __future__ import annotations

from pallas_kernels.testing import RaggedPagedAttentionTests


class TestReference(RaggedPagedAttentionTests):
    implementation = "reference"
