"""Errors of this package. They derive from `ValueError`: the input (a checkpoint, a name) is what is wrong."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint that cannot be read as the model it claims to be: broken files, tensors, config or tokenizer."""


class UnsupportedModelError(CheckpointError):
    """A checkpoint of an architecture that has no file in this package."""


class UnsupportedAttentionError(UnsupportedModelError):
    """An attention whose cache is not K and V per head (MLA, DSA), so that it has no pages to share."""
