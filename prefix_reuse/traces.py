"""Traces of prompts: Mooncake's JSON lines, and `.npz` token streams."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from prefix_reuse.errors import InvalidRequestError
from prefix_reuse.hashing import as_tokens

LARGEST_BLOCK = 1 << 24
"""Tokens per hash id at most; each gets that many ids of its own out of int32."""


def open_trace(path: str | Path, block: int = 512) -> Iterator[np.ndarray]:
    """Prompts (int32 token ids) of a trace file: a token stream if its name ends in `.npz`, else Mooncake's format.

    Args:
        path: the file.
        block: tokens per hash id of a Mooncake trace.

    Raises:
        InvalidRequestError: a file that cannot be read or is neither; names the line, the field and the value.
    """
    if not 1 <= block <= LARGEST_BLOCK:
        raise InvalidRequestError(f"a block of {block} tokens cannot be; Mooncake's traces have blocks of 512")
    return token_prompts(path) if Path(path).suffix == ".npz" else mooncake_prompts(path, block)


def count_prompts(path: str | Path) -> int:
    """Prompts in a trace file, empty ones included, without reading their tokens."""
    if Path(path).suffix == ".npz":
        return max(len(_load_stream(path)[1]) - 1, 0)
    try:
        with open(path, "rb") as lines:
            return sum(1 for line in lines if line.strip())
    except OSError as error:
        raise InvalidRequestError(f"cannot read the trace {path}: {error.strerror or error}") from error


def mooncake_prompts(path: str | Path, block: int = 512) -> Iterator[np.ndarray]:
    """Token ids of each request of a Mooncake trace, invented such that equal blocks have equal tokens.

    A line is a JSON object with `hash_ids`, one id per block, and `input_length` in tokens; the last block may be partly
    filled.
    """
    offsets = np.arange(block, dtype=np.int32)
    numbers: dict[Any, int] = {}  # ids may be any hashes; numbered as they come, the tokens stay small
    try:
        with open(path, encoding="utf-8") as lines:
            for at, line in enumerate(lines, 1):
                if line.strip():
                    ids, length = _request(line, f"{path}, line {at}", block)
                    blocks = np.array([numbers.setdefault(i, len(numbers)) for i in ids], np.int32)
                    if len(numbers) * block >= 2**31:
                        raise InvalidRequestError(f"{path}, line {at}: more blocks than int32 tokens can tell apart")
                    yield (blocks[:, None] * block + offsets).reshape(-1)[:length]
    except OSError as error:
        raise InvalidRequestError(f"cannot read the trace {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{path} is no text; a token stream's name must end in .npz") from error


def _request(line: str, where: str, block: int) -> tuple[list[Any], int]:
    """Hash ids and tokens of one line."""
    try:
        request = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidRequestError(f"{where} is not JSON: {error}") from error
    if not isinstance(request, dict) or not isinstance(request.get("hash_ids"), list):
        raise InvalidRequestError(f"{where} has no list hash_ids; a Mooncake trace has one JSON object a line")
    ids = request["hash_ids"]
    if not all(isinstance(i, (int, str)) for i in ids):
        raise InvalidRequestError(f"{where}: hash_ids must be integers or texts, got {ids[:4]}")
    length = request.get("input_length", len(ids) * block)
    if isinstance(length, bool) or not isinstance(length, int) or length < 0:
        raise InvalidRequestError(f"{where}: input_length must be a number of tokens, got {length!r}")
    if -(-length // block) != len(ids):
        raise InvalidRequestError(
            f"{where}: input_length {length} takes {-(-length // block)} blocks of {block} tokens, but there are "
            f"{len(ids)} hash_ids; is the block right?"
        )
    return ids, length


def token_prompts(path: str | Path) -> Iterator[np.ndarray]:
    """Token ids of each prompt of a stream: `tokens`, all prompts one after another; prompt i has offsets i to i + 1."""
    tokens, offsets = _load_stream(path)
    tokens = as_tokens(tokens)
    for start, end in pairwise(offsets.tolist()):
        yield tokens[start:end]


def _load_stream(path: str | Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        with open(path, "rb") as file:  # numpy leaves a file open that is no archive
            data = np.load(file)
            tokens, offsets = data["tokens"], data["offsets"]
    except OSError as error:
        raise InvalidRequestError(f"cannot read the trace {path}: {error.strerror or error}") from error
    except (LookupError, ValueError, TypeError, zipfile.BadZipFile, EOFError) as error:
        raise InvalidRequestError(f"{path} is no .npz with the arrays tokens and offsets: {error}") from error
    if offsets.ndim != 1 or offsets.dtype.kind not in "iu" or tokens.ndim != 1:
        raise InvalidRequestError(
            f"{path}: tokens and offsets must be one-dimensional, offsets integers; got {tokens.dtype}{list(tokens.shape)} "
            f"and {offsets.dtype}{list(offsets.shape)}"
        )
    ends = offsets.astype(np.int64)
    if len(ends) and (ends[0] < 0 or ends[-1] > len(tokens) or (np.diff(ends) < 0).any()):
        raise InvalidRequestError(f"{path}: offsets must rise within 0..{len(tokens)}, the number of tokens")
    return tokens, ends
