"""An engine under hypothesis whose requests outlive its workers, its sleeps and its weights; or are lost with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from hypothesis import strategies as st
from hypothesis.stateful import precondition

from trioengine.core.lifecycle import Power
from trioengine.core.sampling_params import SamplingParams
from trioengine.testing.fuzz import inside
from trioengine.testing.fuzz.callers import Style
from trioengine.testing.fuzz.calls_machine import WHICH
from trioengine.testing.fuzz.faults import Harm
from trioengine.testing.fuzz.grammars import GOOD, GRAMMARS
from trioengine.testing.fuzz.operator_machine import OperatorMachine
from trioengine.testing.fuzz.program import recorded
from trioengine.testing.fuzz.tools_machine import CALLING, LONGEST, PLACES, moment_of
from trioengine.testing.toy_weights import TOY_PATH

SUSPENDED = (
    "wake",
    "wake",
    "drain",
    "drain soon",
    "abort all",
    "abort",
    "cancel",
    "end",
    "kill",
    "sleep",
)  # ways to go on, or not
DEATHS = 2  # without a token between them, which make a request a suspect
ROUNDS_TO_DIE = 120  # of a request that kills its workers, at most


class PowerMachine(OperatorMachine):
    """The rules of OperatorMachine, and those that bring a request in flight to a change or to a death."""

    # ---- a request meets a change -----------------------------------------------------------------------------------

    @precondition(lambda self: self.open_holders and self.engine.state is Power.AWAKE)
    @recorded(
        which=WHICH, level=st.sampled_from((1, 2)), rounds=st.sampled_from((3, 8, 12)), way=st.sampled_from(SUSPENDED)
    )
    def suspend(self, which: int, level: Literal[1, 2], rounds: int, way: str) -> None:
        """A request is suspended by a sleep, which may not be done yet; and then something happens to it."""
        reader = self._read(which, Style.ALL, SamplingParams(max_tokens=20))
        self._flow(rounds)
        self._sleep(level, "keep")
        self._flow(rounds)
        match way:
            case "wake":
                self._change("wake", self.engine.wake, None, True)
            case "sleep":
                self._sleep(level, "abort")
            case "end":
                self._end(reader.holder)
            case "abort" | "cancel":
                self._stop(reader, way)
            case "kill" if self.worker is not None:
                self._kill(0)
            case "drain" | "drain soon" | "abort all":
                self._suffer(way)

    @precondition(lambda self: self.open_holders and self.engine.state is Power.AWAKE)
    @recorded(
        which=WHICH,
        grammar=st.sampled_from(GOOD),
        rounds=st.sampled_from((12, 16, 20, 26)),
        way=st.sampled_from(("kill", "sleep", "update", "update")),
    )
    def move_by_grammar(self, which: int, grammar: str, rounds: int, way: str) -> None:
        """An answer that follows a grammar goes on with another worker, after a sleep, or with other weights."""
        self._read(which, Style.ALL, SamplingParams(max_tokens=40, grammar=GRAMMARS[grammar].grammar))
        self._flow(rounds)
        self._change_worker(way)

    @precondition(lambda self: self.idle_holders and self.engine.state is Power.AWAKE)
    @recorded(
        which=st.integers(0, 2),
        use=st.sampled_from(CALLING),
        place=st.sampled_from(PLACES),
        way=st.sampled_from(("kill", "kill", "sleep", "update")),
    )
    def move_in_call(self, which: int, use: str, place: str, way: str) -> None:
        """The same of an answer that has come to a place in a call."""
        reader = self._call_tools(which, use, Style.ALL, SamplingParams(max_tokens=LONGEST))
        if found := self._flow_into_call(reader, place):
            self.coverage.saw(f"{way} {moment_of(found)}, which goes on")
            self._change_worker(way)

    def _change_worker(self, way: str) -> None:
        """An answer has to go on with another worker, or with other weights."""
        match way:
            case "kill" if self.worker is not None:
                self._kill(0)
            case "sleep":
                self._sleep(1, "keep")
                self._change("wake", self.engine.wake, None, True)
            case "update":
                self._update("new", "keep")

    # ---- a request meets deaths -------------------------------------------------------------------------------------

    @precondition(lambda self: self.worker is not None and self.engine.state is Power.AWAKE)
    @recorded(
        which=st.integers(0, 2),
        others=st.sampled_from((1, 1, 1, 0)),
        num_tokens=st.sampled_from((0, 0, 1, 3)),
        rounds=st.sampled_from((0, 1, 2, 4, 6)),
        change=st.sampled_from(("sleep", "update", "abort", "nothing", "nothing")),
    )
    def ask_for_death(self, which: int, others: int, num_tokens: int, rounds: int, change: str) -> None:
        """A request kills each worker which computes more than so many tokens of it, maybe beside good ones.

        Unless the rounds are 0, the engine changes so many rounds after the third worker is READY, or the oldest
        request is aborted while that worker starts, or nothing happens until the request that kills is over.
        """
        for _ in range(others + 1):
            if not self.idle_holders:
                self._open(None, None)
                self.loop.settle()
            if self.idle_holders:
                self._read(which, Style.ALL, SamplingParams(max_tokens=5))
                self.loop.settle()
        entered = [reader for reader in self.running_readers if reader.entered]
        if not entered or entered[-1].generation is None:
            return
        self.faults.begin(Harm.WORKERS)
        self.simulation.poisoned[entered[-1].generation.request_id] = num_tokens
        third = len(self.simulation.workers) + DEATHS
        if rounds and change == "abort":
            self._flow_until(lambda: len(self.simulation.workers) >= third)
            self._stop(entered[0], "abort")
        elif rounds and change == "nothing":
            self._flow_until(lambda: entered[-1].over)
        elif rounds:
            self._flow_until(lambda: len(self.simulation.workers) >= third and inside.has_worker(self.engine))
            self._flow(rounds)
            if change == "sleep":
                self._sleep(1, "keep")
            else:
                self._update(TOY_PATH, "keep")

    def _flow_until(self, is_done: Callable[[], bool]) -> None:
        """Go on through deaths of workers and their restarts, for ROUNDS_TO_DIE rounds at most."""
        for _ in range(ROUNDS_TO_DIE):
            if is_done():
                break
            self._flow(1)
            if self.worker is None:
                self._jump(max(self.config.restart_delays))
