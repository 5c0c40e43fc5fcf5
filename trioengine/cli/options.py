"""Options of the commands: one for each field of a configuration's dataclass, with its type and default.

Every option, also a command's own, has an environment variable TRIOENGINE_<FLAG>. The command line beats it, and it
beats the file of `--config`.
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

from trioengine.cli.help import HELP, panel_of
from trioengine.cli.sources import (
    environment_variable,
    read_config_file,
    rename_fields_in_errors,
    warn_about_unknown_variables,
)
from trioengine.core.config import EngineConfig
from trioengine.core.sampling_params import SamplingParams
from trioengine.hub.known_models import KNOWN_MODELS
from trioengine.serve.config import ServeConfig

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
Check: TypeAlias = Callable[[typer.Context], None]

HELP_FLAGS = {"help_option_names": ["-h", "--help"]}
LOCAL_SERVER = "http://127.0.0.1:8000"  # as `serve` listens without options
MODEL_HELP = f"A known model ({', '.join(KNOWN_MODELS)}), a .gguf file, a Hugging Face directory or a hub id."
Model = Annotated[str, typer.Argument(help=MODEL_HELP, envvar="TRIOENGINE_MODEL", show_envvar=False)]
Connect = Annotated[str, typer.Option(metavar="URL", help="The server.")]
AdminKey = Annotated[str | None, typer.Option(help="The server's key for operators.")]
ModelOption = Annotated[str, typer.Option("--model", help=MODEL_HELP)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
_NOT_OPTIONS = ("model", "restart_delays", "logit_bias", "logprobs", "prompt_logprobs", "cache_salt", "grammar")
_ENGINE_OPTIONS_ALONE = ("num_speculative_tokens",)  # also fields of requests: one option is enough


def options_of(cls: type, panel: str | None, texts: Mapping[str, str] = HELP) -> list[inspect.Parameter]:
    """Make an option of each field of a dataclass; `panel` is its place in the help, None for the one in `PANELS`."""
    hints = typing.get_type_hints(cls)
    fields = [field for field in dataclasses.fields(cls) if field.name not in _NOT_OPTIONS]
    return [_option(field, hints[field.name], panel or panel_of(field.name), texts[field.name]) for field in fields]


def _option(field: dataclasses.Field[Any], hint: Any, panel: str, text: str) -> inspect.Parameter:
    """An option that is left out is None, and the dataclass's own default applies."""
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
    """The choices, or the type of an element; None: typer's own word for the type."""
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
SAMPLING_OPTIONS = [each for each in options_of(SamplingParams, "Sampling") if each.name not in _ENGINE_OPTIONS_ALONE]


def with_options(*groups: list[inspect.Parameter], check: Check | None = None) -> Callable[[F], F]:
    """Replace a command's `**fields` by these options, except its own, and give every option its variable.

    With any groups it also takes a config file. Its errors name options as the user gave them. `check` runs before the
    command and may raise InvalidConfig.
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
    """The option --config, which is processed before the others; a file has no arguments without a variable."""
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
    """Construct a dataclass from the options that were given. Raises InvalidConfig for bad values."""
    names = {field.name for field in dataclasses.fields(typing.cast("Any", cls))}
    given = {name: value for name, value in fields.items() if name in names and value not in (None, [])}
    return cls(**others, **given)


def require_command(context: typer.Context) -> None:
    """Without a command, print the help and end with exit code 2."""
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)
