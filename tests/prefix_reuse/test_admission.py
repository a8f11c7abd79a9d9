"""Admission is planned row by row: the same decisions as planning everything again for each row, in linear time (A12, A23)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from engine_helpers import GREEDY, check, drained, engine, prompt

from prefix_reuse import Engine, SamplingParams, scheduler
from prefix_reuse.admission import Admission, AdmissionBatch
from prefix_reuse.device_plan import DevicePlan, DevicePlanner, PageDemand
from prefix_reuse.device_pool import DevicePool
from prefix_reuse.sequence import Sequence as Row
from prefix_reuse.wave import Wave

ONE = SamplingParams(max_tokens=1, ignore_eos=True)


def naive_plan(demands: Sequence[PageDemand], pool: DevicePool, share: bool) -> DevicePlan:
    """All rows at once, pages looked up one by one."""
    row_pages: list[list[int]] = []
    loads: list[tuple[int, int]] = []
    mirrors: list[tuple[int, int]] = []
    fresh = itertools.count()
    attached = set()
    copies = duplicates = residents = 0
    for demand in demands:
        pages = []
        for column in range(demand.first, len(demand.host_pages)):
            host_page, sharable = int(demand.host_pages[column]), column < demand.num_sharable
            resident = pool.resident_page(host_page)
            before = [i for h, i in mirrors if h == host_page]
            if share and sharable and resident is not None:
                residents += 1
                pages.append(resident)
                attached |= set() if pool.is_counted(resident) else {resident}
            elif share and sharable and before:
                duplicates += 1
                pages.append(-1 - before[0])
            else:
                place = next(fresh)
                loads.append((host_page, place))
                mirrors += [(host_page, place)] if share and sharable else []
                copies += sharable
                pages.append(-1 - place)
        pages += [-1 - next(fresh) for _ in range(demand.num_private)]
        row_pages.append(pages)
    arrays = tuple(np.array(pages, np.int64) for pages in row_pages)
    counts = next(fresh), copies + len(attached), duplicates, residents
    return DevicePlan(tuple(demands), arrays, tuple(loads), tuple(mirrors), *counts)


def fits(pool: DevicePool, plan: DevicePlan) -> bool:
    """By the pool's own arrays."""
    attached = sum(1 for page in range(pool.num_pages) if pool.attached[page] and not pool.kept[page])
    extra = min(pool.chunk_pages, int(pool.extra.sum()) + sum(d.extra for d in plan.demands))
    free = pool.num_pages - int(pool.reserve.sum()) - attached - extra
    return plan.num_attachments + sum(d.num_owned for d in plan.demands) <= free


def same(plan: DevicePlan, other: DevicePlan) -> bool:
    a, b = vars(plan) | {"row_pages": None}, vars(other) | {"row_pages": None}
    return a == b and all(map(np.array_equal, plan.row_pages, other.row_pages))


class NaiveBatch(AdmissionBatch):
    """Plans everything again for each row that is added."""

    def __init__(self, accounts: Sequence[DevicePool], share: bool):
        super().__init__(accounts, share)
        self.share = share

    def plans(self) -> list[DevicePlan]:
        return [
            naive_plan([a.demands[group] for a in self.admissions], account, self.share)
            for group, account in enumerate(self._accounts)
        ]

    def try_add(self, *admissions: Admission) -> bool:
        self.admissions += admissions
        if all(map(fits, self._accounts, self.plans())):
            return True
        del self.admissions[len(self.admissions) - len(admissions) :]
        return False

    def add(self, *admissions: Admission) -> None:
        self.admissions += admissions

    def undo(self, mark: Any) -> None:
        del self.admissions[mark[0][0] :]


def random_demand(rng: np.random.Generator) -> PageDemand:
    """Of host pages 0..29, each at most once in a row."""
    n = int(rng.integers(0, 7))
    host_pages, sharable = rng.permutation(30)[:n], int(rng.integers(0, n + 1))
    if rng.random() < 0.4:
        first, reserve = int(rng.integers(0, n + 1)), int(rng.integers(0, 6))
        return PageDemand(host_pages, sharable, 0, first, reserve, int(rng.integers(0, 5)), int(rng.integers(0, 9)))
    return PageDemand(host_pages, sharable, int(rng.integers(0, 4)))


def random_pool(rng: np.random.Generator) -> DevicePool:
    """Rows, shared pages, and pages that are only resident."""
    pool = DevicePool(60, 4, 12, 20, chunk_pages=int(rng.integers(0, 4)))
    for row in range(5):
        n, shared = int(rng.integers(1, 6)), 0
        pages = pool.allocate(n)
        if rng.random() < 0.5:
            host_pages = [h for h in rng.permutation(30)[:n].tolist() if h not in pool.resident]
            pool.attach(host_pages, pages[: len(host_pages)])
            shared = len(host_pages)
        pool.bind(row, pages, shared)
    for row in range(2):
        pool.release(row)
    return pool


@pytest.mark.parametrize("seed", range(60))
def test_decisions_and_plans_are_those_of_planning_everything_again(seed: int):
    """Groups of rows that fit or not, any state of the pools, with and without M3; what does not fit leaves nothing."""
    rng = np.random.default_rng(seed)
    pools, share = [random_pool(rng) for _ in range(2)], bool(seed % 3)
    batch, naive = AdmissionBatch(pools, share), NaiveBatch(pools, share)
    answers = set()
    for _ in range(12):
        size = int(rng.integers(1, 4))
        some = [Admission(None, (random_demand(rng), random_demand(rng))) for _ in range(size)]  # type: ignore[arg-type]
        before, mark = batch.plans(), batch.mark()
        answer = batch.try_add(*some)
        assert answer == naive.try_add(*some)
        answers.add(answer)
        if not answer:
            assert all(map(same, batch.plans(), before))
            assert batch.mark() == mark
        elif rng.random() < 0.2:  # the host has no room for them
            batch.undo(mark)
            del naive.admissions[len(naive.admissions) - size :]
            assert all(map(same, batch.plans(), before))
        assert all(map(same, batch.plans(), naive.plans()))
        assert [(p.pages_needed, p.extra) for p in batch._planners] == [
            (p.num_attachments + sum(d.num_owned for d in p.demands), sum(d.extra for d in p.demands))
            for p in naive.plans()
        ]
    assert answers == {True, False}


def workload(e: Engine, seed: int) -> tuple[list[Any], Any]:
    """Random requests over few beginnings; who was in after each step, the outputs, and the statistics."""
    rng = np.random.default_rng(seed)
    bases = [prompt(16, seed=seed + i) for i in range(3)]
    seen: list[Any] = []
    ids: list[int] = []
    for step in range(40):
        for _ in range(int(rng.integers(0, 4)) if step < 10 else 0):
            length = int(rng.integers(1, 25))
            tokens = prompt(32, seed=int(rng.integers(0, 3)), start=bases[int(rng.integers(0, 3))])[:length]
            params = SamplingParams(
                max_tokens=int(rng.integers(1, 9)), ignore_eos=True, n=int(rng.choice([1, 1, 1, 2, 3]))
            )
            ids.append(e.submit(tokens, params))
        if rng.random() < 0.2:
            e.drop_device_pages()
        if rng.random() < 0.2 and (live := [i for i in ids if i in e._requests]):
            chosen = int(rng.choice(live))
            e.hold(chosen)
            e.resume(chosen)
        outputs = [(o.request_id, o.cached_tokens, [s.token_ids for s in o.samples]) for o in e.step()]
        check(e)
        seen.append((outputs, [(r.id, r.row, r.state, r.shared_tokens) for r in e.scheduler.running]))
    assert not e.has_work
    stats = e.stats()
    return seen, (stats.requests, stats.prefill, stats.decode, stats.device, stats.host)


@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        pytest.param("llama", 1, marks=pytest.mark.slow),
        ("llama", 2),
        pytest.param("hybrid", 3, marks=pytest.mark.slow),
        ("hybrid", 4),
    ],
)
def test_random_workloads_run_as_with_planning_everything_again(kind: str, seed: int, monkeypatch: pytest.MonkeyPatch):
    """Pools and rows that run short: the same rows in after every step, the same outputs and statistics."""
    sizes: dict[str, Any] = {
        "num_device_pages": 24,
        "num_host_pages": 28,
        "max_rows": 3,
    }  # programs of the engine machine
    now = workload(engine(kind, **sizes), seed)
    monkeypatch.setattr(scheduler, "AdmissionBatch", NaiveBatch)
    e = engine(kind, **sizes)
    assert workload(e, seed) == now
    drained(e)


@pytest.mark.parametrize("groups", [1, 2])
def test_each_row_is_planned_once(groups: int, monkeypatch: pytest.MonkeyPatch):
    """n requests that come in together, and one that finds no row: n plans in each layer group, not n (n + 1) / 2."""
    calls = 0

    def counted(self: DevicePlanner, demand: PageDemand, add: Callable[..., None] = DevicePlanner.add) -> None:
        nonlocal calls
        calls += 1
        add(self, demand)

    monkeypatch.setattr(DevicePlanner, "add", counted)
    e = engine(["llama", "hybrid"][groups - 1], num_device_pages=96, num_host_pages=96, max_rows=16)
    planned = []
    for n in (4, 8, 16):
        ids = [e.submit(prompt(9, seed=100 * n + i), GREEDY) for i in range(n)]
        calls = 0
        e.scheduler.admit()
        assert len(e.scheduler.running) == n
        planned.append(calls)
        for request in ids:
            e.cancel(request)
        e.step()
    assert planned == [4 * groups, 8 * groups, 16 * groups]
    drained(e)


def test_a_row_that_the_host_has_no_room_for_leaves_no_plan():
    """It fits the device, so it was planned; it waits, and those before it come in."""
    e = engine(num_host_pages=12, num_device_pages=48)
    e.submit(prompt(17, seed=1), GREEDY)
    e.submit(prompt(25, seed=2), GREEDY)
    e.scheduler.admit()
    assert [len(e.scheduler.running), len(e.scheduler.waiting)] == [1, 1]
    assert e.runner.accounts[0].stats().logical == 6
    check(e)


def test_a_hit_that_differs_from_what_was_looked_at_is_planned_as_it_is(monkeypatch: pytest.MonkeyPatch):
    e = engine(num_device_pages=24, num_host_pages=28, max_rows=3)
    base = prompt(8, seed=1)
    e.generate(base, ONE)
    tokens = prompt(13, seed=2, start=base)
    want = engine(on=False, num_device_pages=24, num_host_pages=28, max_rows=3).generate(tokens, GREEDY)[0].token_ids
    monkeypatch.setattr(e.scheduler, "cached_pages", lambda row: np.zeros(0, np.int32))
    out = e.generate(tokens, GREEDY)[0]
    assert (out.token_ids, out.cached_tokens) == (want, 8)
    drained(e)


@pytest.mark.parametrize("seed", range(8))
def test_a_wave_is_the_rows_that_will_publish_the_next_page(seed: int):
    """X1: rows that come later, any ends, rows that publish less than their prompt, pages alike in the middle only."""
    rng = np.random.default_rng(seed)
    size = 2

    def row(length: int) -> Row:
        tokens = rng.integers(0, 2, length).astype(np.int32)
        return Row(0, 0, tokens, ONE, b"ns%d" % rng.integers(0, 2), reuse=bool(rng.random() < 0.9))

    def publishable(some: Row) -> int:
        return max(0, len(some.prompt) - some.stream)

    wave, rows = Wave(size, publishable), []
    answers = set()
    for _ in range(60):
        new = row(int(rng.integers(1, 10)))
        new.stream, new.offloaded_pages = int(rng.integers(0, 3)), int(rng.integers(0, 2))
        wave.add([new])
        rows.append(new)
        asks, cached = row(int(rng.integers(1, 10))), int(rng.integers(0, 4))
        end = (cached + 1) * size
        want = asks.reuse and len(asks.prompt) >= end
        want = want and any(
            other.reuse
            and other.namespace == asks.namespace
            and publishable(other) >= end
            and other.offloaded_pages < publishable(other) // size
            and np.array_equal(other.prompt[:end], asks.prompt[:end])
            for other in rows
        )
        assert wave.brings_next_page(asks, cached) == want
        answers.add(want)
    assert answers == {True, False}
