"""Ops on paged KV: attention through page tables, guarded writes, page copies. Knows nothing of models or caches."""

from pallas_kernels.add_rms_norm.api import add_rms_norm as add_rms_norm
from pallas_kernels.append_kv.api import append_kv as append_kv
from pallas_kernels.copy_pages.api import copy_within as copy_within
from pallas_kernels.copy_pages.api import gather_pages as gather_pages
from pallas_kernels.copy_pages.api import scatter_pages as scatter_pages
from pallas_kernels.dispatch import available_implementations as available_implementations
from pallas_kernels.dispatch import dispatch_report as dispatch_report
from pallas_kernels.dispatch import reset_dispatch_report as reset_dispatch_report
from pallas_kernels.layout import LayerGroup as LayerGroup
from pallas_kernels.layout import page_bytes as page_bytes
from pallas_kernels.layout import page_shape as page_shape
from pallas_kernels.layout import pool_shape as pool_shape
from pallas_kernels.layout import split_kv as split_kv
from pallas_kernels.merge import add_sinks as add_sinks
from pallas_kernels.merge import merge_states as merge_states
from pallas_kernels.paged_decode_attention.api import paged_decode_attention as paged_decode_attention
from pallas_kernels.qkv_rope.api import qkv_rope as qkv_rope
from pallas_kernels.ragged_paged_attention.api import ragged_paged_attention as ragged_paged_attention
from pallas_kernels.shared_prefix_attention.api import shared_prefix_attention as shared_prefix_attention
from pallas_kernels.shared_prefix_attention.plan import SPLIT as SPLIT
from pallas_kernels.shared_prefix_attention.plan import SharedPrefixPlan as SharedPrefixPlan
from pallas_kernels.shared_prefix_attention.plan import crossover_tokens as crossover_tokens
from pallas_kernels.shared_prefix_attention.plan import empty_plan as empty_plan
from pallas_kernels.shared_prefix_attention.plan import plan_shared_prefix as plan_shared_prefix
from pallas_kernels.shared_prefix_attention.plan import rows_per_tile as rows_per_tile
from pallas_kernels.shared_prefix_attention.plan import saved_tokens as saved_tokens
