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

import numpy as np

TOKEN_BYTES = 4
FEW_RUNS = 4
SHORT_PROMPT = 1 << 13
"""Bytes of tokens that are copied without a second thought."""
NO_PAGES = np.zeros(0, np.int32)
NO_PAGES.setflags(write=False)


class Node:
    """A run of pages. The first `num_pages` pages of `tokens` are valid; eviction shortens a run without copying."""

    __slots__ = (
        "children",
        "cuts",
        "digests",
        "family",
        "hits",
        "holds",
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

    def __init__(
        self,
        parent: Node | None,
        key: bytes,
        tokens: bytes,
        page_ids: np.ndarray,
        start: int,
        family: int,
        last_access: int = 0,
        priority: int = 0,
        touched_at: float = 0.0,
    ) -> None:
        self.parent = parent
        self.key = key
        self.tokens = tokens
        self.page_ids = page_ids
        self.num_pages = len(page_ids)
        self.start = start  # index of the first page of the run within a prompt
        self.family = family  # both halves of a split keep it, so that records of evicted pages still find their place
        self.last_access = last_access  # of matches that ended here, or below in runs that are gone: see `unlink`
        self.priority = priority
        self.touched_at = touched_at
        self.children: dict[bytes, Node] | None = None  # most nodes are leaves: no dict until there is a child
        self.cuts = 0  # times that it lost pages at its end: what it holds now may be something else
        self.hits = 0
        self.holds = 0  # open leases whose match ends with this run
        self.soft_pinned = False
        self.record = 0  # of the leaf queue
        self.digests = b""  # one after another, if the index makes any

    @property
    def is_root(self) -> bool:
        return self.parent is None and not self.key

    def set_uses(self, last_access: int, hits: int, touched_at: float) -> None:
        self.last_access, self.hits, self.touched_at = last_access, hits, touched_at

    def __repr__(self) -> str:
        return f"Node(pages {self.start}..{self.start + self.num_pages}, children={len(self.children or ())})"


def is_leaf(node: Node) -> bool:
    """Whether `node` is in a tree and nothing hangs below it."""
    return node.parent is not None and not node.children


def walk(root: Node, tokens: np.ndarray, full_pages: int, step: int) -> tuple[Node, int, list[np.ndarray], bytes]:
    """Follow a prompt from `root` as far as its pages are there. Changes nothing.

    Args:
        root: where to begin.
        tokens: int32 [T], contiguous.
        full_pages: pages to match at most, T // page_size.
        step: bytes of one page of tokens.

    Returns:
        The run in which the match ends; how many of its pages belong to the match (all of them, unless the prompt ends
        or differs inside the run); the page ids by run; the tokens of the first page that is not there, or nothing.
        The match has `run.start` + that many pages.
    """
    found: list[np.ndarray] = []
    node, at, base, end = root, 0, 0, full_pages * step
    if end <= SHORT_PROMPT:
        rest = (tokens if tokens.nbytes < end + step else tokens[: end // TOKEN_BYTES]).tobytes()
    else:  # most long prompts end after a few runs: then a view spares the copy
        view = memoryview(tokens).cast("B")
        while len(found) < FEW_RUNS:
            key = bytes(view[at : at + step]) if at < end else b""
            child = node.children.get(key) if node.children else None
            if child is None:
                return node, node.num_pages, found, key
            stop = at + child.num_pages * step
            if stop > end or not child.tokens.startswith(view[at:stop]):
                return part_of(child, view[at:end], step, found)
            found.append(child.page_ids)
            node, at = child, stop
        rest, base = bytes(view[at:end]), at
    # Slices of bytes cost a quarter of slices of a view.
    at, limit = 0, end - base
    while at < limit:
        key = rest[at : at + step]
        children = node.children
        child = children.get(key) if children else None
        if child is None:
            return node, node.num_pages, found, key
        run = child.tokens
        if not rest.startswith(run, at):
            return part_of(child, memoryview(rest)[at:], step, found)
        found.append(child.page_ids)
        node = child
        at += len(run)
    return node, node.num_pages, found, b""


def part_of(
    node: Node, data: memoryview, step: int, found: list[np.ndarray]
) -> tuple[Node, int, list[np.ndarray], bytes]:
    """End of a walk inside `node`: the prompt ends there, or differs, or eviction has cut the run."""
    tokens = node.tokens
    pages = min(node.num_pages, len(data) // step)
    if not tokens.startswith(data[: pages * step]):
        same = 1  # the first `same` pages are equal (the first is its key), the first `pages` are not
        while pages - same > 1:
            middle = (same + pages) // 2
            if tokens.startswith(data[same * step : middle * step], same * step):
                same = middle
            else:
                pages = middle
        pages = same
    found.append(node.page_ids[:pages])
    return node, pages, found, bytes(data[pages * step : (pages + 1) * step])


def common_tokens(node: Node, data: memoryview, limit: int) -> int:
    """How many of the first `limit` tokens of `node` equal the first tokens of `data`."""
    limit = min(limit, len(data) // TOKEN_BYTES)
    mine = np.frombuffer(node.tokens, np.int32, limit)
    theirs = np.frombuffer(data, np.int32, limit)
    differs = mine != theirs
    first = int(differs.argmax()) if limit else 0
    return first if limit and differs[first] else limit


def join_pages(found: list[np.ndarray]) -> np.ndarray:
    """Page ids of a walk as one int32 array, in order."""
    if len(found) == 1:
        return found[0]
    return np.concatenate(found) if found else NO_PAGES


def split(node: Node, pages: int, step: int) -> Node:
    """Cut `node` after its first `pages` pages; returns the new upper half. `node` stays the lower half.

    Which pages are cached does not change, nor do their recency, their order of eviction and what leases hold.
    """
    parent = node.parent
    assert parent is not None
    assert parent.children is not None
    assert 0 < pages < node.num_pages
    cut = pages * step
    upper = Node(parent, node.key, node.tokens[:cut], node.page_ids[:pages], node.start, node.family)
    upper.priority, upper.soft_pinned = node.priority, node.soft_pinned
    node.tokens = node.tokens[cut : node.num_pages * step]
    node.key = node.tokens if node.num_pages - pages == 1 else node.tokens[:step]
    node.page_ids = node.page_ids[pages:]
    node.num_pages -= pages
    node.start += pages
    if node.digests:
        cut = pages * len(node.digests) // (node.num_pages + pages)
        upper.digests, node.digests = node.digests[:cut], node.digests[cut:]
    node.parent = upper
    upper.children = {node.key: node}
    parent.children[upper.key] = upper
    return upper


def unlink(node: Node) -> Node:
    """Take a node off its parent, to which it leaves its uses: whatever matched it had matched the parent before.

    Only the end of a match is marked as used, so a lookup costs the same however many runs it crosses. A run is
    evicted only as a leaf, and by then its own marks include those of all that ever hung below it.

    Returns:
        The parent that it had.
    """
    parent = node.parent
    assert parent is not None
    children = parent.children
    assert children is not None
    node.parent = None
    del children[node.key]
    if not children:
        parent.children = None
    parent.hits += node.hits
    if node.last_access > parent.last_access:
        parent.last_access = node.last_access
    if node.touched_at > parent.touched_at:
        parent.touched_at = node.touched_at
    return parent


def uses(root: Node) -> Iterator[tuple[Node, int, int]]:
    """(node, last access, hits) of `root` and everything below it, children before parents."""
    marks: dict[Node, tuple[int, int]] = {}
    for node in reversed(list(subtree(root))):
        below = [marks.pop(child) for child in (node.children or {}).values()]
        last = max(node.last_access, *(last for last, _ in below)) if below else node.last_access
        hits = node.hits + sum(hits for _, hits in below)
        marks[node] = last, hits
        yield node, last, hits


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
