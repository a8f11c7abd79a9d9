"""Resuming a walk: a row that publishes page after page compares only its new pages with the index.

A cursor says where the last commit of the row ended: in which run, and behind which page. It is a hint. Runs may since have
been split, extended, shortened or dropped; what can no longer be relied on is walked again from the beginning.
"""

from __future__ import annotations

from typing import NamedTuple

from prefix_reuse.index_tree import Node, Path, walk


class Cursor(NamedTuple):
    """Where a commit ended: behind page `end - 1` of its prompt, which `node` or a run above it holds."""

    node: Node
    end: int


def resume(
    cursor: Cursor | None, root: Node, data: memoryview, full_pages: int, step: int, version: int
) -> Path | None:
    """The path that `walk` from `root` would give for a prompt that still begins with the pages of `cursor`.

    Returns None when the cursor no longer holds: walk from the root then. Arguments as for `walk`.
    """
    if cursor is None or cursor.end > full_pages:
        return None
    node: Node | None = cursor.node
    while node is not None and node.start >= cursor.end:  # the run was split: its upper half may hold the end
        node = node.parent
    known: list[Node] = []
    current = node
    while current is not None and current.parent is not None:
        known.append(current)
        current = current.parent
    if current is not root or not known:
        return None  # dropped, or of another namespace
    known.reverse()
    last = known[-1]
    if last.start + last.num_pages < cursor.end:
        return None  # evicted
    final = (cursor.end - 1) * step
    if data[final : final + step] != last.tokens[final - last.start * step :][:step]:
        return None  # not the prompt that it was
    if last.start + last.num_pages > cursor.end:
        known.pop()  # extended by somebody else: this one run is compared again
        last = known[-1] if known else root
    at = last.start + last.num_pages
    rest = walk(last, data[at * step :], full_pages - at, step, version)
    return rest._replace(nodes=[*known, *rest.nodes], num_pages=at + rest.num_pages, known=len(known))
