"""A chat: of lines that a pipe brings, or on a terminal."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TypeAlias

import trio

from trioengine.cli.answering import answer, check_prompt, write
from trioengine.cli.complaints import complain
from trioengine.cli.keys import STDIN, on_terminal
from trioengine.cli.repl import Repl
from trioengine.cli.sessions import AnySession
from trioengine.cli.standard_input import Lines
from trioengine.client.session import Session as RemoteSession
from trioengine.core.errors import RequestRejected
from trioengine.core.sampling_params import SamplingParams

OpenSession: TypeAlias = Callable[[], AbstractAsyncContextManager[AnySession]]


def hold_chat(open_session: OpenSession, model: str, params: SamplingParams) -> None:
    """Read messages from stdin and answer each, in one session; `model` is the name to show on a terminal."""
    trio.run(_hold_chat, open_session, model, params)


async def _hold_chat(open_session: OpenSession, model: str, params: SamplingParams) -> None:
    async with open_session() as session:
        if on_terminal():
            await Repl(session, _name_of(session) or model, params).run()
        else:
            await converse(session, Lines(), params)


def _name_of(session: AnySession) -> str | None:
    """The name that a server gives its model."""
    return session.model if isinstance(session, RemoteSession) else None


async def converse(session: AnySession, lines: Lines, params: SamplingParams) -> None:
    """Answer each line that is not empty; of one that cannot be answered stderr says why."""
    while (question := await _ask(lines)) is not None:
        if not question:
            continue
        try:
            check_prompt(question)
            await answer(session, question, params)
        except RequestRejected as exc:
            complain(f"error: {exc}")


async def _ask(lines: Lines) -> str | None:
    """A line, after a prompt if it is typed; None at the end of the input."""
    if os.isatty(STDIN):
        await write("> ")
    line = await lines.next()
    return None if line is None else line.strip()
