"""The tree behind the index: each edge is a run of pages, compared with a prompt in one piece.

    root(namespace)
      └─ [page 0 .. page 7]            one node: 8 pages of tokens as int32 bytes, 8 page ids as one array slice
           ├─ [page 8 .. page 99]
           └─ [page 8 .. page 12]      children differ in their first page, whose bytes are their key in a dict

A match compares bytes with bytes (memcmp), never a digest with a digest, so it is exact by construction. Runs split at
page borders only. Nothing here recurses: a chain may be as long as memory allows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

TOKEN_BYTES = 4
FEW_RUNS = 4
NO_PAGES = np.zeros(0, np.int32)
NO_PAGES.setflags(write=False)


class Node:
    """A run of pages. The first `num_pages` pages of `tokens` are valid; eviction shortens a run without copying."""

    __slots__ = (
        "children",
        "digests",
        "family",
        "hits",
        "key",
        "last_access",
        "num_pages",
        "page_ids",
        "parent",
        "priority",
        "record",
        "soft_pinned",
        "start",
        "tokens",
        "touched_at",
    )

    def __init__(self, parent: Node | None, key: bytes, tokens: bytes, page_ids: np.ndarray, start: int) -> None:
        self.parent = parent
        self.key = key
        self.tokens = tokens
        self.page_ids = page_ids
        self.num_pages = len(page_ids)
        self.start = start  # index of the first page of the run within a prompt
        self.children: dict[bytes, Node] | None = None  # most nodes are leaves: no dict until there is a child
        self.last_access = 0
        self.hits = 0
        self.priority = 0
        self.touched_at = 0.0
        self.soft_pinned = False
        self.record = 0  # of the leaf queue
        self.family = 0  # both halves of a split keep it, so that records of evicted pages still find their place
        self.digests: list[bytes] | None = None

    @property
    def is_root(self) -> bool:
        return self.parent is None and not self.key

    def __repr__(self) -> str:
        return f"Node(pages {self.start}..{self.start + self.num_pages}, children={len(self.children or ())})"


def is_leaf(node: Node) -> bool:
    """Whether `node` is in a tree and nothing hangs below it."""
    return node.parent is not None and not node.children


class Path(NamedTuple):
    """What a walk found: `nodes` matched wholly, then `partial` (if any) with its first `partial_pages` pages.

    The first `known` nodes had matched before and were not compared.
    """

    nodes: list[Node]
    partial: Node | None
    partial_pages: int
    num_pages: int
    version: int
    known: int = 0

    @property
    def compared(self) -> int:
        """Runs whose tokens were compared."""
        return len(self.nodes) - self.known + (self.partial is not None)


def walk(root: Node, data: memoryview, full_pages: int, step: int, version: int) -> Path:
    """Follow a prompt from `root` as far as its pages are there. Changes nothing.

    Args:
        root: where to begin.
        data: token bytes of the prompt.
        full_pages: pages to match at most.
        step: bytes of one page of tokens.
        version: number of splits so far; a path is stale once it differs.
    """
    nodes: list[Node] = []
    node, at, end = root, 0, full_pages * step
    while at < end and len(nodes) < FEW_RUNS:
        children = node.children
        child = children.get(bytes(data[at : at + step])) if children else None
        if child is None:
            return Path(nodes, None, 0, at // step, version)
        stop = at + child.num_pages * step
        if stop > end or not child.tokens.startswith(data[at:stop]):
            k = common_pages(child, data[at:end], min(stop, end) - at, step)
            return Path(nodes, child, k, at // step + k, version)
        nodes.append(child)
        node, at = child, stop
    if at == end:
        return Path(nodes, None, 0, full_pages, version)
    # Many runs: slices of bytes cost half as much as slices of a view, which pays for one copy of the rest.
    rest, base, limit, at = bytes(data[at:end]), at, end - at, 0
    while at < limit:
        children = node.children
        if not children:
            break
        child = children.get(rest[at : at + step])
        if child is None:
            break
        tokens = child.tokens
        if len(tokens) != child.num_pages * step or not rest.startswith(tokens, at):
            # They differ, or one is shorter: the prompt ends here, or eviction has cut the run.
            k = common_pages(child, data[base + at : end], min(child.num_pages * step, limit - at), step)
            return Path(nodes, child, k, (base + at) // step + k, version)
        nodes.append(child)
        node = child
        at += len(tokens)
    return Path(nodes, None, 0, (base + at) // step, version)


def common_pages(node: Node, data: memoryview, limit: int, step: int) -> int:
    """How many whole pages the first `limit` bytes of `node` and of `data` have in common."""
    if node.tokens.startswith(data[:limit]):
        return limit // step
    return common_tokens(node, data, limit // TOKEN_BYTES) * TOKEN_BYTES // step


def common_tokens(node: Node, data: memoryview, limit: int) -> int:
    """How many of the first `limit` tokens of `node` equal the first tokens of `data`."""
    limit = min(limit, len(data) // TOKEN_BYTES)
    mine = np.frombuffer(node.tokens, np.int32, limit)
    theirs = np.frombuffer(data, np.int32, limit)
    differs = mine != theirs
    first = int(differs.argmax()) if limit else 0
    return first if limit and differs[first] else limit


def path_pages(path: Path) -> np.ndarray:
    """Page ids of a match, int32, in order."""
    nodes, partial = path.nodes, path.partial
    if partial is None:
        if len(nodes) == 1:
            return nodes[0].page_ids
        return np.concatenate([node.page_ids for node in nodes]) if nodes else NO_PAGES
    tail = partial.page_ids[: path.partial_pages]
    return np.concatenate([*(node.page_ids for node in nodes), tail]) if nodes else tail


def split(node: Node, pages: int, step: int) -> Node:
    """Cut `node` after its first `pages` pages; returns the new upper half. `node` stays the lower half.

    Which pages are cached does not change, nor do their recency and order of eviction.
    """
    parent = node.parent
    assert parent is not None
    assert parent.children is not None
    assert 0 < pages < node.num_pages
    cut = pages * step
    upper = Node(parent, node.key, node.tokens[:cut], node.page_ids[:pages], node.start)
    for name in ("last_access", "hits", "priority", "touched_at", "soft_pinned", "family"):
        setattr(upper, name, getattr(node, name))
    node.tokens = node.tokens[cut : node.num_pages * step]
    node.key = node.tokens if node.num_pages - pages == 1 else node.tokens[:step]
    node.page_ids = node.page_ids[pages:]
    node.num_pages -= pages
    node.start += pages
    if node.digests is not None:
        upper.digests, node.digests = node.digests[:pages], node.digests[pages:]
    node.parent = upper
    upper.children = {node.key: node}
    parent.children[upper.key] = upper
    return upper


def compact(node: Node, step: int, worth: int = 2) -> None:
    """Give back the memory of pages that eviction cut off, once the run has `worth` times the tokens it needs.

    A node with children must have no such rest (`worth=1`): `walk` relies on it.
    """
    if worth * node.num_pages * step < len(node.tokens):
        node.tokens = node.tokens[: node.num_pages * step]
        node.page_ids = node.page_ids.copy()
        if node.digests is not None:
            del node.digests[node.num_pages :]


def subtree(node: Node) -> Iterator[Node]:
    """`node` and everything below it, parents before children."""
    stack = [node]
    while stack:
        current = stack.pop()
        yield current
        if current.children:
            stack.extend(current.children.values())


def prefix_of(node: Node, step: int) -> tuple[bytes, np.ndarray]:
    """Token bytes and page ids of the whole prefix that ends with `node`."""
    chain = []
    current: Node | None = node
    while current is not None and current.parent is not None:
        chain.append(current)
        current = current.parent
    chain.reverse()
    tokens = b"".join(n.tokens[: n.num_pages * step] for n in chain)
    return tokens, np.concatenate([n.page_ids for n in chain]) if chain else NO_PAGES
