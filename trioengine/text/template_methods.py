"""Attributes and methods of a chat template's values: those that templates use, each within a rendering's budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

from trioengine.text import template_operations as operations
from trioengine.text.template_budget import Budget, text_bytes

Method = Callable[..., Any]  # of a budget, the value and the arguments


class FormatMethod:
    """`text.format`, to be called within a budget."""

    def __init__(self, text: str) -> None:
        self.text = text


class ChatSandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox; of strings, objects and lists it gives the methods in METHODS alone."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        methods = methods_of(obj)
        return super().is_safe_attribute(obj, attr, value) and (methods is None or attr in methods)

    def wrap_str_format(self, value: Any) -> Any:
        is_format = callable(value) and getattr(value, "__name__", "") == "format"
        text = getattr(value, "__self__", None) if is_format else None
        return FormatMethod(text) if isinstance(text, str) else None

    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(obj, operations.checked_key(argument))


def methods_of(value: Any) -> Mapping[str, Method] | None:
    """The methods that a value may be asked for; None where its type has no list of them."""
    return next((METHODS[kind] for kind in type(value).__mro__ if kind in METHODS), None)


# ---- the costs of methods -----------------------------------------------------------------------------------------


def _search(budget: Budget, text: str, wanted: str | None = None, *where: Any) -> None:
    budget.charge_search(text, wanted or "")


def _affix(budget: Budget, text: str, affix: Any, *where: Any) -> None:
    budget.measure(affix)
    budget.charge_text(text_bytes(text))


def _split(budget: Budget, text: str, sep: str | None = None, maxsplit: int = -1) -> None:
    budget.charge_text(text_bytes(text))
    if sep:
        budget.charge_search(text, sep)
        budget.charge(text.count(sep))
    else:
        budget.charge(len(text) // 8)  # an object for a word of a few characters


def _splitlines(budget: Budget, text: str, keepends: bool = False) -> None:
    _split(budget, text)


def _pad(budget: Budget, text: str, width: int, fill: str = " ") -> None:
    operations.checked_width(width)
    budget.charge_text(text_bytes(text) + 4 * operations.MAX_WIDTH)


def _convert(budget: Budget, text: str) -> None:
    budget.charge_text(3 * text_bytes(text))


def _get(budget: Budget, mapping: Any, key: Any, default: Any = None) -> None:
    operations.checked_key(key)


def _view(budget: Budget, mapping: Any) -> None:
    budget.charge(1)


def _copy(budget: Budget, values: Any) -> None:
    budget.charge(1 + len(values))


def _look_for(budget: Budget, values: Any, wanted: Any, *where: Any) -> None:
    budget.measure(values)
    budget.charge(budget.measure(wanted) * len(values))


def _join(budget: Budget, text: str, values: Any) -> str:
    return text.join(operations.joined(budget, text, values))


def _charged(charge: Callable[..., None], names: str) -> dict[str, Method]:
    def method(name: str) -> Method:
        def call(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> Any:
            charge(budget, value, *args, **kwargs)
            return getattr(value, name)(*args, **kwargs)

        return call

    return {name: method(name) for name in names.split()}


_OF_SEQUENCES = _charged(_look_for, "count index") | _charged(_copy, "copy")
METHODS: Mapping[type, Mapping[str, Method]] = {
    str: {
        **_charged(_search, "count find index lstrip partition rfind rindex rpartition rstrip strip"),
        **_charged(_affix, "endswith removeprefix removesuffix startswith"),
        **_charged(_convert, "capitalize casefold lower swapcase title upper"),
        **_charged(_convert, "isalnum isalpha isascii isdecimal isdigit islower isnumeric isprintable isspace isupper"),
        **_charged(_pad, "center ljust rjust zfill"),
        **_charged(_split, "rsplit split"),
        **_charged(_splitlines, "splitlines"),
        "join": _join,
        "replace": operations.replaced,
    },
    dict: _charged(_get, "get") | _charged(_view, "items keys values") | _charged(_copy, "copy"),
    list: _OF_SEQUENCES,
    tuple: _OF_SEQUENCES,
}
