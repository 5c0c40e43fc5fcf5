"""A chat on a terminal: messages and commands, and answers that Ctrl+C stops."""

from __future__ import annotations

from collections.abc import Callable

from trioengine.cli.answering import check_prompt, write_answer
from trioengine.cli.complaints import complain
from trioengine.cli.sessions import AnySession
from trioengine.cli.terminal import Terminal, stopped_by_interrupt
from trioengine.core.errors import RequestRejected, WorkerLost
from trioengine.core.sampling_params import SamplingParams

_HELP = """\
/reset    forget the conversation
/help     this
A line that ends with \\ goes on in the next one. Ctrl+C stops an answer; what came of it stays in the conversation.
An empty line, Ctrl+D, or Ctrl+C where a line is awaited, ends the chat."""


class Repl:
    """One session's chat, until an empty line, the end of the input or an interrupt where a line is awaited."""

    def __init__(self, session: AnySession, terminal: Terminal, params: SamplingParams) -> None:
        self._session = session
        self._terminal = terminal
        self._params = params
        self._commands: dict[str, Callable[[], None]] = {"/reset": self._reset, "/help": self._help}

    async def run(self) -> None:
        """Answer each message; of one that cannot be answered stderr says why."""
        while message := (await self._terminal.next()).strip():
            command = self._commands.get(message)
            try:
                if command is not None:
                    command()
                else:
                    await self._answer(message)
            except (RequestRejected, WorkerLost) as exc:
                complain(f"error: {exc}", before="\n")  # after what came of the answer

    async def _answer(self, message: str) -> None:
        check_prompt(message)
        generation = self._session.generate(message, self._params, keep_partial=True, wait=True)
        async with stopped_by_interrupt(generation.abort):
            await write_answer(generation)

    def _reset(self) -> None:
        self._session.replace_history([])
        print("The conversation is forgotten.")

    def _help(self) -> None:
        print(_HELP)
