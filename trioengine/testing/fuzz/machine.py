"""What every machine is: rules that are taken down, states that are counted, steps that can be compared."""

from __future__ import annotations

from hypothesis.stateful import RuleBasedStateMachine

from trioengine.testing.fuzz.program import Program
from trioengine.testing.fuzz.rare import Rare


class Machine(RuleBasedStateMachine):
    """Its rules are under `@recorded`; what it finds it raises as one exception, in a rule or at its teardown."""

    def __init__(self) -> None:
        super().__init__()
        self.program = Program(type(self).__name__)
        self.rare = Rare()

    @property
    def passes(self) -> int:
        """Scheduler passes that were run."""
        return 0

    @property
    def checksum(self) -> str:
        """Equal in two runs that took the same steps."""
        return ""
