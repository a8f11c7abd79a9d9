"""Whole pages out of a store and into it: every layer of every group, or nothing at all (B8, B15, B18)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from store_helpers import GROUPS, MODEL, PAGE, contents, fill, geometry, make_store, payload, seq

from pallas_kernels.layout import LayerGroup
from prefix_reuse.errors import (
    GeometryError,
    HostPagesExhausted,
    IntegrityError,
    InvalidRequestError,
    PrefixReuseError,
    SharedPageWriteError,
    TransferError,
    UnknownRequestError,
)
from prefix_reuse.geometry import StoreGeometry
from prefix_reuse.host_archive import PageExport, StoredPrefix
from prefix_reuse.host_store import HostPageStore, PrefixRequest
from prefix_reuse.index import PrefixIndex

NS = MODEL.digest


def admit(store: HostPageStore, name: Any, tokens: np.ndarray, capacity: int = 0, filled: int | None = None):
    """A live row with random bytes in its private pages; the last `filled` tokens' tail page is partial."""
    request = PrefixRequest(name, tokens, capacity or len(tokens), NS)
    (got,) = store.allocate_pages_for_sequences_with_prefix([request])
    count = len(tokens) if filled is None else filled
    used = got.private_pages[: -(-count // PAGE) - len(got.shared_pages)]
    store.begin_copy(used)
    slots = np.minimum(count - got.private_start - PAGE * np.arange(len(used)), PAGE)
    store.finish_copy(used, [payload(int(p)) for p in used], slots)
    store.set_context(name, count)
    return got


def bytes_of(pages: PageExport) -> list[list[bytes]]:
    return [[np.asarray(part).tobytes() for part in page] for page in pages.payloads]


def unchanged(store: HostPageStore, error: type[Exception], call: Any) -> str:
    """`call` raises `error` and leaves every count, row, entry and payload as it was. Returns the message."""
    before = store.snapshot_counters()
    with pytest.raises(error) as caught:
        call()
    assert store.snapshot_counters() == before
    store.check_integrity()
    return str(caught.value)


def test_one_page_id_gives_every_layer_of_every_group():
    """B8: exported pages go into private pages of another store and are the same bytes there."""
    one, two = make_store(), make_store()
    pages = fill(one, seq(1, 12))
    before = one.snapshot_counters()
    exported = one.export(pages)
    assert one.snapshot_counters() == before
    assert [p.shape for p in exported.payloads[0]] == [part.shape for part in geometry().parts]
    target = admit(two, "row", seq(1, 12)).private_pages
    two.import_pages(target, exported)
    assert bytes_of(two.export(target)) == bytes_of(exported)
    assert two.publish("row", 12, NS).tolist() == target.tolist()
    two.check_integrity()


def test_imported_bytes_are_the_stores_own():
    """H30: what the caller does to its arrays afterwards changes nothing."""
    store = make_store()
    page = admit(store, "row", seq(1, 4)).private_pages
    mine = payload(7)
    store.import_pages(page, PageExport(geometry(), (mine,), (PAGE,)))
    mine[0][:] = 0
    assert not np.array_equal(store.read(int(page[0]))[0], mine[0])


@pytest.mark.parametrize("bad", [[99], [-1], [0, 0]])
def test_bad_ids_are_refused(bad: list[int]):
    """B8, H12: ids first."""
    store = make_store()
    fill(store, seq(1, 8))
    unchanged(store, InvalidRequestError, lambda: store.export(bad))
    pages = PageExport(geometry(), tuple(payload(abs(i)) for i in bad), (PAGE,) * len(bad))
    unchanged(store, InvalidRequestError, lambda: store.import_pages(bad, pages))


def test_pages_that_are_not_whole_are_not_exported():
    """B8: no bytes, a copy in flight, a group too few, a free page."""
    store = make_store()
    (got,) = store.allocate_pages_for_sequences_with_prefix([PrefixRequest("row", seq(1, 12), 12, NS)])
    first, second, third = got.private_pages.tolist()
    store.begin_copy([first, second])
    unchanged(store, TransferError, lambda: store.export([first]))
    store.finish_copy([first, second], [payload(1), payload(2)[:1]])
    assert "2 arrays" in unchanged(store, TransferError, lambda: store.export([first, second]))
    for page in (third, 20):
        unchanged(store, TransferError, lambda page=page: store.export([first, page]))
    unbound = make_store(bound=False)
    fill(unbound, seq(1, 4))
    unchanged(unbound, GeometryError, lambda: unbound.export([0]))


def test_a_changed_byte_is_not_exported_in_integrity_mode():
    """N6."""
    store = make_store(integrity=True)
    pages = fill(store, seq(1, 8))
    store.payloads[pages[1]][0].reshape(-1)[3] += 1
    unchanged(store, IntegrityError, lambda: store.export(pages))


def misfits() -> list[PageExport]:
    good, other = payload(1), (LayerGroup((0, 2), 1, 4, np.float32), GROUPS[1])
    return [
        PageExport(geometry(), (good, good[:1]), (PAGE, PAGE)),
        PageExport(geometry(), (good, (good[0], good[1].astype(np.float32))), (PAGE, PAGE)),
        PageExport(geometry(), (good, (good[0][:1], good[1])), (PAGE, PAGE)),
        PageExport(geometry(), (good, good), (PAGE, PAGE + 1)),
        PageExport(geometry(), (good, (None, good[1])), (PAGE, PAGE)),
        PageExport(StoreGeometry.of(other, PAGE), (payload(1, other),) * 2, (PAGE, PAGE)),
        PageExport(StoreGeometry(PAGE, geometry().parts, "S,K,2,D"), (good, good), (PAGE, PAGE)),
        PageExport(StoreGeometry.of(GROUPS, 8), (good, good), (PAGE, PAGE)),
    ]


@pytest.mark.parametrize("i", range(len(misfits())))
def test_nothing_is_written_unless_everything_fits(i: int):
    """B8: group count, dtype, shape, slots, geometry and layout are checked before the first write, the good page included."""
    store = make_store()
    pages = admit(store, "row", seq(1, 8)).private_pages
    unchanged(store, TransferError, lambda: store.import_pages(pages, misfits()[i]))


def test_imports_aim_at_private_pages_only():
    """A13, B15: shared, indexed, foreign and busy pages are refused."""
    store = make_store()
    indexed = fill(store, seq(1, 8))
    private = admit(store, "row", np.append(seq(1, 8), seq(50, 57))).private_pages.tolist()
    two = PageExport(geometry(), (payload(1), payload(2)), (PAGE, PAGE))
    for target in (indexed, [private[0], indexed[0]], [private[0], 20]):
        unchanged(store, SharedPageWriteError, lambda target=target: store.import_pages(target, two))
    unchanged(store, InvalidRequestError, lambda: store.import_pages(private[:1], two))
    store.begin_copy(private[1:])
    unchanged(store, SharedPageWriteError, lambda: store.import_pages(private, two))


def test_a_row_comes_back_as_it_was():
    """B18: context, capacity and bytes, the partial tail included; in the same store its indexed pages are attached again."""
    store = make_store()
    fill(store, seq(1, 8))
    admit(store, "row", np.append(seq(1, 8), seq(50, 55)), capacity=24, filled=17)
    saved, record = store.checkpoint("row"), store.row("row")
    assert (saved.context_length, len(saved.pages), saved.pages.slots[-1]) == (17, 5, 1)
    store.release("row")
    for target in (store, make_store()):
        row = target.restore(saved, "again")
        assert (row.context_length, row.capacity_tokens) == (record.context_length, record.capacity_tokens)
        assert row.shared_prefix_tokens == (8 if target is store else 0)
        assert bytes_of(target.checkpoint("again").pages) == bytes_of(saved.pages)
        target.check_integrity()
        assert target.publish("again", 14, NS).tolist() == row.logical_pages[:3].tolist()
        target.release("again")
        target.check_integrity()
    assert len(contents(store)) == 3


def test_a_row_whose_bytes_have_not_landed_has_no_checkpoint():
    store = make_store()
    admit(store, "row", seq(1, 8), capacity=16, filled=6)
    store.set_context("row", 8)
    assert "holds 2 of 4" in unchanged(store, TransferError, lambda: store.checkpoint("row"))
    store.set_context("row", 12)
    unchanged(store, TransferError, lambda: store.checkpoint("row"))
    unchanged(store, UnknownRequestError, lambda: store.checkpoint("nobody"))


def test_a_restore_that_does_not_fit_takes_nothing():
    """B18, A12: no room, a live id, another geometry."""
    store = make_store(6)
    admit(store, "row", seq(1, 12), capacity=16)
    saved = store.checkpoint("row")
    unchanged(store, InvalidRequestError, lambda: store.restore(saved, "row"))
    unchanged(store, HostPagesExhausted, lambda: store.restore(saved, "twin"))
    other = HostPageStore(16, PAGE, index=PrefixIndex(PAGE))
    other.bind(StoreGeometry.of(GROUPS[:1], PAGE))
    unchanged(other, PrefixReuseError, lambda: other.restore(saved, "row"))
    assert not other.has_row("row")


def prefixes(*prompts: np.ndarray) -> list[StoredPrefix]:
    return [StoredPrefix(NS, p, [payload(int(p[4 * i])) for i in range(len(p) // PAGE)]) for p in prompts]


def test_inserted_prefixes_share_their_beginnings():
    """B8, A8: each page is kept once; known pages keep theirs; nobody holds them afterwards but the index."""
    store = make_store(integrity=True)
    known = fill(store, seq(1, 8))
    before = contents(store)
    branches = prefixes(seq(1, 16), np.append(seq(1, 12), seq(50, 57)), seq(200, 203))
    assert store.insert(branches) == 5
    assert len(contents(store)) == 7
    assert before.items() <= contents(store).items()
    assert store.index is not None
    assert store.index.peek(seq(1, 16), NS).page_ids[:2].tolist() == known
    stats = store.stats()
    assert (stats.index_only_pages, stats.reserved_pages, stats.imported_pages) == (7, 0, 5)
    assert stats.ref_increments == stats.ref_decrements
    store.check_integrity()
    assert store.insert(branches) == 0
    store.check_integrity()


def test_inserted_pages_are_checked_like_published_ones():
    """N6: one flipped byte is reported with its page, layer group and half."""
    store = make_store(integrity=True)
    store.insert(prefixes(seq(1, 8)))
    assert store.index is not None
    first, second = store.index.peek(seq(1, 8), NS).page_ids.tolist()
    store.payloads[second][1].view(np.uint8).reshape(-1)[0] ^= 1
    store.read(first)
    with pytest.raises(IntegrityError, match=rf"host page {second}, group 1, layer 0 of the group, K"):
        store.read(second)


def test_an_insert_evicts_only_when_it_may():
    store = make_store(4)
    fill(store, seq(1, 16))
    unchanged(store, HostPagesExhausted, lambda: store.insert(prefixes(seq(50, 57)), may_evict=False))
    assert store.insert(prefixes(seq(50, 57))) == 2
    assert store.index is not None
    assert store.index.peek(seq(1, 16), NS).num_pages == 2
    unchanged(store, HostPagesExhausted, lambda: store.insert(prefixes(seq(300, 319))))
    unchanged(store, InvalidRequestError, lambda: store.insert([StoredPrefix(NS, seq(1, 7), [payload(1)])]))
    unchanged(store, TransferError, lambda: store.insert([StoredPrefix(NS, seq(1, 4), [payload(1)[:1]])]))
    store.check_integrity()


def test_an_insert_respects_max_entries():
    store = make_store(12, max_entries=3)
    assert store.insert(prefixes(seq(1, 8), seq(101, 116))) == 3  # two, and one of four beside them
    store.check_integrity()


def test_a_fault_at_any_step_leaves_everything_as_it_was():
    """A12: export, import, checkpoint, restore, insert: full counters before = after; a retry works."""

    def build() -> tuple[HostPageStore, Any]:
        store = make_store(10, integrity=True)
        fill(store, seq(1, 8))
        fill(store, seq(101, 112))
        admit(store, "row", np.append(seq(1, 8), seq(50, 53)), capacity=12)
        return store, store.checkpoint("row")

    one = PageExport(geometry(), (payload(5),), (PAGE,))
    actions: dict[str, Any] = {
        "export": lambda store, saved: store.export(store.pages("row")),
        "import": lambda store, saved: store.import_pages(store.pages("row")[2:], one),
        "checkpoint": lambda store, saved: store.checkpoint("row"),
        "restore": lambda store, saved: store.restore(saved, "twin"),
        "insert": lambda store, saved: store.insert(prefixes(np.append(seq(1, 12), seq(70, 85)), seq(1, 16))),
    }
    steps: dict[str, set[str]] = {name: set() for name in actions}
    for name, action in actions.items():
        for at in range(1, 20):
            store, saved = build()
            before, left = store.snapshot_counters(), [at]

            def fault(step: str, left: list[int] = left) -> None:
                left[0] -= 1
                if left[0] == 0:
                    raise RuntimeError(step)

            store._fault = fault
            try:
                action(store, saved)
            except RuntimeError as error:
                steps[name].add(str(error))
                assert store.snapshot_counters() == before
                store._fault = None
                store.check_integrity()
                action(store, saved)
                store.check_integrity()
            else:
                break
    assert steps == {
        "export": {"export"},
        "import": {"import"},
        "checkpoint": {"export"},
        "restore": {"lease", "evict", "allocate", "restore"},
        "insert": {"lease", "evict", "allocate", "insert"},
    }
