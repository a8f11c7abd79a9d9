"""Trace files: what is read from them, and what is said about files that cannot be right."""

from __future__ import annotations

import json

import numpy as np
import pytest

from prefix_reuse.errors import InvalidRequestError
from prefix_reuse.traces import count_prompts, open_trace


def write(path, *lines) -> str:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


def test_equal_blocks_have_equal_tokens_and_others_differ(tmp_path):
    """A2: ids may be any numbers or texts; the last block is partly filled; blank lines are nothing."""
    big = 2**60
    trace = write(
        tmp_path / "a.jsonl",
        {"input_length": 10, "hash_ids": [big, "x", 7]},
        "",
        {"input_length": 0, "hash_ids": []},
        {"hash_ids": [big, 7]},
    )
    first, empty, second = open_trace(trace, 4)
    assert count_prompts(trace) == 3
    assert (len(first), len(empty), len(second)) == (10, 0, 8)
    assert first.dtype == second.dtype == np.int32
    assert first[:4].tolist() == second[:4].tolist()
    assert first[8:10].tolist() == second[4:6].tolist()
    assert len(set(first.tolist())) == 10


def test_a_stream_gives_its_prompts_in_order(tmp_path):
    """The tokens may have any integer type; empty prompts stay in their place."""
    path = tmp_path / "a.npz"
    np.savez(path, tokens=np.arange(7, dtype=np.uint16), offsets=np.array([0, 3, 3, 7]))
    prompts = list(open_trace(path))
    assert [p.tolist() for p in prompts] == [[0, 1, 2], [], [3, 4, 5, 6]]
    assert prompts[0].dtype == np.int32
    assert count_prompts(path) == 3


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"hash_ids": [1'], "line 1 is not JSON"),
        ([{"hash_ids": [1]}, "[1, 2]"], "line 2 has no list hash_ids"),
        ([{"input_length": 4}], "no list hash_ids"),
        ([{"hash_ids": 3, "input_length": 4}], "no list hash_ids"),
        ([{"hash_ids": [[1]], "input_length": 4}], "must be integers or texts"),
        ([{"hash_ids": [1], "input_length": "4"}], "must be a number of tokens"),
        ([{"hash_ids": [1], "input_length": -1}], "must be a number of tokens"),
        ([{"hash_ids": [1], "input_length": 5}], "takes 2 blocks of 4 tokens, but there are 1"),
        ([{"hash_ids": [1, 2], "input_length": 4}], "is the block right"),
    ],
)
def test_a_bad_line_is_named(tmp_path, lines, message):
    """Errors say which line and what is wrong with it."""
    with pytest.raises(InvalidRequestError, match=message):
        list(open_trace(write(tmp_path / "a.jsonl", *lines), 4))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"tokens": np.arange(3)}, "no \\.npz with the arrays"),
        ({"tokens": np.arange(3), "offsets": np.array([0.0, 3.0])}, "offsets integers"),
        ({"tokens": np.zeros((2, 2), np.int32), "offsets": np.array([0, 2])}, "one-dimensional"),
        ({"tokens": np.arange(3), "offsets": np.array([0, 4])}, "rise within 0..3"),
        ({"tokens": np.arange(3), "offsets": np.array([2, 0, 3])}, "rise within 0..3"),
        ({"tokens": np.array([1, -5]), "offsets": np.array([0, 2])}, "token ids must lie in"),
        ({"tokens": np.array([0.5]), "offsets": np.array([0, 1])}, "token ids must be"),
    ],
)
def test_a_bad_stream_is_refused(tmp_path, arrays, message):
    """Arrays that are missing, of another kind, or do not fit each other."""
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(InvalidRequestError, match=message):
        list(open_trace(tmp_path / "a.npz"))


def test_files_that_are_no_traces_are_refused(tmp_path):
    """Absent, binary, not an archive, blocks of nothing."""
    for name in ("none.jsonl", "none.npz"):
        for read in (lambda path: list(open_trace(path)), count_prompts):
            with pytest.raises(InvalidRequestError, match="cannot read the trace"):
                read(tmp_path / name)
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "b.npz").write_bytes(b"PK\x03\x04 but no archive")
    (tmp_path / "c.npz").write_text("text")
    (tmp_path / "d.npz").touch()
    with open(tmp_path / "e.npz", "wb") as file:
        np.save(file, np.arange(3))
    with pytest.raises(InvalidRequestError, match="is no text"):
        list(open_trace(tmp_path / "b.jsonl"))
    for name in ("b.npz", "c.npz", "d.npz", "e.npz"):
        with pytest.raises(InvalidRequestError, match=r"is no \.npz"):
            list(open_trace(tmp_path / name))
    with pytest.raises(InvalidRequestError, match="a block of 0"):
        open_trace(tmp_path / "b.jsonl", 0)
