"""Plans: worked numbers of A15, A21, A23, B11, B12."""

from __future__ import annotations

import numpy as np
import pytest

from prefix_reuse.device_plan import PageDemand, plan_device_pages
from prefix_reuse.errors import LengthsError
from prefix_reuse.plan import (
    Chunk,
    PagedBatchLengths,
    bucket,
    pack_chunks,
    plan_prefill,
)


def test_suffix_plans_of_a_mixed_batch_have_the_worked_numbers():
    """A15: page 4, prompts 6/4/5, hits 4/0/4."""
    prompts = [np.arange(n, dtype=np.int32) for n in (6, 4, 5)]
    plans = [plan_prefill(p, hit, 4) for p, hit in zip(prompts, (4, 0, 4), strict=True)]
    assert [p.suffix_length for p in plans] == [2, 4, 1]
    assert [p.suffix_start_pos for p in plans] == [4, 0, 4]
    assert [p.positions.tolist() for p in plans] == [[4, 5], [0, 1, 2, 3], [4]]
    assert [p.suffix_input_ids.tolist() for p in plans] == [[4, 5], [0, 1, 2, 3], [4]]
    assert sum(p.context_length for p in plans) == 15
    assert sum(p.computed_tokens for p in plans) == 7
    assert sum(p.cached_tokens for p in plans) == 8


def test_full_hit_replays_the_last_token_and_is_never_a_full_prefill():
    """A21: (query 1 | kv L), context L-1; matched L, computed 1, cached L-1."""
    plan = plan_prefill(np.arange(8, dtype=np.int32), 8, 4)
    assert plan.is_full_hit
    assert (plan.prefix_shared_tokens, plan.computed_tokens, plan.cached_tokens) == (8, 1, 7)
    assert plan.positions.tolist() == [7]
    lengths = PagedBatchLengths.create([plan.computed_tokens], [plan.cached_tokens])
    assert (lengths.query_lengths[0], lengths.kv_seq_lengths[0], lengths.context_lengths[0]) == (1, 8, 7)


@pytest.mark.parametrize("hit", [2, 12, -4])
def test_inconsistent_hit_lengths_raise(hit: int):
    """A15."""
    with pytest.raises(LengthsError):
        plan_prefill(np.arange(8, dtype=np.int32), hit, 4)


def test_empty_prompt_has_no_plan():
    with pytest.raises(LengthsError, match="empty"):
        plan_prefill(np.zeros(0, np.int32), 0, 4)


@pytest.mark.parametrize(
    ("query", "context", "offsets", "last"),
    [
        ([80], [0], [0, 80], [16]),
        ([16], [64], [0, 16], [16]),
        ([3, 5], [64, 16], [0, 3, 8], [3, 5]),
    ],
)
def test_batch_lengths_have_the_worked_offsets_and_last_pages(query, context, offsets, last):
    """B11 and B12 at page 16: (80|80), (16|80), ([3,5]|[67,21])."""
    lengths = PagedBatchLengths.create(query, context)
    assert lengths.query_offsets.tolist() == offsets
    assert lengths.last_page_lengths(16).tolist() == last
    assert lengths.kv_seq_lengths.tolist() == [q + c for q, c in zip(query, context, strict=True)]
    assert lengths.page_counts(16).tolist() == [-(-(q + c) // 16) for q, c in zip(query, context, strict=True)]


def test_contradicting_batch_lengths_raise():
    """B11: lengths are validated wherever they are made."""
    good = PagedBatchLengths.create([3, 5], [64, 16])
    with pytest.raises(LengthsError):
        PagedBatchLengths(good.query_lengths, good.query_offsets, good.context_lengths, good.kv_seq_lengths + 1)
    with pytest.raises(LengthsError):
        PagedBatchLengths(
            good.query_lengths, good.query_offsets[::-1].copy(), good.context_lengths, good.kv_seq_lengths
        )
    with pytest.raises(LengthsError):
        PagedBatchLengths.create([1, 2], [1])
    with pytest.raises(LengthsError):
        PagedBatchLengths.create([-1], [1])


def test_padding_of_a_packed_batch_can_touch_no_page():
    chunks = [Chunk(2, np.array([7, 8], np.int32), 4, True, True), Chunk(0, np.array([9], np.int32), 7, False, True)]
    batch = pack_chunks(chunks, num_tokens=8, num_rows=4, table_rows=6)
    assert batch.tokens.tolist() == [7, 8, 9, 0, 0, 0, 0, 0]
    assert batch.positions.tolist()[:3] == [4, 5, 7]
    assert batch.token_rows.tolist() == [0, 0, 1, 4, 4, 4, 4, 4]
    assert batch.writes_kv.tolist() == [True, True] + [False] * 6
    assert batch.rows.tolist() == [2, 0, 6, 6]
    assert batch.lengths.kv_seq_lengths.tolist() == [6, 8, 0, 0]


def test_chunks_that_do_not_fit_their_bucket_raise():
    chunk = Chunk(0, np.arange(5, dtype=np.int32), 0, True, True)
    with pytest.raises(LengthsError):
        pack_chunks([chunk], num_tokens=4, num_rows=1, table_rows=1)
    with pytest.raises(LengthsError):
        bucket(9, 1, 8)


def test_buckets_are_powers_of_two_capped_by_the_largest():
    assert [bucket(n, 4, 12) for n in (0, 1, 4, 5, 8, 9, 12)] == [4, 4, 4, 8, 8, 12, 12]


def demand(host_pages: list[int], sharable: int, private: int) -> PageDemand:
    return PageDemand(np.array(host_pages), sharable, private)


def test_each_missing_host_page_is_loaded_once_and_nothing_resident_is_loaded():
    """A23."""
    resident = {10: 3}
    plan = plan_device_pages(
        [demand([10, 11], 2, 1), demand([10, 11, 12], 3, 0)], resident.get, lambda page: False, share=True
    )
    assert [h for h, _ in plan.loads] == [11, 12]
    assert (plan.skipped_duplicate, plan.skipped_resident) == (1, 2)
    assert plan.row_pages[0][0] == plan.row_pages[1][0] == 3
    assert plan.row_pages[0][1] == plan.row_pages[1][1]
    assert plan.num_allocations == 3
    assert plan.pages_needed == 4  # the reclaimable page 3 is used up as well
    assert plan.mirrors == plan.loads


def test_without_m3_each_row_gets_its_own_copy():
    """A3: M2 without M3."""
    plan = plan_device_pages([demand([10, 11], 2, 1)] * 2, {10: 3}.get, lambda page: False, share=False)
    assert [h for h, _ in plan.loads] == [10, 11, 10, 11]
    assert not plan.mirrors
    assert plan.num_allocations == 6
    assert len({*plan.row_pages[0].tolist(), *plan.row_pages[1].tolist()}) == 6


def test_private_host_pages_are_loaded_privately_even_when_sharing():
    plan = plan_device_pages([demand([10, 20], 1, 0), demand([10, 21], 1, 0)], {}.get, lambda page: False, share=True)
    assert [h for h, _ in plan.loads] == [10, 20, 21]
    assert [h for h, _ in plan.mirrors] == [10]
