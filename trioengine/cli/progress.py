"""A progress bar on stderr for a download, shown only while there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

_TELLING = 1 << 20  # bytes; what came before is pip's small files, and the pace unknown


class _Estimate(ProgressColumn):
    """Another column, once enough has come for its figure to mean something."""

    def __init__(self, column: TransferSpeedColumn | TimeRemainingColumn) -> None:
        super().__init__()
        self._column = column

    def render(self, task: Task) -> Text:
        return self._column.render(task) if task.completed >= _TELLING else Text("")


@contextmanager
def download_bar() -> Iterator[Callable[[int, int], None]]:
    """Gives a callback `progress(done, total)`, in bytes; safe to be called from another thread."""
    columns = (
        TextColumn("fetching the model"),
        BarColumn(),
        DownloadColumn(),
        _Estimate(TransferSpeedColumn()),
        _Estimate(TimeRemainingColumn()),
    )
    bar = Progress(*columns, console=Console(stderr=True), redirect_stdout=False, redirect_stderr=False)

    def progress(done: int, total: int) -> None:
        if not bar.task_ids:
            bar.add_task("download", total=total)
            bar.start()
        bar.update(bar.task_ids[0], completed=done, total=total)
        if bar.finished:
            stop()

    def stop() -> None:
        if bar.live.is_started:
            bar.stop()

    try:
        yield progress
    finally:
        stop()
