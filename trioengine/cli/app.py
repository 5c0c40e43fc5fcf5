"""The commands. Each imports what it needs when it runs, so that `--help` and mistakes are quick."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from trioengine.cli.options import ENGINE_OPTIONS, SAMPLING_OPTIONS, build, with_options
from trioengine.core.config import DEFAULT_MODEL, EngineConfig
from trioengine.core.errors import EngineError, InvalidConfig, RequestRejected
from trioengine.core.sampling_params import SamplingParams

app = typer.Typer(
    name="trioengine",
    help="Runs large language models for programs that must never leak a session.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
bench_app = typer.Typer(help="Measure the engine.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")

MODEL_HELP = "A name that `pull` knows, a .gguf file, a Hugging Face directory or a hub id."
Model = Annotated[str, typer.Argument(help=MODEL_HELP, envvar="TRIOENGINE_MODEL", show_envvar=False)]
ModelOption = Annotated[str, typer.Option("--model", help=MODEL_HELP, envvar="TRIOENGINE_MODEL", show_envvar=False)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def run(arguments: Sequence[str]) -> int:
    """Run a command; returns the exit code."""
    try:
        result = app(args=list(arguments), standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except typer.TyperException as exc:
        message = exc.format_message() if hasattr(exc, "format_message") else str(exc)
        return _fail(message, 2) if message else 0
    except typer.Exit as exc:
        return int(exc.exit_code)
    except (InvalidConfig, RequestRejected) as exc:
        return _fail(str(exc), 2)
    except (EngineError, OSError) as exc:
        if isinstance(exc, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at its exit
            return 1
        return _fail(str(exc), 1)
    except (KeyboardInterrupt, typer.Abort):
        return 130


def _fail(message: str, code: int) -> int:
    print("trioengine: error:", " ".join(message.split()), file=sys.stderr)
    return code


@app.command()
@with_options(ENGINE_OPTIONS)
def serve(
    model: Model = DEFAULT_MODEL,
    host: Annotated[str, typer.Option(envvar="TRIOENGINE_HOST", show_envvar=False)] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, envvar="TRIOENGINE_PORT", show_envvar=False)] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="What clients call the model.", envvar="TRIOENGINE_SERVED_MODEL_NAME")
    ] = None,
    drain_timeout: Annotated[float, typer.Option(min=0, help="Seconds that requests have after SIGTERM.")] = 30.0,
    insecure: Annotated[bool, typer.Option("--insecure", help="Allow other addresses than loopback.")] = False,
    **fields: object,
) -> None:
    """Serve a model over WebSocket and HTTP, until SIGINT or SIGTERM."""
    from trioengine.cli.serving import serve_until_told

    config = build(EngineConfig, fields, model=model)
    serve_until_told(config, host, port, model_name=served_model_name, drain_timeout=drain_timeout, insecure=insecure)


@app.command()
@with_options(ENGINE_OPTIONS, SAMPLING_OPTIONS)
def generate(
    prompt: Annotated[str, typer.Argument(help="The user message; `-` reads it from stdin.")],
    model: ModelOption = DEFAULT_MODEL,
    as_json: Json = False,
    **fields: object,
) -> None:
    """Print one answer."""
    from trioengine.cli.answering import print_answer

    prompt = sys.stdin.read() if prompt == "-" else prompt
    params = build(SamplingParams, fields)
    print_answer(build(EngineConfig, fields, model=model), prompt, params, as_json=as_json)


@app.command()
@with_options(ENGINE_OPTIONS, SAMPLING_OPTIONS)
def chat(model: Model = DEFAULT_MODEL, **fields: object) -> None:
    """Talk to a model; an empty line or Ctrl-D ends it."""
    from trioengine.cli.answering import hold_chat

    params = build(SamplingParams, fields)
    hold_chat(build(EngineConfig, fields, model=model), params)


@app.command()
def pull(model: Model = DEFAULT_MODEL) -> None:
    """Fetch a model and print where it lies."""
    from trioengine.cli.progress import download_bar
    from trioengine.hub.pull import resolve

    with download_bar() as progress:
        path = resolve(model, progress)
    print(path)


@bench_app.command()
@with_options(ENGINE_OPTIONS)
def offline(
    model: Model = DEFAULT_MODEL,
    requests: Annotated[int, typer.Option(min=1, help="Requests, all at once.")] = 64,
    prompt_len: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 128,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 128,
    repeat: Annotated[int, typer.Option(min=1, help="Runs; the median is reported.")] = 3,
    as_json: Json = False,
    **fields: object,
) -> None:
    """Throughput and latency of requests that come all at once, greedy, with random prompts."""
    from trioengine.cli.bench import bench_offline

    if os.environ.get("TRIOENGINE_ENABLE_PREFIX_CACHING") is None and fields.get("enable_prefix_caching") is None:
        fields["enable_prefix_caching"] = False  # the runs repeat their prompts
    config = build(EngineConfig, fields, model=model)
    bench_offline(config, requests, prompt_len, output_len, repeat=repeat, as_json=as_json)
