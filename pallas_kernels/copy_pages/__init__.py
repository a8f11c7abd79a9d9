from pallas_kernels.copy_pages.api import copy_within as copy_within
from pallas_kernels.copy_pages.api import gather_pages as gather_pages
from pallas_kernels.copy_pages.api import scatter_pages as scatter_pages
