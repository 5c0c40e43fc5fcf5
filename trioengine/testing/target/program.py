"""Programs of steps, drawn from a seed; a step is the name of a rule and plain arguments."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

CLIENTS = 12  # so that the id of one client begins with the id of another
ENDS = ("fin", "rst", "half")
BAD = ("not json", "empty", "wrong type", "out of range", "no prompt", "unknown model")
RULES: dict[str, dict[str, tuple[Any, ...]]] = {  # the arguments, each with its values, simplest first
    "open": {
        "client": tuple(range(CLIENTS)),
        "stream": (True, False),
        "max_tokens": (8, 1, 24, 64),
        "words": (0, 30, 200),
        "golden": (False, True),
    },
    "read": {"client": tuple(range(CLIENTS)), "chunks": (1, 2, 5)},
    "stall": {"client": tuple(range(CLIENTS))},
    "close": {"client": tuple(range(CLIENTS)), "how": ENDS},
    "burst": {"count": (2, 1, 4, 8, 12), "chunks": (0, 1), "how": ("fin", "rst"), "words": (0, 200)},
    "wait": {"milliseconds": (10, 100, 500)},
    "oversize": {"kilobytes": (100, 1000, 6000)},
    "bad": {"what": BAD},
    "native": {"how": ("fin", "rst")},
    "abort": {"client": tuple(range(CLIENTS))},
    "reuse": {"client": tuple(range(CLIENTS)), "of": tuple(range(CLIENTS))},
    "abort_all": {},
    "pause": {"variant": (0, 1, 2, 3)},
    "resume": {"variant": (0,)},
    "sleep": {"variant": (0, 1, 2, 3)},
    "wake": {"variant": (0,)},
    "update": {"variant": (0,)},
    "reset": {"variant": (0,)},
    "stop": {"milliseconds": (100, 500, 1500)},
}
ALWAYS = ("open", "read", "stall", "close", "burst", "wait", "oversize", "bad")
WEIGHTS = {"open": 8, "close": 5, "read": 4, "burst": 3, "abort": 3}  # the others: 1


@dataclass(frozen=True)
class Step:
    """A rule with its arguments."""

    rule: str
    args: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.rule}({', '.join(f'{name}={value!r}' for name, value in self.args.items())})"


def draw(chooser: random.Random, rules: Collection[str], longest: int = 12) -> list[Step]:
    """Draw a program; most leave out some rules, so that the others meet more often."""
    chosen = [rule for rule in rules if rule in ("open", "close") or chooser.random() < 0.6]
    weights = [WEIGHTS.get(rule, 1) for rule in chosen]
    steps: list[Step] = []
    opened: list[int] = []
    for rule in chooser.choices(chosen, weights, k=chooser.randint(3, longest)):
        step = _draw_step(chooser, rule, opened)
        if rule in ("open", "reuse"):
            opened.append(step.args["client"])
        steps.append(step)
    return steps


def _draw_step(chooser: random.Random, rule: str, opened: list[int]) -> Step:
    args = {name: chooser.choice(values) for name, values in RULES[rule].items()}
    if "client" in args and rule not in ("open", "reuse") and opened:
        args["client"] = chooser.choice(opened)
    if rule == "reuse" and opened:
        args["of"] = chooser.choice(opened)
    return Step(rule, args)


def step_from(value: Any) -> Step:
    """Read a step from JSON. Raises ValueError."""
    match value:
        case [str(rule), dict(args)] if rule in RULES:
            for name in RULES[rule]:
                if name not in args or not _is_allowed(args[name], RULES[rule][name]):
                    raise ValueError(f"step {rule!r}: bad or missing argument {name!r}")
            if extra := set(args) - set(RULES[rule]):
                raise ValueError(f"step {rule!r}: unknown argument {min(extra)!r}")
            return Step(rule, args)
    raise ValueError(f"not a step: {value!r:.80}")


def _is_allowed(value: Any, values: tuple[Any, ...]) -> bool:
    if type(values[0]) is int:
        return type(value) is int and 0 <= value <= max(values)
    return value in values


def simpler(steps: list[Step]) -> list[list[Step]]:
    """Return smaller programs: without a part, then with an argument simplified."""
    found: list[list[Step]] = []
    size = max(1, len(steps) // 2)
    while True:
        found += [steps[:at] + steps[at + size :] for at in range(0, len(steps), size)]
        if size == 1:
            break
        size //= 2
    for at, step in enumerate(steps):
        for name, values in RULES[step.rule].items():
            if name not in ("client", "of") and step.args[name] in values:
                before = values[: values.index(step.args[name])]
                found += [[*steps[:at], Step(step.rule, step.args | {name: each}), *steps[at + 1 :]] for each in before]
    return [each for each in found if each]
