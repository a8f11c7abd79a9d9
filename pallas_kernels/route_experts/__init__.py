from pallas_kernels.route_experts.api import Routing as Routing
from pallas_kernels.route_experts.api import route_experts as route_experts
