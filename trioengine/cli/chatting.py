"""A chat: of lines that a pipe brings, or on a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TypeAlias

import trio

from trioengine.cli.answering import answer, check_prompt, write
from trioengine.cli.complaints import complain
from trioengine.cli.repl import Repl
from trioengine.cli.sessions import AnySession
from trioengine.cli.standard_input import STDIN, Lines
from trioengine.cli.terminal import Terminal
from trioengine.core.errors import RequestRejected
from trioengine.core.sampling_params import SamplingParams

OpenSession: TypeAlias = Callable[[], AbstractAsyncContextManager[AnySession]]


def hold_chat(open_session: OpenSession, params: SamplingParams) -> None:
    """Read messages from stdin and answer each, in one session."""
    trio.run(_hold_chat, open_session, params)


async def _hold_chat(open_session: OpenSession, params: SamplingParams) -> None:
    if os.isatty(STDIN) and sys.stdout.isatty():
        terminal = Terminal()
        async with open_session() as session:
            await Repl(session, terminal, params).run()
    else:
        lines = Lines()
        async with open_session() as session:
            await converse(session, lines, params)


async def converse(session: AnySession, lines: Lines, params: SamplingParams) -> None:
    """Answer each line until an empty one; of a line that cannot be answered stderr says why."""
    while question := await _ask(lines):
        try:
            check_prompt(question)
            await answer(session, question, params)
        except RequestRejected as exc:
            complain(f"error: {exc}")


async def _ask(lines: Lines) -> str:
    """A line; "" at the end of the input."""
    if os.isatty(STDIN):
        await write("> ")
    return (await lines.next()).strip()
