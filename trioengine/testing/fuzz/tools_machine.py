"""Sessions under hypothesis whose requests offer tools, and give back the results of calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import precondition

from trioengine.core.grammar import Grammar
from trioengine.core.sampling_params import SamplingParams
from trioengine.core.types import ToolCall
from trioengine.testing.fuzz.callers import Reader, SessionHolder, Style
from trioengine.testing.fuzz.calls_machine import WAIT, WHICH
from trioengine.testing.fuzz.conversations import Called, Result, Turn, messages_of
from trioengine.testing.fuzz.grammars_machine import GrammarsMachine
from trioengine.testing.fuzz.oracles import committed
from trioengine.testing.fuzz.program import pick, recorded
from trioengine.testing.fuzz.tools import TOOL_USES, Offered, is_json, parts_of
from trioengine.testing.toy_model import END_OF_TEXT

USES = tuple(name for name, use in TOOL_USES.items() if not use.turns)
CALLING = ("required", "required of two", "named", "text and call", "call and text", "two calls", "two calls")
NEXT = ("", "auto", "auto", "none", "named")  # with the results of calls
PLACES = ("head", "arguments", "arguments", "behind")  # of a call in an answer
WAYS_TO_STOP = ("abort", "cancel", "end", "kill", "abort by id")
LONGEST = 90  # tokens: more than the context has room for
MOST_ROUNDS = 90  # to a place in a call
CALLS = (ToolCall("c1", "f", '{"a": true}'), ToolCall("c2", "g", "{}"))
HISTORIES: tuple[tuple[Turn, ...], ...] = (
    (("user", "a"), ("assistant", Called("", CALLS))),
    (("user", "a"), ("assistant", Called("b", CALLS[:1])), ("tool", Result("no", "c1"))),
)


class ToolsMachine(GrammarsMachine):
    """The rules of requests with tools. In half of the configurations the model writes calls without tags."""

    def __init__(self) -> None:
        super().__init__()
        self.simulation.prints_tools = True
        self.simulation.tool_form = self.tool_form

    @property
    def tool_form(self) -> str:
        """The form in which the model writes calls."""
        return "hermes" if self.variant % 2 else "llama3"

    @precondition(lambda self: self.open_holders)
    @recorded(
        which=WHICH,
        use=st.sampled_from(USES),
        style=st.sampled_from([style.value for style in Style]),
        stop=st.sampled_from(("", "", "", '"', "}", "</", "tr", "a")),
        max_tokens=st.sampled_from((LONGEST, LONGEST, 48, 30, 12)),
        keep_partial=st.booleans(),
        timeout=st.sampled_from((None, None, 0.5)),
        rounds=st.sampled_from((0, 0, 12, 24)),
    )
    def ask_with_tools(
        self,
        which: int,
        use: str,
        style: str,
        stop: str,
        max_tokens: int,
        keep_partial: bool,
        timeout: float | None,
        rounds: int,
    ) -> None:
        """A request with tools; how far it gets is given."""
        params = SamplingParams(max_tokens=max_tokens, stop=(stop,) if stop else ())
        self._call_tools(which, use, Style(style), params, keep_partial=keep_partial, timeout=timeout)
        self._flow(rounds)

    @precondition(lambda self: self.worker is not None and self.idle_holders)
    @recorded(
        which=st.integers(0, 2),
        use=st.sampled_from(CALLING),
        place=st.sampled_from(PLACES),
        what=st.sampled_from(WAYS_TO_STOP),
        keep_partial=st.sampled_from((True, True, False)),
    )
    def stop_in_call(self, which: int, use: str, place: str, what: str, keep_partial: bool) -> None:
        """A request is stopped at a place in a call, or its worker dies there; if it gets to none, it goes on."""
        params = SamplingParams(max_tokens=LONGEST)
        reader = self._call_tools(which, use, Style.ALL, params, keep_partial=keep_partial)
        found = self._flow_into_call(reader, place)
        if not found or self.worker is None:
            return
        self.coverage.saw(f"{what} {moment_of(found)}")
        if what == "kill":
            self._kill(0)
        else:
            self._stop_or_end(reader, what)

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
            self._call_tools(which, use, Style.ALL, SamplingParams(max_tokens=LONGEST))
            self._settle()
        if not self._called_holders:  # its answer was cut, or failed
            return
        holder = pick(self._called_holders, which)
        results = results_of(committed(holder)[-1], -1 if is_reversed else 1)
        self.coverage.saw("a call is answered" if len(results) == 1 else "several calls are answered")
        params = SamplingParams(max_tokens=max_tokens)
        tools = self._offered(later) if later else None
        self._read(self.idle_holders.index(holder), Style.ALL, params, prompt=prompt, tools=tools, results=results)

    @recorded(which=st.integers(0, len(HISTORIES) - 1), wait=WAIT)
    def open_called(self, which: int, wait: bool | None) -> None:
        """A session that begins with calls."""
        self._open(wait, None, HISTORIES[which], messages_of(HISTORIES[which]))

    # ---- actions ----------------------------------------------------------------------------------------------------

    def _offered(self, use: str) -> Offered:
        return Offered(TOOL_USES[use], self.tool_form)

    def _call_tools(
        self,
        which: int,
        use: str,
        style: Style,
        params: SamplingParams,
        *,
        keep_partial: bool = False,
        timeout: float | None = None,
    ) -> Reader:
        pattern = TOOL_USES[use].pattern
        if pattern is not None:
            params = replace(params, grammar=Grammar.regex(pattern))
        return self._read(
            which, style, params, prompt="a", keep_partial=keep_partial, timeout=timeout, tools=self._offered(use)
        )

    def _flow_into_call(self, reader: Reader, place: str) -> str:
        """The place to which the answer has come, this one or the next that it shows; "" if it gets to none."""
        for _ in range(MOST_ROUNDS):
            if reader.over or self.worker is None:
                return ""
            found = _place_of(reader, self.tool_form)
            if found and _ORDER.index(found) >= _ORDER.index(place):
                return found if reader.generation is not None and reader.generation.outcome is None else ""
            self._flow(1)
        return ""

    @property
    def _called_holders(self) -> list[SessionHolder]:
        """Idle sessions whose latest turn has calls."""
        return [holder for holder in self.idle_holders if ends_with_calls(committed(holder))]


def ends_with_calls(turns: Sequence[Turn]) -> bool:
    """Whether the latest turn has calls."""
    return bool(turns) and isinstance(turns[-1][1], Called)


def results_of(turn: Turn, step: int) -> tuple[Turn, ...]:
    """The results of the calls of a turn, in their order, or backwards with the step -1."""
    content = turn[1]
    assert isinstance(content, Called), "it has calls"
    return tuple(("tool", Result(f"r{number}", call.id)) for number, call in enumerate(content.calls))[::step]


def moment_of(place: str) -> str:
    """A place in a call, for a note of coverage."""
    return "behind a call" if place == "behind" else f"in the {place} of a call"


_ORDER = ("head", "arguments", "behind")


def _place_of(reader: Reader, form: str) -> str:
    """Where an answer has come to in its latest call; "" before the first one."""
    ids = [token for chunk in reader.chunks for token in chunk.token_ids]
    answer = "".join(chr(token) for token in ids if token < END_OF_TEXT)
    begins = len(answer) > len(parts_of(answer, form, is_aborted=True).text)
    calls = parts_of(answer, form).calls
    if not calls:
        return "head" if begins else ""
    return "behind" if is_json(calls[-1].arguments) else "arguments"
