"""Options made from the fields of the configuration's dataclasses, one a field, with its type and its default.

Every option, these and the commands' own, has an environment variable TRIOENGINE_<FLAG>, which the command line beats,
and which beats the file of `--config`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

import typer
from typer.models import OptionInfo

from trioengine.cli.help import panel_of
from trioengine.cli.sources import (
    environment_variable,
    read_config_file,
    rename_fields_in_errors,
    warn_about_unknown_variables,
)
from trioengine.core.config import EngineConfig
from trioengine.core.sampling_params import SamplingParams
from trioengine.serve.config import ServeConfig

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
Check: TypeAlias = Callable[[typer.Context], None]

_HELP = {
    "device": "auto, cpu, cuda or cuda:N.",
    "dtype": "auto, float32 or bfloat16.",
    "max_model_len": "Tokens of prompt and answer together; without it the model's own limit.",
    "max_num_seqs": "Sequences in one step.",
    "max_num_queued_reqs": "Requests that may wait beside those that run; more are refused.",
    "max_sessions": "Sessions at a time.",
    "max_num_batched_tokens": "Tokens in one step, and of prompts between two tokens of a request.",
    "chunked_prefill_size": "Tokens of prompts in one step; without it 512 on the CPU, and no limit on a GPU.",
    "block_size": "Tokens in a block of the KV cache.",
    "kv_cache_memory": "Bytes; without it a quarter of the free memory, at most 4 GiB, on the CPU.",
    "gpu_memory_utilization": "Share of a GPU's memory, without --kv-cache-memory.",
    "enable_prefix_caching": "Use again what was computed for prompts that begin alike.",
    "encoder_cache_memory": "Bytes of encoded images that are kept for later requests.",
    "payload_memory": "Bytes of images on their way to the worker, or kept for later turns.",
    "num_threads": "Threads of the worker; without it torch's own choice.",
    "kernels": "auto, native (in C++, on a CPU where there is a compiler) or torch.",
    "batch_invariant": "The same bits whatever shares a step, in bfloat16 as in float32; on a CPU, and slower.",
    "startup_timeout": "Seconds without progress while the worker loads.",
    "step_timeout": "Seconds that one step may take.",
    "unresponsive_timeout": "Seconds that the worker may leave a ping unanswered.",
    "ping_interval": "Seconds between two pings of the worker.",
    "worker_shutdown_timeout": "Seconds that the engine may take to end.",
    "max_restarts": "Deaths in a row, of workers that delivered no token, until the engine gives up.",
    "on_worker_loss": "What becomes of requests in flight: resume, they go on with the next worker, or fail.",
    "host": "The address to listen on.",
    "port": "0: a free one.",
    "served_model_name": "What clients call the model.",
    "api_key": "A key that clients must have; may be given several times.",
    "admin_key": "A key for the operators' routes, and for all others; may be given several times.",
    "allowed_origin": "A site whose pages may ask, as https://example.com; may be given several times.",
    "weights_dir": "Where the checkpoints lie that an operator may name to /update_weights.",
    "insecure": "Serve other machines without a key, all of them.",
    "shutdown_timeout": "Seconds that requests have after the first SIGTERM or SIGINT.",
    "max_connections": "Connections at a time; an idle one makes room for more, or they are answered with 503.",
    "max_sessions_per_key": "WebSockets and requests of a key at a time; more are answered with 429.",
    "max_body_size": "Bytes of a request's body; without it 4 MiB, or 32 MiB for a model that takes images.",
    "max_header_size": "Bytes of a request's head.",
    "max_message_size": "Bytes of a WebSocket message; without it 1 MiB, or 32 MiB for a model that takes images.",
    "max_conversation_size": "Bytes in memory of the items of a WebSocket's conversation.",
    "max_buffered_bytes": "Bytes of bodies and of WebSocket connections at a time; more are answered with 503.",
    "max_buffered_bytes_per_key": "The same of one key; more are answered with 429.",
    "handshake_timeout": "Seconds for a request's head.",
    "body_timeout": "Seconds for a request's body.",
    "idle_timeout": "Seconds between two requests.",
    "client_ping_interval": "Seconds between two pings of a WebSocket, and for the answer.",
    "send_timeout": "Seconds that a client may read nothing of what it is sent.",
    "max_tokens": "Tokens of the answer; without it up to the context.",
    "temperature": "0 is greedy.",
    "top_k": "Choose among that many tokens; 0 or -1: all.",
    "top_p": "Choose among the likeliest tokens that add up to this.",
    "min_p": "Least probability of a token, relative to the likeliest one's.",
    "repetition_penalty": "Over prompt and answer, multiplicative.",
    "presence_penalty": "Over the answer, additive.",
    "frequency_penalty": "Over the answer, additive, times the count.",
    "seed": "For answers that can be repeated.",
    "stop": "A string that ends the answer; may be given several times.",
    "stop_token_ids": "A token id that ends the answer; may be given several times.",
    "min_tokens": "No end before that many tokens.",
    "ignore_eos": "Do not end at the model's end token.",
    "skip_special_tokens": "Leave special tokens out of the text.",
}
_NOT_OPTIONS = ("model", "restart_delays", "logit_bias", "logprobs", "cache_salt")


def options_of(cls: type, panel: str | None, texts: Mapping[str, str] = _HELP) -> list[inspect.Parameter]:
    """Make an option of each field of a dataclass; `panel` is its place in the help, None for the one in `PANELS`."""
    hints = typing.get_type_hints(cls)
    fields = [field for field in dataclasses.fields(cls) if field.name not in _NOT_OPTIONS]
    return [_option(field, hints[field.name], panel or panel_of(field.name), texts[field.name]) for field in fields]


def _option(field: dataclasses.Field[Any], hint: Any, panel: str, text: str) -> inspect.Parameter:
    """Left out on the command line an option is None, and the dataclass's own default counts."""
    kind = _kind(hint)
    flag = "--" + field.name.replace("_", "-")
    declarations = [f"{flag}/--no-{flag[2:]}"] if field.default is True else [flag]
    value = getattr(field.default, "value", field.default)
    default = "" if value in (None, (), dataclasses.MISSING) else f" [default: {value}]"
    option = typer.Option(
        *declarations,
        metavar=_metavar(hint),
        help=text + default,
        show_default=False,
        rich_help_panel=panel,
    )
    annotation: Any = Annotated[kind | None, option]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _metavar(hint: Any) -> str | None:
    """The choices, or the type of one of several values; None: typer's own word for the type."""
    if typing.get_origin(hint) is typing.Literal:
        return f"<{'|'.join(map(str, typing.get_args(hint)))}>"
    return f"<{_kind(hint).__args__[0].__name__}>" if typing.get_origin(hint) is tuple else None


def _kind(hint: Any) -> Any:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        (hint,) = (argument for argument in typing.get_args(hint) if argument is not types.NoneType)
    if typing.get_origin(hint) is tuple:
        return list[typing.get_args(hint)[0]]  # type: ignore[misc]
    if typing.get_origin(hint) is typing.Literal:
        return str  # the configuration checks it, and names the option
    return hint


ENGINE_OPTIONS = options_of(EngineConfig, None)
SERVE_OPTIONS = options_of(ServeConfig, None)
SAMPLING_OPTIONS = options_of(SamplingParams, "Sampling")


def with_options(*groups: list[inspect.Parameter], check: Check | None = None) -> Callable[[F], F]:
    """Replace the command's `**fields` by these options but for its own, and give every option its variable.

    With any of them it takes a file of options, too. Its errors name what the user has given. `check` sees first what
    was given where, and may raise InvalidConfig.
    """

    def decorate(command: F) -> F:
        signature = inspect.signature(command, eval_str=True)
        own = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
        names = {parameter.name for parameter in own}
        parameters = [*own, *(option for group in groups for option in group if option.name not in names)]
        if groups:
            parameters.append(_config_option(parameters))
        for parameter in parameters:
            (info,) = parameter.annotation.__metadata__
            if isinstance(info, OptionInfo):
                info.envvar, info.show_envvar = environment_variable(parameter.name), False

        @functools.wraps(command)
        def run(*, _context: typer.Context, **options: object) -> object:
            _context.find_root().obj.as_json = options.get("log_json") is True
            warn_about_unknown_variables(_context)
            with rename_fields_in_errors(_context):
                if check is not None:
                    check(_context)
                return command(**options)

        context = inspect.Parameter("_context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        keywords = [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in (*parameters, context)]
        run.__signature__ = signature.replace(parameters=keywords)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in keywords}
        return typing.cast("F", run)

    return decorate


def _config_option(parameters: list[inspect.Parameter]) -> inspect.Parameter:
    """The option that reads a file before the others are looked at; arguments without a variable are not in files."""
    kinds = {
        parameter.name: _kind(typing.get_args(parameter.annotation)[0])
        for parameter in parameters
        if isinstance(info := parameter.annotation.__metadata__[0], OptionInfo) or info.envvar
    }

    example = "max-num-seqs = 16" if "max_num_seqs" in kinds else "num-prompts = 64"

    def read(context: typer.Context, path: Path | None) -> None:
        if path is not None:
            context.obj = read_config_file(path, kinds)
            context.default_map = dict(context.obj.values)

    option = typer.Option(
        callback=read,
        is_eager=True,
        expose_value=False,
        help=f"A TOML file with any of these options, as {example}; flags and variables beat it.",
    )
    annotation: Any = Annotated[Path | None, option]
    return inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def build(cls: Callable[..., T], fields: Mapping[str, object], **others: object) -> T:
    """The dataclass from the options that were given. Raises what it raises for bad values."""
    names = {field.name for field in dataclasses.fields(typing.cast("Any", cls))}
    given = {name: value for name, value in fields.items() if name in names and value not in (None, [])}
    return cls(**others, **given)


HELP_FLAGS = {"help_option_names": ["-h", "--help"]}
LOCAL_SERVER = "http://127.0.0.1:8000"  # as `serve` listens without options
MODEL_HELP = "A name that `pull` knows, a .gguf file, a Hugging Face directory or a hub id."
Model = Annotated[str, typer.Argument(help=MODEL_HELP, envvar="TRIOENGINE_MODEL", show_envvar=False)]
Connect = Annotated[str, typer.Option(metavar="URL", help="The server.")]
AdminKey = Annotated[str | None, typer.Option(help="The server's key for operators.")]
ModelOption = Annotated[str, typer.Option("--model", help=MODEL_HELP)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def require_command(context: typer.Context) -> None:
    """Without a command, print the help and end with exit code 2."""
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)
