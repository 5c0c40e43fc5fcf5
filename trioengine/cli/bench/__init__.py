"""The commands of `trioengine bench`. Each imports its modules when it runs, so that `--help` is quick."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, cast

import typer

from trioengine.cli.bench.config import HELP as LOAD_HELP
from trioengine.cli.bench.config import BenchConfig, goodput_of
from trioengine.cli.help import CommandGroup, PanelCommand
from trioengine.cli.options import (
    ENGINE_OPTIONS,
    HELP_FLAGS,
    Json,
    Model,
    build,
    options_of,
    require_command,
    with_options,
)
from trioengine.core.config import DEFAULT_MODEL, EngineConfig
from trioengine.core.errors import InvalidConfig

bench_app = typer.Typer(
    cls=CommandGroup, context_settings=HELP_FLAGS, help="Measure the engine, or a server.", rich_markup_mode=None
)
LOAD_OPTIONS = options_of(BenchConfig, "Load", LOAD_HELP)
bench_command = partial(bench_app.command, cls=PanelCommand, context_settings=HELP_FLAGS)


@bench_app.callback(invoke_without_command=True)
def bench(context: typer.Context) -> None:
    """Measure the engine, or a server."""
    require_command(context)


@bench_command("offline")
@with_options(ENGINE_OPTIONS)
def offline_command(
    model: Model = DEFAULT_MODEL,
    requests: Annotated[int, typer.Option(min=1, help="Requests, all at once.")] = 64,
    prompt_len: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 128,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 128,
    repeat: Annotated[int, typer.Option(min=1, help="Runs; the median is reported.")] = 3,
    structured: Annotated[bool, typer.Option("--structured", help="Answers are JSON that follows a schema.")] = False,
    profile: Annotated[bool, typer.Option("--profile", help="One run, and where the time of its steps goes.")] = False,
    json: Json = False,
    enable_prefix_caching: Annotated[
        bool,
        typer.Option(
            help="The runs repeat their prompts: with it, they find them computed. [default: False]", show_default=False
        ),
    ] = False,
    **fields: object,
) -> int:
    """Requests that come all at once.

    Their throughput and latency, greedy, with random prompts.
    """
    from trioengine.cli.bench.offline import bench_offline
    from trioengine.cli.bench.profile import bench_profile

    config = build(EngineConfig, fields, model=model, enable_prefix_caching=enable_prefix_caching)
    if profile and (structured or enable_prefix_caching or config.num_speculative_tokens or config.draft_model):
        others = "--structured, --enable-prefix-caching, --num-speculative-tokens and --draft-model"
        raise InvalidConfig(f"--profile runs without {others}")
    if profile:
        return bench_profile(config, requests, prompt_len, output_len, as_json=json)
    bench_offline(config, requests, prompt_len, output_len, repeat=repeat, as_json=json, structured=structured)
    return 0


@bench_command("roof")
@with_options()
def roof_command(
    seconds: Annotated[float, typer.Option(min=0.001, max=60, help="How long each peak is measured.")] = 1.0,
    num_threads: Annotated[int | None, typer.Option(min=1, help="Threads; without it torch's choice.")] = None,
    json: Json = False,
) -> int:
    """The peaks of this CPU.

    Memory that is read, and products of integers and floats: the most that a kernel can reach.
    """
    from trioengine.cli.bench.roof import bench_roof

    return bench_roof(seconds, num_threads, as_json=json)


@bench_command("payload")
@with_options(ENGINE_OPTIONS)
def payload_command(
    model: Annotated[str, typer.Argument(help="A vision model's directory.")],
    requests: Annotated[int, typer.Option(min=1, help="Requests of a wave, all at once.")] = 128,
    waves: Annotated[int, typer.Option(min=1, help="Waves, one after the other.")] = 5,
    image_bytes: Annotated[int, typer.Option(min=3, help="Bytes of each request's picture, as raw RGB.")] = 10_000_000,
    output_len: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 64,
    slow: Annotated[float, typer.Option(min=0, max=1, help="Share of readers that take 0.5 s for each piece.")] = 0.0,
    leave: Annotated[float, typer.Option(min=0, max=1, help="Share of readers that leave on the way.")] = 0.0,
    kill: Annotated[bool, typer.Option("--kill", help="Kill the worker in every second wave.")] = False,
    text_streams: Annotated[int, typer.Option(min=0, help="Streams without images beside the waves.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="An .svg or .png file for the memory over time.")] = None,
    json: Json = False,
    **fields: object,
) -> None:
    """Images and long answers.

    The memory of the engine's process while it takes images and streams answers, over several waves.
    """
    from trioengine.cli.bench.payload import PayloadWork, bench_payload

    config = build(EngineConfig, fields, model=model)
    work = PayloadWork(requests, waves, image_bytes, output_len, slow, leave, kill, text_streams)
    bench_payload(config, work, plot=plot, as_json=json)


@bench_command("serve")
@with_options(LOAD_OPTIONS)
def serve_command(
    more_goals: Annotated[list[str] | None, typer.Argument(metavar="[METRIC:MS]...", hidden=True)] = None,
    model: Annotated[str | None, typer.Option(help=LOAD_HELP["model"])] = None,
    json: Json = False,
    save_result: Annotated[Path | None, typer.Option(help="A file for the JSON, with every request's times.")] = None,
    plot: Annotated[Path | None, typer.Option(help="An .svg or .png file for the latencies.")] = None,
    **fields: object,
) -> int:
    """A load on a server.

    Throughput and latency of any server with OpenAI's API, or of trioengine's WebSocket, as clients see them.
    """
    from trioengine.cli.bench.serve import Output, bench_serve

    goodput = goodput_of(cast("list[str]", fields.pop("goodput") or []), more_goals or [])
    config = build(BenchConfig, fields, model=model, goodput=goodput)
    return bench_serve(config, Output(json, save_result, plot))
