"""Snapshots: host pages written to a folder and read back, by this process or a later one (X7).

A save writes a new set and gives it its name by one rename, so that a save that is torn leaves the previous set as it was.
See `snapshot_format` for what is on disk and how it is checked, `snapshot_files` for the files. Pages are stored through
orbax-checkpoint, uncompressed, one array per page and layer group, so that damage to one page costs no other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from prefix_reuse.errors import SnapshotError
from prefix_reuse.host_archive import StoredPrefix
from prefix_reuse.host_store import HostPageStore
from prefix_reuse.index_types import Readable
from prefix_reuse.snapshot_files import (
    damaged_files,
    discard,
    file_marks,
    find_sets,
    load_tree,
    remove_leftovers,
    save_tree,
    sync_folder,
    write_durably,
)
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
    sets = find_sets(root)
    number = max(sets, default=0) + 1
    store._step("snapshot-begin")
    root.mkdir(parents=True, exist_ok=True)
    remove_leftovers(root)
    partial, final = root / f"set-{number:08d}.partial", root / f"set-{number:08d}"
    entries, namespaces, page_ids = Entries.create(prefixes, store.page_size, len(identity.geometry.parts))
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
                entries.parts[entry] = [part is not None for part in payload]
                parts = {f"group{g}": np.asarray(part) for g, part in enumerate(payload) if part is not None}
                if parts:
                    tree[_leaf(entry)] = parts
            if tree:
                save_tree(partial / f"pages-{shard:05d}", tree)
        store._step("snapshot-index")
        if len(entries):
            save_tree(partial / "index", dict(vars(entries)))
        store._step("snapshot-manifest")
        write_durably(partial / "manifest.json", seal({**manifest, "files": file_marks(partial)}))
        store._step("snapshot-commit")
        partial.rename(final)  # the commit: from now on this is the newest whole set
        sync_folder(root)
    except BaseException:
        discard(partial)
        raise
    counters.saved_pages += len(entries)
    store._step("snapshot-clean")
    for old in sets.values():  # renamed first, so that a set is whole or has no valid name at any moment
        old.rename(old.with_suffix(".old"))
    remove_leftovers(root)
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
    path, manifest, entries, damaged_sets = _newest_whole_set(root, identity)
    namespaces = [bytes.fromhex(name) for name in manifest["namespaces"]]
    sound, faults = entries.verify(namespaces)
    wanted = entries.hottest(sound, num_pages)
    skipped = int((sound & ~wanted).sum())
    payloads: dict[int, Any] = {}
    per_shard = int(manifest["pages_per_shard"])
    damaged = damaged_files(path, manifest["files"])
    for first in range(0, len(entries), per_shard):
        names = range(first, min(first + per_shard, len(entries)))
        here = [entry for entry in names if wanted[entry]]
        if not here:
            continue
        store._step("snapshot-read")
        shard = f"pages-{first // per_shard:05d}"
        readable = [entry for entry in here if f"{shard}/{_leaf(entry)}" not in damaged]
        for entry, payload in _load_pages(path / shard, names, readable, entries.parts).items():
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


def _newest_whole_set(root: Path, identity: Identity) -> tuple[Path, Mapping[str, Any], Entries, int]:
    problems: list[str] = []
    sets = find_sets(root)
    for number in sorted(sets, reverse=True):
        path = sets[number]
        try:
            manifest = unseal(_read_manifest(path))
            identity.check(manifest)
            geometry, count = identity.geometry, int(manifest["pages"])
            entries = _load_entries(path, count, geometry.page_size, len(geometry.parts), int(manifest["version"]))
            return path, manifest, entries, len(problems)
        except DamagedSet as error:
            problems.append(f"{path.name}: {error}")
    if problems:
        raise SnapshotError(Refusal.DAMAGED, f"no set in {root} is whole ({'; '.join(problems)})")
    raise SnapshotError(Refusal.NONE, f"there is no snapshot in {root}")


def _pages_per_shard(page_bytes: int) -> int:
    return min(max(SHARD_BYTES // page_bytes, 1), LARGEST_SHARD)


def _leaf(entry: int) -> str:
    return f"page{entry:08d}"


def _read_manifest(path: Path) -> str:
    try:
        return (path / "manifest.json").read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise DamagedSet(f"the manifest cannot be read: {error}") from error


def _load_entries(path: Path, count: int, page_size: int, groups: int, version: int = VERSION) -> Entries:
    if count == 0:
        return Entries.create([], page_size, groups)[0]
    try:
        tree = load_tree(path / "index")
        if version == 1:
            tree["parts"] = np.ones((count, groups), np.uint8)
        entries = Entries(**{name: np.asarray(array) for name, array in tree.items()})
    except Exception as error:
        raise DamagedSet(f"its index cannot be read: {type(error).__name__}: {error}") from error
    entries.check_shapes(count, page_size, groups)
    return entries


def _load_pages(path: Path, entries: Sequence[int], wanted: Sequence[int], parts: np.ndarray) -> dict[int, Any]:
    """Pages of one shard by entry, with None for the layer groups that `parts` has not; what cannot be read is left out."""
    names = {e: {g: f"group{g}" for g in np.flatnonzero(parts[e]).tolist()} for e in entries}

    def load(some: Sequence[int]) -> dict[int, Any]:
        shape = {_leaf(e): dict.fromkeys(names[e].values(), e in some) for e in entries if names[e]}
        tree = load_tree(path, shape) if any(names[e] for e in some) else {}
        return {
            e: tuple(tree[_leaf(e)][names[e][g]] if g in names[e] else None for g in range(parts.shape[1]))
            for e in some
        }

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
