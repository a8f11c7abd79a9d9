"""Why a prompt hits as far as it does and no further."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from prefix_reuse.index_tree import Node, common_tokens
from prefix_reuse.index_types import Explanation
from prefix_reuse.lease import MissReason, PrefixMatch

if TYPE_CHECKING:
    from prefix_reuse.index import PrefixIndex


def explain(index: PrefixIndex, tokens: np.ndarray, namespace: bytes) -> Explanation:
    """See `PrefixIndex.explain`."""
    match = index.peek(tokens, namespace)
    size, full, reason = index.page_size, len(tokens) // index.page_size, match.miss_reason
    hit = match.num_pages
    different: int | None = None
    if reason in (MissReason.NOT_CACHED, MissReason.DIFFERENT):
        elsewhere = max((index.peek(tokens, ns).num_pages for ns in index._roots if ns != namespace), default=0)
        if elsewhere > hit:
            return Explanation(
                hit, hit * size, full, MissReason.NAMESPACE, None,
                f"{elsewhere} pages are cached under another namespace (salt, adapter, weights or settings differ)",
            )  # fmt: skip
    if reason == MissReason.DIFFERENT:
        different = _first_difference(index, match, tokens)
    details = {
        MissReason.NONE: "every full page is cached",
        MissReason.EMPTY: "the prompt is empty",
        MissReason.TOO_SHORT: f"the prompt has {len(tokens)} tokens, a page {size}; only full pages are shared",
        MissReason.NOT_CACHED: f"nothing is cached after token {hit * size}",
        MissReason.DIFFERENT: f"token {different} differs from every cached prompt",
        MissReason.EVICTED: f"the page of tokens {hit * size}..{(hit + 1) * size - 1} was cached and has been evicted",
    }
    return Explanation(hit, hit * size, full, reason, different, details[MissReason(reason)])


def _first_difference(index: PrefixIndex, match: PrefixMatch, tokens: np.ndarray) -> int:
    """Position of the first token that no cached prompt has after the same history."""
    at = match.num_pages * index.page_size
    data = memoryview(tokens[at : at + index.page_size].tobytes())
    if match.run_pages < match.run.num_pages:
        rest = Node(None, b"", match.run.tokens[match.run_pages * index._step :], match.run.page_ids, 0, 0)
        return at + common_tokens(rest, data, index.page_size)
    return at + max(common_tokens(child, data, index.page_size) for child in (match.run.children or {}).values())
