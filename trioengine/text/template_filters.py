"""Methods, filters and tests of chat templates, each of which charges the rendering's budget.

The tables METHODS, FILTERS and TESTS hold the ones that templates use. Jinja's others (urlize, wordwrap, random and so
on) are left out: chat templates do not need them, and their cost is hard to bound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import pass_context
from jinja2.filters import make_attrgetter
from jinja2.sandbox import ImmutableSandboxedEnvironment
from markupsafe import escape

from trioengine.text import template_operations as operations
from trioengine.text.template_operations import BoundedContext, Budget, text_bytes

FILTER_STEPS = 4
MAX_PRECISION = 15
_SORTING_STEPS = 20  # comparisons of each item while sorting, or objects for each of a text's steps
Method = Callable[..., Any]  # takes a budget, the value and the arguments, as do filters and tests
Prepare = Callable[[Budget, Any, int], Any]  # charges for a value and steps for each item; returns the filter's input


class FormatMethod:
    """The method `text.format`, before its call within a budget."""

    def __init__(self, text: str) -> None:
        self.text = text


class ChatSandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which strings, objects and lists have only the methods in METHODS."""

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
    """Return the methods of a value by name; None for a type without an entry in METHODS."""
    return next((METHODS[kind] for kind in type(value).__mro__ if kind in METHODS), None)


_PLAIN = ChatSandbox()  # has Jinja's own filters


# ---- methods ------------------------------------------------------------------------------------------------------


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


def _join_method(budget: Budget, text: str, values: Any) -> str:
    return text.join(operations.joined(budget, text, values))


def _methods(charge: Callable[..., None], names: str) -> dict[str, Method]:
    def method(name: str) -> Method:
        def call(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> Any:
            charge(budget, value, *args, **kwargs)
            return getattr(value, name)(*args, **kwargs)

        return call

    return {name: method(name) for name in names.split()}


_OF_SEQUENCES = _methods(_look_for, "count index") | _methods(_copy, "copy")
METHODS: Mapping[type, Mapping[str, Method]] = {
    str: {
        **_methods(_search, "count find index lstrip partition rfind rindex rpartition rstrip strip"),
        **_methods(_affix, "endswith removeprefix removesuffix startswith"),
        **_methods(_convert, "capitalize casefold lower swapcase title upper"),
        **_methods(_convert, "isalnum isalpha isascii isdecimal isdigit islower isnumeric isprintable isspace isupper"),
        **_methods(_pad, "center ljust rjust zfill"),
        **_methods(_split, "rsplit split"),
        **_methods(_splitlines, "splitlines"),
        "join": _join_method,
        "replace": operations.replaced,
    },
    dict: _methods(_get, "get") | _methods(_view, "items keys values") | _methods(_copy, "copy"),
    list: _OF_SEQUENCES,
    tuple: _OF_SEQUENCES,
}


# ---- filters ------------------------------------------------------------------------------------------------------


def _as_it_is(budget: Budget, value: Any, steps: int) -> Any:
    return value


def _each_once(budget: Budget, value: Any, steps: int) -> Any:
    """For filters that take each item once. The output of an earlier lazy filter is read here: they form no chain."""
    return budget.turns(operations.materialized(budget, value), 1 + steps)


def _all(budget: Budget, value: Any, steps: int) -> Any:
    value = operations.materialized(budget, value)
    budget.measure(value)
    return value


def _sorted(budget: Budget, value: Any, steps: int) -> Any:
    value = operations.materialized(budget, value)
    budget.measure(value, factor=_SORTING_STEPS)
    return value


_OF_JINJA: Mapping[str, Prepare] = {
    **dict.fromkeys(("attr", "count", "d", "default", "first", "last", "length"), _as_it_is),
    **dict.fromkeys(("items", "list", "map", "reject", "rejectattr", "reverse", "select", "selectattr"), _each_once),
    **dict.fromkeys(("capitalize", "float", "int", "lower", "string", "truncate", "upper"), _all),
    **dict.fromkeys(("dictsort", "groupby", "max", "min", "sort", "title", "unique"), _sorted),
}


def _join(budget: Budget, value: Any, d: Any = "", attribute: str | int | None = None) -> str:
    separator = operations.text_of(budget, d)
    values = operations.joined(budget, separator, _attributes(budget, value, attribute))
    return separator.join(map(str, values))


def _attributes(budget: Budget, value: Any, attribute: str | int | None) -> Any:
    """Return the values, or this attribute of each."""
    if attribute is None:
        return value
    return [*map(make_attrgetter(_PLAIN, attribute), _each_once(budget, value, budget.measure(attribute)))]


def _replace(budget: Budget, value: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, wanted, instead = (operations.text_of(budget, part) for part in (value, old, new))
    return operations.replaced(budget, text, wanted, instead, count)


def _indent(budget: Budget, value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    text = operations.text_of(budget, value)
    indention = width if isinstance(width, str) else " " * operations.checked_width(width)
    budget.charge(1 + len(text) // 8)  # the lines
    budget.charge_text(len(text.splitlines()) * text_bytes(indention))
    return str(_PLAIN.call_filter("indent", text, (width, first, blank)))


def _trim(budget: Budget, value: Any, chars: str | None = None) -> str:
    text = operations.text_of(budget, value)
    budget.charge_search(text, chars or "")
    return text.strip(chars)


def _format(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> str:
    return operations.formatted(budget, operations.text_of(budget, value), kwargs or args)


def _escape(budget: Budget, value: Any) -> str:
    text = operations.text_of(budget, value)
    budget.charge_text(5 * text_bytes(text))
    return str(escape(text))


def _sum(budget: Budget, value: Any, attribute: str | int | None = None, start: Any = 0) -> Any:
    total = start
    for number in budget.turns(_attributes(budget, value, attribute), 2):
        operations.check_number(number)
        total = operations.calculated(budget, "+", total, number)
    return total


def _round(budget: Budget, value: Any, precision: int = 0, method: str = "common") -> Any:
    operations.check_number(value)
    if abs(precision) > MAX_PRECISION:
        raise ValueError(f"a precision beyond {MAX_PRECISION}")
    return _PLAIN.call_filter("round", value, (precision, method))


def _abs(budget: Budget, value: Any) -> Any:
    operations.check_number(value)
    return abs(value)


_OWN: Mapping[str, Method] = {
    "abs": _abs,
    "e": _escape,
    "escape": _escape,
    "format": _format,
    "indent": _indent,
    "join": _join,
    "replace": _replace,
    "round": _round,
    "safe": operations.text_of,
    "sum": _sum,
    "tojson": operations.to_json,
    "trim": _trim,
}


def _arguments(budget: Budget, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Charge for a call and its arguments, which a filter hashes or prints at most once; returns their steps."""
    budget.charge(FILTER_STEPS)
    return budget.measure(*args, *kwargs.values()) if args or kwargs else 0


def _bounded(name: str, prepare: Prepare) -> Method:
    @pass_context
    def bounded(context: BoundedContext, value: Any, *args: Any, **kwargs: Any) -> Any:
        value = prepare(context.budget, value, _arguments(context.budget, args, kwargs))
        return _PLAIN.call_filter(name, value, args, kwargs, context=context)

    return bounded


def _charged(implementation: Method) -> Method:
    @pass_context
    def charged(context: BoundedContext, value: Any, *args: Any, **kwargs: Any) -> Any:
        _arguments(context.budget, args, kwargs)
        return implementation(context.budget, value, *args, **kwargs)

    return charged


FILTERS: Mapping[str, Method] = {
    **{name: _bounded(name, prepare) for name, prepare in _OF_JINJA.items()},
    **{name: _charged(implementation) for name, implementation in _OWN.items()},
}


# ---- tests --------------------------------------------------------------------------------------------------------


def _comparison(symbol: str) -> Method:
    return lambda budget, value, other: operations.compared(budget, value, symbol, other)


def _divisible(budget: Budget, value: Any, by: Any = 2) -> bool:
    operations.check_number(value)
    return bool(operations.calculated(budget, "%", value, by) == 0)


_COMPARISONS: Mapping[str, tuple[str, ...]] = {
    "eq": ("eq", "==", "equalto"),
    "ne": ("ne", "!="),
    "gt": ("gt", ">", "greaterthan"),
    "gteq": ("ge", ">="),
    "lt": ("lt", "<", "lessthan"),
    "lteq": ("le", "<="),
    "in": ("in",),
}
_CONSTANT_TIME = (  # they do not look at the elements of a value
    *("boolean", "callable", "defined", "escaped", "false", "float", "integer", "iterable", "mapping", "none"),
    *("number", "sameas", "sequence", "string", "true", "undefined"),
)
TESTS: Mapping[str, Any] = {
    **{name: _PLAIN.tests[name] for name in _CONSTANT_TIME},
    **{name: _charged(_comparison(symbol)) for symbol, names in _COMPARISONS.items() for name in names},
    "divisibleby": _charged(_divisible),
    "even": _charged(_divisible),
    "odd": _charged(lambda budget, value: not _divisible(budget, value)),
    "lower": _charged(lambda budget, value: operations.text_of(budget, value).islower()),
    "upper": _charged(lambda budget, value: operations.text_of(budget, value).isupper()),
}
