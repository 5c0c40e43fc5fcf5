"""Progress bars on stderr, for a download and for loading, each shown only while there is one, drawn by rich."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

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

OnProgress: TypeAlias = Callable[[int, int], None]  # (done, total), in bytes
_MIN_BYTES = 1 << 20  # of a meaningful estimate; pip's small files come before


class _Estimate(ProgressColumn):
    """Shows another column once enough bytes have come for a meaningful estimate."""

    def __init__(self, column: TransferSpeedColumn | TimeRemainingColumn) -> None:
        super().__init__()
        self._column = column

    def render(self, task: Task) -> Text:
        return self._column.render(task) if task.completed >= _MIN_BYTES else Text("")


@contextmanager
def download_bar() -> Iterator[OnProgress]:
    """A bar for a download; a file or a pipe gets one line at its end."""
    columns = (
        TextColumn("fetching the model"),
        BarColumn(),
        DownloadColumn(),
        _Estimate(TransferSpeedColumn()),
        _Estimate(TimeRemainingColumn()),
    )
    with _shown(Progress(*columns, console=_stderr(), redirect_stdout=False, redirect_stderr=False)) as progress:
        yield progress


@contextmanager
def loading_bar() -> Iterator[OnProgress]:
    """A bar for the loading of the weights: on a terminal only, and removed when they are loaded."""
    console = _stderr()
    if not console.is_terminal:
        yield lambda done, total: None
        return
    columns = (TextColumn("loading the model"), BarColumn(), DownloadColumn())
    bar = Progress(*columns, console=console, redirect_stdout=False, redirect_stderr=False, transient=True)
    with _shown(bar) as progress:
        yield progress


def _stderr() -> Console:
    return Console(stderr=True)


@contextmanager
def _shown(bar: Progress) -> Iterator[OnProgress]:
    """Show the bar from the first call of the callback to the last."""

    def progress(done: int, total: int) -> None:
        if not bar.task_ids:
            bar.add_task("", total=total)
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
