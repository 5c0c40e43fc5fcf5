"""The budget of one rendering of a chat template, and the operations that charge it by the size of their operands.

The budget counts steps. A step is one evaluated node of the template, or BYTES_PER_STEP bytes of text that are made or
searched. An operation charges before it allocates or loops, so that the steps bound the time and the memory of every
template's rendering. The bounds grow with the conversation, and are equal for equal conversations.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from typing import Any, NoReturn

from jinja2 import Undefined, pass_context
from jinja2.environment import Environment
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import SandboxedFormatter
from jinja2.utils import Namespace

BYTES_PER_STEP = 64
BASE_STEPS = 20_000
STEPS_PER_VALUE = 300  # for each string, number, list and object of the messages
STEPS_PER_BYTE = 0.5  # of the messages' strings
BASE_OUTPUT = 32 << 10  # bytes
OUTPUT_PER_VALUE = 1 << 10
OUTPUT_PER_BYTE = 4
MAX_DEPTH = 64  # calls of macros within calls
MAX_NESTING = 200  # lists within lists
MAX_INTEGER_BITS = 64
MAX_EXPONENT = 64
MAX_INDENT = 64
MAX_WIDTH = 999
_PRINTED_BYTES = 4  # of text for a byte of text that is printed within a list: escapes and quotes
_FORMAT_STEPS = 40  # for a field of up to 999 characters and 999 digits
_FIELDS = re.compile(r"%%|%(?:\([^()]*\))?[#0\- +.\d*]*\(?")  # of a printf-style format, up to their types
_TOO_WIDE = re.compile(r"\*|\d{4}|\($")  # or with parentheses in its key, which hide where that ends
_TIME_FORMAT = re.compile(r"(?:[^%]|%-?[A-Za-z%]){0,128}")  # without widths, which the C library takes
_ARITHMETIC: Mapping[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "**": operator.pow,
    "%": operator.mod,
}
_COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "gteq": operator.ge,
    "lt": operator.lt,
    "lteq": operator.le,
}


class TemplateTooCostly(Exception):
    """The template exceeds its budget."""


class Budget:
    """The steps and the output that are left to one rendering."""

    __slots__ = ("_depth", "_output", "_steps")

    def __init__(self, messages: Sequence[Mapping[str, Any]]) -> None:
        num_values, num_bytes = _size(messages)
        self._steps = BASE_STEPS + STEPS_PER_VALUE * num_values + int(STEPS_PER_BYTE * num_bytes)
        self._output = BASE_OUTPUT + OUTPUT_PER_VALUE * num_values + OUTPUT_PER_BYTE * num_bytes
        self._depth = 0

    @property
    def steps(self) -> int:
        """The steps that are left."""
        return self._steps

    def charge(self, steps: int) -> None:
        """Take this many steps. Raises TemplateTooCostly, now and at every later charge, if fewer are left."""
        self._steps -= steps
        if self._steps < 0:
            _exceeded("takes too many steps")

    def charge_text(self, num_bytes: int) -> None:
        """Charge for making or reading this many bytes of text."""
        self.charge(1 + num_bytes // BYTES_PER_STEP)

    def charge_search(self, text: str, wanted: str) -> None:
        """Charge for a search, whose worst case is the product of both lengths for short strings."""
        self.charge((1 + text_bytes(text) // BYTES_PER_STEP) * (1 + min(len(wanted), 128) // 8))

    def charge_output(self, piece: str) -> None:
        """Charge for a piece of the rendering. Raises TemplateTooCostly if the rendering is too long."""
        self._output -= text_bytes(piece)
        if self._output < 0:
            _exceeded("renders too much text")

    def measure(self, *values: Any, factor: int = 1) -> int:
        """Charge for everything in the values, as often as it is in them; returns the steps.

        Printing, comparing or hashing the values takes at most this many steps. Raises TemplateTooCostly also if their
        nesting could exceed Python's recursion limit.
        """
        before, level, depth = self._steps, list(values), 0
        while level:
            depth += 1
            if depth > MAX_NESTING:
                _exceeded("nests its values too deeply")
            held: list[Any] = []
            for value in level:
                self.charge(factor * self._look_at(value, held))
            level = held
        return before - self._steps

    def _look_at(self, value: Any, held: list[Any]) -> int:
        """Add the elements of a value to `held`; returns the steps for the value itself."""
        if isinstance(value, str):
            return 1 + _PRINTED_BYTES * text_bytes(value) // BYTES_PER_STEP
        if isinstance(value, Namespace):
            value = value._Namespace__attrs
        if isinstance(value, Mapping):
            self.charge(2 * len(value))
            held.extend(value)
            held.extend(value.values())
        elif isinstance(value, list | tuple | KeysView | ValuesView | ItemsView):
            self.charge(len(value))
            held.extend(value)
        return 1

    def turns(self, iterable: Any, steps: int) -> Any:
        """Return the iterable, charging these steps for each item: at once if it has a length, else as it is read."""
        try:
            length = len(iterable)
        except TypeError:
            return self._counted(iterable, steps)
        self.charge(1 + length * steps)
        return iterable

    def _counted(self, iterable: Iterable[Any], steps: int) -> Iterator[Any]:
        for item in iterable:
            self.charge(1 + steps)
            yield item

    def enter(self) -> None:
        """Begin a call. Raises TemplateTooCostly if calls are nested too deeply."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            _exceeded("nests its calls too deeply")

    def leave(self) -> None:
        """End the innermost call."""
        self._depth -= 1


def text_bytes(text: str) -> int:
    """Return an upper bound of the memory of a string."""
    return len(text) if text.isascii() else 4 * len(text)


def _size(value: Any) -> tuple[int, int]:
    """Return the number of values in messages, and the bytes of their strings."""
    num_values, num_bytes = 0, 0
    waiting = [value]
    while waiting:
        value = waiting.pop()
        num_values += 1
        if isinstance(value, str):
            num_bytes += text_bytes(value)
        elif isinstance(value, Mapping):
            num_bytes += sum(map(text_bytes, value))
            waiting.extend(value.values())
        elif isinstance(value, Sequence):
            waiting.extend(value)
    return num_values, num_bytes


def _exceeded(problem: str) -> NoReturn:
    raise TemplateTooCostly(problem)


class BoundedContext(Context):
    """The variables of a rendering, and its budget."""

    budget: Budget


def within_budget(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Return the operation for Jinja, which calls it with a context instead of the budget."""

    @pass_context
    def call(context: BoundedContext, *operands: Any) -> Any:
        return operation(context.budget, *operands)

    return call


def formatted_time(strftime: Callable[[str], str], format: Any) -> str:
    """Return the present time in this format; the result is a few times as long as a format, which is short."""
    if not isinstance(format, str) or _TIME_FORMAT.fullmatch(format) is None:
        raise SecurityError("strftime_now takes a short format without widths")
    return strftime(format)


# ---- operations ---------------------------------------------------------------------------------------------------


def text_of(budget: Budget, value: Any) -> str:
    """Return `str(value)`."""
    if isinstance(value, str):
        budget.charge_text(text_bytes(value))
        return value
    budget.measure(value)
    return str(value)


def concatenated(budget: Budget, *values: Any) -> str:
    """Return `a ~ b`, and so on."""
    texts = [text_of(budget, value) for value in values]
    budget.charge_text(sum(map(text_bytes, texts)))
    return "".join(texts)


def calculated(budget: Budget, symbol: str, left: Any, right: Any) -> Any:
    """Return `left symbol right`. Raises TypeError or ValueError for operands that no template needs."""
    if symbol == "%" and isinstance(left, str):
        return formatted(budget, left, right)
    if symbol == "+" and isinstance(left, str) and isinstance(right, str):
        budget.charge_text(text_bytes(left) + text_bytes(right))
    elif symbol == "+" and isinstance(left, list | tuple) and isinstance(right, list | tuple):
        budget.charge(1 + len(left) + len(right))
    elif symbol == "*" and isinstance(left, str | list | tuple):
        _charge_repetition(budget, left, right)
    elif symbol == "*" and isinstance(right, str | list | tuple):
        _charge_repetition(budget, right, left)
    elif not isinstance(left, Undefined) and not isinstance(right, Undefined):  # these raise their own error
        _check_numbers(symbol, left, right)
    return _ARITHMETIC[symbol](left, right)


def _charge_repetition(budget: Budget, sequence: Any, count: Any) -> None:
    times = max(0, count) if isinstance(count, int) else 0
    if isinstance(sequence, str):
        budget.charge_text(times * text_bytes(sequence))
    else:
        budget.charge(1 + times * len(sequence))


def _check_numbers(symbol: str, *operands: Any) -> None:
    for operand in operands:
        check_number(operand)
    if symbol == "**" and abs(operands[1]) > MAX_EXPONENT:
        raise ValueError(f"an exponent beyond {MAX_EXPONENT}")


def check_number(value: Any) -> None:
    """Raise TypeError unless this is a number, and ValueError for an integer beyond MAX_INTEGER_BITS."""
    if not isinstance(value, int | float):
        raise TypeError(f"expected a number, got {type(value).__name__}")
    if isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
        raise ValueError(f"an integer beyond {MAX_INTEGER_BITS} bits")


def checked_width(width: int) -> int:
    """Return the width of a padded text. Raises ValueError beyond MAX_WIDTH."""
    if width > MAX_WIDTH:
        raise ValueError(f"a width beyond {MAX_WIDTH}")
    return width


def compared(budget: Budget, left: Any, *rest: Any) -> bool:
    """Return `a < b in c`, given as left operand, operator, operand, operator, operand."""
    result: Any = True
    for symbol, right in zip(rest[::2], rest[1::2], strict=True):
        if symbol in ("in", "notin"):
            result = _contains(budget, right, left) is (symbol == "in")
        else:
            _charge_comparison(budget, left, right)
            result = _COMPARISONS[symbol](left, right)
        if not result:
            return bool(result)
        left = right
    return bool(result)


def _charge_comparison(budget: Budget, left: Any, right: Any) -> None:
    if isinstance(left, str) and isinstance(right, str):
        budget.charge_text(min(text_bytes(left), text_bytes(right)))
    else:
        budget.measure(left, right)


def _contains(budget: Budget, container: Any, item: Any) -> bool:
    if isinstance(container, str):
        if isinstance(item, str):
            budget.charge_search(container, item)
        return item in container
    budget.measure(item)
    if isinstance(container, dict):
        return item in container
    held = materialized(budget, container)
    steps_of_item = budget.measure(item)
    budget.measure(held)
    budget.charge(steps_of_item * len(held) if hasattr(held, "__len__") else 0)
    return item in held


def materialized(budget: Budget, value: Any) -> Any:
    """Return an iterator's items as a list, and any other value unchanged."""
    if isinstance(value, Iterator | range):
        return list(budget.turns(value, 1))
    return value


def sliced(budget: Budget, value: Any, start: Any, stop: Any, step: Any) -> Any:
    """Return `value[start:stop:step]`."""
    where = slice(start, stop, step)
    if isinstance(value, str):
        budget.charge_text(text_bytes(value))
    elif isinstance(value, list | tuple):
        budget.charge(1 + len(range(*where.indices(len(value)))))
    return value[where]


def formatted(budget: Budget, template: str, values: Any) -> str:
    """Return `template % values`."""
    budget.charge_text(8 * text_bytes(template))
    if any(_TOO_WIDE.search(field) for field in _FIELDS.findall(template)):
        raise ValueError("a format with a width beyond 999, or a variable one")
    steps = _FORMAT_STEPS + budget.measure(values)
    budget.charge(template.count("%") * steps)
    return str(template % values)


class BoundedFormatter(SandboxedFormatter):
    """Formats as str.format does, charging for each field."""

    def __init__(self, environment: Environment, budget: Budget) -> None:
        super().__init__(environment)
        self._budget = budget

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        found = super().get_field(field_name, args, kwargs)
        self._budget.measure(found[0])
        return found

    def format_field(self, value: Any, format_spec: str) -> str:
        if re.search(r"\d{4}", format_spec):
            raise ValueError("a format with a width beyond 999")
        self._budget.charge(_FORMAT_STEPS)
        return str(super().format_field(value, format_spec))


def replaced(budget: Budget, text: str, old: str, new: str, count: int | None = None) -> str:
    """Return `text.replace(old, new)`, replacing at most `count` times."""
    budget.charge_search(text, old)
    times = text.count(old)
    times = times if count is None or count < 0 else min(times, count)
    width = 1 if text.isascii() and new.isascii() else 4
    budget.charge_text(width * (len(text) + times * len(new)))
    return text.replace(old, new, times)


def joined(budget: Budget, separator: str, values: Any) -> Any:
    """Return the values, an iterator as a list, charged as if joined by the separator."""
    values = materialized(budget, values)
    budget.measure(values)
    if hasattr(values, "__len__"):
        budget.charge_text(len(values) * text_bytes(separator))
    return values


def to_json(
    budget: Budget,
    value: Any,
    *,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON, with the options that Hugging Face's templates use."""
    budget.measure(value, factor=2)
    if indent is not None and indent > MAX_INDENT:
        raise ValueError(f"an indent beyond {MAX_INDENT}")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None and separators is None:
        return encoder.encode(value)
    pieces = []
    for piece in encoder.iterencode(value):  # indents and separators may be longer than the values
        budget.charge_text(text_bytes(piece))
        pieces.append(piece)
    return "".join(pieces)


def checked_key(value: Any) -> Any:
    """Return a key. Raises SecurityError for a tuple, whose hash visits all its elements each time."""
    if isinstance(value, tuple):
        raise SecurityError("a tuple may not be a key")
    return value
