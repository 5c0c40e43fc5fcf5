"""Read JSON of clients as structs; an error names the path of the field, its rule, and the value that was given.

The rule is made from the struct's types, as is the schema in /openapi.json.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, inspect

from trioengine.core.errors import RequestRejected
from trioengine.core.grammar import Grammar
from trioengine.core.sampling_params import SamplingParams
from trioengine.core.wording import did_you_mean
from trioengine.serve.errors import ClientError
from trioengine.serve.parsing import either, is_number, shown, unknown
from trioengine.serve.requests import Sampling

T = TypeVar("T")
S = TypeVar("S", bound=Struct)
_PLACE = re.compile(r"^(?P<fault>.*?)(?: - at `(?:key` in `)?\$(?P<path>.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>.*)`$")
_STEP = re.compile(r"\.(?P<name>[^.\[\]]+)|\[(?P<index>[0-9]+)\]")  # "[...]" is a value of an object


def read(value: object, type_: type[T], where: str = "") -> T:
    """Return the JSON value as this type; `where` is its path, and empty for a whole body.

    Members that a struct does not have are passed over. Raises ClientError.
    """
    try:
        return msgspec.convert(value, type_, str_keys=True)
    except msgspec.ValidationError as exc:
        raise _client_error(str(exc), value, type_, where) from None


def read_known(fields: Mapping[str, Any], type_: type[S]) -> S:
    """Return the body as this struct. Raises ClientError, also for a field that the struct does not have."""
    known = type_.__struct_encode_fields__
    for name in unknown_names(fields, known):
        raise unknown("field", name, known)
    return read(fields, type_)


def _client_error(message: str, value: object, type_: Any, where: str) -> ClientError:
    match = _PLACE.match(message)
    assert match is not None  # it matches any text
    fault, path = match["fault"], match["path"] or ""
    if missing := _MISSING.match(fault):
        path = f"{path}.{missing['name']}"
    given, holder, info = value, value, _info(type_)
    for step in _STEP.finditer(path):
        info = _child(info, given, step["name"])
        given, holder = _child_of_value(given, step["name"], step["index"]), given
    param = (where + path).removesuffix("[...]").removeprefix(".")
    name = param or "the body"
    if given is None:
        return ClientError("missing_parameter", f"{name} is missing{_hint(holder, param)}", param=param or None)
    rule = rule_of(info)
    is_typed = "got `" not in fault or "`key` in" in message or _are_numbers(given, info)
    code = "invalid_value" if is_typed else "invalid_type"
    return ClientError(code, f"{name} must be {rule}, got {shown(given)}", param=param or None)


def _hint(holder: object, param: str) -> str:
    """Name the member of the object that may be a misspelling of the one that is missing."""
    name = param.rpartition(".")[2]
    names = list(holder) if isinstance(holder, Mapping) else []
    near = next((each for each in names if did_you_mean(each, [name])), None)
    return "" if near is None else f"; did you mean it by {near[:64]!r}?"


def _are_numbers(value: object, info: inspect.Type) -> bool:
    """Whether a number is due and given, if another one: JSON has one type of numbers."""
    return is_number(value) and all(
        isinstance(option, inspect.IntType | inspect.FloatType) for option in _options(info)
    )


@cache
def _info(type_: Any) -> inspect.Type:
    return inspect.type_info(type_)


def _options(info: inspect.Type) -> Iterator[inspect.Type]:
    """The types of a union but null, or the type."""
    if isinstance(info, inspect.Metadata):
        yield from _options(info.type)
    elif isinstance(info, inspect.UnionType):
        for option in info.types:
            yield from _options(option)
    elif not isinstance(info, inspect.NoneType):
        yield info


def _child(info: inspect.Type, value: object, name: str | None) -> inspect.Type:
    """Return the type of a member of the value, or without a name of one of its entries."""
    options = list(_options(info))
    if name is None:
        return next(option.item_type for option in options if isinstance(option, inspect.ListType))
    structs = [option for option in options if isinstance(option, inspect.StructType)]
    if name in (struct.tag_field for struct in structs):
        return inspect.LiteralType(tuple(struct.tag for struct in structs))
    if len(structs) > 1:
        assert isinstance(value, Mapping)
        structs = [struct for struct in structs if value.get(struct.tag_field) == struct.tag]
    return next(field.type for struct in structs for field in struct.fields if field.encode_name == name)


def _child_of_value(value: object, name: str | None, index: str | None) -> object:
    if isinstance(value, Mapping):
        return value.get(name)
    return value[int(index)] if isinstance(value, list) and index is not None else None


# ---- rules ---------------------------------------------------------------------------------------------------------


def rule_of(info: inspect.Type) -> str:
    """Return the rule for values of the type, as it follows "must be"."""
    return either(list(dict.fromkeys(map(_rule, _options(info)))))


def _rule(info: inspect.Type) -> str:
    match info:
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType():
            return "an integer" + _bounds(info.ge, info.le)
        case inspect.FloatType():
            return "a number" + _bounds(info.ge, info.le)
        case inspect.StrType():
            return "a string" + _length(info.min_length, info.max_length, "characters")
        case inspect.LiteralType():
            return either([shown(value) for value in info.values])
        case inspect.ListType():
            return "a list" + _length(info.min_length, info.max_length, "entries")
        case inspect.DictType():
            head = "an object" + _length(info.min_length, info.max_length, "members")
            return f"{head} (each key {rule_of(info.key_type)}, each value {rule_of(info.value_type)})"
        case inspect.AnyType():
            return "any value"
        case _:
            return "an object"


def _bounds(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f" from {low} to {high}"
    return f" of at least {low}" if low is not None else f" of at most {high}" if high is not None else ""


def _length(low: int | None, high: int | None, unit: str) -> str:
    if low and high is not None:
        return f" of {low} to {high} {unit}"
    return f" of at most {high} {unit}" if high is not None else f" of at least {low} {unit}" if low else ""


# ---- names and values that are not implemented ---------------------------------------------------------------------


def check_supported(fields: Mapping[str, Any], unsupported: Mapping[str, tuple[Any, ...]], where: str = "") -> None:
    """Refuse fields that would change an answer and are not implemented, except with a value that changes nothing.

    `unsupported` has such values by the names of the fields; null is always one. Raises ClientError.
    """
    for name, value in fields.items():
        if value is None or name not in unsupported:
            continue
        harmless = unsupported[name]
        if any(type(value) is type(each) and value == each for each in harmless):
            continue
        param = f"{where}.{name}" if where else name
        rule = f"must be {either([shown(each) for each in harmless])}" if harmless else "is not supported"
        message = f"{param} {rule}, got {shown(value)}"
        if harmless == ([],):
            message = f"this server does not support {param}"
        raise ClientError("unsupported_parameter", message, param=param)


def unknown_names(fields: Mapping[str, Any], known: Collection[str]) -> tuple[str, ...]:
    """Return the names of the fields that are neither null nor known."""
    return tuple(name for name, value in fields.items() if value is not None and name not in known)


def sampling_params(
    given: Sampling,
    *,
    max_tokens: int | None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    grammar: Grammar | None = None,
    where: str = "",
) -> SamplingParams:
    """Return the engine's parameters. Raises ClientError for values that do not go together."""
    values = {name: value for name in _SAMPLING if (value := getattr(given, name)) is not None}
    try:
        return SamplingParams(
            **values, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs, grammar=grammar
        )
    except RequestRejected as exc:
        raise ClientError(exc.code, f"{where}{exc.message}", param=f"{where}{exc.param}") from exc


_SAMPLING = Sampling.__struct_fields__
