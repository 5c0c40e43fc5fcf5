"""The machines that there are, by their names."""

from __future__ import annotations

from trioengine.testing.fuzz.core_machine import CoreMachine
from trioengine.testing.fuzz.engine_machine import EngineMachine
from trioengine.testing.fuzz.http_machine import HttpMachine
from trioengine.testing.fuzz.machine import Machine
from trioengine.testing.fuzz.power_machine import PowerMachine
from trioengine.testing.fuzz.realtime_machine import RealtimeMachine

_ALL: tuple[type[Machine], ...] = (EngineMachine, PowerMachine, RealtimeMachine, HttpMachine, CoreMachine)
MACHINES = {machine.__name__: machine for machine in _ALL}
