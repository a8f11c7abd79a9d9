"""What a snapshot on disk says about itself, and how it is checked before anything of it is used.

    <folder>/set-00000007/             one whole set; it got this name by one rename, after everything else was written
        manifest.json                  version, geometry, namespace, platform, pages, files; sealed by a sha256
        index/                         orbax: tokens, parents, chained keys, checksums, layer groups, one entry per page
        pages-00000/, pages-00001/     orbax: the bytes, one array per page and layer group that the page has
    <folder>/set-00000008.partial/     a save that was torn; ignored, and removed by the next save

Keys are those of `hashing.page_keys`: a page is used only if its key follows from its parent's key and its own tokens, so a
damaged entry can only be left out, never be taken for another one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from prefix_reuse.errors import SnapshotError
from prefix_reuse.geometry import StoreGeometry
from prefix_reuse.hashing import Namespace, page_keys

FORMAT = "prefix-reuse snapshot"
VERSION = 2
"""1: every page has the bytes of every layer group; still read."""
NO_PARENT = -1


class Refusal(StrEnum):
    """Why a snapshot was not written or not used."""

    DISABLED = "disabled"
    """Reuse is not active: snapshots are neither read nor written."""
    NONE = "no-snapshot"
    NOT_A_SNAPSHOT = "not-a-snapshot"
    """The folder holds something else."""
    NEWER = "newer-format"
    DAMAGED = "damaged"
    """No set in the folder is whole."""
    GEOMETRY = "other-geometry"
    NAMESPACE = "other-namespace"
    """Other model, weights, tokenizer or settings."""
    PLATFORM = "other-platform"
    """Other kind of device, or other jaxlib: equal inputs may give other bits there."""
    NOT_PORTABLE = "namespace-not-portable"
    """The model does not say what it is, so that no other process could recognise its pages."""


class DamagedSet(Exception):
    """A set that is not whole; the one before it may be."""


@dataclass(frozen=True)
class Identity:
    """What the writer and the reader of a snapshot must agree on.

    Attributes:
        namespace: of the model, without salt and adapter.
        geometry: of a page.
        platform: kind of device and version of the compiler that the bytes came from.
    """

    namespace: Namespace
    geometry: StoreGeometry
    platform: Mapping[str, str]

    def check_portable(self) -> None:
        """Raises `SnapshotError` when another process could not name this namespace."""
        if not self.namespace.is_portable:
            missing = [name for name, value in asdict(self.namespace).items() if value is None]
            missing = [name for name in missing if name not in ("adapter", "tenant_salt")]
            raise SnapshotError(
                Refusal.NOT_PORTABLE, f"the model's `identity` does not give {', '.join(missing)}; add it to save pages"
            )

    def describe(self) -> dict[str, Any]:
        """As plain values, for the manifest."""
        fields = {name: value for name, value in asdict(self.namespace).items() if value is not None}
        return {
            "geometry": {**asdict(self.geometry), "identity": self.geometry.identity, "device": ""},
            "namespace": self.namespace.digest.hex(),
            "namespace_fields": fields,
            "platform": dict(self.platform),
        }

    def check(self, manifest: Mapping[str, Any]) -> None:
        """Raises `SnapshotError` unless the snapshot's pages are interchangeable with those of this engine."""
        mine = json.loads(json.dumps(self.describe()))
        for key, reason in (
            ("geometry", Refusal.GEOMETRY),
            ("namespace", Refusal.NAMESPACE),
            ("platform", Refusal.PLATFORM),
        ):
            if manifest[key] != mine[key]:
                here, there = mine, manifest
                key = "namespace_fields" if key == "namespace" else key
                odd = [k for k in here[key] if here[key][k] != there[key].get(k)]
                what = "; ".join(f"{k} is {there[key].get(k)!r}, here {here[key][k]!r}" for k in odd)
                raise SnapshotError(
                    reason, f"the snapshot was made elsewhere: {what or 'it says more than is known here'}"
                )


def seal(manifest: dict[str, Any]) -> str:
    """The manifest as text, with a digest over everything in it."""
    body = json.dumps(manifest, sort_keys=True)
    return json.dumps({**manifest, "sha256": hashlib.sha256(body.encode()).hexdigest()}, sort_keys=True, indent=1)


def unseal(text: str) -> dict[str, Any]:
    """The manifest back. Raises `SnapshotError` for another format or version, `DamagedSet` for a broken seal."""
    try:
        manifest = json.loads(text)
        name, version = manifest.get("format"), manifest.get("version")
    except (ValueError, AttributeError) as error:
        raise DamagedSet(f"the manifest cannot be read: {error}") from error
    if name != FORMAT:
        raise SnapshotError(Refusal.NOT_A_SNAPSHOT, f"the manifest is of format {name!r}")
    if not isinstance(version, int) or version > VERSION:
        raise SnapshotError(Refusal.NEWER, f"format version {version}, this build reads up to {VERSION}")
    digest = manifest.pop("sha256", "")
    if hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest() != digest:
        raise DamagedSet("the manifest does not match its digest")
    return manifest


@dataclass
class Entries:
    """The index part of a snapshot: N pages of S tokens, parents before children.

    Attributes:
        tokens: int32 [N, S].
        parents: int32 [N], entry of the page before; -1 at the beginning of a prompt.
        namespace: int32 [N], number of its namespace.
        rank: int32 [N], larger = used later.
        keys: uint8 [N, 32], chained sha256.
        checksums: uint8 [N, 16], of the bytes.
        parts: uint8 [N, G], 1 where the page has the bytes of a layer group; a sliding group's may be absent.
    """

    tokens: np.ndarray
    parents: np.ndarray
    namespace: np.ndarray
    rank: np.ndarray
    keys: np.ndarray
    checksums: np.ndarray
    parts: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def create(
        cls, prefixes: Iterable[tuple[bytes, np.ndarray, np.ndarray]], page_size: int, num_groups: int
    ) -> tuple[Entries, list[bytes], list[int]]:
        """Entries of (namespace, tokens, page ids) prefixes, hottest last; the namespaces, and the page id of each entry.

        Checksums and parts are left to whoever reads the bytes.
        """
        numbers: dict[bytes, int] = {}
        entry_of: dict[int, int] = {}
        tokens, parents, namespace, rank, keys = [], [], [], [], []
        for at, (name, prompt, pages) in enumerate(prefixes):
            number = numbers.setdefault(name, len(numbers))
            parent = NO_PARENT
            for i, page in enumerate(np.asarray(pages).tolist()):
                entry = entry_of.get(page)
                if entry is None:
                    entry = entry_of[page] = len(tokens)
                    mine = np.asarray(prompt[i * page_size : (i + 1) * page_size], np.int32)
                    above = None if parent == NO_PARENT else keys[parent]
                    keys += page_keys(mine, page_size, name, parent=above, first_page=i)
                    tokens.append(mine)
                    parents.append(parent)
                    namespace.append(number)
                    rank.append(at)
                rank[entry] = at
                parent = entry
        count = len(tokens)
        return (
            cls(
                np.array(tokens, np.int32).reshape(count, page_size),
                np.array(parents, np.int32),
                np.array(namespace, np.int32),
                np.array(rank, np.int32),
                np.frombuffer(b"".join(keys), np.uint8).reshape(count, 32),
                np.zeros((count, 16), np.uint8),
                np.ones((count, num_groups), np.uint8),
            ),
            list(numbers),
            list(entry_of),
        )

    def check_shapes(self, count: int, page_size: int, num_groups: int) -> None:
        """Raises `DamagedSet` unless every array has one row per page."""
        for name, width in (("tokens", page_size), ("keys", 32), ("checksums", 16), ("parts", num_groups)):
            if getattr(self, name).shape != (count, width):
                raise DamagedSet(f"{name} has shape {getattr(self, name).shape}, not {(count, width)}")
        for name in ("parents", "namespace", "rank"):
            if getattr(self, name).shape != (count,):
                raise DamagedSet(f"{name} has shape {getattr(self, name).shape}, not {(count,)}")

    def verify(self, namespaces: Sequence[bytes]) -> tuple[np.ndarray, int]:
        """bool [N]: entries whose key follows from their parent's and their own tokens; below a bad one all are bad.

        Also returns how many are bad by themselves.
        """
        good, faults = np.zeros(len(self), bool), 0
        depth = np.zeros(len(self), np.int64)
        size = self.tokens.shape[1] if len(self) else 1
        for i, (parent, number) in enumerate(zip(self.parents.tolist(), self.namespace.tolist(), strict=True)):
            if NO_PARENT < parent < i and not good[parent]:
                continue
            faults += 1
            if not NO_PARENT <= parent < i or not 0 <= number < len(namespaces) or self.tokens[i].min() < 0:
                continue
            if self.parts[i].max(initial=0) > 1:
                continue
            above = None
            if parent != NO_PARENT:
                if self.namespace[parent] != number:
                    continue
                depth[i] = depth[parent] + 1
                above = self.keys[parent].tobytes()
            (key,) = page_keys(self.tokens[i], size, namespaces[number], parent=above, first_page=int(depth[i]))
            good[i] = key == self.keys[i].tobytes()
            faults -= int(good[i])
        return good, faults

    def without_subtrees(self, good: np.ndarray) -> np.ndarray:
        """`good` without what hangs below an entry that is not."""
        good = good.copy()
        for i, parent in enumerate(self.parents.tolist()):
            if good[i] and parent != NO_PARENT and not good[parent]:
                good[i] = False
        return good

    def chains(self, good: np.ndarray) -> list[list[int]]:
        """Each longest prefix of `good` entries, as entries from its beginning on; hottest last."""
        inner = {self.parents[i] for i in np.flatnonzero(good)}
        leaves = [i for i in np.flatnonzero(good).tolist() if i not in inner]
        out = []
        for leaf in sorted(leaves, key=lambda i: (self.rank[i], i)):
            chain = [leaf]
            while (parent := int(self.parents[chain[-1]])) != NO_PARENT:
                chain.append(parent)
            out.append(chain[::-1])
        return out

    def hottest(self, good: np.ndarray, num_pages: int) -> np.ndarray:
        """bool [N]: of the `good` entries up to `num_pages`, most recently used prefixes first, none without its parent."""
        chosen = np.zeros(len(self), bool)
        left = num_pages
        for chain in reversed(self.chains(good)):
            new = [i for i in chain if not chosen[i]][: max(left, 0)]
            chosen[new] = True
            left -= len(new)
        return chosen


def payload_checksum(payload: Sequence[Any]) -> bytes:
    """16 bytes over a page: all layer groups, and which of them it has."""
    import xxhash

    digest = xxhash.xxh3_128()
    for group, part in enumerate(payload):
        if part is None:
            digest.update(f"no group {group}".encode())
            continue
        digest.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
    return digest.digest()
