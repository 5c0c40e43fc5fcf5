"""A chat: of lines that a pipe brings, or on a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import TypeAlias

import trio

from trioengine.cli.answering import answer, check_prompt, write
from trioengine.cli.complaints import complain
from trioengine.cli.repl import Repl
from trioengine.cli.sessions import AnySession
from trioengine.cli.standard_input import STDIN, Lines
from trioengine.cli.terminal import Terminal
from trioengine.client.session import Session as RemoteSession
from trioengine.core.errors import RequestRejected
from trioengine.core.sampling_params import SamplingParams

OpenSession: TypeAlias = Callable[[], AbstractAsyncContextManager[AnySession]]


def hold_chat(open_session: OpenSession, model: str, params: SamplingParams) -> None:
    """Read messages from stdin and answer each, in one session; `model` is the name to show on a terminal."""
    trio.run(_hold_chat, open_session, model, params)


async def _hold_chat(open_session: OpenSession, model: str, params: SamplingParams) -> None:
    if os.isatty(STDIN) and sys.stdout.isatty():
        terminal = Terminal()
        async with AsyncExitStack() as stack:
            with terminal.quiet():
                session = await stack.enter_async_context(open_session())
            await Repl(session, _name_of(session) or model, terminal, params).run()
    else:
        lines = Lines()
        async with open_session() as session:
            await converse(session, lines, params)


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
    """A line; None at the end: that of the input, or an empty line of one who types."""
    is_typed = os.isatty(STDIN)
    if is_typed:
        await write("> ")
    line = await lines.next()
    question = None if line is None else line.strip()
    return question or None if is_typed else question
