"""The commands. Each imports its modules when it runs, so that `--help` and usage errors are quick."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from trioengine import __version__
from trioengine.cli.bench import bench_app
from trioengine.cli.errors import Stderr, report_failure
from trioengine.cli.help import CommandGroup, PanelCommand
from trioengine.cli.options import (
    ENGINE_OPTIONS,
    HELP_FLAGS,
    LOCAL_SERVER,
    MODEL_HELP,
    SAMPLING_OPTIONS,
    SERVE_OPTIONS,
    AdminKey,
    Connect,
    Json,
    Model,
    ModelOption,
    build,
    require_command,
    with_options,
)
from trioengine.cli.sources import given_on_command_line, option_source
from trioengine.core.config import DEFAULT_MODEL, EngineConfig
from trioengine.core.errors import InvalidConfig
from trioengine.core.sampling_params import SamplingParams
from trioengine.serve.config import ServeConfig

app = typer.Typer(
    name="trioengine",
    cls=CommandGroup,
    context_settings=HELP_FLAGS,
    help="Runs large language models for programs that must never leak a session.",
    add_completion=False,
    rich_markup_mode=None,
)
app.add_typer(bench_app, name="bench")
command = partial(app.command, cls=PanelCommand, context_settings=HELP_FLAGS)


def run(arguments: Sequence[str]) -> int:
    """Run a command and return its exit code."""
    stderr = Stderr.of(arguments, os.environ)
    try:
        result = app(args=list(arguments), prog_name="trioengine", standalone_mode=False, obj=stderr)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except (Exception, KeyboardInterrupt, BaseExceptionGroup) as exc:
        return report_failure(exc, stderr)


def _print_version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Runs large language models for programs that must never leak a session."""
    require_command(context)


@command()
@with_options(SERVE_OPTIONS, ENGINE_OPTIONS)
def serve(
    model: Model = DEFAULT_MODEL,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option(help="The least level that is logged, on stderr.")
    ] = "info",
    log_json: Annotated[bool, typer.Option("--log-json", help="Log one JSON object a line.")] = False,
    **fields: object,
) -> None:
    """Serve a model over WebSocket and HTTP, until SIGINT or SIGTERM."""
    from trioengine.cli.serve import run_server

    config, serve_config = build(EngineConfig, fields, model=model), build(ServeConfig, fields)
    run_server(config, serve_config, log_level=log_level, log_json=log_json)


@command()
@with_options(SAMPLING_OPTIONS, ENGINE_OPTIONS)
def generate(
    prompt: Annotated[str, typer.Argument(help="The user message; `-` reads it from stdin.")],
    model: ModelOption = DEFAULT_MODEL,
    json: Json = False,
    **fields: object,
) -> None:
    """Print one answer."""
    from trioengine.cli.generate import print_answer, read_all

    prompt = read_all().removesuffix("\n") if prompt == "-" else prompt
    params = build(SamplingParams, fields)
    print_answer(build(EngineConfig, fields, model=model), prompt, params, as_json=json)


def _check_chat(context: typer.Context) -> None:
    """Refuse options of the command line that have no effect; variables and files may be for other commands."""
    connect, given = option_source(context, "connect"), given_on_command_line(context)
    for option in ENGINE_OPTIONS:
        if connect is not None and option.name in given:
            raise InvalidConfig(
                f"{option_source(context, option.name)} is not for {connect}: the server has the engine"
            )
    if connect is None and "api_key" in given:
        raise InvalidConfig("--api-key is for --connect: it is the server's key")


@command()
@with_options(SAMPLING_OPTIONS, ENGINE_OPTIONS, check=_check_chat)
def chat(
    model: Annotated[str | None, typer.Argument(help=MODEL_HELP, envvar="TRIOENGINE_MODEL", show_envvar=False)] = None,
    connect: Annotated[
        str | None, typer.Option(metavar="URL", help="Talk to this server instead; it has the engine's options.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="With --connect: the server's key.")] = None,
    **fields: object,
) -> None:
    """Talk to a model.

    On a terminal Ctrl+C stops an answer, and the part that came stays in the conversation. /bye, Ctrl+D, or Ctrl+C
    twice at the prompt, ends the chat. Each line of a pipe that is not empty is a message. When a server is lost, a
    chat on a terminal connects again with the next message; a chat of a pipe fails.
    """
    from trioengine.cli.tty import hide_keys

    with hide_keys():  # from here on: the imports take a part of a second
        from trioengine.cli.chat import run_chat
        from trioengine.cli.chat_session import local_session, remote_session

        params = build(SamplingParams, fields)
        if connect is not None:
            run_chat(partial(remote_session, connect, api_key, model), model or connect, params)
        else:
            config = build(EngineConfig, fields, model=DEFAULT_MODEL if model is None else model)
            run_chat(partial(local_session, config), config.model, params)


@command()
@with_options()
def sleep(
    connect: Connect = LOCAL_SERVER,
    admin_key: AdminKey = None,
    level: Annotated[
        int, typer.Option(min=1, max=2, help="1: the weights are moved to host memory; 2: they are discarded.")
    ] = 1,
    mode: Annotated[
        Literal["abort", "wait", "keep"],
        typer.Option(help="Running requests are aborted, or finish first, or pause and go on later."),
    ] = "abort",
    timeout: Annotated[
        float | None, typer.Option(help="With --mode wait: seconds after which the rest is aborted.")
    ] = None,
    json: Json = False,
) -> None:
    """Put a server's engine to sleep: it gives its memory back.

    Waits until this is done.
    """
    from trioengine.cli.operate import operate

    operate(connect, admin_key, "POST", "/sleep", {"level": level, "mode": mode, "timeout": timeout}, as_json=json)


@command()
@with_options()
def wake(
    connect: Connect = LOCAL_SERVER,
    admin_key: AdminKey = None,
    tags: Annotated[
        list[str] | None,
        typer.Option(metavar="<weights|kv_cache>", help="Only weights, or only kv_cache; without it both."),
    ] = None,
    reload: Annotated[
        bool, typer.Option(help="Load discarded weights again; without, they are left to /update_weights.")
    ] = True,
    json: Json = False,
) -> None:
    """Wake a server's engine: it takes its memory again.

    Waits until this is done.
    """
    from trioengine.cli.operate import operate

    given = {"tags": tags or None, "reload": None if reload else "false"}
    operate(connect, admin_key, "POST", "/wake_up", given, as_json=json)


@command()
@with_options()
def status(connect: Connect = LOCAL_SERVER, admin_key: AdminKey = None, json: Json = False) -> None:
    """Print whether a server's engine is awake, and its weights."""
    from trioengine.cli.operate import operate

    operate(connect, admin_key, "GET", "/is_sleeping", {}, as_json=json)


@command()
@with_options()
def pull(model: Model = DEFAULT_MODEL) -> None:
    """Fetch a model and print its path."""
    from trioengine.cli.bars import download_bar
    from trioengine.hub.pull import check_magic, resolve

    with download_bar() as progress:
        path = resolve(model, progress)
    check_magic(path)
    print(path)


@command()
@with_options()
def doctor(json: Json = False) -> int:
    """Check whether this machine can serve a model.

    Prints its hardware and software, and the problems; exit code 1 if it cannot work.
    """
    from trioengine.cli.doctor import CHECKS, run_checks

    return run_checks(CHECKS, as_json=json)


@command()
@with_options()
def fuzz(
    seconds: Annotated[float | None, typer.Option(help="How long to search, more than 0. [default: 60]")] = None,
    examples: Annotated[int | None, typer.Option(min=1, help="How many programs to run.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="The same seed runs the same programs. [default: 0]")] = None,
    profile: Annotated[
        Literal["quick", "deep"] | None, typer.Option(help="How long the programs are. [default: quick]")
    ] = None,
    replay: Annotated[Path | None, typer.Option(help="Run the program in this file again.")] = None,
    machine: Annotated[
        str | None,
        typer.Option(help="Only engine, power, realtime, http, client or core; or yours: file.py:Class."),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="How many searches run at a time. [default: one for each machine, or of one machine for each core]",
        ),
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(help="Where the program that failed is kept. [default: fuzz-failure.json or fuzz-finding.json]"),
    ] = None,
    trace: Annotated[bool | None, typer.Option("--trace", help="Print the whole trace of a failure.")] = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="URL|process",
            help="Fuzz the server at this URL instead: any with OpenAI's API. process: start a server, and harm it.",
        ),
    ] = None,
    serve: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- MODEL OPTIONS]", help="With --target process: the arguments of serve.", show_default=False
        ),
    ] = None,
    dialect: Annotated[
        str | None,
        typer.Option(help="With --target: openai, vllm, sglang, llama.cpp or trioengine; without it detected."),
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="With --target: how long to search. [default: 5]")] = None,
    model: Annotated[str | None, typer.Option(help="With --target: the model; without it the server's first.")] = None,
    api_key: Annotated[str | None, typer.Option(help="With --target: the server's key.")] = None,
    pid: Annotated[
        int | None, typer.Option(min=1, help="With --target: the server's process, to watch and to stop for a while.")
    ] = None,
    kill_worker: Annotated[
        bool, typer.Option("--kill-worker", help="With --pid: also kill a child of the process, which it must replace.")
    ] = False,
    report: Annotated[Path | None, typer.Option(help="With --target: write an HTML page with the findings.")] = None,
    i_own_this_server: Annotated[
        bool, typer.Option("--i-own-this-server", help="With --target: permit one on another machine.")
    ] = False,
) -> int:
    """Look for a program that breaks a promise of the engine.

    Without --target on a simulated worker. Exit code 1 if there is one, 3 if the fuzzer itself fails.
    """
    for_target = {
        "dialect": dialect,
        "minutes": minutes,
        "model": model,
        "api_key": api_key,
        "pid": pid,
        "kill_worker": kill_worker or None,
        "report": report,
        "i_own_this_server": i_own_this_server or None,
    }
    for_both = {"seed": seed, "replay": replay, "keep": keep}
    url_options = ("dialect", "model", "api_key", "pid", "kill_worker", "i_own_this_server")
    for_url = {name: for_target[name] for name in url_options}
    for_engine = {
        "seconds": seconds,
        "examples": examples,
        "profile": profile,
        "machine": machine,
        "jobs": jobs,
        "trace": trace,
    }
    if target is not None:
        _refuse_given(for_engine, "does not go with --target")
        from trioengine.cli.fuzz_process import fuzz_process
        from trioengine.cli.fuzz_target import TargetOptions, fuzz_target

        given = {name: value for name, value in (for_target | for_both).items() if value is not None}
        if target == "process":
            _refuse_given(for_url, "is for the URL of a server")
            return fuzz_process(TargetOptions(target, serve=tuple(serve or ()), **given))  # type: ignore[arg-type]
        _refuse_arguments(serve)
        return fuzz_target(TargetOptions(target, **given))  # type: ignore[arg-type]
    _refuse_arguments(serve)
    _refuse_given(for_target, "is for --target")
    try:
        from trioengine.cli.fuzz import run as run_fuzz
    except ModuleNotFoundError as exc:
        if exc.name != "hypothesis":
            raise
        raise InvalidConfig("the fuzzer needs hypothesis: pip install hypothesis") from exc

    return run_fuzz({name: value for name, value in (for_engine | for_both).items() if value is not None})


def _refuse_arguments(given: list[str] | None) -> None:
    """Refuse arguments of a server that is not started. Raises InvalidConfig."""
    if given:
        raise InvalidConfig(f"unexpected argument {given[0]!r}: the arguments of serve are for --target process")


def _refuse_given(options: Mapping[str, object], reason: str) -> None:
    """Refuse options that have no effect. Raises InvalidConfig."""
    for name, value in options.items():
        if value is not None:
            raise InvalidConfig(f"--{name.replace('_', '-')} {reason}")
