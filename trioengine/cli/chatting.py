"""A chat: of lines that a pipe brings, or on a terminal."""

from __future__ import annotations

import os

import trio

from trioengine.cli.answering import answer, check_prompt, write
from trioengine.cli.complaints import complain
from trioengine.cli.keys import STDIN, on_terminal
from trioengine.cli.repl import Repl
from trioengine.cli.sessions import AnySession, OpenSession, open_chat, tell_on_stderr
from trioengine.cli.standard_input import Lines
from trioengine.cli.terminal import Terminal
from trioengine.core.errors import RequestRejected
from trioengine.core.sampling_params import SamplingParams


def hold_chat(open_session: OpenSession, model: str, params: SamplingParams) -> None:
    """Read messages from stdin and answer each, in one session; `model` is the name to show on a terminal."""
    trio.run(_hold_chat, open_session, model, params)


async def _hold_chat(open_session: OpenSession, model: str, params: SamplingParams) -> None:
    if on_terminal():
        terminal = Terminal()
        async with open_chat(open_session, terminal.notice) as session:
            await Repl(session, terminal, session.model or model, params).run()
    else:
        async with open_session((), tell_on_stderr) as session:
            await converse(session, Lines(), params)


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
