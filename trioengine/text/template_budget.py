"""The budget of one rendering of a chat template, counted in steps.

A step is one node of the template that is evaluated, or BYTES_PER_STEP bytes of text that are made or searched. An
operation charges before it allocates or loops, so that a rendering's time and memory are bounded by its steps for
every template. The bounds grow with the conversation, and are the same for equal conversations.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from typing import Any, NoReturn

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
_OPAQUE_BYTES = 4  # of text that is made of text: escapes and quotes


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
        """How many are left."""
        return self._steps

    def charge(self, steps: int) -> None:
        """Raises TemplateTooCostly, then always, when more steps are taken than there are."""
        self._steps -= steps
        if self._steps < 0:
            _exceeded("takes too many steps")

    def charge_text(self, num_bytes: int) -> None:
        """Charge for making or reading so many bytes of text."""
        self.charge(1 + num_bytes // BYTES_PER_STEP)

    def charge_search(self, text: str, wanted: str) -> None:
        """Charge for a search, whose worst case is the product of both lengths for short strings."""
        self.charge((1 + text_bytes(text) // BYTES_PER_STEP) * (1 + min(len(wanted), 128) // 8))

    def charge_output(self, piece: str) -> None:
        """Raises TemplateTooCostly when the rendering becomes too long."""
        self._output -= text_bytes(piece)
        if self._output < 0:
            _exceeded("renders too much text")

    def measure(self, *values: Any, factor: int = 1) -> int:
        """Charge for all that values hold, however often they hold it; returns the steps.

        Printing, comparing or hashing the values takes at most as many steps. Raises TemplateTooCostly also where they
        are nested so deeply that Python's own recursion is in danger.
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
        """Add the values that a value holds to `held`; returns the steps for the value itself."""
        if isinstance(value, str):
            return 1 + _OPAQUE_BYTES * text_bytes(value) // BYTES_PER_STEP
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
        """The iterable, each of whose items costs so many steps; charged at once where it has a length."""
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
        """Begin a call. Raises TemplateTooCostly when calls are nested too deeply."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            _exceeded("nests its calls too deeply")

    def leave(self) -> None:
        """End the call that was begun last."""
        self._depth -= 1


def text_bytes(text: str) -> int:
    """The memory that a string takes, at most."""
    return len(text) if text.isascii() else 4 * len(text)


def _size(value: Any) -> tuple[int, int]:
    """How many values there are in messages, and how many bytes their strings have."""
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
