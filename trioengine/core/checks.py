"""Checks of values that come from outside: numbers, the arguments of public calls, and their names in errors.

A number is returned as a plain int or float; a wrong number or path raises ValueError with the rule. A wrong argument
raises RequestRejected, an unknown keyword UnknownArgument with the nearest known one.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import numbers
import operator
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec, Self, TypeVar, cast

from trioengine.core.errors import InvalidConfig, RequestRejected, UnknownArgument
from trioengine.core.types import Cause
from trioengine.core.wording import brief, did_you_mean

MAX_COUNT = 2**31 - 1  # tokens, sequences, …: the largest int32
MAX_INT64 = 2**63 - 1  # the largest integer of msgpack and torch
MAX_FLOAT32 = 3.4e38
MAX_DEPTH = 64  # of JSON values within each other
BYTES = (bytes, bytearray, memoryview)  # sequences, but neither texts nor lists
_REMEDIES = {"stream": "session.generate(...) gives an answer in chunks"}  # for arguments of other libraries
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


# ---- numbers, paths and keys ----------------------------------------------------------------------------------------


def integer(value: Any, low: int, high: int) -> int:
    """Return an integer of any library as an int. Raises ValueError outside the bounds (inclusive) and for bools."""
    try:
        count = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = None
    if count is None or not low <= count <= high:
        raise ValueError(f"must be an integer from {low} to {high}, got {brief(value)}")
    return count


def number(value: Any, low: float, high: float, *, above: bool = False) -> float:
    """Return a real number of any library as a float.

    Raises ValueError outside the bounds (`above` excludes the lower one), for nan and for bools.
    """
    try:
        # float first: checks against abstract classes are slow
        is_number = isinstance(value, (float, numbers.Real)) and not isinstance(value, bool)
        converted = float(value) if is_number else math.nan
    except OverflowError:  # an integer that no float holds
        converted = math.nan
    if low <= converted <= high and not (above and converted == low):
        return converted
    rule = f"above {low} and at most {high}" if above else f"from {low} to {high}"
    raise ValueError(f"must be a number {rule}, got {brief(value)}")


def path(value: Any, kind: str) -> str:
    """Return the path of a file or a directory, which need not exist; `kind` is its name in the rule.

    Raises ValueError for a value that no system call takes: anything but a text, "", and a name with a NUL or a lone
    surrogate.
    """
    if not isinstance(value, str) or not value:
        raise ValueError(f"must be {kind}, got {brief(value)}")
    try:
        value.encode(errors="surrogateescape")  # as `os.fsencode` does
        problem = "has a NUL" if "\0" in value else ""
    except UnicodeEncodeError:
        problem = "is not valid Unicode"
    if problem:
        raise ValueError(f"must be {kind}, and its name {problem}: {brief(value)}")
    return value


def is_key(value: object) -> bool:
    """Whether the value can be a client's key: visible ASCII characters, as in a header."""
    return isinstance(value, str) and bool(value) and all("!" <= character <= "~" for character in value)


# ---- arguments ------------------------------------------------------------------------------------------------------


def rejected(param: str, problem: str) -> RequestRejected:
    """Return the error of one argument."""
    return RequestRejected("invalid_value", f"{param} {problem}", param=param)


def check_flag(param: str, value: object) -> bool:
    """Return the flag. Raises RequestRejected unless it is a bool."""
    if not isinstance(value, bool):
        raise rejected(param, f"must be True or False, got {brief(value)}")
    return value


def check_wait(wait: object) -> bool | None:
    """Return `wait`. Raises RequestRejected unless it is a bool or None."""
    if not (wait is None or isinstance(wait, bool)):
        raise rejected("wait", f"must be True, False or None, got {brief(wait)}")
    return wait


def check_label(label: object) -> str | None:
    """Return the label. Raises RequestRejected unless it is a string or None."""
    if not (label is None or isinstance(label, str)):
        raise rejected("label", f"must be a string, got {brief(label)}")
    return label


def check_history(history: object) -> Sequence[Mapping[str, Any]] | None:
    """Return the history. Raises RequestRejected unless it is a list or None; its messages are not checked here."""
    if history is not None and (isinstance(history, str | bytes) or not isinstance(history, Sequence)):
        raise rejected("history", f"must be a list of messages, got {brief(history)}")
    return history


def check_role(name: str, message: Mapping[str, Any], roles: Iterable[str]) -> None:
    """Raise RequestRejected unless the message, called `name` in the error, has one of the roles."""
    if "role" not in message:
        raise rejected(f"{name}.role", f"is missing: the message has {brief(list(message))}")
    if message["role"] not in (known := list(roles)):
        raise rejected(f"{name}.role", f"must be one of {', '.join(known)}, got {brief(message['role'])}")


def kind_of(prompt: object) -> str:
    """Return the type of a bad prompt for an error, with advice for a single message."""
    return type(prompt).__name__ + ("; put a message into a list" if isinstance(prompt, Mapping) else "")


def content_of(name: str, message: Mapping[str, Any]) -> object:
    """Return the content of a message, called `name` in the error; "" for null beside calls of tools.

    Raises RequestRejected if it is missing.
    """
    if message.get("content") is None and message.get("tool_calls"):
        return ""
    if "content" not in message:
        raise rejected(f"{name}.content", f"is missing: the message has {brief(list(message))}")
    return message["content"]


def check_seconds(timeout: object) -> float:
    """Return the timeout in seconds. Raises RequestRejected unless it is a number from 0; infinity is allowed."""
    try:
        return number(timeout, 0, math.inf)
    except ValueError:
        raise rejected("timeout", f"must be seconds from 0, got {brief(timeout)}") from None


def check_request(request: object) -> int | str:
    """Return a request's id or label. Raises RequestRejected for other types."""
    if isinstance(request, bool) or not isinstance(request, int | str):
        raise rejected("request", f"must be a request's id or its label, got {brief(request)}")
    return request


def check_cause(cause: str) -> Cause:
    """Return the cause of this name. Raises RequestRejected for an unknown one."""
    try:
        return Cause(cause)
    except ValueError:
        raise rejected("cause", f"must be one of {', '.join(Cause)}, got {brief(cause)}") from None


def check_callback(field: str, callback: object) -> None:
    """Raise InvalidConfig unless the callback can be called or is None."""
    if not (callback is None or callable(callback)):
        raise InvalidConfig.of(field, f"must be a function, got {brief(callback)}")


# ---- JSON values ----------------------------------------------------------------------------------------------------


def check_unicode(text: str, name: str) -> None:
    """Raise RequestRejected for lone surrogates: JSON can carry them, tokenizers refuse them."""
    if text.isascii():  # constant time
        return
    try:
        text.encode()
    except UnicodeEncodeError:
        raise rejected(name, "is not valid Unicode: it has a lone surrogate") from None


def check_json(value: object, name: str, depth: int = 0) -> None:
    """Raise RequestRejected for values that JSON does not have: templates cannot be relied on to print them."""
    if depth > MAX_DEPTH:
        raise rejected(name, "is nested too deeply")
    if isinstance(value, str):
        check_unicode(value, name)
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            if not isinstance(key, str):
                raise rejected(name, f"has a key that is not a string: {key!r:.60}")
            check_unicode(key, name)
            check_json(entry, f"{name}.{key:.40}", depth + 1)
    elif isinstance(value, Sequence) and not isinstance(value, BYTES):
        for index, entry in enumerate(value):
            check_json(entry, f"{name}[{index}]", depth + 1)
    elif value is not None and not isinstance(value, (bool, int, float)):
        raise rejected(name, f"must be a JSON value, got {type(value).__name__}")


# ---- names of arguments ---------------------------------------------------------------------------------------------


def check_names(function: str, given: Iterable[str], known: Sequence[str], others: Sequence[str] = ()) -> None:
    """Raise UnknownArgument for the first unknown name, with the nearest known one.

    `others` are suggested as well: arguments that the function takes by other ways.
    """
    for name in given:
        if name not in known:
            suggested = [other for other in (*known, *others) if other != name]
            hint = f"; {_REMEDIES[name]}" if name in _REMEDIES else did_you_mean(name, suggested)
            raise UnknownArgument(f"{function}() has no argument {name!r}{hint}")


def fields_checked(cls: type[T]) -> type[T]:
    """Let the dataclass raise UnknownArgument for a keyword that is not one of its fields."""
    init, known = cls.__init__, field_names(cls)

    @functools.wraps(init)
    def checked(self: T, *args: Any, **kwargs: Any) -> None:
        check_names(cls.__name__, kwargs, known)
        init(self, *args, **kwargs)

    cast("Any", cls).__init__ = checked
    return cls


def names_checked(function: Callable[P, R]) -> Callable[P, R]:
    """Let the function, which has no `**` parameters, raise UnknownArgument for an unknown keyword."""
    return checked_call(function, function.__name__, parameters_of(function))


def field_names(cls: type[object]) -> list[str]:
    """Return the names of a dataclass's fields."""
    return [field.name for field in dataclasses.fields(cast("Any", cls))]


def parameters_of(function: Callable[..., object]) -> list[str]:
    """Return the names of a function's parameters, without `self` and the name of its `**` parameter."""
    parameters = inspect.signature(function).parameters.values()
    return [each.name for each in parameters if each.name != "self" and each.kind is not each.VAR_KEYWORD]


def checked_call(
    function: Callable[P, R], name: str, known: Sequence[str], others: Sequence[str] = ()
) -> Callable[P, R]:
    """Return the function under this name; it checks its keywords first, as check_names does."""

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        check_names(name, kwargs, known, others)
        return function(*args, **kwargs)

    async def call_async(*args: P.args, **kwargs: P.kwargs) -> object:
        check_names(name, kwargs, known, others)
        result = cast("Awaitable[object]", function(*args, **kwargs))
        del args, kwargs  # this frame lives as long as the call, and must not keep images alive
        return await result

    checked: Any = functools.wraps(function)(call_async if inspect.iscoroutinefunction(function) else call)
    checked.__name__ = name
    checked.__qualname__ = function.__qualname__.removesuffix(function.__name__) + name  # as its coroutines
    return cast("Callable[P, R]", checked)


# ---- places in a prompt ---------------------------------------------------------------------------------------------

_PLACE = re.compile(r"prompt\[(\d+)\]\.content(?:\[(\d+)\]((?:\.\w+)*))?")  # in the messages made of a prompt
_WHOLE = re.compile(r"^messages(?=$|: )")  # all messages, as templates call them


@dataclass(frozen=True, slots=True)
class PromptPlaces:
    """The parts of a prompt by the arguments of the call that they came in, `prompt` and `media`, for errors.

    Media become the first parts of the last message.
    """

    is_text: bool  # the prompt became the only message
    last: int  # the index of the last message
    ends_with_text: bool  # the last message's content is a string, which became the one part behind the media
    num_media: int

    @classmethod
    def of(cls, prompt: object, media: object) -> Self:
        """Make them of arguments that are not checked yet."""
        if isinstance(prompt, Sequence) and not isinstance(prompt, str) and prompt:
            is_text, last, content = False, len(prompt) - 1, prompt[-1]
            content = content.get("content") if isinstance(content, Mapping) else None
        else:
            is_text, last, content = isinstance(prompt, str), 0, prompt
        return cls(is_text, last, isinstance(content, str), len(media) if isinstance(media, Sequence) else 0)

    def name(self, place: str) -> str:
        """Rename a place in the messages by the call's arguments; `place` may begin a longer message."""
        if (found := _PLACE.match(place)) is None:
            return _WHOLE.sub("prompt", place, count=1)
        return self._name(int(found[1]), found) + place[found.end() :]

    def _name(self, index: int, found: re.Match[str]) -> str:
        if index == self.last and found[2] is not None:
            if (part := int(found[2]) - self.num_media) < 0:
                return f"media[{found[2]}]"
            if not self.is_text:
                return f"prompt[{index}].content" + ("" if self.ends_with_text else f"[{part}]{found[3]}")
        return "prompt" if self.is_text else found[0]

    @contextmanager
    def naming(self) -> Iterator[None]:
        """A context in which RequestRejected gets these names."""
        try:
            yield
        except RequestRejected as exc:
            raise self.rejection(exc).with_traceback(exc.__traceback__) from exc.__cause__

    def rejection(self, error: RequestRejected) -> RequestRejected:
        """Return the error with its places renamed."""
        param = None if error.param is None else self.name(error.param)
        return RequestRejected(error.code, self.name(error.message), param=param)
