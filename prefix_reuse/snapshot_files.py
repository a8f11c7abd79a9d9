"""Files of a snapshot: the sets in a folder, whether their files are what was written, trees of arrays through orbax."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from prefix_reuse.errors import SnapshotError
from prefix_reuse.snapshot_format import Refusal

SMALL_FILE = 4096
"""Bytes up to which a file is checked as a whole before it is read; larger ones are pages, which have their checksum."""
SET_NAME = re.compile(r"set-(\d{8})")
LEFTOVER = re.compile(r"set-\d{8}\.(partial|old).*")


def find_sets(root: Path) -> dict[int, Path]:
    """Sets by number. Raises `SnapshotError` for a folder with anything else in it, which is never touched."""
    if not root.exists():
        return {}
    if not root.is_dir():
        raise SnapshotError(Refusal.NOT_A_SNAPSHOT, f"{root} is a file, a snapshot is a folder")
    sets: dict[int, Path] = {}
    foreign: list[str] = []
    for path in root.iterdir():
        if match := SET_NAME.fullmatch(path.name):
            sets[int(match[1])] = path
        elif not LEFTOVER.fullmatch(path.name):
            foreign.append(path.name)
    if foreign:
        raise SnapshotError(Refusal.NOT_A_SNAPSHOT, f"{root} holds other things: {', '.join(sorted(foreign)[:5])}")
    return sets


def remove_leftovers(root: Path) -> None:
    for path in root.iterdir():
        if LEFTOVER.fullmatch(path.name):
            discard(path)


def discard(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


def file_marks(path: Path) -> dict[str, list[Any]]:
    """Size of every file of a set, and a digest of the small ones, by name."""
    return {file.relative_to(path).as_posix(): _mark(file) for file in sorted(path.rglob("*")) if file.is_file()}


def _mark(path: Path) -> list[Any]:
    size = path.stat().st_size
    return [size, hashlib.sha256(path.read_bytes()).hexdigest() if size <= SMALL_FILE else ""]


def damaged_files(path: Path, files: Mapping[str, Sequence[Any]]) -> set[str]:
    """`shard/page` of every file that is not what was written; asked before orbax meets it in the middle of a read."""
    damaged = set()
    for name, mark in files.items():
        try:
            good = _mark(path / name) == list(mark)
        except OSError:
            good = False
        if not good:
            shard, _, rest = name.partition("/")
            damaged.add(f"{shard}/{rest.partition('.')[0]}")
    return damaged


def write_durably(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def save_tree(path: Path, tree: Any) -> None:
    import orbax.checkpoint as ocp

    with _quiet(), ocp.Checkpointer(_handler()) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree))


def load_tree(path: Path, wanted: Any = None) -> Any:
    """The tree of numpy arrays at `path`; of `wanted`, a tree of bools, only those that are True."""
    import orbax.checkpoint as ocp

    item = None
    if wanted is not None:
        item = jax.tree.map(lambda yes: 0 if yes else ocp.PLACEHOLDER, wanted)
    numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item) if item is not None else None
    with _quiet(), ocp.Checkpointer(_handler()) as checkpointer:
        return checkpointer.restore(path, args=ocp.args.PyTreeRestore(item=item, restore_args=numpy))


def _handler() -> Any:
    import orbax.checkpoint as ocp

    options: dict[str, Any] = {"use_ocdbt": False}
    if "use_compression" in inspect.signature(ocp.PyTreeCheckpointHandler).parameters:  # not in older versions
        options["use_compression"] = False  # K/V hardly compress; and one damaged byte then costs one page
    return ocp.PyTreeCheckpointHandler(**options)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps orbax from warning, at each save, that there are no OCDBT files to merge."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
