"""Resuming a walk: a row that publishes page after page compares only its new pages with the index.

A cursor says where the last commit of the row ended: in which run, and behind which page. It is a hint. Runs may since have
been split, extended, shortened or dropped; what can no longer be relied on is walked again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from prefix_reuse.index_tree import TOKEN_BYTES, Node


class Cursor(NamedTuple):
    """Where a commit ended: behind page `end - 1` of its prompt, which `run` or one above it holds.

    `cuts` is that of the run at that time: a run that has been shortened since may have been lengthened by another prompt.
    (Runs above one that is still there never were at the end of a branch, so they are what they were.)
    """

    run: Node
    end: int
    cuts: int


def resume(cursor: Cursor, root: Node, tokens: np.ndarray, step: int) -> tuple[Node, list[np.ndarray]]:
    """The run from which a walk of a prompt that has grown may start, and the page ids of all runs down to it.

    The walk starts behind that run: its pages are those of `cursor`, or the first of them where the last run was extended by
    somebody else. It is `root` when the cursor no longer holds.
    """
    run: Node | None = cursor.run
    if cursor.run.cuts != cursor.cuts:
        return root, []  # shortened
    while run is not None and run.start >= cursor.end:  # it was split: its upper half may hold the end
        run = run.parent
    chain: list[Node] = []
    above = run
    while above is not None and above.parent is not None:
        chain.append(above)
        above = above.parent
    if above is not root or not chain:
        return root, []  # dropped, or of another namespace
    last = chain[0]
    if last.start + last.num_pages < cursor.end:
        return root, []  # evicted
    page = step // TOKEN_BYTES
    final = tokens[(cursor.end - 1) * page : cursor.end * page].tobytes()
    at = (cursor.end - 1 - last.start) * step
    if not final or last.tokens[at : at + step] != final:
        return root, []  # not the prompt that it was
    if last.start + last.num_pages > cursor.end:
        del chain[0]  # extended: this one run is compared again
    return (chain[0] if chain else root), [node.page_ids for node in reversed(chain)]
