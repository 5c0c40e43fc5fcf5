"""The lines of a user's program that ordinary programs of its machine do not reach: there, nothing was looked for."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from types import CodeType

from trioengine.testing.fuzz.machine import Machine
from trioengine.testing.fuzz.runner import PROFILES, Fuzzer, silence
from trioengine.testing.fuzz.suspects import Steps
from trioengine.testing.fuzz.trace import is_users, short_path

PROGRAMS = 60


def unreached_text(machine: type[Machine]) -> str:
    """Return the lines by file and function, or an empty text if there are none, or the machine is this package's."""
    file = inspect.getsourcefile(machine)
    if file is None or not is_users(file):
        return ""
    steps = Steps(is_users)

    def make() -> Machine:
        with steps:
            made = machine()
        made.around_rules = steps
        return made

    with silence():
        Fuzzer(make, PROFILES["quick"], 0, shrink=False).run(examples=PROGRAMS)
    reached = defaultdict(set, {file: set[int]()})
    for code, _, line in steps.order:
        reached[code.co_filename].add(line)
    texts = [
        f"  {short_path(file)}: {', '.join(found)}" for file in reached if (found := [*_missing(file, reached[file])])
    ]
    return "\n".join([f"lines of your program that {PROGRAMS} programs do not reach:", *texts]) if texts else ""


def _missing(file: str, reached: set[int]) -> Iterator[str]:
    """The functions of a file that have lines which were not reached, each with the first and last of a run of them."""
    try:
        functions = [*_functions(compile(Path(file).read_bytes(), file, "exec"))]
    except (OSError, SyntaxError, ValueError):  # not a file of Python's
        return
    for function in functions:
        first: int | None = None
        lines = sorted({line for *_, line in function.co_lines() if line} - {function.co_firstlineno})
        for line, following in zip_longest(lines, lines[1:]):
            if line in reached:
                continue
            first = line if first is None else first
            if following is None or following in reached:
                yield f"{first}{f'-{line}' if line > first else ''} {function.co_qualname}"
                first = None


def _functions(code: CodeType) -> Iterator[CodeType]:
    """All functions in the code, and in them; not the bodies of classes, which run at the import."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_flags & inspect.CO_NEWLOCALS and constant.co_flags & inspect.CO_OPTIMIZED:
                yield constant
            yield from _functions(constant)
