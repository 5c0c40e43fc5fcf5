"""`trioengine fuzz --target process`: search for a finding in a server that the command starts, and harms."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

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
from trioengine.testing.target.faults import FaultyRun
from trioengine.testing.target.hunt import Hunt
from trioengine.testing.target.program import FAULTS, Step
from trioengine.testing.target.server_process import LAUNCHER, command_line, started


def fuzz_process(options: TargetOptions, launcher: Sequence[str] = LAUNCHER) -> int:
    """Run the search and return the exit code. Raises InvalidConfig, and ModelError."""
    check_options(options)
    steps: list[Step] | None = None
    if options.replay is not None:
        _, steps, kept = read_finding(options.replay)
        options = replace(options, serve=options.serve or _arguments_in(kept))
    options = replace(options, serve=options.serve or ())
    return run_reported(_search, options, command_line(with_model(options.serve or ()), launcher), steps)


def _arguments_in(kept: dict[str, object]) -> tuple[str, ...]:
    arguments = kept.get("serve")
    if not isinstance(arguments, list) or not all(isinstance(each, str) for each in arguments):
        raise InvalidConfig("the file is not a finding of --target process")
    return tuple(arguments)


def with_model(arguments: tuple[str, ...]) -> list[str]:
    """Return arguments of `serve` that also permit updates to the weights that are served already."""
    model, *more = arguments if arguments and not arguments[0].startswith("-") else (DEFAULT_MODEL, *arguments)
    path = resolve(model)
    return [model, f"--weights-dir={path.parent}", f"--served-model-name={path.name}", *more]


async def _search(options: TargetOptions, command: list[str], steps: list[Step] | None) -> int:
    print("starting a server:", " ".join(command), file=sys.stderr)
    async with started(command) as server:
        hunt = Hunt(
            server,
            await server.measured(),
            options.seed,
            show_progress,
            server.restart,
            make_run=FaultyRun,
            faults=FAULTS,
        )
        describe(hunt.target, detected=False)
        return await run_hunt(hunt, options, steps)
