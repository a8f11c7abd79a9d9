"""Language models over pages: one readable file a family, and checkpoints to fill them.

import models
model = models.load("smollm2")                 # or a folder, or a .gguf file
models.save(model, "folder")                   # models.load("folder") is this model again
hidden, kv = model.forward(model.params, tokens, positions, kv, attend)
logits = model.unembed(model.params, hidden)
"""

from models.errors import CheckpointError, UnsupportedAttentionError, UnsupportedModelError
from models.model import Attend, Model
from models.params import LoadProgress
from models.registry import check_folder, checkpoint_memory, from_config, load, save
from models.tokenizer import Tokenizer

__all__ = [
    "Attend",
    "CheckpointError",
    "LoadProgress",
    "Model",
    "Tokenizer",
    "UnsupportedAttentionError",
    "UnsupportedModelError",
    "check_folder",
    "checkpoint_memory",
    "from_config",
    "load",
    "save",
]
