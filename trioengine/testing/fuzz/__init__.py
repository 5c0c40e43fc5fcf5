"""The lifecycle fuzzer, and the base class of machines for programs that use trioengine.

    class ChatMachine(LifecycleMachine):
        async def app(self, engine):
            async with engine.open_session() as session:
                await session.ask("to be", max_tokens=3)

`rule` and `initialize` are hypothesis' decorators, by keyword arguments; they also keep the rule's arguments for a
replay, so that these must be plain values: numbers, strings, booleans, None. `precondition` is hypothesis'.
"""

import functools

from hypothesis import stateful
from hypothesis.stateful import precondition as precondition

from trioengine.testing.fuzz.lifecycle_machine import LifecycleMachine as LifecycleMachine
from trioengine.testing.fuzz.program import recorded as rule

initialize = functools.partial(rule, stateful.initialize)
