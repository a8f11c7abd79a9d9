"""Invariants of the index tree, checked from scratch."""

from __future__ import annotations

import numpy as np

from prefix_reuse.errors import IntegrityError
from prefix_reuse.index_tree import Node, is_leaf, subtree


def check_tree(roots: dict[bytes, Node], step: int, leaves: list[Node], digest_bytes: int) -> None:
    """Raise `IntegrityError` unless runs, keys, links and the leaf queue agree and no page is named twice."""
    ids: list[np.ndarray] = []
    queued = {id(node) for node in leaves}
    for namespace, root in roots.items():
        if not root.children:
            raise IntegrityError(f"namespace {namespace.hex()[:8]} has a root without entries")
        for node in subtree(root):
            _check_node(node, step, digest_bytes)
            ids.append(node.page_ids)
            if is_leaf(node) and id(node) not in queued:
                raise IntegrityError(f"{node} is a leaf that eviction would never see")
    if ids:
        seen, counts = np.unique(np.concatenate(ids), return_counts=True)
        if counts.size and counts.max() > 1:
            raise IntegrityError(f"pages {seen[counts > 1].tolist()} are named by more than one entry")


def _check_node(node: Node, step: int, digest_bytes: int) -> None:
    if node.parent is not None:
        if node.num_pages < 1 or node.num_pages != len(node.page_ids) or node.num_pages * step > len(node.tokens):
            raise IntegrityError(f"{node} has {len(node.page_ids)} page ids and {len(node.tokens)} bytes of tokens")
        if node.children and node.num_pages * step != len(node.tokens):
            raise IntegrityError(f"{node} has children and {len(node.tokens)} bytes of tokens")
        if node.key != node.tokens[:step]:
            raise IntegrityError(f"{node} is filed under the tokens of another page")
        if node.start != node.parent.start + node.parent.num_pages:
            raise IntegrityError(f"{node} does not continue {node.parent}")
        if node.holds < 0:
            raise IntegrityError(f"{node} has {node.holds} holds")
        if len(node.digests) < node.num_pages * digest_bytes:
            raise IntegrityError(f"{node} has {len(node.digests)} bytes of digests, {digest_bytes} a page")
    for key, child in (node.children or {}).items():
        if child.parent is not node or child.key != key:
            raise IntegrityError(f"{child} and its parent {node} disagree")
