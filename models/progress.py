"""A progress bar for loading."""

from __future__ import annotations

from collections.abc import Callable

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from models.params import LoadProgress


def progress_bar(title: str) -> Callable[[LoadProgress], None]:
    """A function that draws the load of one model; it first says how much memory the weights will take."""
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn()
    bar = Progress(*columns)
    task = bar.add_task(f"loading {title}", total=None)

    def report(at: LoadProgress) -> None:
        if at.done == 0:
            bar.console.print(f"{title}: {at.total} tensors, {at.bytes_total / 1e6:,.1f} MB of device memory")
            bar.start()
        bar.update(task, completed=at.bytes_done, total=at.bytes_total)
        if at.done == at.total:
            bar.stop()

    return report
