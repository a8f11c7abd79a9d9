from pallas_kernels.grouped_matmul.api import grouped_matmul as grouped_matmul
from pallas_kernels.grouped_matmul.mxfp4 import Mxfp4 as Mxfp4
