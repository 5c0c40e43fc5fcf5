"""Parsing of clients' input: JSON bodies and messages, their fields, queries, and sampling parameters.

An unknown field or parameter is refused by its name, never ignored. JSON is UTF-8, without the constants that only
Python's reader accepts, and nested at most 64 levels deep.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias, TypeVar
from urllib.parse import parse_qsl

from trioengine.actors.ports import Ports
from trioengine.core.checks import number
from trioengine.core.errors import RequestRejected
from trioengine.core.sampling_params import SamplingParams
from trioengine.core.wording import brief, did_you_mean
from trioengine.serve.errors import ClientError
from trioengine.serve.http import HttpRequest

T = TypeVar("T")
Parameters: TypeAlias = Mapping[str, Sequence[str]]  # values of a query, by name
MAX_DEPTH = 64  # objects and lists within each other; Python can neither read nor show many more
LONG_JSON = 1 << 16  # bytes of a body, or characters of a message; longer ones are parsed in a thread
SAMPLING = {  # the names that every protocol shares with SamplingParams
    name: name
    for name in (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "seed",
        "stop",
        "stop_token_ids",
        "min_tokens",
        "ignore_eos",
        "logit_bias",
        "skip_special_tokens",
        "cache_salt",
    )
}
_TYPES: Mapping[str, tuple[type, ...]] = {  # of sampling parameters as JSON has them; the others are numbers
    "stop": (str, list),
    "stop_token_ids": (list,),
    "ignore_eos": (bool,),
    "logit_bias": (Mapping,),
    "skip_special_tokens": (bool,),
    "cache_salt": (str,),
}
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # an escape of half of a pair, or of one of its halves
_FLAGS = {"true": True, "1": True, "false": False, "0": False}
_SHOWN = 120  # characters of a name
_SHOWN_VALUE = 80  # characters of a value
_LISTED = 8  # names, at most
_MAX_METADATA = 16


async def in_thread_if(is_long: bool, ports: Ports, function: Callable[[], T]) -> T:
    """Call a function without side effects, in a thread if it takes long; cancelled, its result is dropped."""
    if not is_long:
        return function()
    result: T = await ports.run_in_thread(function)
    return result


# ---- JSON ---------------------------------------------------------------------------------------------------------


class _NotJson(ValueError):
    """A constant that only Python's reader accepts."""


def load_object(data: str | bytes, source: str, code: str = "invalid_type") -> Mapping[str, Any]:
    """Load a JSON object from `source`, which is "the body" or "the message".

    Raises ClientError, with this `code` for JSON other than an object.
    """
    try:
        text = data if isinstance(data, str) else data.decode()
    except UnicodeDecodeError:
        raise ClientError("invalid_json", f"{source} is not UTF-8") from None
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise _too_deep(source) from None
    except _NotJson as exc:
        raise ClientError("invalid_json", f"{source} is not JSON: {exc}") from None
    except json.JSONDecodeError as exc:
        fault = f"is not JSON: line {exc.lineno}, column {exc.colno}" if text.strip() else "is empty"
        raise ClientError("invalid_json", f"{source} {fault}") from None
    except ValueError:
        raise ClientError("invalid_json", f"{source} is not JSON") from None
    if text.count("{") + text.count("[") > MAX_DEPTH:
        _check_depth(value, source)
    if not isinstance(value, dict):
        raise ClientError(code, f"{source} is not a JSON object")
    return value


def load_body(body: bytes) -> Mapping[str, Any]:
    """Load the JSON object in a body, whose strings are Unicode. Raises ClientError."""
    fields = load_object(body, "the body")
    if _SURROGATE.search(body):
        _check_text(fields)
    return fields


def _check_text(value: object, where: str = "") -> None:
    """Raise ClientError for a string with half of a surrogate pair, which is not Unicode; `where` is its path."""
    if isinstance(value, dict):
        for name, entry in value.items():
            if not _is_text(name):
                name = where or "the body"
                raise ClientError(
                    "invalid_value", f"{name} has a name with half of a surrogate pair", param=where or None
                )
            _check_text(entry, f"{where}.{name}" if where else name)
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            _check_text(entry, f"{where}[{index}]")
    elif isinstance(value, str) and not _is_text(value):
        raise ClientError("invalid_value", f"{where} has half of a surrogate pair", param=where)


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_depth(value: object, source: str) -> None:
    """Raise ClientError for deeper nesting. Iterative, because recursion is the danger to guard against."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for parent in level for child in _children(parent)]
    if level:
        raise _too_deep(source)


def _children(value: object) -> list[object]:
    """Return the objects and lists directly in an object or a list."""
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [entry for entry in entries if isinstance(entry, dict | list)]


def _too_deep(source: str) -> ClientError:
    return ClientError("invalid_json", f"{source} is nested deeper than {MAX_DEPTH} levels")


def _refuse_constant(name: str) -> NoReturn:
    raise _NotJson(f"{name} is not a JSON number")


# ---- fields -------------------------------------------------------------------------------------------------------


def known_fields(value: object, names: Collection[str], where: str = "") -> Mapping[str, Any]:
    """Check that an object has these fields only; without `where` it is the whole body. Raises ClientError."""
    if not isinstance(value, Mapping):
        raise ClientError("invalid_type", f"{where or 'the body'} must be an object", param=where or None)
    for name in value:
        if name not in names:
            raise unknown("field", name, names, f"{where}." if where else "")
    return value


def check_fixed(fields: Mapping[str, Any], fixed: Mapping[str, tuple[Any, ...]], where: str = "") -> None:
    """Raise ClientError unless each `fixed` field is null, absent, or one of the values that are supported."""
    for name, allowed in fixed.items():
        value = fields.get(name)
        if value is not None and not any(type(value) is type(choice) and value == choice for choice in allowed):
            param = f"{where}.{name}" if where else name
            rule = "must be " + " or ".join(map(shown, allowed)) if allowed else "is not supported"
            message = f"{param} {rule}, got {shown(value)}"
            if allowed == ([],):
                message = f"this server does not support {param}"
            raise ClientError("unsupported_parameter", message, param=param)


def text_of(value: object, where: str) -> str:
    """Return a string that is Unicode text. Raises ClientError."""
    if not isinstance(value, str):
        raise ClientError("invalid_type", f"{where} must be a string", param=where)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ClientError("invalid_value", f"{where} has half of a surrogate pair", param=where) from None
    return value


def flag_of(value: object, where: str) -> bool:
    """Return a boolean; null is false. Raises ClientError."""
    if value is None or isinstance(value, bool):
        return bool(value)
    raise ClientError("invalid_type", f"{where} must be true or false, got {shown(value)}", param=where)


def metadata_of(value: object, where: str) -> Mapping[str, str] | None:
    """Return an object of up to 16 short strings, or None for null. Raises ClientError."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ClientError("invalid_type", f"{where} must be an object", param=where)
    if len(value) > _MAX_METADATA or not all(
        isinstance(text, str) and len(key) <= 64 and len(text) <= 512 for key, text in value.items()
    ):
        raise ClientError("invalid_value", f"{where} must map at most {_MAX_METADATA} keys to strings", param=where)
    return value


def is_number(value: object) -> bool:
    """Whether a value is a JSON number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def shown(value: object) -> str:
    """Return a client's value for a message: JSON of at most 80 characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN_VALUE else text[: _SHOWN_VALUE - 1] + "…"


def either(choices: Sequence[str]) -> str:
    """Join choices to a text: a, b or c."""
    *others, last = choices
    return f"{', '.join(others)} or {last}" if others else last


def in_json(message: str, value: object) -> str:
    """Rewrite an engine's message that ends with this value in Python's notation."""
    quoted = brief(value)
    return message.removesuffix(quoted) + shown(value) if message.endswith(f", got {quoted}") else message


def as_served(message: str, own: str, model: str) -> str:
    """Rewrite an engine's message to call the model by the name that clients use, in place of the engine's `own`."""
    return message.replace(f"model {own!r}", f"model {model!r}")


def unknown(kind: str, name: str, names: Collection[str], prefix: str = "") -> ClientError:
    """Name an unknown field or parameter with its path, and the nearest of the known `names`, or all."""
    param = (prefix + name)[:_SHOWN]
    hint = did_you_mean(name, names, prefix)
    if not hint and 0 < len(names) <= _LISTED:
        hint = f"; the {kind}s are {', '.join(sorted(names))}"
    return ClientError("unsupported_parameter", f"unknown {kind} {param!r}{hint}", param=param)


# ---- queries ------------------------------------------------------------------------------------------------------


def read_query(query: str, names: Collection[str]) -> Parameters:
    """Return the parameters in a query, each of which must have one of these names. Raises ClientError."""
    given: dict[str, list[str]] = {name: [] for name in names}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in given:
            raise unknown("parameter", name, names)
        given[name].append(value)
    return given


def parameters_of(request: HttpRequest, names: Collection[str]) -> Parameters:
    """Return the parameters of a request that has them in its query, and no body. Raises ClientError."""
    if request.body.strip() not in (b"", b"{}"):
        raise ClientError("invalid_value", f"{request.path} takes its parameters in its query, and no body")
    return read_query(request.query, names)


def one_of(parameters: Parameters, name: str, choices: Sequence[str]) -> str:
    """Return one of the choices, by default the first. Raises ClientError."""
    value = _single(parameters, name, choices[0])
    if value not in choices:
        message = f"{name} must be {either(choices)}, got {brief(value)}"
        raise ClientError("invalid_value", message, param=name)
    return value


def some_of(parameters: Parameters, name: str, choices: Collection[str]) -> list[str] | None:
    """Return some of the choices, separated by commas or given several times; None without any. Raises ClientError."""
    if not parameters[name]:
        return None
    values = [value for given in parameters[name] for value in given.split(",")]
    for value in values:
        if value not in choices:
            message = f"{name} must be some of {', '.join(sorted(choices))}, got {brief(value)}"
            raise ClientError("invalid_value", message, param=name)
    return values


def flag_in(parameters: Parameters, name: str, default: bool) -> bool:
    """Return a boolean. Raises ClientError."""
    value = _single(parameters, name, str(default).lower())
    if value not in _FLAGS:
        raise ClientError("invalid_value", f"{name} must be true or false, got {brief(value)}", param=name)
    return _FLAGS[value]


def number_in(parameters: Parameters, name: str, low: float, high: float) -> float | None:
    """Return a number, or None if it is absent. Raises ClientError."""
    text = _single(parameters, name, "")
    if not parameters[name]:
        return None
    try:
        value: object = float(text)
    except ValueError:
        value = text
    try:
        return number(value, low, high)
    except ValueError as exc:
        raise ClientError("invalid_value", f"{name} {exc}", param=name) from None


def _single(parameters: Parameters, name: str, default: str) -> str:
    given = parameters[name]
    if len(given) > 1:
        raise ClientError("invalid_value", f"{name} is given {len(given)} times", param=name)
    return given[0] if given else default


# ---- sampling parameters ------------------------------------------------------------------------------------------


def sampling_params(given: Mapping[str, Any], names: Mapping[str, str], where: str = "") -> SamplingParams:
    """Return the engine's parameters for those `given` by a client; `names` maps the protocol's names to ours.

    Raises ClientError in the client's names.
    """
    prefix = f"{where}." if where else ""
    values = {
        names[name]: _logit_bias(value, prefix) if name == "logit_bias" else value for name, value in given.items()
    }
    try:
        return SamplingParams(**values)
    except RequestRejected as exc:
        name = next((name for name in given if names[name] == exc.param), exc.param)
        problem = in_json(exc.message, given.get(str(name))).replace(str(exc.param), str(name), 1)
        code = exc.code if _has_its_type(values.get(str(exc.param)), exc.param) else "invalid_type"
        raise ClientError(code, f"{prefix}{problem}", param=f"{prefix}{name}") from exc


def _has_its_type(value: object, name: str | None) -> bool:
    return isinstance(value, types) if (types := _TYPES.get(str(name))) is not None else is_number(value)


def _logit_bias(value: Any, prefix: str) -> Any:
    """Make integers of the keys, which are strings in JSON. Raises ClientError."""
    if not isinstance(value, Mapping):
        return value
    if not all(_TOKEN_ID.fullmatch(token_id) for token_id in value):
        param = f"{prefix}logit_bias"
        raise ClientError("invalid_value", f"{param} must map token ids to numbers", param=param)
    return {int(token_id): bias for token_id, bias in value.items()}
