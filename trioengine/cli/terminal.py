"""A terminal on which a user types messages, and stops answers."""

from __future__ import annotations

import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import trio

from trioengine.cli import keys
from trioengine.core.errors import RequestRejected

with suppress(ImportError):  # a Python may have been built without it: lines are edited by the terminal itself then
    import readline as readline  # editing and a history, of this process, for the lines that `input` reads


async def read_message() -> str | None:
    """A message from standard input, which is a terminal; None at the end of the input.

    A line that ends with a backslash goes on in the next one. Cancelled, or interrupted, the terminal is as it was.
    Raises RequestRejected for input that is not UTF-8.
    """
    text = line = await _line("> ")
    while text is not None and line is not None and line.endswith("\\"):
        line = await _line("… ")
        text = f"{text[:-1]}\n{line or ''}"
    return text


async def _line(prompt: str) -> str | None:
    """In a thread, so that the engine goes on; one that is left behind does not keep the process."""
    is_read = False
    try:
        with keys.unchanged():
            line = await trio.to_thread.run_sync(_input, prompt, abandon_on_cancel=True)
        is_read = True
        return line
    except EOFError:
        return None
    except UnicodeDecodeError as exc:
        raise RequestRejected("invalid_value", "prompt is not UTF-8", param="prompt") from exc
    finally:
        if not is_read:
            sys.stdout.write("\n")


def _input(prompt: str) -> str:
    keys.show(edited_by_terminal="readline" not in sys.modules)
    return input(prompt)


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

    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals, keys.kept_at_interrupt():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(obey)
            yield
            nursery.cancel_scope.cancel()
    for number in ends:
        signal.raise_signal(number)
