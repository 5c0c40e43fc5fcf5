"""Programs of steps, drawn from a seed; a step is the name of a rule and plain arguments."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

CLIENTS = 8
ENDS = ("fin", "rst", "half")
BAD = ("not json", "empty", "wrong type", "out of range", "no prompt", "unknown model")
RULES: dict[str, dict[str, tuple[Any, ...]]] = {  # the arguments, each with its values, simplest first
    "open": {
        "client": tuple(range(CLIENTS)),
        "stream": (True, False),
        "max_tokens": (8, 1, 24, 64, 64),
        "words": (0, 30, 200),
        "golden": (False, True),
    },
    "read": {"client": tuple(range(CLIENTS)), "chunks": (1, 2, 5)},
    "stall": {"client": tuple(range(CLIENTS))},
    "close": {"client": tuple(range(CLIENTS)), "how": ENDS},
    "burst": {"count": (2, 1, 4, 8, 12), "chunks": (0, 1), "how": ("fin", "rst"), "words": (0, 200)},
    "wait": {"milliseconds": (10, 100, 500)},
    "oversize": {"kilobytes": (100, 1000, 6000)},
    "bad": {"kind": BAD},
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
    "kill_worker": {},
    "kill": {"process": ("worker", "server")},
    "freeze": {"process": ("worker", "relay", "server"), "milliseconds": (100, 1000, 5000)},
    "pipes": {"way": ("bytes", "slow", "lumps", "fast")},
    "starve": {"process": ("worker", "server"), "megabytes": (0, 16, 64)},
    "crowd": {"spare": (0, 1, 4), "count": (4, 12), "kill": (False, True)},
    "terminate": {},
}
FAULTS = ("kill", "freeze", "pipes", "starve", "crowd", "terminate")  # for a server that the fuzzer has started
SIGNALS = ("stop", "kill_worker")  # for a server whose process is known
ALWAYS = ("open", "read", "stall", "close", "burst", "wait", "oversize", "bad")
WEIGHTS = {"open": 8, "close": 5, "read": 4, "burst": 5, "abort": 3}  # the others: 1


@dataclass(frozen=True)
class Step:
    """A rule with its arguments."""

    rule: str
    args: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.rule}({', '.join(f'{name}={value!r}' for name, value in self.args.items())})"


def draw(
    chooser: random.Random, rules: Collection[str], longest: int, most: Mapping[str, int] | None = None
) -> list[Step]:
    """Draw a program; most leave out some rules, so that the others meet more often.

    `most` has the largest values of arguments, by name.
    """
    chosen = [rule for rule in rules if rule in ("open", "close") or chooser.random() < 0.6]
    weights = [WEIGHTS.get(rule, 1) for rule in chosen]
    steps: list[Step] = []
    opened: list[int] = []
    for rule in chooser.choices(chosen, weights, k=chooser.randint(2, longest)):
        step = _draw_step(chooser, rule, opened, most or {})
        if rule in ("open", "reuse"):
            opened.append(step.args["client"])
        steps.append(step)
    return steps


def _draw_step(chooser: random.Random, rule: str, opened: list[int], most: Mapping[str, int]) -> Step:
    args = {
        name: chooser.choice([value for value in values if name not in most or value <= most[name]])
        for name, values in RULES[rule].items()
    }
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


def simpler(step: Step, name: str) -> list[Step]:
    """Return the step with each simpler value of an argument, simplest first."""
    values = RULES[step.rule][name]
    if name in ("client", "of") or step.args[name] not in values:
        return []
    return [Step(step.rule, step.args | {name: value}) for value in values[: values.index(step.args[name])]]
