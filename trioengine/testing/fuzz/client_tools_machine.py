"""Users of the client library whose requests offer tools, and give back the results of calls."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition

from trioengine.core.sampling_params import SamplingParams
from trioengine.core.types import ToolCallDelta
from trioengine.testing.fuzz import client_oracles
from trioengine.testing.fuzz.callers import Style
from trioengine.testing.fuzz.client_callers import RemoteHolder, RemoteReader
from trioengine.testing.fuzz.client_environment import MOST, ClientEnvironment
from trioengine.testing.fuzz.peers import WHICH
from trioengine.testing.fuzz.program import pick, recorded
from trioengine.testing.fuzz.tools import TOOL_USES, Offered, joined
from trioengine.testing.fuzz.tools_machine import (
    HISTORIES,
    LONGEST,
    MOST_ROUNDS,
    NEXT,
    ends_with_calls,
    moment_of,
    results_of,
)

USES = ("required", "required of two", "single", "named", "none", "auto")
CALLING = ("required", "required of two", "named")
PLACES = ("arguments", "arguments", "behind")  # of a call in an answer
WAYS_TO_STOP = ("abort", "abort by id", "cancel", "leave", "end", "kill")


class ClientToolsMachine(ClientEnvironment):
    """The rules of requests with tools, which have no grammar beside them."""

    @precondition(lambda self: self.open_holders)
    @recorded(
        which=WHICH,
        use=st.sampled_from(USES),
        style=st.sampled_from([style.value for style in Style]),
        stop=st.sampled_from(("", "", "", '"', "}", "tr", "a")),
        max_tokens=st.sampled_from((LONGEST, LONGEST, 48, 30, 12)),
        keep_partial=st.booleans(),
        rounds=st.sampled_from((0, 0, 20, 40)),
    )
    def ask_with_tools(
        self, which: int, use: str, style: str, stop: str, max_tokens: int, keep_partial: bool, rounds: int
    ) -> None:
        """A request with tools; how far it gets is given."""
        params = SamplingParams(max_tokens=max_tokens, stop=(stop,) if stop else ())
        self._read(which, Style(style), params, prompt="a", keep_partial=keep_partial, tools=self._offered(use))
        self._flow(rounds)

    @precondition(lambda self: self.open_holders)
    @recorded(
        which=st.integers(0, 2),
        use=st.sampled_from(CALLING),
        place=st.sampled_from(PLACES),
        what=st.sampled_from(WAYS_TO_STOP),
        keep_partial=st.sampled_from((True, True, False)),
    )
    def stop_in_call(self, which: int, use: str, place: str, what: str, keep_partial: bool) -> None:
        """A request is stopped at a place in a call, or the worker dies there; if it gets to none, it goes on."""
        params, tools = SamplingParams(max_tokens=LONGEST), self._offered(use)
        reader = self._read(which, Style.ALL, params, prompt="a", keep_partial=keep_partial, tools=tools)
        if reader is None or not self._flow_into_call(reader, place):
            return
        if what == "kill" and self.worker is None:
            return
        self.coverage.saw(f"{what} {moment_of(place)}")
        match what:
            case "kill":
                self._kill(0)
            case "leave":
                reader.holder.leave.set()
            case "end":
                reader.holder.end()
            case _:
                self._stop(reader, what)

    @precondition(lambda self: self.idle_holders)
    @recorded(
        which=st.integers(0, 2),
        use=st.sampled_from(CALLING),
        later=st.sampled_from(NEXT),
        prompt=st.sampled_from(("", "", "a")),
        is_reversed=st.booleans(),
        max_tokens=st.sampled_from((3, 12, LONGEST)),
    )
    def answer_calls(self, which: int, use: str, later: str, prompt: str, is_reversed: bool, max_tokens: int) -> None:
        """The results of calls go back; of a session's latest turn, or else of a request that is made first."""
        if not self._called_holders:
            params = SamplingParams(max_tokens=LONGEST)
            self._read(which, Style.ALL, params, prompt="a", tools=self._offered(use))
            self._settle()
        if not self._called_holders:  # its answer was cut, or failed
            return
        holder = pick(self._called_holders, which)
        results = results_of(client_oracles.committed(holder)[-1], -1 if is_reversed else 1)
        self.coverage.saw("a call is answered" if len(results) == 1 else "several calls are answered")
        params, tools = SamplingParams(max_tokens=max_tokens), self._offered(later) if later else None
        self._read(which, Style.ALL, params, prompt=prompt, tools=tools, results=results, holder=holder)

    @precondition(lambda self: self.num_callers < MOST)
    @recorded(which=st.integers(0, len(HISTORIES) - 1))
    def open_called(self, which: int) -> None:
        """A session that begins with calls."""
        self._open(True, None, HISTORIES[which])

    # ---- actions ----------------------------------------------------------------------------------------------------

    def _offered(self, use: str) -> Offered:
        return Offered(TOOL_USES[use], self.tool_form)

    def _flow_into_call(self, reader: RemoteReader, place: str) -> bool:
        for _ in range(MOST_ROUNDS):
            if reader.over:
                return False
            deltas = [delta for chunk in reader.chunks for delta in chunk.tool_calls]
            if deltas and place == _place_of(deltas):
                return not reader.has_outcome
            self._flow(1)
        return False

    @property
    def idle_holders(self) -> list[RemoteHolder]:
        return [holder for holder in self.open_holders if not holder.is_busy]

    @property
    def _called_holders(self) -> list[RemoteHolder]:
        """Idle sessions whose latest turn has calls."""
        return [holder for holder in self.idle_holders if ends_with_calls(client_oracles.committed(holder))]


def _place_of(deltas: list[ToolCallDelta]) -> str:
    """Where the latest call has come to."""
    return "behind" if len(joined(deltas)) > deltas[-1].index else "arguments"
