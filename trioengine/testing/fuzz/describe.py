"""Failures as texts: the error and its place, the program, the end of its trace, the traceback."""

from __future__ import annotations

import traceback

from trioengine.testing.fuzz.program import Program
from trioengine.testing.fuzz.trace import Trace, is_fuzzers_own, place

TRACE_LINES = 25  # shown of a trace
ERROR_LINES = 6  # shown of an error above its program


def error_text(failure: Exception) -> str:
    """Describe the failure: the first paragraph of the error, and its place."""
    own = "the fuzzer itself failed: " if is_fuzzers_own(failure) else ""
    first, _, more = str(failure).partition("\n\n")
    hint = " (all of it is at the end)" if more else ""
    return f"{own}{type(failure).__name__}: {first}\nat {place(failure)}{hint}"


def trace_text(trace: Trace, *, whole: bool) -> str:
    """Return the last lines of the trace, or all of them; repeated lines are one."""
    every = list(trace.folded())
    lines = every if whole else every[-TRACE_LINES:]
    hidden = len(every) - len(lines)
    head = "  pass     time" + (f"   the end of the trace; --trace prints {hidden} lines more" if hidden else "")
    return "\n".join([head, *lines])


def failure_text(failure: Exception, program: Program, trace: Trace, *, whole: bool = False) -> str:
    """Describe a failure with its program, its trace and its traceback."""
    stack = "".join(traceback.format_exception(failure))  # has the whole message
    first = _shortened(error_text(failure))
    return "\n\n".join([first, str(program), trace_text(trace, whole=whole), stack])


def _shortened(text: str) -> str:
    """Leave out the middle of a long text, such as the stacks of all tasks, which belongs below the program."""
    lines = text.splitlines()
    if len(lines) <= ERROR_LINES:
        return text
    hidden = len(lines) - ERROR_LINES + 1
    return "\n".join([*lines[: ERROR_LINES - 2], f"... {hidden} lines more below", lines[-1]])
