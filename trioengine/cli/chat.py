"""A chat on a terminal: messages and commands, and answers that Ctrl+C stops."""

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

from trioengine.aio.nursery import open_unwrapped_nursery
from trioengine.cli.chat_session import AnySession, ChatSession, OpenSession, notify_on_stderr, open_chat
from trioengine.cli.errors import warn
from trioengine.cli.generate import answer, require_prompt, write, write_answer
from trioengine.cli.tty import STDIN, keep_keys_at_interrupt, on_terminal, restore_terminal, show_keys, wrapped
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
                warn(f"error: {exc}")
            except WorkerLost as exc:
                warn(f"error: {exc}")
            except (ConnectionLost, EngineClosed) as exc:
                if not self._session.is_remote:
                    raise
                await self._session.leave()
                warn(f"error: {exc}")
                again = "Enter sends the message again, over" if self._draft else "the next message opens"
                _say(f"({again} a new connection; the conversation is kept)")

    async def _take(self, line: str | None) -> None:
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
            async with stop_on_interrupt(opening.cancel):
                session = await self._session.opened()
        if opening.cancelled_caught:
            _say("(stopped)")
            return
        generation = session.generate(message, self._params, keep_partial=True, wait=True)
        async with stop_on_interrupt(generation.abort):
            await write_answer(generation)

    async def _run_command(self, name: str) -> None:
        command = self._commands.get(name)
        if command is None:
            warn(f"error: unknown command {name!r}; /help lists the commands")
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


def run_chat(open_session: OpenSession, model: str, params: SamplingParams) -> None:
    """Read messages from stdin and answer each, in one session; `model` is the name to show on a terminal."""
    trio.run(_hold_chat, open_session, model, params)


async def _hold_chat(open_session: OpenSession, model: str, params: SamplingParams) -> None:
    if on_terminal():
        terminal = Terminal()
        async with open_chat(open_session, terminal.notice) as session:
            await Repl(session, terminal, session.model or model, params).run()
    else:
        async with open_session((), notify_on_stderr) as session:
            await converse(session, Lines(), params)


async def converse(session: AnySession, lines: Lines, params: SamplingParams) -> None:
    """Answer each line that is not empty; of one that cannot be answered stderr says why."""
    while (question := await _ask(lines)) is not None:
        if not question:
            continue
        try:
            require_prompt(question)
            await answer(session, question, params)
        except RequestRejected as exc:
            warn(f"error: {exc}")


async def _ask(lines: Lines) -> str | None:
    """A line, after a prompt if it is typed; None at the end of the input."""
    if os.isatty(STDIN):
        await write("> ")
    line = await lines.next()
    return None if line is None else line.strip()


with suppress(ImportError):  # a Python may have been built without it: lines are edited by the terminal itself then
    import readline as readline  # editing and a history, of this process, for the lines that `input` reads


class Terminal:
    """Reads messages, and writes notices that leave the line being typed as it is."""

    def __init__(self) -> None:
        self._prompt = ""  # of the line that is awaited, if any

    async def read_message(self, draft: str = "") -> str | None:
        """A message from standard input, which is a terminal; None at the end of the input.

        The draft can be edited; where the terminal itself edits lines, it is only shown. A line that ends with a
        backslash goes on in the next one. The first Ctrl+C writes a notice, the second one raises KeyboardInterrupt.
        Cancelled, or interrupted, the terminal is as it was. Raises RequestRejected for input that is not UTF-8.
        """
        drafts = iter(draft.replace("\n", "\\\n").split("\n"))
        text = line = await self._line("> ", next(drafts))
        while text is not None and line is not None and line.endswith("\\"):
            line = await self._line("… ", next(drafts, ""))
            text = f"{text[:-1]}\n{line or ''}"
        return text

    def notice(self, text: str) -> None:
        """Write a line to stderr, also in the middle of an answer or of a line that is typed."""
        warn(text, before="\n")
        self._show_line_again()

    async def _line(self, prompt: str, draft: str) -> str | None:
        """In a thread, so that the engine goes on; one that is left behind does not keep the process."""
        line, is_read = None, False
        self._prompt = prompt
        try:
            async with stop_on_interrupt(self._warn, most=1):
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

    def _warn(self) -> None:
        sys.stdout.write("\n(press Ctrl+C again, or /bye, to leave)\n")
        self._show_line_again()

    def _show_line_again(self) -> None:
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
async def stop_on_interrupt(stop: Callable[[], object], most: float = math.inf) -> AsyncIterator[None]:
    """Ctrl+C in the body calls `stop`, at most so often.

    Another one, or SIGTERM, ends the body, and is then raised again outside of it.
    """
    ends: list[int] = []

    async def obey() -> None:
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
            nursery.start_soon(obey)
            yield
            nursery.cancel_scope.cancel()
    for number in ends:
        signal.raise_signal(number)


MAX_LINE = 16 << 20  # bytes
_CHUNK = 1 << 16


def read_all() -> str:
    """Standard input to its end; blocks."""
    with open(STDIN, encoding="utf-8", errors="surrogateescape", closefd=False) as file:
        return file.read()


class Lines:
    """The lines of a descriptor, for trio.

    Its reads are in threads and not through `sys.stdin`, whose lock a thread that is left in a read would hold: the
    interpreter crashes over it when it ends.
    """

    def __init__(self, fd: int = STDIN) -> None:
        self._fd = fd
        self._rest = bytearray()

    async def next(self) -> str | None:
        """A line without its end; None at the end of the input.

        Raises RequestRejected for a line that is too long; there is no next one then.
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
