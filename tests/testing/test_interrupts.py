"""Where a rule that takes too long may be interrupted: in a task or a check, and not in the loop that runs them."""

import json
import sys
import sysconfig
import types
from pathlib import Path

import trio

from trioengine.testing.fuzz.machine import _would_break

TRIO = f"{Path(trio.__file__).parent}/"
LIBRARY = f"{sysconfig.get_path('purelib')}/library.py"
SPIN = """
async def spin(look):
    help_to_spin(look)

def help_to_spin(look):
    look()
"""


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
        try:
            json.dumps([1], indent=1)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.lowlevel.checkpoint)
        finally:
            sys.setprofile(None)

    trio.run(main)
    assert breaks["task", "library"] == {False}
    assert breaks["task", "trio"] == breaks["trio", "trio"] == breaks["trio", "library"] == {True}


def test_a_task_of_a_library_is_interrupted():
    library = types.ModuleType("library")
    exec(compile(SPIN, LIBRARY, "exec"), library.__dict__)
    breaks = []

    async def main():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(library.spin, lambda: breaks.append(_would_break(sys._getframe(1))))

    trio.run(main)
    assert breaks == [False]
