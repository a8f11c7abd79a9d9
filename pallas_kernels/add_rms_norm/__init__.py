from pallas_kernels.add_rms_norm.api import add_rms_norm as add_rms_norm
