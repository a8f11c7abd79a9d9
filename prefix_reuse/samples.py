"""Several samples of one prompt: admitted together or not at all, the prompt computed once, its pages shared (B17, B19, B20).

line        leader + followers                     all wait, in one place of the line
admitted    leader: prompt + answer                followers: pages for their own tails and answers only
prefilled   leader's full pages -> every table     the partly filled tail page is copied for each follower
            first tokens: one per sample, from the same logits, each by its own random stream
decoding    rows like any other; the group is over
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prefix_reuse.plan import pages_for
from prefix_reuse.runner import DeviceRunner
from prefix_reuse.sequence import Sequence as Row
from prefix_reuse.sequence import SequenceState
from prefix_reuse.steps import PrefillOutputs
from prefix_reuse.windows import GroupWindow


def form_groups(
    samples: Sequence[Row],
    page_size: int,
    num_rows: int,
    num_pages: int,
    windows: Sequence[tuple[GroupWindow, int]] = (),
) -> None:
    """Makes followers of all samples but the first; of so many at a time as fit an empty engine together.

    Args:
      samples: of one request, none of them admitted yet.
      num_rows: rows of the page table. num_pages: pages of the smallest pool of a group without a window.
      windows: layer groups with the pages of their pools.
    """
    if len(samples) < 2:
        return
    first = samples[0]
    whole, shared = pages_for(first.capacity_tokens, page_size), len(first.prompt) // page_size
    own = whole - shared
    most = num_rows if own == 0 else min(num_rows, 1 + (num_pages - whole) // own)
    for window, pages in windows:
        most = min(most, window.most_samples(len(first.prompt), first.capacity_tokens, pages, num_rows))
    for start in range(0, len(samples), max(most, 1)):
        leader, *followers = samples[start : start + max(most, 1)]
        leader.followers = followers
        for follower in followers:
            follower.leader = leader


def members(row: Row) -> list[Row]:
    """The row and those that follow it."""
    return [row, *row.followers]


def start_followers(
    runner: DeviceRunner, leaders: Sequence[tuple[int, Row]], outputs: PrefillOutputs, page_size: int
) -> dict[int, list[tuple[Row, int]]]:
    """Lets the followers of rows whose prompt is computed continue from there, on the device.

    All layers of the leader's tail page are copied before a follower's table names the copy as written.

    Args:
      leaders: (place in the prefill batch, row).
      outputs: of that batch.

    Returns:
      By place: each follower and its first token. Their tables name the leader's full pages and their own tail.
    """
    places = [(place, leader, follower) for place, leader in leaders for follower in leader.followers]
    if not places:
        return {}
    tails: list[list[tuple[int, int]]] = []
    for window, account in zip(runner.windows, runner.accounts, strict=True):
        pairs = []
        for _, leader, follower in places:
            full, rest = divmod(len(leader.prompt), page_size)
            passed = min(window.first(len(leader.prompt)), full)
            pair = account.fork(leader.row_index, follower.row_index, full, passed)
            if rest:
                pairs.append(pair)
        tails.append(pairs)
    if any(tails):
        runner.copy_tails(tails)
    tokens = runner.sample_again(outputs, [p for p, _, _ in places], [f for _, _, f in places])
    out: dict[int, list[tuple[Row, int]]] = {}
    for (place, _, follower), token in zip(places, np.asarray(tokens).tolist(), strict=True):
        out.setdefault(place, []).append((follower, token))
    return out


def end_group(leader: Row) -> None:
    """From now on every sample stands for itself. Followers are prefilled as far as the leader."""
    for follower in leader.followers:
        follower.leader = None
        follower.prefilled_tokens = len(follower.prompt)
        follower.offloaded_pages = leader.offloaded_pages
        follower.move_to(SequenceState.PREFILLED)
    leader.followers = []
