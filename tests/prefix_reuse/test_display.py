"""Pictures and tables show what is there."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from prefix_reuse import display
from prefix_reuse.index import PrefixIndex
from prefix_reuse.index_types import IndexRun


def run(start: int, pages: list[int], children: int = 0) -> IndexRun:
    return IndexRun(b"ns", start, np.zeros(0, np.int32), np.array(pages, np.int32), 0, 0, children)


def small_index(*, other: bool = False) -> PrefixIndex:
    """Two prompts that share two pages of two tokens, and on request one of another namespace."""
    index = PrefixIndex(page_size=2)
    index.commit([1, 2, 3, 4, 5, 6], np.array([0, 1, 2], np.int32), b"ns")
    index.commit([1, 2, 3, 4, 7, 8], np.array([0, 1, 3], np.int32), b"ns")
    if other:
        index.commit([1, 2, 3, 4, 7, 8], np.array([4, 5, 6], np.int32), b"other")
    return index


def test_tree_runs_finds_parents_and_keeps_lanes_apart() -> None:
    runs = display.tree_runs([run(0, [0, 1, 2], 2), run(3, [3]), run(3, [4, 5], 1), run(5, [6]), run(0, [9])])
    assert [r.parent for r in runs] == [None, 0, 0, 2, None]
    assert [r.lane for r in runs] == [0, 0, 1, 1, 2]
    for i, a in enumerate(runs):
        for b in runs[:i]:
            assert a.lane != b.lane or a.start >= b.end or b.start >= a.end


def test_tree_runs_reads_a_real_index() -> None:
    index = small_index(other=True)
    runs = display.tree_runs(index)
    by_pages = {r.page_ids: r for r in runs}
    assert set(by_pages) == {(0, 1), (2,), (3,), (4, 5, 6)}
    top = runs.index(by_pages[(0, 1)])
    assert by_pages[(2,)].parent == by_pages[(3,)].parent == top
    assert by_pages[(4, 5, 6)].parent is None


def test_index_picture_names_every_page(tmp_path) -> None:
    index = small_index()
    figure = display.plot_index(index, refs=np.array([1, 1, 0, 0]))
    (axes,) = figure.axes
    assert {text.get_text() for text in axes.texts} == {"0..1", "2", "3"}
    assert axes.get_title().startswith("4 indexed pages in 3 runs")
    figure.savefig(tmp_path / "index.png")


def test_empty_index_and_empty_page_table_can_be_drawn(tmp_path) -> None:
    display.plot_index([]).savefig(tmp_path / "a.png")
    display.plot_page_table(np.full((2, 4), -1)).savefig(tmp_path / "b.png")


def test_page_table_picture_frames_the_shared_pages(tmp_path) -> None:
    table = np.array([[7, 2, 5, -1], [7, 2, 9, -1], [-1, -1, -1, -1]], np.int32)
    figure = display.plot_page_table(table, labels=["a", "b", "c"])
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.texts] == ["7", "2", "5", "7", "2", "9"]
    assert [patch.get_linewidth() > 1 for patch in axes.patches] == [True, True, False, True, True, False]
    same_page = axes.patches[0].get_facecolor(), axes.patches[3].get_facecolor()
    assert same_page[0] == same_page[1]
    assert axes.get_title().startswith("6 logical pages on 4 physical pages")
    figure.savefig(tmp_path / "table.png")


@dataclass
class Part:
    pages_saved: int = 12345


@dataclass
class Stats:
    active: bool = True
    prefill: Part = field(default_factory=Part)
    device: tuple[Part, ...] = (Part(1), Part(2))
    compilations: dict[str, int] = field(default_factory=lambda: {"prefill_step": 3})
    rate: float = 0.5


def test_stats_become_sections() -> None:
    assert display.stats_sections(Stats()) == [
        ("", [("active", "yes"), ("rate", "0.5")]),
        ("prefill", [("pages saved", "12,345")]),
        ("device 0", [("pages saved", "1")]),
        ("device 1", [("pages saved", "2")]),
        ("compilations", [("prefill step", "3")]),
    ]
    assert display.stats_table(Stats()).row_count == 10


@pytest.mark.parametrize("progress", [None, False, True])
def test_track_yields_every_name_in_order(progress, capsys) -> None:
    assert list(display.track(iter("abc"), "compiling", progress, 3)) == ["a", "b", "c"]
    captured = capsys.readouterr()
    assert captured.out == ""
    assert ("compiling" in captured.err) == bool(progress)


def test_track_tells_a_callable_before_each_part() -> None:
    told: list[str] = []
    for name in display.track(iter("ab"), "compiling", told.append):
        assert told[-1] == name
    assert told == ["a", "b"]
