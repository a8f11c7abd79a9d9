"""Snapshots: host pages written to a folder and read back, by this process or a later one (X7).

A save writes a new set and gives it its name by one rename, so that a save that is torn leaves the previous set as it was.
See `snapshot_format` for what is on disk and how it is checked. Pages are stored through orbax-checkpoint, uncompressed, one
array per page and layer group, so that damage to one page costs no other.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from prefix_reuse.errors import SnapshotError
from prefix_reuse.host_archive import StoredPrefix
from prefix_reuse.host_store import HostPageStore
from prefix_reuse.index_types import Readable
from prefix_reuse.snapshot_format import (
    FORMAT,
    VERSION,
    DamagedSet,
    Entries,
    Identity,
    Refusal,
    payload_checksum,
    seal,
    unseal,
)
from prefix_reuse.stats import SnapshotCounters

SHARD_BYTES = 256 << 20
"""Bytes of the pages that are written or read at once."""
LARGEST_SHARD = 256
SMALL_FILE = 4096
"""Bytes up to which a file is checked as a whole before it is read; larger ones are pages, which have their checksum."""
SET_NAME = re.compile(r"set-(\d{8})")
LEFTOVER = re.compile(r"set-\d{8}\.(partial|old).*")


@dataclass(frozen=True)
class SnapshotReport(Readable):
    """What a save or a load did.

    Attributes:
        path: folder of the set.
        pages: written, or indexed by the load (pages that were cached already are not counted).
        present: pages in the set.
        dropped: damaged pages and what follows them.
        faults: damaged pages alone.
        skipped: good pages for which there was no room.
        damaged_sets: newer sets that were not whole and therefore passed over.
    """

    path: str
    pages: int
    present: int
    dropped: int = 0
    faults: int = 0
    skipped: int = 0
    damaged_sets: int = 0


@dataclass(frozen=True)
class SnapshotContents:
    """What a snapshot holds for this store, checked.

    Attributes:
        kind: `cache` or `prefix`.
        prefixes: ready for `HostPageStore.insert`, hottest last.
        namespaces: digests.
        requested: int32, of a `prefix`: all its tokens, those of damaged pages included.
    """

    kind: str
    prefixes: list[StoredPrefix]
    namespaces: list[bytes]
    requested: np.ndarray
    path: str
    present: int
    dropped: int
    faults: int
    skipped: int
    damaged_sets: int

    def report(self, pages: int) -> SnapshotReport:
        return SnapshotReport(
            self.path, pages, self.present, self.dropped, self.faults, self.skipped, self.damaged_sets
        )


def write_snapshot(
    folder: Any,
    store: HostPageStore,
    identity: Identity,
    prefixes: Sequence[tuple[bytes, np.ndarray, np.ndarray]],
    *,
    kind: str,
    counters: SnapshotCounters,
) -> SnapshotReport:
    """Writes prefixes (namespace, tokens, page ids; hottest last) as a new set, then removes the older ones.

    Changes nothing in the store. Whatever fails, the previous set is as it was.

    Raises:
        SnapshotError: the folder holds something else, or the identity is not portable.
        TransferError, IntegrityError: a page that cannot be exported.
    """
    identity.check_portable()
    root = Path(folder).absolute()
    sets = _sets(root)
    number = max(sets, default=0) + 1
    store._step("snapshot-begin")
    root.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(root)
    partial, final = root / f"set-{number:08d}.partial", root / f"set-{number:08d}"
    entries, namespaces, page_ids = Entries.create(prefixes, store.page_size)
    per_shard = _pages_per_shard(identity.geometry.page_bytes)
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "kind": kind,
        **identity.describe(),
        "namespaces": [name.hex() for name in namespaces],
        "pages": len(entries),
        "pages_per_shard": per_shard,
    }
    try:
        partial.mkdir()
        for shard, first in enumerate(range(0, len(entries), per_shard)):
            store._step("snapshot-pages")
            payloads = store.export(page_ids[first : first + per_shard]).payloads
            tree = {}
            for entry, payload in enumerate(jax.device_get(payloads), start=first):
                entries.checksums[entry] = np.frombuffer(payload_checksum(payload), np.uint8)
                tree[_leaf(entry)] = {f"group{g}": np.asarray(part) for g, part in enumerate(payload)}
            _save_tree(partial / f"pages-{shard:05d}", tree)
        store._step("snapshot-index")
        if len(entries):
            _save_tree(partial / "index", dict(vars(entries)))
        store._step("snapshot-manifest")
        _write_durably(partial / "manifest.json", seal({**manifest, "files": _files(partial)}))
        store._step("snapshot-commit")
        partial.rename(final)  # the commit: from now on this is the newest whole set
        _sync_folder(root)
    except BaseException:
        _discard(partial)
        raise
    counters.saved_pages += len(entries)
    store._step("snapshot-clean")
    for old in sets.values():  # renamed first, so that a set is whole or has no valid name at any moment
        old.rename(old.with_suffix(".old"))
    _remove_leftovers(root)
    return SnapshotReport(str(final), len(entries), len(entries))


def read_snapshot(
    folder: Any,
    identity: Identity,
    store: HostPageStore,
    *,
    num_pages: int,
    adopt: Callable[[Any], Any],
    counters: SnapshotCounters,
) -> SnapshotContents:
    """Reads the newest whole set, as far as it is sound and `num_pages` go. Changes nothing in the store.

    Args:
        folder: given to `write_snapshot` before.
        identity: of this engine.
        store: told each step, for tests.
        num_pages: pages wanted at most; the most recently used ones come first.
        adopt: moves a page of numpy arrays to where host pages are kept.
        counters: of what was damaged.

    Raises:
        SnapshotError: see `Refusal`.
    """
    root = Path(folder).absolute()
    store._step("snapshot-open")
    path, manifest, entries, damaged_sets = _newest_whole_set(root, identity, store.page_size)
    namespaces = [bytes.fromhex(name) for name in manifest["namespaces"]]
    sound, faults = entries.verify(namespaces)
    wanted = entries.hottest(sound, num_pages)
    skipped = int((sound & ~wanted).sum())
    payloads: dict[int, Any] = {}
    per_shard, groups = int(manifest["pages_per_shard"]), len(identity.geometry.parts)
    damaged = _damaged_files(path, manifest["files"])
    for first in range(0, len(entries), per_shard):
        names = range(first, min(first + per_shard, len(entries)))
        here = [entry for entry in names if wanted[entry]]
        if not here:
            continue
        store._step("snapshot-read")
        shard = f"pages-{first // per_shard:05d}"
        readable = [entry for entry in here if f"{shard}/{_leaf(entry)}" not in damaged]
        for entry, payload in _load_pages(path / shard, names, readable, groups).items():
            try:
                identity.geometry.check_payload(payload)
            except Exception:  # not a page of this geometry: the file is not what was written
                continue
            if payload_checksum(payload) == entries.checksums[entry].tobytes():
                payloads[entry] = adopt(payload)
    loaded = np.zeros(len(entries), bool)
    loaded[list(payloads)] = True
    faults += int((wanted & ~loaded).sum())
    good = entries.without_subtrees(wanted & loaded)
    prefixes = [
        StoredPrefix(
            namespaces[entries.namespace[chain[0]]],
            entries.tokens[chain].reshape(-1),
            [payloads[entry] for entry in chain],
        )
        for chain in entries.chains(good)
    ]
    dropped = len(entries) - skipped - int(good.sum())
    counters.faults += faults
    counters.dropped_pages += dropped
    counters.damaged_sets += damaged_sets
    requested = entries.tokens.reshape(-1) if manifest["kind"] == "prefix" else np.zeros(0, np.int32)
    return SnapshotContents(
        manifest["kind"],
        prefixes,
        namespaces,
        requested,
        str(path),
        len(entries),
        dropped,
        faults,
        skipped,
        damaged_sets,
    )


def _files(path: Path) -> dict[str, list[Any]]:
    """Size of every file of a set, and a digest of the small ones, by name."""
    return {file.relative_to(path).as_posix(): _file_mark(file) for file in sorted(path.rglob("*")) if file.is_file()}


def _file_mark(path: Path) -> list[Any]:
    size = path.stat().st_size
    return [size, hashlib.sha256(path.read_bytes()).hexdigest() if size <= SMALL_FILE else ""]


def _damaged_files(path: Path, files: Mapping[str, Sequence[Any]]) -> set[str]:
    """`shard/page` of every file that is not what was written; asked before orbax meets it in the middle of a read."""
    damaged = set()
    for name, mark in files.items():
        try:
            good = _file_mark(path / name) == list(mark)
        except OSError:
            good = False
        if not good:
            shard, _, rest = name.partition("/")
            damaged.add(f"{shard}/{rest.partition('.')[0]}")
    return damaged


def _newest_whole_set(root: Path, identity: Identity, page_size: int) -> tuple[Path, Mapping[str, Any], Entries, int]:
    problems: list[str] = []
    sets = _sets(root)
    for number in sorted(sets, reverse=True):
        path = sets[number]
        try:
            manifest = unseal(_read_manifest(path))
            identity.check(manifest)
            return path, manifest, _load_entries(path, int(manifest["pages"]), page_size), len(problems)
        except DamagedSet as error:
            problems.append(f"{path.name}: {error}")
    if problems:
        raise SnapshotError(Refusal.DAMAGED, f"no set in {root} is whole ({'; '.join(problems)})")
    raise SnapshotError(Refusal.NONE, f"there is no snapshot in {root}")


def _sets(root: Path) -> dict[int, Path]:
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


def _remove_leftovers(root: Path) -> None:
    for path in root.iterdir():
        if LEFTOVER.fullmatch(path.name):
            _discard(path)


def _discard(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


def _pages_per_shard(page_bytes: int) -> int:
    return min(max(SHARD_BYTES // page_bytes, 1), LARGEST_SHARD)


def _leaf(entry: int) -> str:
    return f"page{entry:08d}"


def _write_durably(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _read_manifest(path: Path) -> str:
    try:
        return (path / "manifest.json").read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise DamagedSet(f"the manifest cannot be read: {error}") from error


def _load_entries(path: Path, count: int, page_size: int) -> Entries:
    if count == 0:
        return Entries.create([], page_size)[0]
    try:
        tree = _load_tree(path / "index")
        entries = Entries(**{name: np.asarray(array) for name, array in tree.items()})
    except Exception as error:
        raise DamagedSet(f"its index cannot be read: {type(error).__name__}: {error}") from error
    entries.check_shapes(count, page_size)
    return entries


def _load_pages(path: Path, entries: Sequence[int], wanted: Sequence[int], groups: int) -> dict[int, Any]:
    """Pages of one shard by entry; what cannot be read is left out."""

    def load(some: Sequence[int]) -> dict[int, Any]:
        tree = _load_tree(path, {_leaf(e): {f"group{g}": e in some for g in range(groups)} for e in entries})
        return {e: tuple(tree[_leaf(e)][f"group{g}"] for g in range(groups)) for e in some}

    if not wanted:
        return {}
    try:
        return load(set(wanted))  # type: ignore[arg-type]
    except Exception:  # which page is it? One by one, so that a damaged one costs no other
        pages: dict[int, Any] = {}
        for entry in wanted:
            with contextlib.suppress(Exception):
                pages |= load({entry})  # type: ignore[arg-type]
        return pages


# ---- orbax


def _save_tree(path: Path, tree: Any) -> None:
    import orbax.checkpoint as ocp

    with _quiet(), ocp.Checkpointer(_handler()) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree))


def _load_tree(path: Path, wanted: Any = None) -> Any:
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
