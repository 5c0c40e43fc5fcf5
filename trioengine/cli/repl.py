"""A chat on a terminal: messages and commands, and answers that Ctrl+C stops."""

from __future__ import annotations

import re
import sys
from collections.abc import Awaitable, Callable

import trio

from trioengine.cli.answering import check_prompt, write_answer
from trioengine.cli.complaints import complain
from trioengine.cli.screen import wrapped
from trioengine.cli.sessions import ChatSession
from trioengine.cli.terminal import Terminal, stopped_by_interrupt
from trioengine.core.errors import ConnectionLost, EngineClosed, RequestRejected, WorkerLost
from trioengine.core.sampling_params import SamplingParams

_HELP = """\
/reset    forget the conversation
/help     this
/bye      end the chat, as /exit, /quit and Ctrl+D do, and Ctrl+C twice where a line is awaited
A line that ends with \\ goes on in the next one; one that begins with a space is a message even if a / follows.
Ctrl+C stops an answer; the part that has come stays in the conversation."""

_COMMAND = re.compile(r"/\w*(\s|$)")  # not the path of a file


class Repl:
    """A chat, until /bye, the end of the input or two interrupts where a line is awaited."""

    def __init__(self, session: ChatSession, terminal: Terminal, model: str, params: SamplingParams) -> None:
        self._session = session
        self._terminal = terminal
        self._model = model
        self._params = params
        self._draft = ""  # the last message, if its answer was lost: it is put back for editing
        self._is_over = False
        self._commands: dict[str, Callable[[], Awaitable[None]]] = {
            "/reset": self._reset,
            "/help": self._help,
            "/bye": self._end,
            "/exit": self._end,
            "/quit": self._end,
        }

    async def run(self) -> None:
        """Run each command and answer each message; report on stderr why one cannot be answered."""
        _say(f"{self._model}: /help lists the commands, /bye or Ctrl+D ends the chat")
        while not self._is_over:
            try:
                await self._take(await self._terminal.read_message(self._draft))
            except RequestRejected as exc:
                self._draft = ""
                complain(f"error: {exc}")
            except WorkerLost as exc:
                complain(f"error: {exc}")
            except (ConnectionLost, EngineClosed) as exc:
                if not self._session.is_remote:
                    raise
                await self._session.leave()
                complain(f"error: {exc}")
                again = "Enter sends the message again, over" if self._draft else "the next message opens"
                _say(f"({again} a new connection; the conversation is kept)")

    async def _take(self, line: str | None) -> None:
        self._draft = ""
        if line is None:
            self._is_over = True
        elif _COMMAND.match(line):
            await self._run_command(line.strip())
        elif line.strip():
            check_prompt(line)
            self._draft = line
            await self._answer(line.strip())
            self._draft = ""

    async def _answer(self, message: str) -> None:
        with trio.CancelScope() as opening:
            async with stopped_by_interrupt(opening.cancel):
                session = await self._session.opened()
        if opening.cancelled_caught:
            _say("(stopped)")
            return
        generation = session.generate(message, self._params, keep_partial=True, wait=True)
        async with stopped_by_interrupt(generation.abort):
            await write_answer(generation)

    async def _run_command(self, name: str) -> None:
        command = self._commands.get(name)
        if command is None:
            complain(f"error: unknown command {name!r}; /help lists the commands")
        else:
            await command()

    async def _reset(self) -> None:
        await self._session.forget()
        _say("The conversation is forgotten.")

    async def _help(self) -> None:
        _say(_HELP)

    async def _end(self) -> None:
        self._is_over = True


def _say(text: str) -> None:
    print(wrapped(text, sys.stdout))
