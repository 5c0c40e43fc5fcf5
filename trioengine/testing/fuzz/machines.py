"""The machines that there are, by their names."""

from __future__ import annotations

from trioengine.testing.fuzz.engine_machine import EngineMachine
from trioengine.testing.fuzz.machine import Machine
from trioengine.testing.fuzz.realtime_machine import RealtimeMachine

MACHINES: dict[str, type[Machine]] = {machine.__name__: machine for machine in (EngineMachine, RealtimeMachine)}
