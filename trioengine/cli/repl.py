"""A chat on a terminal: messages and commands, and answers that Ctrl+C stops."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

from trioengine.cli.answering import check_prompt, write_answer
from trioengine.cli.complaints import complain
from trioengine.cli.screen import wrapped
from trioengine.cli.sessions import AnySession
from trioengine.cli.terminal import read_message, stopped_by_interrupt
from trioengine.core.errors import RequestRejected, WorkerLost
from trioengine.core.sampling_params import SamplingParams

_HELP = """\
/reset    forget the conversation
/help     this
/bye      end the chat, as /exit and Ctrl+D do, and Ctrl+C where a line is awaited
A line that ends with \\ goes on in the next one; one that begins with a space is a message even if a / follows.
Ctrl+C stops an answer; the part that has come stays in the conversation."""

_COMMAND = re.compile(r"/\w*(\s|$)")  # not the path of a file


class Repl:
    """One session's chat, until /bye, the end of the input or an interrupt where a line is awaited."""

    def __init__(self, session: AnySession, model: str, params: SamplingParams) -> None:
        self._session = session
        self._model = model
        self._params = params
        self._is_over = False
        self._commands: dict[str, Callable[[], None]] = {
            "/reset": self._reset,
            "/help": self._help,
            "/bye": self._end,
            "/exit": self._end,
        }

    async def run(self) -> None:
        """Run each command and answer each message; report on stderr why one cannot be answered."""
        _say(f"{self._model}: /help lists the commands, /bye or Ctrl+D ends the chat")
        while not self._is_over:
            try:
                await self._take(await read_message())
            except (RequestRejected, WorkerLost) as exc:
                complain(f"error: {exc}", before="\n")  # after the part of the answer that has come

    async def _take(self, line: str | None) -> None:
        if line is None:
            self._end()
        elif _COMMAND.match(line):
            self._run_command(line.strip())
        elif line.strip():
            await self._answer(line.strip())

    async def _answer(self, message: str) -> None:
        check_prompt(message)
        generation = self._session.generate(message, self._params, keep_partial=True, wait=True)
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
        _say("The conversation is forgotten.")

    def _help(self) -> None:
        _say(_HELP)

    def _end(self) -> None:
        self._is_over = True


def _say(text: str) -> None:
    print(wrapped(text, sys.stdout))
