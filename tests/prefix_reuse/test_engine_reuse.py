"""Reuse through the engine: A1-A3, A6, A9-A11, A13, A14, A16-A18, A20-A25, A27, A28, B9, B13, B14, X1, N1, N2.

Every warm = cold test also asserts that hits happened, and compares with a dense forward that knows no pages.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from engine_helpers import GREEDY, check, cold, drained, engine, index_of, last_batch, model, page_bytes, prompt

from models.llama import Llama
from models.rope import RopeConfig
from models.testing import reference_logits, tiny_llama
from prefix_reuse import EngineConfig, SamplingParams
from prefix_reuse.capability import get_prefix_reuse_capability
from prefix_reuse.engine import Engine
from prefix_reuse.errors import ConfigError, IntegrityError

KINDS = ["llama", "hybrid"]
STAGES = {
    "M1": {"suffix_prefill": False, "decode_page_sharing": False},
    "M1+M2": {"suffix_prefill": True, "decode_page_sharing": False},
    "M1+M3": {"suffix_prefill": False, "decode_page_sharing": True},
    "M1+M2+M3": {"suffix_prefill": True, "decode_page_sharing": True},
}


@pytest.mark.parametrize("kind", [pytest.param("llama", marks=pytest.mark.slow), "hybrid"])
def test_scores_equal_a_dense_forward(kind: str):
    """A18, N2 and the cold = cold control: prompts of many lengths, chunked or not."""
    e = engine(kind)
    for n in (1, 3, 4, 5, 31, 32, 33, 50):
        tokens = prompt(n, seed=n)
        logits = e.score(tokens)
        assert logits.shape == (n, 128)
        np.testing.assert_allclose(logits, cold(tokens, kind), atol=1e-4)
        assert np.array_equal(e.score(tokens), logits)
    assert e.stats().prefill.hits == 0
    drained(e)


@pytest.mark.parametrize("kind", KINDS)
def test_warm_logits_equal_cold_for_every_hit_length(kind: str):
    """A15-A18, A21, A22: the same prompt after prefixes of 0, 1, 2, ... pages, full hit included."""
    tokens = prompt(24, seed=3)
    reference = cold(tokens, kind)
    for pages in range(7):
        e = engine(kind)
        if pages:
            e.generate(np.concatenate([tokens[: 4 * pages], [2]]), GREEDY)
        logits, first = e.score(tokens, reuse=True)
        assert first == min(4 * pages, 23)
        assert len(logits) == 24 - first
        np.testing.assert_allclose(logits, reference[first:], atol=1e-4)
        stats = e.stats().prefill
        assert stats.cached_tokens == min(4 * pages, 23)
        assert stats.hits == (pages > 0)
        assert stats.full_hits == (pages == 6)
        drained(e)


def test_a_full_hit_replays_one_token_and_writes_no_kv():
    """A21: matched L, computed 1, cached L-1; the pages' bytes stay as they are."""
    e = engine()
    tokens = prompt(8)
    first = e.generate(tokens, GREEDY)[0]
    pages = index_of(e).lookup(tokens, e.namespace()).page_ids.tolist()
    before = [page_bytes(e, p) for p in pages]
    for _ in range(3):  # any number of hits (A13)
        again = e.generate(tokens, GREEDY)[0]
    assert again.token_ids == first.token_ids
    assert (again.full_hit, again.cached_tokens, again.computed_tokens) == (True, 7, 1)
    lengths = last_batch(e).lengths
    assert (lengths.query_lengths[0], lengths.kv_seq_lengths[0], lengths.context_lengths[0]) == (1, 8, 7)
    assert not last_batch(e).writes_kv.any()
    for page, old in zip(pages, before, strict=True):
        for a, b in zip(page_bytes(e, page), old, strict=True):
            assert np.array_equal(a, b)
    drained(e)


@pytest.mark.parametrize("kind", KINDS)
def test_on_with_an_empty_cache_is_bitwise_off(kind: str):
    """N1: prompts that do not overlap."""
    prompts = [prompt(n, seed=n) for n in (5, 17, 40, 3)]
    off, on = engine(kind, on=False), engine(kind)
    assert [o.token_ids for o in off.generate(prompts, GREEDY)] == [o.token_ids for o in on.generate(prompts, GREEDY)]
    on.clear_cache()
    for tokens in prompts:
        a, b = off.score(tokens), on.score(tokens, reuse=True)[0]
        assert np.array_equal(a, b)
        on.clear_cache()


def test_off_keeps_no_prefix_state():
    """A1: no index, no pins, no reference above 1; the host store and its flush are there."""
    e = engine(on=False)
    tokens = prompt(13)
    for _ in range(2):
        out = e.generate(tokens, GREEDY)[0]
        assert out.cached_tokens == 0
    stats = e.stats()
    assert (stats.enabled, stats.active, stats.disabled_reason) == (False, False, "disabled")
    assert e.store.index is None
    assert stats.prefill.pages_offloaded > 0
    assert stats.host.free_pages == e.config.num_host_pages
    assert stats.device[0].reclaimable == 0
    drained(e)


def test_only_whole_pages_are_shared():
    """A2: 2.5 matching pages share exactly 2."""
    e = engine()
    first = prompt(20, seed=1)
    e.generate(first, GREEDY)
    second = prompt(20, seed=2, start=first[:10])
    out = e.generate(second, GREEDY)[0]
    assert out.cached_tokens == 8
    logits, at = e.score(second, reuse=True)
    np.testing.assert_allclose(logits, cold(second)[at:], atol=1e-4)


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_each_set_of_stages_gives_the_same_tokens_and_its_own_savings(kind: str, stages: str):
    """A3: M1 saves host pages, M2 computed tokens, M3 device pages and copies."""
    switches = STAGES[stages]
    prefix = prompt(16, seed=5)
    prompts = [prompt(21, seed=10 + i, start=prefix) for i in range(3)]
    off = engine(kind, on=False)
    expected = [o.token_ids for o in off.generate(prompts, GREEDY)]
    e = engine(kind, max_prefill_tokens=64, **switches)
    e.generate(prompt(17, seed=9, start=prefix), GREEDY)
    before = e.stats()
    ids = [e.submit(p, GREEDY) for p in prompts]
    e.step()
    check(e)
    stats = e.stats()
    host = stats.host
    # A14: N rows sharing P pages with q private each, published before.
    n, shared, private = 3, 4, -(-(21 + 6) // 4) - 4
    assert (host.logical_pages, host.physical_pages, host.pages_saved) == (
        n * (shared + private),
        shared + n * private,
        8,
    )
    computed = stats.prefill.computed_tokens - before.prefill.computed_tokens
    assert computed == (3 * 5 if switches["suffix_prefill"] else 3 * 21)
    device = stats.device[0]
    saved = 2 * shared if switches["decode_page_sharing"] else 0
    assert device.logical == n * (shared + private)
    assert device.physical == device.logical - saved
    if stages == "M1+M2":  # every row loads its own copy
        assert stats.decode.host_pages_loaded - before.decode.host_pages_loaded == n * shared
    if stages == "M1+M2+M3":  # still resident from the first request
        assert stats.decode.host_pages_loaded == before.decode.host_pages_loaded
        assert stats.decode.loads_skipped_resident == n * shared
    outputs = run(e)
    assert [outputs[i].token_ids for i in ids] == expected
    cached = [outputs[i].cached_tokens for i in ids]
    assert cached == ([16] * 3 if switches["suffix_prefill"] else [0] * 3)
    drained(e)


def run(e: Engine) -> dict[int, Any]:
    outputs = {}
    while e.has_work:
        outputs.update((o.request_id, o) for o in e.step())
        check(e)
    return outputs


def test_other_sets_of_stages_are_configuration_errors():
    """A3: M2 and M3 need M1."""
    for m2, m3 in itertools.product([True, False], repeat=2):
        with pytest.raises(ConfigError, match="M1"):
            EngineConfig(enable_prefix_reuse=True, host_page_reuse=False, suffix_prefill=m2, decode_page_sharing=m3)


@pytest.mark.parametrize("kind", KINDS)
def test_hits_misses_full_hits_and_fresh_rows_run_in_one_batch(kind: str):
    """A6, B14 and H22: cold 5; cached 8 + 3; length 8 fully cached; cached 4 + 9; each as if alone."""
    base = prompt(8, seed=1)
    rows = [prompt(5, seed=2), prompt(11, seed=3, start=base), base, prompt(13, seed=4, start=base[:4])]
    alone = [engine(kind, on=False).generate(r, GREEDY)[0].token_ids for r in rows]
    e = engine(kind)
    e.generate(base, GREEDY)
    outs = e.generate(rows, GREEDY)
    assert [o.token_ids for o in outs] == alone
    assert [o.cached_tokens for o in outs] == [0, 8, 7, 4]
    lengths = last_batch(e).lengths
    assert lengths.query_lengths.tolist() == [5, 3, 1, 9]
    assert lengths.kv_seq_lengths.tolist() == [5, 11, 8, 13]
    drained(e)


@pytest.mark.parametrize("rope", ["llama3", "yarn"])
def test_a_suffix_is_rotated_by_its_place_in_the_prompt_under_scaled_rope(rope: str):
    """H22: cached 8 + 3, a full hit of 8, cached 4 + 9, with frequencies that scaling has changed."""
    scaled = tiny_llama(rope=RopeConfig(8, 100.0, rope, factor=4.0, original_context=16))
    config = EngineConfig(
        page_size=4, num_device_pages=32, num_host_pages=32, max_rows=4, max_context=64, poison=True,
        compilation_cache=False, enable_prefix_reuse=True,
    )  # fmt: skip
    e = Engine(scaled, config)
    one = prompt(13, seed=1)
    other = prompt(13, seed=2, start=one[:4])
    e.generate(one[:8], SamplingParams(max_tokens=1))
    for tokens, n, first_computed in ((one, 11, 8), (one, 8, 7), (other, 13, 4)):
        logits, first = e.score(tokens[:n], reuse=True)
        assert first == first_computed
        np.testing.assert_allclose(logits, reference_logits(scaled, tokens.tolist())[first:n], atol=1e-4)


def test_the_last_batch_plan_is_an_immutable_snapshot():
    """B13."""
    e = engine()
    e.generate(prompt(6), GREEDY)
    with pytest.raises(dataclasses.FrozenInstanceError):
        last_batch(e).tokens = prompt(1)  # type: ignore[misc]


def test_swapping_two_cached_tokens_changes_the_output():
    """H22's control: the cached part matters, and a page of the same tokens in another order is another page."""
    e = engine()
    tokens = prompt(12, seed=1)
    swapped = tokens.copy()
    swapped[[2, 3]] = swapped[[3, 2]]
    assert tokens[2] != tokens[3]
    warm = []
    for text in (tokens, swapped):
        assert e.generate(text, SamplingParams(max_tokens=1))[0].cached_tokens == 0
        logits, first = e.score(np.append(text, 7), reuse=True)
        assert first == 12
        np.testing.assert_allclose(logits, cold(np.append(text, 7))[12:], atol=1e-4)
        warm.append(logits[-1])
    assert not np.allclose(*warm, atol=1e-3)


def test_only_the_suffix_is_offloaded():
    """A20: cached pages are not copied again, whether M2 computes them or not."""
    for switches in STAGES.values():
        e = engine("llama", **switches)
        base = prompt(16, seed=1)
        e.generate(base, SamplingParams(max_tokens=1))
        assert e.stats().prefill.pages_offloaded == 4
        e.generate(prompt(24, seed=2, start=base), SamplingParams(max_tokens=1))
        assert e.stats().prefill.pages_offloaded == 6


@pytest.mark.parametrize("kind", KINDS)
def test_dropped_device_pages_are_read_back_from_the_host(kind: str):
    """A23, A28: each unique page once, duplicates and residents counted apart, same result."""
    base = prompt(16, seed=1)
    prompts = [prompt(20, seed=10 + i, start=base) for i in range(3)]
    e = engine(kind)
    e.generate(base, GREEDY)
    resident = [o.token_ids for o in e.generate(prompts, GREEDY)]
    e.evict_host_entries(0)
    assert e.drop_device_pages() > 0
    before = e.stats().decode
    outs = e.generate([*prompts], GREEDY)
    after = e.stats().decode
    assert [o.token_ids for o in outs] == resident
    assert [o.cached_tokens for o in outs] == [19, 19, 19]
    # 4 common pages and one more of each: 7 unique, of 15 wanted.
    assert after.host_pages_loaded - before.host_pages_loaded == 7
    assert after.loads_skipped_duplicate - before.loads_skipped_duplicate == 8
    assert after.loads_skipped_resident == before.loads_skipped_resident
    for tokens in prompts:
        e.drop_device_pages()
        logits, first = e.score(tokens, reuse=True)
        np.testing.assert_allclose(logits, cold(tokens, kind)[first:], atol=1e-4)
    drained(e)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stages", STAGES)
def test_a_held_row_resumes_from_the_host_with_the_same_tokens(kind: str, stages: str):
    """A26, A29: IN_DECODE -> ON_HOLD -> IN_DECODE; zero device pages on hold, host references kept."""
    params = SamplingParams(max_tokens=14, ignore_eos=True)
    tokens = prompt(10, seed=4)
    expected = engine(kind, on=False).generate(tokens, params)[0].token_ids
    e = engine(kind, **STAGES[stages])
    e.generate(prompt(9, seed=5, start=tokens[:8]), GREEDY)
    request = e.submit(tokens, params)
    outputs: dict[int, Any] = {}
    for _ in range(12):
        outputs.update((o.request_id, o) for o in e.step())
        check(e)
        if request in outputs:
            break
        e.hold(request)
        check(e)
        assert e.stats().device[0].physical == 0
        assert len(e.store.pages(e._requests[request].samples[0].id)) == 6
        e.drop_device_pages()
        e.resume(request)
    assert outputs[request].token_ids == expected
    assert e.stats().decode.host_pages_loaded > 0
    drained(e)


def test_decode_writes_to_shared_pages_are_refused_and_reported():
    """A27: a plan that aims at a shared page is stopped inside the jitted step; the page keeps its bytes."""
    e = engine()
    base = prompt(8, seed=1)
    e.generate(base, GREEDY)
    request = e.submit(prompt(10, seed=2, start=base), GREEDY)
    e.step()
    row = e._requests[request].samples[0]
    host = e.store.pages(row.id)[:2]
    before = [page_bytes(e, int(p)) for p in host]
    device = e.runner.accounts[0].pages(row.row_index)[:2]
    kv = np.asarray(e.runner.pools[0].kv_pages)[:, device].copy()
    row.committed_kv_tokens = 5  # a fault of the host: the next token would land in a shared page
    with pytest.raises(IntegrityError, match="shared"):
        e.step()
    assert np.array_equal(np.asarray(e.runner.pools[0].kv_pages)[:, device], kv)
    for page, old in zip(host, before, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(page_bytes(e, int(page)), old, strict=True))


def test_runway_pages_are_private():
    """A25: columns behind the shared prefix name different pages in every row."""
    e = engine()
    base = prompt(12, seed=1)
    e.generate(base, GREEDY)
    for i in range(3):
        e.submit(prompt(14, seed=20 + i, start=base), GREEDY)
    e.step()
    account = e.runner.accounts[0]
    tables = [account.pages(r.row_index) for r in e.scheduler.running]
    assert all((t[:3] == tables[0][:3]).all() for t in tables)
    tails = np.concatenate([t[3:] for t in tables])
    assert len(np.unique(tails)) == len(tails)
    assert (account.refs[tails] == 1).all()
    run(e)
    drained(e)


def test_host_rows_keep_shared_and_private_pages_apart():
    """A9, A11: shared pages, private pages, combined view, shared tokens, private start."""
    e = engine()
    base = prompt(8, seed=1)
    e.generate(base, GREEDY)
    cached = index_of(e).lookup(base, e.namespace()).page_ids.tolist()
    request = e.submit(prompt(10, seed=2, start=base), GREEDY)
    e.step()
    row = e.store.row(e._requests[request].samples[0].id)
    assert list(row.shared_pages) == cached
    assert row.shared_prefix_tokens == 8
    assert row.private_start == 8
    combined = e.store.pages(e._requests[request].samples[0].id).tolist()
    assert combined == [*row.shared_pages, *row.private_pages]
    assert len(combined) == 4  # 10 + 6 tokens
    run(e)


def test_one_wave_computes_its_common_prefix_once():
    """X1, H15: three requests of one wave; the two others wait for the first and hit its pages."""
    base = prompt(16, seed=1)
    prompts = [prompt(19, seed=30 + i, start=base) for i in range(3)]
    expected = [o.token_ids for o in engine(on=False).generate(prompts, GREEDY)]
    e = engine()
    outs = e.generate(prompts, GREEDY)
    assert [o.token_ids for o in outs] == expected
    assert [o.cached_tokens for o in outs] == [0, 16, 16]
    assert e.stats().prefill.computed_tokens == 19 + 3 + 3
    drained(e)


def test_a_row_waits_for_the_deepest_page_that_another_computes_and_for_no_other():
    """X1: three pages cached; one row computes a fourth; who shares that one waits, who goes another way does not."""
    base, more = prompt(12, seed=1), prompt(16, seed=2, start=prompt(12, seed=1))
    other = prompt(16, seed=3, start=base)
    e = engine()
    e.generate(base, GREEDY)
    requests = [e.submit(prompt(18, seed=30 + i, start=start), GREEDY) for i, start in enumerate([more, more, other])]
    outputs: dict[int, Any] = {}
    while e.has_work:
        outputs.update((o.request_id, o) for o in e.step())
    assert [outputs[r].cached_tokens for r in requests] == [12, 16, 12]
    assert e.stats().requests.wave_waits == 1
    drained(e)


def test_without_in_wave_sharing_every_row_computes_for_itself_and_duplicates_stay_private():
    """H14, H15: two cold requests build the same pages; nothing leaks."""
    base = prompt(16, seed=1)
    prompts = [prompt(19, seed=30 + i, start=base) for i in range(3)]
    expected = [o.token_ids for o in engine(on=False).generate(prompts, GREEDY)]
    e = engine(share_in_wave=False)
    outs = e.generate(prompts, GREEDY)
    assert [o.token_ids for o in outs] == expected
    assert [o.cached_tokens for o in outs] == [0, 0, 0]
    assert e.generate(prompts[0], GREEDY)[0].cached_tokens == 16
    drained(e)


@dataclasses.dataclass(frozen=True, eq=False)
class SkipsALayer(Llama):
    """A user's model whose layer 1 keeps no pages."""

    def forward(self, params: Any, tokens: Any, positions: Any, kv: Any, attend: Any) -> Any:
        def skipping(kv: Any, layer: int, q: Any, k: Any, v: Any, **options: Any) -> Any:
            return (q, kv) if layer == 1 else attend(kv, layer, q, k, v, **options)

        return super().forward(params, tokens, positions, kv, skipping)


def test_a_model_that_skips_a_layer_runs_cold_with_a_stable_reason():
    """B9, B10, A5: gap in the layer registry."""
    base = model()
    fields = {f.name: getattr(base, f.name) for f in dataclasses.fields(base)}
    config = EngineConfig(
        page_size=4, num_device_pages=16, num_host_pages=16, max_context=64, max_prefill_tokens=32,
        enable_prefix_reuse=True, compilation_cache=False,
    )  # fmt: skip
    e = Engine(SkipsALayer(**fields), config)
    capability = e.get_prefix_reuse_capability()
    assert (capability.supported, capability.reason) == (False, "incomplete-paged-layer-registry")
    assert "[1]" in capability.detail
    tokens = prompt(9)
    assert e.generate(tokens, GREEDY)[0].token_ids == e.generate(tokens, GREEDY)[0].token_ids
    stats = e.stats()
    assert (stats.active, stats.disabled_reason, stats.prefill.hits) == (False, "incomplete-paged-layer-registry", 0)


@dataclasses.dataclass(frozen=True, eq=False)
class RepeatsALayer(Llama):
    """A user's model whose layer 0 attends twice."""

    def forward(self, params: Any, tokens: Any, positions: Any, kv: Any, attend: Any) -> Any:
        def twice(kv: Any, layer: int, q: Any, k: Any, v: Any, **options: Any) -> Any:
            if layer == 0:
                _, kv = attend(kv, layer, q, k, v, **options)
            return attend(kv, layer, q, k, v, **options)

        return super().forward(params, tokens, positions, kv, twice)


def test_a_model_that_attends_twice_in_a_layer_is_reported_too():
    """B9: duplicate in the layer registry."""
    base = model()
    fields = {f.name: getattr(base, f.name) for f in dataclasses.fields(base)}
    capability = get_prefix_reuse_capability(RepeatsALayer(**fields), page_size=4)
    assert (capability.supported, capability.reason) == (False, "incomplete-paged-layer-registry")
    assert "more than once: [0]" in capability.detail


def test_quantised_pages_are_refused_at_start():
    """H34: not supported, so not cast either."""
    base = model()
    fields = {f.name: getattr(base, f.name) for f in dataclasses.fields(base)}

    class Quantised(Llama):
        @property
        def kv_groups(self) -> Any:
            return tuple(dataclasses.replace(g, dtype=jnp.int8) for g in super().kv_groups)

    with pytest.raises(ConfigError, match="quantised"):
        Engine(Quantised(**fields))


@pytest.mark.parametrize("kind", KINDS)
def test_last_logits_of_a_mixed_batch_are_those_of_each_row_alone(kind: str, monkeypatch: pytest.MonkeyPatch):
    """B14, A17: picked by query offsets; the batch computes exactly the suffix tokens."""
    base = prompt(8, seed=1)
    rows = [prompt(5, seed=2), prompt(11, seed=3, start=base), base, prompt(13, seed=4, start=base[:4])]
    e = engine(kind)
    e.generate(base, GREEDY)
    logits: list[np.ndarray] = []
    real = e.runner.prefill

    def spy(chunks: Any, sequences: Any) -> Any:
        outputs = real(chunks, sequences)
        logits.append(np.asarray(outputs.logits))
        return outputs

    monkeypatch.setattr(e.runner, "prefill", spy)
    before = e.stats().prefill.computed_tokens
    e.generate(rows, SamplingParams(max_tokens=1))
    assert e.stats().prefill.computed_tokens - before == 5 + 3 + 1 + 9
    assert len(logits) == 1
    for got, tokens in zip(logits[0], rows, strict=True):
        np.testing.assert_allclose(got, cold(tokens, kind)[-1], atol=1e-4)


def test_layers_with_windows_and_full_layers_agree_on_one_hit_length():
    """H17: window 8, page 4; B shares 20 tokens and hits 5 pages, C shares 32 and hits 8."""
    e = engine("hybrid")
    a = prompt(32, seed=1)
    e.generate(a, GREEDY)
    for start, own, pages in ((20, 5, 5), (32, 4, 8)):
        tokens = prompt(start + own, seed=9, start=a[:start])
        logits, first = e.score(tokens, reuse=True)
        assert first == 4 * pages
        np.testing.assert_allclose(logits, cold(tokens, "hybrid")[first:], atol=1e-4)


@pytest.mark.parametrize("sharing", [True, False])
def test_errors_do_not_grow_along_a_chain_of_hits(sharing: bool):
    """H33: a prefix of 1..12 pages, each built on the previous hit; cold = cold is the control.

    With shared device pages a hit reads what is resident; without, every page has been to the host and back.
    """
    e = engine("hybrid", decode_page_sharing=sharing)
    tokens = prompt(50, seed=3)
    reference = cold(tokens, "hybrid")
    assert np.array_equal(e.score(tokens), e.score(tokens))
    for pages in range(1, 13):
        logits, first = e.score(tokens[: 4 * pages + 2], reuse=True)
        assert first == 4 * (pages - 1)
        np.testing.assert_allclose(logits, reference[first : 4 * pages + 2], atol=1e-4)
    assert (e.stats().decode.host_pages_loaded > 0) == (not sharing)
    e.clear_cache()
    e.generate(tokens, SamplingParams(max_tokens=1))  # now pages leave together, in a bundle
    for _ in range(2):
        logits, first = e.score(tokens, reuse=True)
        assert first == 48
        np.testing.assert_allclose(logits, reference[first:], atol=1e-4)


def test_pages_in_bfloat16_come_back_from_the_host_with_the_same_bits():
    """H33: warm equals warm again, and cold within a step of the largest logits."""
    half = tiny_llama(dtype=jnp.bfloat16)
    config = EngineConfig(
        page_size=4, num_device_pages=48, num_host_pages=48, max_rows=4, max_context=64, max_prefill_tokens=64,
        decode_page_sharing=False, poison=True, compilation_cache=False, enable_prefix_reuse=True,
    )  # fmt: skip
    e = Engine(half, config)
    tokens = prompt(46, seed=3)
    whole = e.score(tokens)
    assert np.array_equal(e.score(tokens), whole)
    e.generate(tokens, SamplingParams(max_tokens=1))
    loaded = e.stats().decode.host_pages_loaded
    first, second = (e.score(tokens, reuse=True) for _ in range(2))
    assert first[1] == second[1] == 44
    assert e.stats().decode.host_pages_loaded - loaded == 2 * 11
    assert np.array_equal(first[0], second[0])
    np.testing.assert_allclose(first[0], whole[44:], atol=2**-6)  # one step of bfloat16 between 2 and 4


def test_equal_geometry_has_one_store_identity():
    """B10."""
    assert engine().capability.store_identity == engine(seed=1).capability.store_identity
    assert engine().capability.store_identity != engine(page_size=8).capability.store_identity


@pytest.mark.parametrize("fill", [float("nan"), float("inf")])
def test_contents_of_unowned_slots_never_matter(fill: float):
    """H19, H20: NaN and Inf in every unowned slot give the same bits as zeros; padding writes nowhere."""
    prompts = [prompt(n, seed=n) for n in (1, 5, 9)]
    results = []
    for value in (0.0, fill):
        e = engine("hybrid", poison=False)
        e.runner.pools = tuple(p.replace(kv_pages=jnp.full_like(p.kv_pages, value)) for p in e.runner.pools)
        tokens = [o.token_ids for o in e.generate(prompts, GREEDY)]
        logits = [e.score(p) for p in prompts]
        assert all(np.isfinite(x).all() for x in logits)
        results.append((tokens, logits))
        untouched = np.asarray(e.runner.pools[0].kv_pages)[:, -8:]  # pages are taken from the front
        assert np.array_equal(untouched, np.full_like(untouched, value), equal_nan=True)
    assert results[0][0] == results[1][0]
    assert all(np.array_equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


def test_prefill_is_chunked_at_page_borders_and_every_page_is_reused():
    """B21, H21: chunk 8; n in 17..24, cached 0..16; the second run reuses floor(n / 4) pages."""
    tokens = prompt(24, seed=7)
    e = engine(max_prefill_tokens=8, max_context=64)
    for n in range(17, 25):
        for cached in (0, 4, 8, 12, 16):
            e.clear_cache()
            if cached:
                e.generate(np.append(tokens[:cached], 2), SamplingParams(max_tokens=1))
            logits, first = e.score(tokens[:n], reuse=True)
            assert first == cached
            np.testing.assert_allclose(logits, cold(tokens[:n])[cached:], atol=1e-4)
            assert e.generate(tokens[:n], SamplingParams(max_tokens=1))[0].cached_tokens == min(n // 4 * 4, n - 1)
        for cached in (0, 4):  # several chunks: the earlier ones of the same request are no hits
            out = e.generate(prompt(n, seed=n, start=tokens[:cached]), SamplingParams(max_tokens=1))[0]
            assert (out.cached_tokens, out.computed_tokens) == (cached, n - cached)


def test_prompt_lengths_around_page_borders_hit_floor_n_over_p():
    """H06: lengths 1..13, three times each."""
    for n in range(1, 14):
        e = engine()
        tokens = prompt(n, seed=n)
        outs = [e.generate(tokens, GREEDY)[0] for _ in range(3)]
        assert outs[0].cached_tokens == 0
        assert [o.cached_tokens for o in outs[1:]] == [min(n // 4 * 4, n - 1)] * 2
        assert outs[0].token_ids == outs[1].token_ids == outs[2].token_ids
        assert all(o.computed_tokens >= 1 for o in outs)
        drained(e)
