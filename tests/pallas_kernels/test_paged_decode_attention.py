"""paged_decode_attention: the shared properties, and that decode agrees with ragged attention of one query."""

from __future__ import annotations

from pallas_kernels.testing import PagedDecodeAttentionTests


class TestReference(PagedDecodeAttentionTests):
    implementation = "reference"
