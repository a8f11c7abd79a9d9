"""Pictures and tables: page tables, the index tree, statistics, progress. Optional imports stay inside functions."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

Progress = bool | Callable[[str], Any] | None
"""None or False: silence; True: a bar on the terminal; a callable: gets the name of each part as it begins."""


# ---- progress


def track(names: Iterable[str], title: str, progress: Progress, total: int | None = None) -> Iterator[str]:
    """Yields `names` and shows how far it is; each name says what is done until the next one is asked for.

    Args:
      names: one name per part of the work.
      title: what is going on, e.g. `compiling`.
      progress: see `Progress`.
      total: number of parts, when known.
    """
    if not progress:
        yield from names
        return
    if callable(progress):
        for name in names:
            progress(name)
            yield name
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # stderr: what a command prints as its result stays clean when it is piped.
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total)
        begun = 0
        for name in names:
            bar.update(task, description=f"{title}: {name}", completed=begun)
            begun += 1
            yield name
        bar.update(task, description=title, completed=begun, total=begun)


# ---- tables


def stats_table(stats: Any, title: str = "engine") -> Table:
    """A rich table of a statistics dataclass; nested dataclasses, mappings and tuples become sections."""
    from rich.table import Table

    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column("name")
    table.add_column("value", justify="right")
    for section, rows in stats_sections(stats):
        if section:
            table.add_section()
            table.add_row(f"[bold]{section}[/bold]", "")
        for name, value in rows:
            table.add_row(name, value)
    return table


def html_table(caption: str, lines: Iterable[tuple[str, str]]) -> str:
    """(name, value) lines as a small HTML table, for `_repr_html_`."""
    rows = "".join(f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>" for name, value in lines)
    return f"<table><caption>{html.escape(caption)}</caption>{rows}</table>"


def stats_sections(stats: Any) -> list[tuple[str, list[tuple[str, str]]]]:
    """(section, [(name, value as text)]) of a statistics dataclass; the nameless first section has the plain fields."""
    plain: list[tuple[str, str]] = []
    sections: list[tuple[str, list[tuple[str, str]]]] = []
    for name, value in _items(stats):
        parts = list(value) if isinstance(value, tuple | list) else [value]
        if parts and all(_is_record(part) for part in parts):
            for i, part in enumerate(parts):
                label = name if len(parts) == 1 else f"{name} {i}"
                rows = [(field, _text(inner)) for field, inner in _items(part)]
                sections.append((label.replace("_", " "), [(field.replace("_", " "), text) for field, text in rows]))
        else:
            plain.append((name.replace("_", " "), _text(value)))
    return [("", plain), *sections]


def _is_record(value: Any) -> bool:
    return isinstance(value, Mapping) or (dataclasses.is_dataclass(value) and not isinstance(value, type))


def _items(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(str(key), inner) for key, inner in value.items()]
    return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.3f}".rstrip("0").rstrip(".")
    return f"{value:,}" if isinstance(value, int | np.integer) else str(value)


# ---- pictures


def plot_page_table(
    page_table: Any, refcounts: Any = None, *, labels: Sequence[str] | None = None, ax: Any = None
) -> Figure:
    """The page table as a grid: one line per row, one cell per column, one colour per physical page.

    A cell shows the id of its physical page; pages that more than one row names have a thick frame.

    Args:
      page_table: int32 [R, M], -1 = unused; a `DevicePages` or a `DevicePool` is accepted too.
      refcounts: int32 [P]; counted from the table if not given.
      labels: a name for each row.
      ax: matplotlib axes to draw on; a new figure by default.
    """
    import matplotlib
    from matplotlib.patches import Rectangle

    table = np.asarray(getattr(page_table, "page_table", page_table))
    table = table[:, : max(1, int((table >= 0).sum(1).max(initial=0)))]
    used = table[table >= 0]
    counts = np.bincount(used) if refcounts is None else np.asarray(refcounts)
    num_rows, num_columns = table.shape
    names = labels or [f"row {i}" for i in range(num_rows)]
    width = max(4.5, 0.45 * num_columns + 0.8 + 0.08 * max(map(len, names), default=0))
    axes, figure = _axes(ax, (width, max(1.2, 0.45 * num_rows + 1.1)))
    colours = matplotlib.colormaps["tab20"]
    # Neighbouring ids get different colours; the id in the cell is the exact name.
    order = {int(page): i for i, page in enumerate(np.unique(used))}
    for (row, column), page in np.ndenumerate(table):
        if page < 0:
            continue
        is_shared = counts[page] > 1
        axes.add_patch(
            Rectangle(
                (column, row),
                1,
                1,
                facecolor=[0.6 * channel + 0.4 for channel in colours(order[int(page)] % 20)[:3]],  # text stays legible
                edgecolor="black" if is_shared else "white",
                linewidth=2.0 if is_shared else 0.8,
                zorder=2 if is_shared else 1,
            )
        )
        axes.text(column + 0.5, row + 0.5, str(page), ha="center", va="center", fontsize=8, zorder=3)
    axes.set(xlim=(0, num_columns), ylim=(num_rows, 0), xlabel="column (page of the sequence)", aspect="equal")
    axes.set_yticks(np.arange(num_rows) + 0.5, names)
    step = max(1, num_columns // 16)
    axes.set_xticks(np.arange(0, num_columns, step) + 0.5, [str(i) for i in range(0, num_columns, step)])
    logical, physical = len(used), len(order)
    axes.set_title(f"{logical} logical pages on {physical} physical pages\nthick frame = shared", fontsize=10)
    return figure


class _Run(Protocol):
    """What iteration over an index gives, as far as a picture needs it (`index_types.IndexRun`)."""

    @property
    def start_page(self) -> int: ...

    @property
    def page_ids(self) -> Any: ...


@dataclasses.dataclass(frozen=True)
class TreeRun:
    """One run of the index: pages that follow each other without a branch, and where the picture has it."""

    start: int
    """Index of the run's first page within its prompts."""
    page_ids: tuple[int, ...]
    parent: int | None
    """Number of the run that this one continues; None at the top."""
    lane: int
    """Line of the picture; the first child stays on its parent's line, so that no two runs overlap."""

    @property
    def end(self) -> int:
        return self.start + len(self.page_ids)


def tree_runs(index: Iterable[_Run]) -> list[TreeRun]:
    """The runs of a `PrefixIndex`, in its own order: depth first, parents before children."""
    runs: list[TreeRun] = []
    path: list[int] = []
    continued: set[int] = set()
    lanes = 0
    for run in index:
        # Along one path ends only grow, so the parent is the one run on it that ends where this one begins.
        while path and runs[path[-1]].end != run.start_page:
            path.pop()
        parent = path[-1] if path else None
        if parent is not None and parent not in continued:
            lane = runs[parent].lane
            continued.add(parent)
        else:
            lane = lanes
            lanes += 1
        path.append(len(runs))
        runs.append(TreeRun(run.start_page, tuple(np.asarray(run.page_ids).tolist()), parent, lane))
    return runs


def plot_index(index: Iterable[_Run], *, refs: Any = None, ax: Any = None) -> Figure:
    """The index as a tree: one bar per run of pages, its place from left to right = the page's place in the prompt.

    Args:
      index: a `PrefixIndex`, see `tree_runs`.
      refs: int32 [P] live references per host page; runs in use are drawn darker.
      ax: matplotlib axes to draw on; a new figure by default.
    """
    from matplotlib.patches import Rectangle

    runs = tree_runs(index)
    num_lanes = max((run.lane for run in runs), default=0) + 1
    end = max((run.end for run in runs), default=1)
    axes, figure = _axes(ax, (8.0, max(1.4, 0.5 * num_lanes + 0.9)))
    for run in runs:
        num_pages = len(run.page_ids)
        in_use = refs is not None and bool(np.asarray(refs)[list(run.page_ids)].any())
        axes.add_patch(
            Rectangle(
                (run.start + 0.06, run.lane + 0.2),
                num_pages - 0.12,
                0.6,
                facecolor="#3b76af" if in_use else "#b6cfe6",
                edgecolor="black",
                linewidth=0.8,
            )
        )
        first, last = run.page_ids[0], run.page_ids[-1]
        text = str(first) if num_pages == 1 else f"{first}..{last}" if num_pages * 30 / end >= 3 else ""
        axes.text(run.start + num_pages / 2, run.lane + 0.5, text, ha="center", va="center", fontsize=8)
        if run.parent is not None:
            x = [run.start - 0.06, run.start + 0.06]
            axes.plot(x, [runs[run.parent].lane + 0.5, run.lane + 0.5], "k-", linewidth=1)
    axes.set(xlim=(0, end), ylim=(num_lanes, 0), xlabel="page of the prompt", yticks=[])
    total = sum(len(run.page_ids) for run in runs)
    axes.set_title(f"{total} indexed pages in {len(runs)} runs; text = host page ids", fontsize=10)
    return figure


def _axes(ax: Any, size: tuple[float, float]) -> tuple[Any, Figure]:
    """(axes, figure); a new figure is not registered with pyplot, so that nothing has to close it."""
    if ax is not None:
        return ax, ax.figure
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure.add_subplot(), figure
