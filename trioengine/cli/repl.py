"""A chat on a terminal: messages and commands, and answers that Ctrl+C stops."""

from __future__ import annotations

import re
from collections.abc import Callable

from trioengine.cli.answering import check_prompt, write_answer
from trioengine.cli.complaints import complain
from trioengine.cli.printable import printable
from trioengine.cli.sessions import AnySession
from trioengine.cli.terminal import Terminal, stopped_by_interrupt
from trioengine.core.errors import RequestRejected, WorkerLost
from trioengine.core.sampling_params import SamplingParams

_HELP = """\
/reset    forget the conversation
/help     this
A line that ends with \\ goes on in the next one; one that begins with a space is a message even if a / follows.
Ctrl+C stops an answer; the part that has come stays in the conversation.
An empty line, Ctrl+D, or Ctrl+C where a line is awaited, ends the chat."""

_COMMAND = re.compile(r"/\w*(\s|$)")  # not the path of a file


class Repl:
    """One session's chat, until an empty line, the end of the input or an interrupt where a line is awaited."""

    def __init__(self, session: AnySession, model: str, terminal: Terminal, params: SamplingParams) -> None:
        self._session = session
        self._model = model
        self._terminal = terminal
        self._params = params
        self._commands: dict[str, Callable[[], None]] = {"/reset": self._reset, "/help": self._help}

    async def run(self) -> None:
        """Run each command and answer each message; report on stderr why one cannot be answered."""
        print(printable(f"{self._model}: /help lists the commands"))
        while (line := await self._terminal.next()).strip():
            if _COMMAND.match(line):
                self._run_command(line.strip())
                continue
            try:
                await self._answer(line.strip())
            except (RequestRejected, WorkerLost) as exc:
                complain(f"error: {exc}", before="\n")  # after the part of the answer that has come

    async def _answer(self, message: str) -> None:
        check_prompt(message)
        generation = self._session.generate(message, self._params, keep_partial=True, wait=True)
        with self._terminal.quiet():
            async with stopped_by_interrupt(generation.abort):
                await write_answer(generation)

    def _run_command(self, name: str) -> None:
        command = self._commands.get(name)
        if command is None:
            complain(f"error: unknown command {name!r}; /help lists the commands")
        else:
            command()

    def _reset(self) -> None:
        self._session.replace_history([])
        print("The conversation is forgotten.")

    def _help(self) -> None:
        print(_HELP)
