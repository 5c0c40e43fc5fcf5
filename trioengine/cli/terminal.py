"""A terminal on which a user types messages, and stops answers."""

from __future__ import annotations

import signal
import sys
import termios
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import trio

from trioengine.cli.standard_input import STDIN
from trioengine.core.errors import RequestRejected

with suppress(ImportError):  # a Python may have been built without it: lines are edited by the terminal itself then
    import readline as readline  # editing and a history, of this process, for what `input` reads

_LOCAL_FLAGS = 3  # their place among the settings


class Terminal:
    """Standard input and output, both a terminal."""

    def __init__(self) -> None:
        self._settings = termios.tcgetattr(STDIN)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Do not show keys in the body; the next line that is read begins with them."""
        settings = termios.tcgetattr(STDIN)
        silent = settings[:]
        silent[_LOCAL_FLAGS] &= ~termios.ECHO
        termios.tcsetattr(STDIN, termios.TCSANOW, silent)
        try:
            yield
        finally:
            termios.tcsetattr(STDIN, termios.TCSANOW, settings)

    async def next(self) -> str:
        """A message; "" for an empty line, and at the end of the input.

        A line that ends with a backslash goes on in the next one. Cancelled, or interrupted, the terminal is as it
        was. Raises RequestRejected for what is not UTF-8.
        """
        text = await self._line("> ")
        while text.endswith("\\"):
            text = f"{text[:-1]}\n{await self._line('… ')}"
        return text

    async def _line(self, prompt: str) -> str:
        """In a thread, so that the engine goes on; one that is left behind does not keep the process."""
        ended = False
        try:
            line = await trio.to_thread.run_sync(input, prompt, abandon_on_cancel=True)
            ended = True
        except EOFError:
            return ""
        except UnicodeDecodeError as exc:
            raise RequestRejected("invalid_value", "prompt is not UTF-8", param="prompt") from exc
        finally:
            if not ended:
                termios.tcsetattr(STDIN, termios.TCSADRAIN, self._settings)
                sys.stdout.write("\n")
        return line


@asynccontextmanager
async def stopped_by_interrupt(stop: Callable[[], object]) -> AsyncIterator[None]:
    """Ctrl+C in the body is a call of `stop`; SIGTERM ends the body, and is then what it was outside of it."""
    ends: list[int] = []

    async def obey() -> None:
        async for number in signals:
            if number == signal.SIGINT:
                stop()
            else:
                ends.append(number)
                nursery.cancel_scope.cancel()

    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(obey)
            yield
            nursery.cancel_scope.cancel()
    for number in ends:
        signal.raise_signal(number)
