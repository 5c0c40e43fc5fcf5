"""Which rule comes next: each program leaves out some rules (Groce et al., Swarm Testing, ISSTA 2012).

Hypothesis does the same for any features that there may be, and asks for them by name before each rule. Of rules alone
it takes less: a program says once which it leaves out, and a rule is one choice. Shrinking brings those left out back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from hypothesis.internal.conjecture.data import ConjectureData
from hypothesis.stateful import Rule, RuleBasedStateMachine
from hypothesis.strategies import SearchStrategy

NextRule: TypeAlias = tuple[Rule, dict[str, Any]]  # with its arguments by name

_ODDS = 255  # p is a number of these
_TRIES = 8  # until all rules are asked whether they can run


class Swarm(SearchStrategy[NextRule]):
    """For one program: draws the rules that its machine runs, one after the other."""

    def __init__(self, machine: RuleBasedStateMachine, rules: Sequence[Rule]) -> None:
        """`rules` are the machine's, the simple ones first: shrinking goes towards the first."""
        super().__init__()
        self._machine = machine
        self._rules = rules
        self._enabled: Sequence[Rule] = ()

    def do_draw(self, data: ConjectureData) -> NextRule:
        if not self._enabled:
            p_disabled = data.draw_integer(0, _ODDS - 1) / _ODDS
            self._enabled = [rule for rule in self._rules if not data.draw_boolean(p_disabled)] or self._rules
        rule = self._next(data)
        return rule, {name: data.draw(strategy) for name, strategy in rule.arguments.items()}

    def _next(self, data: ConjectureData) -> Rule:
        for _ in range(_TRIES):
            rule = _pick(data, self._enabled)
            if self._can_run(rule):
                return rule
        able = [rule for rule in self._enabled if self._can_run(rule)]
        return _pick(data, able or [rule for rule in self._rules if self._can_run(rule)])

    def _can_run(self, rule: Rule) -> bool:
        return all(holds(self._machine) for holds in rule.preconditions)


def _pick(data: ConjectureData, rules: Sequence[Rule]) -> Rule:
    return rules[data.draw_integer(0, len(rules) - 1)]
