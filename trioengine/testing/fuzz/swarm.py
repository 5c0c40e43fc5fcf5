"""Which rule comes next: most programs leave out some rules (Groce et al., Swarm Testing, ISSTA 2012).

Hypothesis asks by name, before each rule, whether it is left out. Here a program says it once, and each rule is one
choice among those that can run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from hypothesis.errors import InvalidDefinition
from hypothesis.internal.conjecture.data import ConjectureData
from hypothesis.stateful import Rule, RuleBasedStateMachine
from hypothesis.strategies import SearchStrategy

NextRule: TypeAlias = tuple[Rule, dict[str, Any]]  # with its arguments by name

_SHARES = 255  # a rule is left out with a probability of 0/255 to 254/255, the same for all of a program


class Swarm(SearchStrategy[NextRule]):
    """For one program: draws the rules that its machine runs, one after the other; its arguments are no Bundles.

    Those left out run where no other can; if all were, none is.
    """

    def __init__(self, machine: RuleBasedStateMachine, rules: Sequence[Rule]) -> None:
        """`rules` are the machine's, the simple ones first: shrinking goes towards the first."""
        super().__init__()
        self._machine = machine
        self._rules = rules
        self._enabled: Sequence[Rule] = ()

    def do_draw(self, data: ConjectureData) -> NextRule:
        """Raises InvalidDefinition if no rule can run."""
        if not self._enabled:
            p_disabled = data.draw_integer(0, _SHARES - 1) / _SHARES
            self._enabled = [rule for rule in self._rules if not data.draw_boolean(p_disabled)] or self._rules
        able = self._able(self._enabled) or self._able(self._rules)
        if not able:
            raise InvalidDefinition(f"no rule of {self._machine} can run")
        rule = able[data.draw_integer(0, len(able) - 1)]
        return rule, {name: data.draw(strategy) for name, strategy in rule.arguments.items()}

    def _able(self, rules: Sequence[Rule]) -> list[Rule]:
        return [rule for rule in rules if all(holds(self._machine) for holds in rule.preconditions)]
