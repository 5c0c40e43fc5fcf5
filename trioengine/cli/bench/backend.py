"""What the load speaks through: one class a protocol."""

from __future__ import annotations

from typing import Protocol

from trioengine.cli.bench.sample import Stopwatch


class Backend(Protocol):
    """A way to ask a server."""

    async def ask(self, prompt: str, watch: Stopwatch) -> None:
        """One request with its answer, told to `watch` as it goes on. Cancelled, its connection is closed at once.

        Raises BackendError when it fails.
        """
        ...
