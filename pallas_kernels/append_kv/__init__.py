from pallas_kernels.append_kv.api import append_kv as append_kv
