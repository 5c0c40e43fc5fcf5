"""Programs of rules: how a seed chooses them, how they are kept, and how they run again."""

from __future__ import annotations

import contextlib
import functools
import json
import platform
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, ClassVar, TypeAlias, TypeVar

from hypothesis import Verbosity, find, settings
from hypothesis.errors import InvalidDefinition
from hypothesis.internal.conjecture.data import ConjectureData
from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS, PrimitiveProvider
from hypothesis.stateful import INITIALIZE_RULE_MARKER, RULE_MARKER, Rule, RuleBasedStateMachine, RuleStrategy, rule
from hypothesis.strategies import SearchStrategy, fixed_dictionaries
from hypothesis.strategies._internal.lazy import unwrap_strategies

BACKEND = "trioengine"  # its name, for `settings(backend=...)`
_UNBOUNDED = 1 << 16
_MANY = 8  # characters or bytes, of a text without a limit


class Choices(PrimitiveProvider):
    """Each choice is independent of those before it."""

    random: ClassVar[random.Random] = random.Random(0)

    def draw_boolean(self, p: float = 0.5) -> bool:
        return self.random.random() < p

    def draw_integer(
        self,
        min_value: int | None = None,
        max_value: int | None = None,
        *,
        weights: dict[int, float] | None = None,
        shrink_towards: int = 0,
    ) -> int:
        if min_value is None:
            min_value = (shrink_towards if max_value is None else max_value) - _UNBOUNDED
        return self.random.randint(min_value, min_value + 2 * _UNBOUNDED if max_value is None else max_value)

    def draw_float(self, *, min_value: float = -1e9, max_value: float = 1e9, **_: Any) -> float:
        return self.random.uniform(max(min_value, -1e9), min(max_value, 1e9))

    def draw_string(self, intervals: Any, *, min_size: int = 0, max_size: int = _MANY) -> str:
        size = self.random.randint(min_size, max(min_size, min(max_size, _MANY)))
        return "".join(chr(intervals[self.random.randrange(len(intervals))]) for _ in range(size))

    def draw_bytes(self, min_size: int = 0, max_size: int = _MANY) -> bytes:
        return self.random.randbytes(self.random.randint(min_size, max(min_size, min(max_size, _MANY))))


def seed_choices(seed: int) -> None:
    """From now on the backend chooses by this seed."""
    AVAILABLE_PROVIDERS[BACKEND] = type("SeededChoices", (Choices,), {"random": random.Random(seed)})


_SHARES = 255  # a rule is left out with a probability of 0/255 to 254/255, the same for all of a program


class RuleSwarm(RuleStrategy):
    """For one program: draws the rules that its machine runs, one after the other; its arguments are no Bundles.

    Those left out run where no other can; if all were, none is. Hypothesis runs the simplest program, in which each
    choice is 0, before any other: it would repeat one rule, and is left out.
    """

    def __init__(self, machine: RuleBasedStateMachine, leave_out: Callable[[], None]) -> None:
        """`leave_out` is called before a program that is not to run."""
        super().__init__(machine)
        self._leave_out = leave_out
        self._share: int | None = None  # of the rules that are left out, in 1/255 and one more; 0: nothing runs
        self._enabled: list[Rule] = []
        # hypothesis' own name: it would make strategies of these rules for every program, which takes long
        self._first, machine._initialize_rules_to_run = machine._initialize_rules_to_run, []

    def do_draw(self, data: ConjectureData) -> tuple[Rule, dict[str, Any]]:
        """A rule and its arguments by name, first one under `initialize`. Raises InvalidDefinition if none can run."""
        if self._share is None:
            self._share = data.draw_integer(0, _SHARES)
            if self._share == 0:
                self._leave_out()
                data.mark_invalid("the simplest program repeats one rule")
        if self._first:
            rule = self._first.pop(data.draw_integer(0, len(self._first) - 1) if len(self._first) > 1 else 0)
            return rule, _all_arguments(rule).do_draw(data)
        if not self._enabled:
            p_disabled = (self._share - 1) / _SHARES
            self._enabled = [rule for rule in self.rules if not data.draw_boolean(p_disabled)] or self.rules
        able = self._able(self._enabled) or self._able(self.rules)
        if not able:
            raise InvalidDefinition(f"no rule of {self.machine} can run")
        rule = able[data.draw_integer(0, len(able) - 1)]
        # without the checks and the records that hypothesis makes of every draw
        return rule, {name: _unwrapped(strategy).do_draw(data) for name, strategy in rule.arguments.items()}

    def _able(self, rules: list[Rule]) -> list[Rule]:
        machine = self.machine
        return [rule for rule in rules if not rule.preconditions or all(holds(machine) for holds in rule.preconditions)]


@functools.cache
def _all_arguments(rule: Rule) -> SearchStrategy[dict[str, Any]]:
    return _unwrapped(fixed_dictionaries(rule.arguments))


@functools.cache
def _unwrapped(strategy: SearchStrategy[Any]) -> SearchStrategy[Any]:
    """The strategy that a lazy one stands for."""
    # hypothesis' own function, which has no types
    unwrapped: SearchStrategy[Any] = unwrap_strategies(strategy)  # type: ignore[no-untyped-call]
    return unwrapped


Method = TypeVar("Method", bound=Callable[..., None])
Machine = TypeVar("Machine")
T = TypeVar("T")
Step: TypeAlias = tuple[str, dict[str, Any]]  # a rule, and its arguments by name

PACKAGES = ("trioengine", "trio", "trio-websocket", "wsproto", "hypothesis", "simloop")  # whose versions may matter
MOST_RULES = 100  # of a program: trimming makes one of several, and adds their numbers up
ENVIRONMENT_RULES = frozenset({"tick", "reorder", "flow", "settle", "move", "carry"})  # they do not count

JUMPS = (0.2, 1.0, 0.6, 11.0)  # seconds of the rule `advance`


class UnknownStep(ValueError):
    """The machine has no rule of this name, or none that takes these arguments."""


@dataclass
class Program:
    """Arguments are numbers, texts, booleans and None."""

    machine: str
    steps: list[Step] = field(default_factory=list)
    variant: int = 0  # of the machine's configuration
    skipped: int = 0  # steps that a replay left out

    @property
    def length(self) -> int:
        """Rules, without those that only let time pass and bytes move."""
        return sum(name not in ENVIRONMENT_RULES for name, _ in self.steps)

    def __str__(self) -> str:
        """Python code that runs it again."""
        name = self.machine.rpartition(":")[2]
        lines = [f"machine = {name}.with_variant({self.variant})()" if self.variant else f"machine = {name}()"]
        for name, arguments in self.steps:
            lines.append(f"machine.{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})")
        return "\n".join([*lines, "machine.teardown()"])

    def to_json(self, **more: object) -> str:
        """The replay file: the program, and the versions that it was found with."""
        return json.dumps(
            {"machine": self.machine, "variant": self.variant, "steps": self.steps, "versions": versions(), **more},
            indent=1,
        )


@dataclass(frozen=True)
class ReplayFile:
    """A program that was kept, and the versions that it was found with."""

    program: Program
    versions: dict[str, str]  # of python and packages; empty if the file has none

    @staticmethod
    def from_json(text: str | bytes) -> ReplayFile:
        """Parse a replay file. Raises ValueError, which names the problem."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as exc:
            raise ValueError(f"no replay file: it is not JSON ({exc})") from exc
        if not isinstance(data, dict):
            raise ValueError("no replay file: it is not a JSON object")
        for key in ("steps", "machine"):
            if key not in data:
                raise ValueError(f"no replay file: it has no {key!r}")
        machine, steps = data["machine"], data["steps"]
        variant, found_with = data.get("variant", 0), data.get("versions", {})
        if type(variant) is not int:
            raise ValueError("no replay file: its variant must be a number")
        if not isinstance(machine, str):
            raise ValueError("no replay file: its machine must be a name")
        if not isinstance(steps, list) or not all(map(_is_step, steps)):
            raise ValueError("no replay file: its steps must be lists of a rule and its arguments by name")
        if not isinstance(found_with, dict):
            raise ValueError("no replay file: its versions must be by name")
        program = Program(machine, [(name, arguments) for name, arguments in steps], variant)
        return ReplayFile(program, found_with)


def _is_step(step: object) -> bool:
    match step:
        case [str(), dict()]:
            return True
    return False


def versions() -> dict[str, str]:
    """The versions on which the run of a program may depend."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def recorded(decorator: Callable[..., Any] = rule, **arguments: SearchStrategy[Any]) -> Callable[[Method], Any]:
    """A hypothesis rule (or `initialize`) that the machine's `program` takes down before it runs."""

    def decorate(method: Method) -> Any:
        @functools.wraps(method)
        def run(self: Any, **values: Any) -> None:
            self.take_down(method.__name__, values)
            self.act(functools.partial(method, self, **values))

        return decorator(**arguments)(run)

    return decorate


def pick(candidates: Sequence[T], which: int) -> T:
    """The candidate that a rule's number chooses."""
    return candidates[which % len(candidates)]


def replay(machine: Any, program: Program) -> int:
    """Run the program on a fresh machine, to its teardown; how many steps its preconditions left out.

    Raises the Finding of the machine. Raises UnknownStep before anything runs.
    """
    try:
        rules = [_rule_of(machine, program, index) for index in range(len(program.steps))]
    except UnknownStep:
        with contextlib.suppress(Exception):  # nothing has run: a finding means nothing
            machine.teardown()
        raise
    try:
        for made, (name, arguments) in zip(rules, program.steps, strict=True):
            if all(holds(machine) for holds in made.preconditions):
                getattr(machine, name)(**arguments)
            else:
                machine.program.skipped += 1
    finally:
        machine.teardown()
    skipped: int = machine.program.skipped
    return skipped


def _rule_of(machine: Any, program: Program, index: int) -> Rule:
    name, arguments = program.steps[index]
    method = getattr(type(machine), name, None)
    made: Rule | None = getattr(method, RULE_MARKER, None) or getattr(method, INITIALIZE_RULE_MARKER, None)
    where = f"step {index + 1}: "
    if made is None:
        raise UnknownStep(f"{where}the machine {program.machine} has no rule {name!r}")
    if set(arguments) != set(made.arguments):
        takes, given = (", ".join(names) or "nothing" for names in (made.arguments, arguments))
        raise UnknownStep(f"{where}{name} takes {takes}, and is given {given}")
    for key, strategy in made.arguments.items():
        if not _may_draw(strategy, arguments[key]):
            raise UnknownStep(f"{where}{name} cannot be given {key}={arguments[key]!r}, but {strategy}")
    return made


def simpler_arguments(kind: type[Any], rule: str, name: str, value: object) -> list[Any]:
    """Simpler values of an argument, simplest first; the simplest one alone where others are not easy to find."""
    made: Rule = getattr(getattr(kind, rule), RULE_MARKER, None) or getattr(getattr(kind, rule), INITIALIZE_RULE_MARKER)
    strategy = made.arguments[name]
    unwrapped: Any = _unwrapped(strategy)
    match type(unwrapped).__name__, value:
        case "BooleansStrategy", bool():
            return [False] if value else []
        case "IntegersStrategy", int():
            least = unwrapped.start or 0
            return sorted({least, (least + value) // 2} - {value}) if value > least else []
        case "SampledFromStrategy", _ if value in unwrapped.elements:
            return list(unwrapped.elements[: min(2, unwrapped.elements.index(value))])
    simplest = find(strategy, lambda _: True, settings=settings(database=None, verbosity=Verbosity.quiet))
    return [] if simplest == value else [simplest]


def _may_draw(strategy: Any, value: object) -> bool:
    """Return False for a value that neither the strategy nor trimming produces, as far as that is easy to decide."""
    strategy = getattr(strategy, "wrapped_strategy", strategy)
    match type(strategy).__name__:
        case "BooleansStrategy":
            return isinstance(value, bool)
        case "IntegersStrategy":
            if type(value) is not int:
                return False
            start, end = strategy.start, strategy.end
            return (start is None or value >= start) and (end is None or value <= end * MOST_RULES)
        case "SampledFromStrategy" if not strategy._transformations:
            return any(type(value) is type(element) and value == element for element in strategy.elements)
    return True
