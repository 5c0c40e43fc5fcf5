"""Where a command's session comes from: an engine of its own, or a server. Both have the same surface."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeAlias

from trioengine.actors.engine import open_engine
from trioengine.actors.generation import Generation
from trioengine.actors.session import Session
from trioengine.cli.complaints import complain
from trioengine.cli.progress import progress_bars
from trioengine.client.address import Address
from trioengine.client.client import connect
from trioengine.client.generation import Generation as RemoteGeneration
from trioengine.client.session import Session as RemoteSession
from trioengine.core.config import EngineConfig
from trioengine.core.errors import InvalidConfig, RequestRejected

AnySession: TypeAlias = Session | RemoteSession
AnyGeneration: TypeAlias = Generation | RemoteGeneration


@asynccontextmanager
async def local_session(config: EngineConfig) -> AsyncIterator[AnySession]:
    """A session of an engine of its own, whose start is shown on a terminal."""
    with progress_bars() as bars:
        async with (
            open_engine(config, on_progress=bars.download, on_load=bars.loading) as engine,
            engine.open_session() as session,
        ):
            yield session


@asynccontextmanager
async def remote_session(url: str, api_key: str | None, model: str | None) -> AsyncIterator[AnySession]:
    """A session of a server that runs; stderr says how its engine's state changes: it loads, restarts, sleeps,
    is updated or drains, or is awake again.

    A URL that is none is the fault of the option `connect`: InvalidConfig. RequestRejected for a key
    that is missing or wrong names the option, too.
    """
    try:
        Address.parse(url, model)
    except InvalidConfig as exc:
        raise InvalidConfig(str(exc).replace("url", "connect", 1), fields=("connect",)) from exc
    try:
        async with (
            connect(url, api_key=api_key, model=model, on_state=_tell) as client,
            client.open_session(wait=True) as session,
        ):
            yield session
    except RequestRejected as exc:
        if exc.code != "invalid_api_key":
            raise
        raise RequestRejected(exc.code, f"{exc.message} (--api-key)") from exc


def _tell(state: str) -> None:
    beginning = "\n" if sys.stderr.isatty() else ""  # in the middle of a line
    complain(f"the engine is {state}", before=beginning)
