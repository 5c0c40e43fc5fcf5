"""`trioengine chat`: a conversation on a terminal, or with the lines of a pipe.

On a terminal, `Repl` reads messages and commands from a `Terminal`, whose keys go to readline; Ctrl+C stops an answer.
From a pipe, `answer_lines` answers each line.
"""

from __future__ import annotations

import math
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

import trio

from trioengine.aio.concurrency import open_unwrapped_nursery
from trioengine.cli.chat_session import AnySession, ChatSession, OpenSession, notify_on_stderr, open_chat
from trioengine.cli.errors import warn
from trioengine.cli.generate import answer_prompt, require_prompt, write, write_answer
from trioengine.cli.tty import STDIN, keep_keys_at_interrupt, on_terminal, restore_terminal, show_keys, wrapped
from trioengine.core.errors import ConnectionLost, EngineClosed, RequestRejected, WorkerLost
from trioengine.core.sampling_params import SamplingParams

with suppress(ImportError):  # a Python may have been built without it: lines are edited by the terminal itself then
    import readline as readline  # editing and a history, of this process, for the lines that `input` reads

MAX_LINE = 16 << 20  # bytes
_CHUNK = 1 << 16
_COMMAND = re.compile(r"/\w*(\s|$)")  # not the path of a file
_HELP = """\
/reset    forget the conversation
/help     this
/bye      end the chat, as /exit, /quit and Ctrl+D do, and Ctrl+C twice where a line is awaited
A line that ends with \\ goes on in the next one; one that begins with a space is a message even if a / follows.
Ctrl+C stops an answer; the part that has come stays in the conversation."""


def run_chat(open_session: OpenSession, model: str, params: SamplingParams) -> None:
    """Read messages from stdin and answer each, in one session; `model` is the name to show on a terminal."""
    trio.run(_run_chat, open_session, model, params)


async def _run_chat(open_session: OpenSession, model: str, params: SamplingParams) -> None:
    if on_terminal():
        terminal = Terminal()
        async with open_chat(open_session, terminal.print_notice) as session:
            await Repl(session, terminal, session.model or model, params).run()
    else:
        async with open_session((), notify_on_stderr) as session:
            await answer_lines(session, Lines(), params)


# ---- on a terminal --------------------------------------------------------------------------------------------------


class Repl:
    """A chat, until /bye, the end of the input or two interrupts at the prompt."""

    def __init__(self, session: ChatSession, terminal: Terminal, model: str, params: SamplingParams) -> None:
        self._session = session
        self._terminal = terminal
        self._model = model
        self._params = params
        self._draft = ""  # the last message, if its answer was lost: it is offered for editing
        self._is_over = False
        self._commands: dict[str, Callable[[], Awaitable[None]]] = {
            "/reset": self._reset,
            "/help": self._help,
            "/bye": self._end,
            "/exit": self._end,
            "/quit": self._end,
        }

    async def run(self) -> None:
        """Run each command and answer each message; write to stderr why one cannot be answered."""
        _print(f"{self._model}: /help lists the commands, /bye or Ctrl+D ends the chat")
        while not self._is_over:
            try:
                await self._handle(await self._terminal.read_message(self._draft))
            except RequestRejected as exc:
                self._draft = ""
                warn(f"error: {exc}")
            except WorkerLost as exc:
                warn(f"error: {exc}")
            except (ConnectionLost, EngineClosed) as exc:
                if not self._session.is_remote:
                    raise
                await self._session.close()
                warn(f"error: {exc}")
                again = "Enter sends the message again, over" if self._draft else "the next message opens"
                _print(f"({again} a new connection; the conversation is kept)")

    async def _handle(self, line: str | None) -> None:
        self._draft = ""
        if line is None:
            self._is_over = True
        elif _COMMAND.match(line):
            await self._run_command(line.strip())
        elif line.strip():
            require_prompt(line)
            self._draft = line
            await self._answer(line.strip())
            self._draft = ""

    async def _answer(self, message: str) -> None:
        with trio.CancelScope() as opening:
            async with on_interrupt(opening.cancel):
                session = await self._session.open()
        if opening.cancelled_caught:
            _print("(stopped)")
            return
        generation = session.generate(message, self._params, keep_partial=True, wait=True)
        async with on_interrupt(generation.abort):
            await write_answer(generation)

    async def _run_command(self, name: str) -> None:
        command = self._commands.get(name)
        if command is None:
            warn(f"error: unknown command {name!r}; /help lists the commands")
        else:
            await command()

    async def _reset(self) -> None:
        await self._session.clear()
        _print("The conversation is forgotten.")

    async def _help(self) -> None:
        _print(_HELP)

    async def _end(self) -> None:
        self._is_over = True


def _print(text: str) -> None:
    print(wrapped(text, sys.stdout))


class Terminal:
    """Reads messages, and prints notices that leave the line being typed as it is."""

    def __init__(self) -> None:
        self._prompt = ""  # of the line being typed, if any

    async def read_message(self, draft: str = "") -> str | None:
        """Read a message from standard input, which is a terminal; None at the end of the input.

        The draft can be edited; where the terminal itself edits lines, it is only shown. A line that ends with a
        backslash goes on in the next one. The first Ctrl+C prints a notice, the second one raises KeyboardInterrupt.
        Cancelled, or interrupted, the terminal is as it was. Raises RequestRejected for input that is not UTF-8.
        """
        drafts = iter(draft.replace("\n", "\\\n").split("\n"))
        text = line = await self._read_line("> ", next(drafts))
        while text is not None and line is not None and line.endswith("\\"):
            line = await self._read_line("… ", next(drafts, ""))
            text = f"{text[:-1]}\n{line or ''}"
        return text

    def print_notice(self, text: str) -> None:
        """Write a line to stderr, also in the middle of an answer or of a line being typed."""
        warn(text, before="\n")
        self._redraw_line()

    async def _read_line(self, prompt: str, draft: str) -> str | None:
        """Read in a thread, so that the engine goes on; an abandoned thread does not keep the process."""
        line, is_read = None, False
        self._prompt = prompt
        try:
            async with on_interrupt(self._on_interrupt, most=1):
                with restore_terminal():
                    line = await trio.to_thread.run_sync(_input, prompt, draft, abandon_on_cancel=True)
                is_read = True
        except EOFError:
            return None
        except UnicodeDecodeError as exc:
            raise RequestRejected("invalid_value", "prompt is not UTF-8", param="prompt") from exc
        finally:
            self._prompt = ""
            if not is_read:
                sys.stdout.write("\n")
        return line

    def _on_interrupt(self) -> None:
        sys.stdout.write("\n(press Ctrl+C again, or /bye, to leave)\n")
        self._redraw_line()

    def _redraw_line(self) -> None:
        if self._prompt:
            editor = sys.modules.get("readline")
            sys.stdout.write(self._prompt + (editor.get_line_buffer() if editor is not None else ""))
            sys.stdout.flush()


def _input(prompt: str, draft: str) -> str:
    """A line, which begins with the draft."""
    editor = sys.modules.get("readline")
    show_keys(edited_by_terminal=editor is None)
    if editor is None:
        return input(f"({draft})\n{prompt}" if draft else prompt)
    editor.set_startup_hook(partial(editor.insert_text, draft))
    try:
        return input(prompt)
    finally:
        editor.set_startup_hook(None)


@asynccontextmanager
async def on_interrupt(stop: Callable[[], object], most: float = math.inf) -> AsyncIterator[None]:
    """Call `stop` for each Ctrl+C during the block, at most `most` times.

    One more, or SIGTERM, ends the block, and is raised again after it.
    """
    ends: list[int] = []

    async def receive_signals() -> None:
        num_stops = 0
        async for number in signals:
            if number == signal.SIGINT and num_stops < most:
                num_stops += 1
                stop()
            else:
                ends.append(number)
                nursery.cancel_scope.cancel()

    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals, keep_keys_at_interrupt():
        async with open_unwrapped_nursery() as nursery:
            nursery.start_soon(receive_signals)
            yield
            nursery.cancel_scope.cancel()
    for number in ends:
        signal.raise_signal(number)


# ---- from a pipe ----------------------------------------------------------------------------------------------------


async def answer_lines(session: AnySession, lines: Lines, params: SamplingParams) -> None:
    """Answer each line that is not empty; write to stderr why one cannot be answered. A typed line has a prompt."""
    while True:
        if os.isatty(STDIN):
            await write("> ")
        line = await lines.next()
        if line is None:
            return
        if prompt := line.strip():
            try:
                require_prompt(prompt)
                await answer_prompt(session, prompt, params)
            except RequestRejected as exc:
                warn(f"error: {exc}")


class Lines:
    """Reads the lines of a descriptor; bytes that are not UTF-8 become surrogates, for `require_prompt`.

    It reads in threads and not through `sys.stdin`, whose lock an abandoned thread would hold: the interpreter crashes
    over it at exit.
    """

    def __init__(self, fd: int = STDIN) -> None:
        self._fd = fd
        self._rest = bytearray()

    async def next(self) -> str | None:
        """Return a line without its end; None at the end of the input.

        Raises RequestRejected for a line of more than MAX_LINE bytes; no further line can be read then.
        """
        searched = 0
        while (end := self._rest.find(b"\n", searched)) < 0 and len(self._rest) <= MAX_LINE:
            searched = len(self._rest)
            data = await trio.to_thread.run_sync(os.read, self._fd, _CHUNK, abandon_on_cancel=True)
            if not data:
                if not self._rest:
                    return None
                end = searched
                break
            self._rest += data
        if not 0 <= end <= MAX_LINE:
            raise RequestRejected("too_large", f"a line of the input is longer than {MAX_LINE} bytes", param="prompt")
        line = self._rest[:end]
        del self._rest[: end + 1]
        return line.decode("utf-8", "surrogateescape")
