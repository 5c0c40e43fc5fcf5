"""Options made from the fields of the configuration's dataclasses.

One a field, with its type, its default and an environment variable TRIOENGINE_<FIELD>.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

import typer

from trioengine.core.config import EngineConfig
from trioengine.core.sampling_params import SamplingParams

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_NOT_OPTIONS = ("model", "restart_delays", "logit_bias", "logprobs")


def _options(cls: type, panel: str) -> list[inspect.Parameter]:
    hints = typing.get_type_hints(cls)
    return [
        _option(field, hints[field.name], panel) for field in dataclasses.fields(cls) if field.name not in _NOT_OPTIONS
    ]


def _option(field: dataclasses.Field[Any], hint: Any, panel: str) -> inspect.Parameter:
    """Left out on the command line an option is None, and the dataclass's own default counts."""
    kind = _kind(hint)
    flag = "--" + field.name.replace("_", "-")
    declarations = [f"{flag}/--no-{flag[2:]}"] if kind is bool else [flag]
    default = "" if field.default in (None, (), dataclasses.MISSING) else f"[default: {field.default}]"
    option = typer.Option(
        *declarations,
        help=default,
        envvar=f"TRIOENGINE_{field.name.upper()}",
        show_envvar=False,
        show_default=False,
        rich_help_panel=panel,
    )
    annotation: Any = Annotated[kind | None, option]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _kind(hint: Any) -> Any:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        (hint,) = (argument for argument in typing.get_args(hint) if argument is not types.NoneType)
    if typing.get_origin(hint) is tuple:
        return list[typing.get_args(hint)[0]]  # type: ignore[misc]
    return hint


ENGINE_OPTIONS = _options(EngineConfig, "Engine")
SAMPLING_OPTIONS = _options(SamplingParams, "Sampling")


def with_options(*groups: list[inspect.Parameter]) -> Callable[[F], F]:
    """Replace the command's `**fields` by these options."""

    def decorate(command: F) -> F:
        signature = inspect.signature(command, eval_str=True)
        own = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
        parameters = [*own, *(option for group in groups for option in group)]
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def build(cls: Callable[..., T], fields: Mapping[str, object], **others: object) -> T:
    """The dataclass from the options that were given. Raises what it raises for bad values."""
    names = {field.name for field in dataclasses.fields(typing.cast("Any", cls))}
    given = {name: value for name, value in fields.items() if name in names and value not in (None, [])}
    return cls(**others, **given)
