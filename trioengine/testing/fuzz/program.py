"""A program of the fuzzer: the rules that ran, with their arguments. Data, so that it can be kept and run again."""

from __future__ import annotations

import functools
import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import hypothesis
import trio
from hypothesis.stateful import rule
from hypothesis.strategies import SearchStrategy

Method = TypeVar("Method", bound=Callable[..., None])
Machine = TypeVar("Machine")

ENVIRONMENT_RULES = frozenset({"tick", "flow", "settle", "move", "carry"})  # they do not count


@dataclass
class Program:
    """Steps are `(rule, arguments)`; arguments are numbers, texts, booleans and None."""

    machine: str
    steps: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Rules, without those that only let time pass and bytes move."""
        return sum(name not in ENVIRONMENT_RULES for name, _ in self.steps)

    def __str__(self) -> str:
        """Python code that runs it again."""
        lines = [f"machine = {self.machine}()"]
        for name, arguments in self.steps:
            lines.append(f"machine.{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})")
        return "\n".join([*lines, "machine.teardown()"])

    def to_json(self, **more: object) -> str:
        """The replay file: the program, and the versions that it was found with."""
        versions = {"python": platform.python_version(), "trio": trio.__version__, "hypothesis": hypothesis.__version__}
        return json.dumps({"machine": self.machine, "steps": self.steps, "versions": versions, **more}, indent=1)

    @staticmethod
    def from_json(text: str) -> Program:
        """Read a replay file. Raises ValueError that says what is wrong with it."""
        try:
            data = json.loads(text)
            steps = [(name, dict(arguments)) for name, arguments in data["steps"]]
            if not isinstance(data["machine"], str) or not all(isinstance(name, str) for name, _ in steps):
                raise TypeError("machine and rules must be names")
        except (ValueError, TypeError, KeyError) as exc:
            raise ValueError(f"no replay file: {type(exc).__name__}: {exc}") from exc
        return Program(data["machine"], steps)

    def machine_in(self, machines: Mapping[str, Machine]) -> Machine:
        """The machine that it is for. Raises ValueError if there is none of that name."""
        if self.machine not in machines:
            raise ValueError(f"no machine {self.machine!r}; there are {', '.join(machines)}")
        return machines[self.machine]


def recorded(decorator: Callable[..., Any] = rule, **arguments: SearchStrategy[Any]) -> Callable[[Method], Any]:
    """A hypothesis rule (or `initialize`) that the machine's `program` takes down before it runs."""

    def decorate(method: Method) -> Any:
        @functools.wraps(method)
        def run(self: Any, **values: Any) -> None:
            self.program.steps.append((method.__name__, values))
            self.act(functools.partial(method, self, **values))

        return decorator(**arguments)(run)

    return decorate


def replay(machine: Any, program: Program) -> None:
    """Run the program on a fresh machine, to its teardown. Raises what it finds; ValueError for an unknown rule."""
    try:
        for name, arguments in program.steps:
            method: Callable[..., None] | None = getattr(machine, name, None)
            if method is None or name.startswith("_"):
                raise ValueError(f"the machine {program.machine} has no rule {name!r}")
            method(**arguments)
    finally:
        machine.teardown()
