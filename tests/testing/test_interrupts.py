"""Where a rule that takes too long may be interrupted: in a task or a check, and not in the loop that runs them."""

import json
import sys
from pathlib import Path

import trio

from trioengine.testing.fuzz.machine import _would_break

TRIO = str(Path(trio.__file__).parent)


def owner(frame):
    file = frame.f_code.co_filename
    return "trio" if file.startswith(TRIO) else "task" if file == __file__ else "library"


def test_an_interrupt_spares_the_loop():
    """An exception from trio's own code, or from a library under it, would leave the loop open."""
    breaks = {}

    def note(frame, event, argument):
        if event == "call" and frame.f_back is not None:
            breaks.setdefault((owner(frame.f_back), owner(frame)), set()).add(_would_break(frame))

    async def main():
        sys.setprofile(note)
        json.dumps([1], indent=1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.lowlevel.checkpoint)
        sys.setprofile(None)

    trio.run(main)
    assert breaks["task", "library"] == {False}
    assert breaks["task", "trio"] == breaks["trio", "trio"] == breaks["trio", "library"] == {True}
