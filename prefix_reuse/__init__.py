"""Page-level prefix KV reuse for JAX: host cache, device pages, jitted steps, and an engine around them."""

from prefix_reuse.config import EngineConfig, SamplingParams
from prefix_reuse.device_pages import DevicePages
from prefix_reuse.engine import Engine
from prefix_reuse.errors import PrefixReuseError, UnsupportedAttentionError
from prefix_reuse.outputs import RequestOutput, SampleOutput, StreamEvent
from prefix_reuse.steps import PagedModel

__version__ = "0.1.0"

__all__ = [
    "DevicePages",
    "Engine",
    "EngineConfig",
    "PagedModel",
    "PrefixReuseError",
    "RequestOutput",
    "SampleOutput",
    "SamplingParams",
    "StreamEvent",
    "UnsupportedAttentionError",
]
