"""The progress of a start, reported to bars on stderr; the library that draws them is imported at the first report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from trioengine.cli.bars import OnProgress


class Bars(NamedTuple):
    """The callbacks of both bars; another thread may call them, one at a time."""

    download: OnProgress
    loading: OnProgress


@contextmanager
def progress_bars() -> Iterator[Bars]:
    """Both bars, for `open_engine(config, on_progress=bars.download, on_load=bars.loading)`."""
    with ExitStack() as shown:

        @cache
        def download() -> OnProgress:
            from trioengine.cli.bars import download_bar

            return shown.enter_context(download_bar())

        @cache
        def loading() -> OnProgress:
            from trioengine.cli.bars import loading_bar

            return shown.enter_context(loading_bar())

        yield Bars(lambda done, total: download()(done, total), lambda done, total: loading()(done, total))
