"""Text to token ids and back, by the `tokenizers` package.

Opened from a `tokenizer.json`, or built from the vocabulary and merges inside a GGUF file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from models.errors import CheckpointError

if TYPE_CHECKING:
    from models.gguf_checkpoint import GgufCheckpoint

CONTROL, USER_DEFINED = 3, 4  # tokenizer.ggml.token_type


class Tokenizer:
    """Encodes and decodes; special tokens written in the text are parsed.

    Args:
        backend: the tokenizer that does the work.
        chat_template: the checkpoint's Jinja template for conversations, if it has one.
    """

    def __init__(self, backend: tokenizers.Tokenizer, chat_template: str | None = None):
        self.backend = backend
        self.chat_template = chat_template
        # Truncation and padding that a tokenizer.json may switch on would change prompts silently.
        self.backend.no_truncation()
        self.backend.no_padding()

    @classmethod
    def from_file(cls, path: str | Path) -> Tokenizer:
        """Opens a `tokenizer.json`. Raises CheckpointError."""
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the package raises bare Exception
            raise CheckpointError(f"{path} is not a tokenizer: {error}") from error

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self.backend.get_vocab_size()

    @property
    def digest(self) -> str:
        """sha256 of all that defines the tokenizer, the same in every process."""
        return hashlib.sha256(self.backend.to_str().encode()).hexdigest()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            text: any text; special tokens in it (`<|im_start|>`) become their ids.
            add_special_tokens: let the tokenizer add what it is configured to add (Llama 3: a leading BOS). Switch it
                off for text that a chat template made, which has them already.
        """
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def stream(self, skip_special_tokens: bool = True) -> TextStream:
        """A decoder that is fed one id at a time."""
        return TextStream(self.backend, skip_special_tokens)


class TextStream:
    """Text of ids as they come; half a character is held back until the rest is there."""

    def __init__(self, backend: tokenizers.Tokenizer, skip_special_tokens: bool):
        self._backend = backend
        self._stream = decoders.DecodeStream(skip_special_tokens=skip_special_tokens)

    def push(self, token_id: int) -> str:
        """The text that this id completes, "" if none."""
        return self._stream.step(self._backend, int(token_id)) or ""


def _digits_then_bytes() -> pre_tokenizers.PreTokenizer:
    """SmolLM: each digit on its own, then GPT-2's split into bytes."""
    split = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])


_PRE_TOKENIZERS = {
    "smollm": _digits_then_bytes,
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
}


def tokenizer_from_gguf(checkpoint: GgufCheckpoint) -> Tokenizer:
    """Builds the byte-level BPE tokenizer that a GGUF file describes.

    Raises:
        CheckpointError: it is of another kind, or its way of splitting text is not known here.
    """
    kind, split = checkpoint.field("tokenizer.ggml.model"), checkpoint.field("tokenizer.ggml.pre")
    if kind != "gpt2" or split not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise CheckpointError(f"{checkpoint.path} has a {kind!r} tokenizer, split {split!r}; supported: gpt2, {known}")
    tokens, types, pairs = (checkpoint.field(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type", "merges"))
    if tokens is None or types is None or pairs is None or len(tokens) != len(types):
        raise CheckpointError(f"{checkpoint.path} has a tokenizer without its tokens, their types or its merges")
    merges = [tuple(merge.split(" ", 1)) for merge in pairs]
    vocab = {token: number for number, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=False))
    backend.pre_tokenizer = _PRE_TOKENIZERS[split]()
    backend.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    backend.add_special_tokens([tokenizers.AddedToken(token, normalized=False, special=True) for token in special])
    added = [token for token, kind in zip(tokens, types, strict=True) if kind == USER_DEFINED]
    backend.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in added])
    return Tokenizer(backend, checkpoint.field("tokenizer.chat_template"))
