"""An engine under hypothesis as an embedding program has it: the rules of sessions, requests and their readers."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition

from trioengine.core.errors import EngineError, EngineOverloaded, SessionBusy
from trioengine.core.sampling_params import SamplingParams
from trioengine.testing.fuzz import inside
from trioengine.testing.fuzz.answers import reference
from trioengine.testing.fuzz.callers import UNPREPARED, Reader, SessionHolder, Style, latest_first
from trioengine.testing.fuzz.calls_machine import WAIT, WHICH, raw_ids
from trioengine.testing.fuzz.conversations import (
    LONG,
    MEDIA,
    RAW,
    UNREADABLE,
    Turn,
    content_of,
    is_mixed,
    messages_of,
    pictures_of,
    prompt_ids,
)
from trioengine.testing.fuzz.oracles import asked, committed
from trioengine.testing.fuzz.program import pick, recorded
from trioengine.testing.fuzz.sessions_machine import ADAPTERS, TURN_LENGTHS
from trioengine.testing.fuzz.tools_machine import ToolsMachine
from trioengine.testing.fuzz.world import CONFIG

TURNS_TO_PARK = 3  # of the worker, in which it takes a session and its request
TURNS_TO_DECODE = 16  # of the worker, in which it takes two requests, if others do not take long
ROUNDS_TO_FINISH = 12  # of a request for one token, if nothing is in its way
PROMPTS = ("a", "to be", "be or not be or not be or", "<|im_end|>", "", UNPREPARED)
DECODED = ("one", UNREADABLE, f"{UNREADABLE} dot")  # pictures of a request that is stopped, and of one behind it
DECODED_NEXT = ("dot", "two", "wide", UNREADABLE)
CROWD = ("two one", "one one", "dot")
WAYS_TO_STOP = ("abort", "cancel", "go on", "abort by id", "abort by label", "fail")
DOT: tuple[Turn, ...] = (("user", content_of("dot", "a")),)
HISTORIES: tuple[tuple[Turn, ...], ...] = (
    (),
    (("user", "a"), ("assistant", "b")),
    LONG,
    (("user", content_of("two", "a")), ("assistant", "b")),
)


class EngineMachine(ToolsMachine):
    """Rules are actions of the outside world; their arguments choose among the objects that exist.

    Requests in flight fail with their worker; in the machines built on it, and for servers, they go on.
    """

    config = replace(CONFIG, on_worker_loss="fail", adapters=ADAPTERS)

    def __init__(self) -> None:
        super().__init__()
        self.simulation.unpreparable = UNPREPARED

    @recorded(
        initialize,
        ready=st.sampled_from((True, True, True, False)),
        sessions=st.integers(0, 2),
        turns=st.integers(0, 1),
        asks=st.integers(0, 2),
        thread_passes=st.integers(1, 4),
    )
    def begin(self, ready: bool, sessions: int, turns: int, asks: int, thread_passes: int) -> None:
        """Mostly from an engine that is ready, with sessions that the worker may know already, and long requests."""
        self.simulation.thread_passes = thread_passes
        if ready:
            self._settle()
        for _ in range(sessions):
            self._open(wait=True)
        if ready:
            self.loop.settle()
        for session in range(sessions if ready else 0):
            for _ in range(turns):
                self._read(session, Style.ALL, SamplingParams(max_tokens=1))
                self._settle()
        for _ in range(min(asks, sessions) if ready else 0):
            self._read(0, Style.ALL, SamplingParams(max_tokens=40))

    # ---- programs that use the engine -----------------------------------------------------------------------------

    @recorded(wait=st.booleans())
    def open(self, wait: bool) -> None:
        self._open(wait)

    @recorded(wait=WAIT)
    def open_long(self, wait: bool | None) -> None:
        """A session that begins with a conversation that soon outgrows the context."""
        self._open(wait, None, LONG, messages_of(LONG))

    @recorded(timeout=st.sampled_from((None, 0.5)))
    def open_by_default(self, timeout: float | None) -> None:
        self._open(None, timeout)

    @precondition(lambda self: self.open_holders)
    @recorded(which=WHICH, max_tokens=st.sampled_from((1, 2, 5, 40)), reads=st.sampled_from((True, True, False)))
    def ask(self, which: int, max_tokens: int, reads: bool) -> None:
        self._read(which, Style.ALL if reads else Style.STALLED, SamplingParams(max_tokens=max_tokens))

    @precondition(lambda self: self.open_holders)
    @recorded(
        which=WHICH,
        prompt=st.sampled_from(PROMPTS),
        stop=st.sampled_from(("", "e", "a b")),
        style=st.sampled_from([style.value for style in Style]),
        keep_partial=st.booleans(),
        timeout=st.sampled_from((None, 0.5, 8.0)),
        wait=WAIT,
        ignore_eos=st.booleans(),
    )
    def ask_so(
        self,
        which: int,
        prompt: str,
        stop: str,
        style: str,
        keep_partial: bool,
        timeout: float | None,
        wait: bool | None,
        ignore_eos: bool,
    ) -> None:
        params = SamplingParams(max_tokens=20, stop=(stop,) if stop else (), ignore_eos=ignore_eos)
        self._read(which, Style(style), params, prompt=prompt, keep_partial=keep_partial, timeout=timeout, wait=wait)

    @precondition(lambda self: self.open_holders)
    @recorded(
        which=WHICH,
        start=st.integers(0, 8),
        length=st.integers(0, 4),
        more=st.sampled_from((None, None, -1, 0, 1)),
        other=st.sampled_from((None, None, -1, 0, 1)),
        style=st.sampled_from([style.value for style in Style]),
    )
    def ask_to_stop(self, which: int, start: int, length: int, more: int | None, other: int | None, style: str) -> None:
        """A stop string that occurs in the answer, where the conversation does not change before.

        Its characters come in different chunks. `more`: `min_tokens` exceeds the tokens up to its end by this number,
        or is 0 (None). `other`: a second stop string begins a character later than the first one, and ends this many
        characters later.
        """
        min_tokens = 0 if more is None else min(max(start + length + more, 0), 12)
        params = SamplingParams(max_tokens=12, min_tokens=min_tokens)
        reader = self._read(which, Style(style), params, prompt="b")
        prompt, _ = asked(reader, committed(reader.holder))
        if is_mixed(prompt):  # it will be refused
            return
        text, end = reference(prompt_ids(prompt), 12).text, start + length
        others = () if other is None else (text[start + 1 : end + other],)
        reader.params = replace(reader.params, stop=tuple(filter(None, (*others, text[start:end]))))

    @precondition(lambda self: self.worker is not None and self.idle_holders)
    @recorded(which=st.integers(0, 2), rounds=st.sampled_from((0, 3, 8)))
    def ask_to_fail(self, which: int, rounds: int) -> None:
        """A request that the worker is to fail, after so many rounds, beside the others of its steps."""
        reader = self._read(which, Style.ALL, SamplingParams(max_tokens=20))
        self.loop.settle()
        self._flow(rounds)
        self._stop(reader, "fail")

    @precondition(lambda self: self.open_holders)
    @recorded(
        which=WHICH,
        length=st.sampled_from(TURN_LENGTHS),
        max_tokens=st.sampled_from((1, 3, 20)),
        style=st.sampled_from([style.value for style in Style]),
        keep_partial=st.booleans(),
    )
    def ask_with_ids(self, which: int, length: int, max_tokens: int, style: str, keep_partial: bool) -> None:
        """A turn of raw token ids; refused in a conversation of messages, as these are after such a turn."""
        params = SamplingParams(max_tokens=max_tokens)
        self._read(which, Style(style), params, raw=raw_ids(length), keep_partial=keep_partial)

    @precondition(lambda self: self.open_holders)
    @recorded(
        which=st.integers(0, 2),
        length=st.sampled_from(TURN_LENGTHS),
        num_turns=st.integers(1, 3),
        history=st.sampled_from((None, 0, 1)),
    )
    def go_over_to_messages(self, which: int, length: int, num_turns: int, history: int | None) -> None:
        """Turns of raw token ids, each at rest; then a message, mostly with a history in the place of the ids."""
        for _ in range(num_turns):
            if self.open_holders:  # the engine may give up meanwhile
                self._read(which, Style.ALL, SamplingParams(max_tokens=3), raw=raw_ids(length))
                self._settle()
        if history is not None and self.readers[-1].holder.is_open:
            self._replace_history(self.readers[-1].holder, HISTORIES[history])
        if self.open_holders:
            self._read(which, Style.ALL, SamplingParams(max_tokens=3), prompt="a")

    @precondition(lambda self: self.shows and self.open_holders)
    @recorded(
        which=WHICH,
        media=st.sampled_from(MEDIA),
        prompt=st.sampled_from(("a", "to be", "", UNPREPARED)),
        style=st.sampled_from([style.value for style in Style]),
        keep_partial=st.booleans(),
        timeout=st.sampled_from((None, None, 0.5, 8.0)),
        wait=WAIT,
    )
    def show(
        self,
        which: int,
        media: str,
        prompt: str,
        style: str,
        keep_partial: bool,
        timeout: float | None,
        wait: bool | None,
    ) -> None:
        """A request with pictures."""
        self._read(
            which,
            Style(style),
            SamplingParams(max_tokens=10),
            prompt=prompt,
            media=media,
            keep_partial=keep_partial,
            timeout=timeout,
            wait=wait,
        )

    @precondition(lambda self: self.shows and self.open_holders)
    @recorded(
        which=WHICH,
        media=st.sampled_from(MEDIA),
        passes=st.integers(0, 14),
        what=st.sampled_from(("abort", "cancel", "end")),
        among=st.booleans(),
    )
    def stop_showing(self, which: int, media: str, passes: int, what: str, among: bool) -> None:
        """A request with pictures is stopped on its way in.

        If it is `among` others, one has taken most of the room for pictures, and one behind it needs little.
        """
        if among:
            self._call("show", lambda: self._show_once(content_of("two one", "hi"), None, None), (EngineError,))
            self.loop.settle()
        if not self.open_holders:  # the engine may give up meanwhile
            return
        reader = self._read(which, Style.ALL, SamplingParams(max_tokens=10), prompt="a", media=media)
        if among:
            self._open(None, None, DOT, messages_of(DOT))
        self.loop.tick(passes)
        self._stop_or_end(reader, what)

    @precondition(lambda self: self.shows and self.worker is not None and self.open_holders)
    @recorded(which=WHICH, media=st.sampled_from(MEDIA), what=st.sampled_from(("abort", "cancel", "end", "end")))
    def stop_parked(self, which: int, media: str, what: str) -> None:
        """A request with pictures is stopped at the worker, where its payloads have not come; or on its way there."""
        reader = self._read(which, Style.ALL, SamplingParams(max_tokens=10), prompt="a", media=media)
        for _ in range(TURNS_TO_PARK):
            self.loop.settle()
            if self.worker is not None:
                self.worker.receive()
                self.worker.turn()
        self._stop_or_end(reader, what)

    @precondition(lambda self: self.shows and self.worker is not None and self.idle_holders)
    @recorded(
        which=st.integers(0, 2),
        media=st.sampled_from(DECODED),
        other=st.sampled_from(DECODED_NEXT),
        what=st.sampled_from(("abort", "cancel", "end")),
    )
    def stop_decoding(self, which: int, media: str, other: str, what: str) -> None:
        """At rest a request with pictures comes, and another one; it is stopped while the first picture is decoded."""
        self._settle()
        if not self.idle_holders:  # the engine may give up meanwhile
            return
        reader = self._read(which, Style.ALL, SamplingParams(max_tokens=10), prompt="a", media=media)
        self.loop.settle()
        self._call("show", lambda: self._show_once(content_of(other, "hi"), None, None), (EngineError,))
        self._flow_to_the_decoder()
        self._stop_or_end(reader, what)
        self._flow_to_the_decoder()

    def _flow_to_the_decoder(self) -> None:
        """The worker does all that it can without decoded pictures; one is begun."""
        for _ in range(TURNS_TO_DECODE):
            self.loop.settle()
            if self.worker is not None:
                self.worker.deliver()
                self.worker.receive()
                self.worker.receive_payloads()
                if not self.worker.only_decodes:
                    self.worker.turn()
        if self.worker is not None:
            self.worker.begin_decoding()

    @precondition(lambda self: len(self.running_calls) <= 2)
    @recorded(callers=st.integers(2, 6), passes=st.integers(1, 12), keep_waiting=st.booleans())
    def abort_crowd(self, callers: int, passes: int, keep_waiting: bool) -> None:
        """One-shots, maybe more than there are slots, are all aborted after some passes: many are on their way in."""
        for _ in range(callers):
            self._ask(True, None)
        self.loop.tick(passes)
        self._abort_all(keep_waiting=keep_waiting)

    @precondition(lambda self: self.shows)
    @recorded(which=WHICH, is_new=st.booleans(), wait=WAIT, timeout=st.sampled_from((None, None, 0.5)))
    def open_with(self, which: int, is_new: bool, wait: bool | None, timeout: float | None) -> None:
        """A session that begins with a picture; or with the history of another session, and so with its payloads."""
        idle = self.idle_holders
        if is_new or not idle:
            self._open(wait, timeout, HISTORIES[-1], messages_of(HISTORIES[-1]))
            return
        lender = pick(idle, which)
        assert lender.session is not None, "it is open"
        history = tuple(turn for turn in committed(lender) if turn[0] != RAW)
        self._open(wait, timeout, history, lender.session.history)

    @precondition(lambda self: self.shows)
    @recorded(
        sessions=st.integers(2, 4),
        first=st.integers(0, 2),
        wait=st.booleans(),
        passes=st.sampled_from((0, 0, 1, 2, 3, 4, 5, 6)),
    )
    def open_many(self, sessions: int, first: int, wait: bool, passes: int) -> None:
        """Sessions that begin with pictures, at once: together more than there is room for, and some have only one.

        After so many passes the second one leaves, unless they are 0.
        """
        for number in range(first, first + sessions):
            history: tuple[Turn, ...] = (("user", content_of(CROWD[number % len(CROWD)], "a")),)
            self._open(wait, None, history, messages_of(history))
        if passes:
            self.loop.tick(passes)
            self.holders[1 - sessions].scope.cancel()

    @precondition(lambda self: self.worker is not None and self.idle_holders)
    @recorded(which=st.integers(0, 2), what=st.sampled_from(("abort", "cancel", "end")))
    def cross(self, which: int, what: str) -> None:
        """A short request is stopped when the worker has finished it, and the engine does not know yet.

        If that does not come about soon, it goes on.
        """
        reader = self._read(which, Style.ALL, SamplingParams(max_tokens=1), prompt="a")
        if not self._flow_to_the_finish(reader):
            return
        self.coverage.saw(f"{what} crosses the finish")
        self._stop_or_end(reader, what)

    def _flow_to_the_finish(self, reader: Reader) -> bool:
        was_there = False
        for _ in range(ROUNDS_TO_FINISH):
            self._flow(1)
            generation, worker = reader.generation, self.worker
            if reader.over or generation is None or worker is None:
                return False
            is_there = reader.entered and generation.request_id in worker.core.requests
            if was_there and not is_there:
                return generation.outcome is None and len(worker.to_engine) > 0
            was_there = is_there
        return False

    @precondition(lambda self: self.readers)
    @recorded(which=WHICH, what=st.sampled_from(WAYS_TO_STOP))
    def stop_reading(self, which: int, what: str) -> None:
        """Also of a request that is over; the latest is the first to be chosen."""
        self._stop(pick(latest_first(self.readers), which), what)

    @precondition(lambda self: self.holders)
    @recorded(which=WHICH, what=st.sampled_from(("leave", "cancel", "end")))
    def leave(self, which: int, what: str) -> None:
        """Also a session that has ended."""
        holder = pick(latest_first(self.holders), which)
        match what:
            case "leave":
                holder.leave.set()
            case "cancel":
                holder.scope.cancel()
            case "end":
                self._end(holder)

    @precondition(lambda self: self.open_holders)
    @recorded(which=WHICH, turns=st.sampled_from((0, 1, 2, 2, 3)))
    def replace_history(self, which: int, turns: int) -> None:
        """Refused while the session has a request without an outcome."""
        self._replace_history(pick(self.open_holders, which), HISTORIES[turns])

    def _replace_history(self, holder: SessionHolder, history: tuple[Turn, ...]) -> None:
        session = holder.session
        assert session is not None, "it is open"
        request = inside.request_of(session)
        is_busy = request is not None and request.outcome is None
        last_id = inside.mint_id(self.engine)
        try:
            session.replace_history(messages_of(history))
        except SessionBusy:
            assert is_busy, f"it has no request, and is busy: {session}"
            self.coverage.saw("a history is replaced in the middle of a request")
        except EngineOverloaded as exc:  # judged where there was no room (PayloadWatch)
            self._refused_history(history, exc)
        else:
            assert not is_busy, f"the history of {session} is replaced under its request"
            if any(role == RAW for role, _ in committed(holder)):
                self.coverage.saw("token ids are replaced by a history")
            holder.replaced.append((last_id, history))
            self.coverage.saw("a history is replaced")

    def _refused_history(self, history: tuple[Turn, ...], error: EngineOverloaded) -> None:
        assert any(pictures_of(content) for _, content in history), f"it has no pictures, and {error!r}"
        self.coverage.saw("a history has no room for its pictures")
