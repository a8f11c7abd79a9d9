"""Abstract test classes: every implementation of an op passes them through a subclass of three lines.

class TestTriton(RaggedPagedAttentionTests):
    implementation = "triton"
"""

from pallas_kernels.testing.attention import PagedDecodeAttentionTests as PagedDecodeAttentionTests
from pallas_kernels.testing.attention import RaggedPagedAttentionTests as RaggedPagedAttentionTests
from pallas_kernels.testing.cases import DECODE_CASES as DECODE_CASES
from pallas_kernels.testing.cases import RAGGED_CASES as RAGGED_CASES
from pallas_kernels.testing.cases import PagedCase as PagedCase
from pallas_kernels.testing.cases import PagedInputs as PagedInputs
from pallas_kernels.testing.cases import make_inputs as make_inputs
from pallas_kernels.testing.cases import share_pages as share_pages
from pallas_kernels.testing.experts import GroupedMatmulTests as GroupedMatmulTests
from pallas_kernels.testing.experts import random_mxfp4 as random_mxfp4
from pallas_kernels.testing.matmul import RowInvariantMatmulTests as RowInvariantMatmulTests
from pallas_kernels.testing.oracle import attention_oracle as attention_oracle
from pallas_kernels.testing.routing import RouteExpertsTests as RouteExpertsTests
from pallas_kernels.testing.writes import AppendKVTests as AppendKVTests
from pallas_kernels.testing.writes import CopyPagesTests as CopyPagesTests
