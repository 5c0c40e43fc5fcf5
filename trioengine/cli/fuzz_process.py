"""`trioengine fuzz --target process`: search for a finding in a server that the command starts, and harms."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

import trio

from trioengine.cli.fuzz_target import (
    TargetOptions,
    check_options,
    describe,
    read_finding,
    run_hunt,
    run_reported,
    show_progress,
)
from trioengine.core.config import DEFAULT_MODEL
from trioengine.core.errors import InvalidConfig
from trioengine.hub.pull import resolve
from trioengine.testing.target.calibrate import calibrate
from trioengine.testing.target.dialects import TRIOENGINE
from trioengine.testing.target.exchange import Target
from trioengine.testing.target.faults import FaultyRun
from trioengine.testing.target.hunt import Hunt
from trioengine.testing.target.program import FAULTS, Step
from trioengine.testing.target.server_process import LAUNCHER, ServerProcess, command_line, started

STARTS = 3  # starts of a server that each deadline has room for, as a worker may have to be started again


def fuzz_process(options: TargetOptions, launcher: Sequence[str] = LAUNCHER) -> int:
    """Run the search and return the exit code. Raises InvalidConfig, and ModelError."""
    check_options(options)
    steps: list[Step] | None = None
    if options.replay is not None:
        _, steps, kept = read_finding(options.replay)
        options = replace(options, serve=options.serve or _arguments_in(kept))
    options = replace(options, serve=options.serve or ())
    return run_reported(_search, options, command_line(_with_model(options.serve or ()), launcher), steps)


def _arguments_in(kept: dict[str, object]) -> tuple[str, ...]:
    arguments = kept.get("serve")
    if not isinstance(arguments, list) or not all(isinstance(each, str) for each in arguments):
        raise InvalidConfig("the file is not a finding of --target process")
    return tuple(arguments)


def _with_model(arguments: tuple[str, ...]) -> list[str]:
    """Return arguments of `serve` that also permit updates to the weights that are served already."""
    model, *more = arguments if arguments and not arguments[0].startswith("-") else (DEFAULT_MODEL, *arguments)
    path = resolve(model)
    return [model, f"--weights-dir={path.parent}", f"--served-model-name={path.name}", *more]


async def _search(options: TargetOptions, command: list[str], steps: list[Step] | None) -> int:
    print("starting a server:", " ".join(command), file=sys.stderr)
    begin = trio.current_time()
    async with started(command) as server:
        start = trio.current_time() - begin
        hunt = Hunt(
            server,
            await measured(server, start),
            options.seed,
            show_progress,
            server.restart,
            make_run=FaultyRun,
            faults=FAULTS,
        )
        describe(hunt.target, detected=False)
        return await run_hunt(hunt, options, steps)


async def measured(server: ServerProcess, start: float) -> Target:
    """Return the server as a target, whose deadlines have room for starts of a worker, each of `start` seconds."""
    target = await server.run(calibrate(Target(server.address, "", TRIOENGINE)))
    target.deadline += STARTS * start
    target.call_deadline += STARTS * start
    return target
