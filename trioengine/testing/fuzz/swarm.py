"""Which rule comes next: most programs leave out some rules (Groce et al., Swarm Testing, ISSTA 2012).

Hypothesis asks by name, before each rule, whether it is left out. Here a program says it once, and each rule is one
choice among those that can run.
"""

from __future__ import annotations

from typing import Any

from hypothesis.errors import InvalidDefinition
from hypothesis.internal.conjecture.data import ConjectureData
from hypothesis.stateful import Rule, RuleBasedStateMachine, RuleStrategy

_SHARES = 255  # a rule is left out with a probability of 0/255 to 254/255, the same for all of a program


class Swarm(RuleStrategy):
    """For one program: draws the rules that its machine runs, one after the other; its arguments are no Bundles.

    Those left out run where no other can; if all were, none is. Hypothesis puts the simple rules first, towards which
    it shrinks.
    """

    def __init__(self, machine: RuleBasedStateMachine) -> None:
        super().__init__(machine)
        self._enabled: list[Rule] = []

    def do_draw(self, data: ConjectureData) -> tuple[Rule, dict[str, Any]]:
        """A rule, and its arguments by name. Raises InvalidDefinition if none can run."""
        if not self._enabled:
            p_disabled = data.draw_integer(0, _SHARES - 1) / _SHARES
            self._enabled = [rule for rule in self.rules if not data.draw_boolean(p_disabled)] or self.rules
        able = self._able(self._enabled) or self._able(self.rules)
        if not able:
            raise InvalidDefinition(f"no rule of {self.machine} can run")
        rule = able[data.draw_integer(0, len(able) - 1)]
        return rule, {name: data.draw(strategy) for name, strategy in rule.arguments.items()}

    def _able(self, rules: list[Rule]) -> list[Rule]:
        return [rule for rule in rules if all(holds(self.machine) for holds in rule.preconditions)]
