"""A progress bar on stderr for a download, shown only while there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


@contextmanager
def download_bar() -> Iterator[Callable[[int, int], None]]:
    """Gives a callback `progress(done, total)`, in bytes; safe to be called from another thread."""
    columns = (
        TextColumn("fetching the model"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
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
