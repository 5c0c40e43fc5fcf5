"""Failures as texts: the error and its place, suspect functions, the program, the end of its trace, the traceback."""

from __future__ import annotations

import traceback
from collections.abc import Iterator

from trioengine.testing.fuzz.judged import judged
from trioengine.testing.fuzz.machine import Machine
from trioengine.testing.fuzz.program import Program
from trioengine.testing.fuzz.suspects import suspects
from trioengine.testing.fuzz.trace import Trace, is_fuzzers_own, is_packages, is_users, place, short_path
from trioengine.testing.sim_loop import Livelock

TRACE_LINES = 25  # shown of a trace
ERROR_LINES = 5  # shown of an error above its program
FILES = 12  # shown with suspects
BESIDE_USERS = 4  # of these: the package's, if some are the user's
SUSPECTS = 3  # shown of a file


def error_text(failure: Exception) -> str:
    """Describe the failure: the beginning of the error, its place, and the files that the check there judges."""
    own = "the fuzzer itself failed: " if is_fuzzers_own(failure) else ""
    first, _, more = f"{own}{type(failure).__name__}: {failure}".partition("\n\n")
    lines = first.splitlines()
    if len(lines) > ERROR_LINES:  # such as the stacks of all tasks, which belong below the program
        lines = [*lines[: ERROR_LINES - 1], "... more below"]
    lines.append(f"at {place(failure)}{' (all of it is at the end)' if more else ''}")
    if files := judged(failure):
        lines.append(f"it judges {', '.join(f'trioengine/{file}' for file in files)}")
    return "\n".join(lines)


def trace_text(trace: Trace, *, whole: bool) -> str:
    """Return the last lines of the trace, or all of them; repeated lines are one."""
    every = list(trace.folded())
    lines = every if whole else every[-TRACE_LINES:]
    hidden = len(every) - len(lines)
    head = "  pass     time" + (f"   the end of the trace; --trace prints {hidden} lines more" if hidden else "")
    return "\n".join([head, *lines])


def suspects_text(machine: type[Machine], program: Program) -> str:
    """Return the functions in which the program, which failed, differs most from those that pass.

    They are shown by file, the file with the most suspicious one first, and the user's files before the package's.
    """
    found = suspects(machine, program)
    if found is None:
        return "it did not fail when it was run again: it depends on something that neither rules nor seeds choose"
    names: dict[str, list[str]] = {}
    for suspect in sorted(found.functions, key=lambda suspect: is_packages(suspect.file)):
        names.setdefault(suspect.file, []).append(f"{suspect.line} {suspect.function} ({suspect.times})")
    head = f"suspects, with the rarest steps (in so many of {found.num_programs} programs that pass):"
    lines = [f"  {short_path(file)}: {', '.join(each[:SUSPECTS])}" for file, each in names.items()]
    num_users = sum(not is_packages(file) for file in names)
    return "\n".join([head, *lines[: min(FILES, num_users + BESIDE_USERS) if num_users else FILES]])


def failure_text(
    failure: Exception, machine: type[Machine], program: Program, trace: Trace, *, whole: bool = False
) -> str:
    """Describe a failure with its suspects, its program, its trace and its traceback."""
    return "\n\n".join(_paragraphs(failure, machine, program, trace, whole))


def _paragraphs(
    failure: Exception, machine: type[Machine], program: Program, trace: Trace, whole: bool
) -> Iterator[str]:
    yield error_text(failure)
    if not isinstance(failure, Livelock):  # which has its place, and takes long
        try:
            yield suspects_text(machine, program)
        except Exception as exc:  # the failure counts, and not the suspects
            yield f"no suspects: {type(exc).__name__}: {exc}"
    yield str(program)
    yield trace_text(trace, whole=whole)
    yield _traceback(failure)  # has the whole message


def _traceback(failure: Exception) -> str:
    """The traceback; of a failure in the user's program without the frames above it."""
    shown = traceback.TracebackException.from_exception(failure)
    first = next((index for index, frame in enumerate(shown.stack) if is_users(frame.filename)), 0)
    if not is_fuzzers_own(failure):
        shown.stack = traceback.StackSummary.from_list(shown.stack[first:])
    return "".join(shown.format())
