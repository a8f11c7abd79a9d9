from pallas_kernels.qkv_rope.api import qkv_rope as qkv_rope
