"""A terminal on which a user types messages, and stops answers."""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

import trio

from trioengine.aio.nursery import open_unwrapped_nursery
from trioengine.cli.keys import keep_keys_at_interrupt, restore_terminal, show_keys
from trioengine.cli.complaints import complain
from trioengine.core.errors import RequestRejected

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
        complain(text, before="\n")
        self._show_line_again()

    async def _line(self, prompt: str, draft: str) -> str | None:
        """In a thread, so that the engine goes on; one that is left behind does not keep the process."""
        line, is_read = None, False
        self._prompt = prompt
        try:
            async with stopped_by_interrupt(self._warn, most=1):
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
async def stopped_by_interrupt(stop: Callable[[], object], most: float = math.inf) -> AsyncIterator[None]:
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
