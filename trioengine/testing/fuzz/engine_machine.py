"""An engine under hypothesis as an embedding program has it: its sessions, requests and their readers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition

from trioengine.actors.generation import Generation
from trioengine.core.errors import EngineOverloaded, SessionBusy
from trioengine.core.overflow import Overflow
from trioengine.core.sampling_params import SamplingParams
from trioengine.testing.fuzz.callers import UNPREPARED, Holder, Reader, Style, latest_first
from trioengine.testing.fuzz.calls_machine import WAIT, WHICH
from trioengine.testing.fuzz.image_states import parked
from trioengine.testing.fuzz.oracles import (
    GOING,
    check_aborted,
    check_deadline,
    check_holder,
    check_reader,
    check_worker,
    committed,
)
from trioengine.testing.fuzz.pictures import MEDIA, Turn, content_of, messages_of
from trioengine.testing.fuzz.pictures_machine import PicturesMachine
from trioengine.testing.fuzz.program import pick, recorded
from trioengine.testing.fuzz.watching import failing
from trioengine.testing.fuzz.world import CONFIG, LIMITS
from trioengine.testing.simulated_worker import Health
from trioengine.text.conversation import Conversation

ROUNDS_TO_FINISH = 12  # of a request for one token, if nothing is in its way
PROMPTS = ("a", "to be", "be or not be or not be or", "<|im_end|>", "", UNPREPARED)
HISTORIES: tuple[tuple[Turn, ...], ...] = (
    (),
    (("user", "a"), ("assistant", "b")),
    (("user", content_of("two", "a")), ("assistant", "b")),
)
SALTS = ("", "", "mine")  # of the requests in turn


class EngineMachine(PicturesMachine):
    """Rules are what the outside world can do; the arguments choose among what there is.

    Requests in flight fail with their worker; in the machines built on it, and for servers, they go on.
    """

    config = replace(CONFIG, on_worker_loss="fail")

    def __init__(self) -> None:
        super().__init__()
        self.holders: list[Holder] = []
        self.readers: list[Reader] = []
        self._watch(Conversation, "prepare", failing)

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

    @precondition(lambda self: self.open_holders)
    @recorded(
        which=WHICH,
        media=st.sampled_from(MEDIA),
        passes=st.integers(0, 14),
        turns=st.sampled_from((0, 0, 3)),
        what=st.sampled_from(("abort", "cancel", "end")),
    )
    def stop_showing(self, which: int, media: str, passes: int, turns: int, what: str) -> None:
        """A request with pictures is stopped on its way in; or at the worker, where its payloads have not come."""
        reader = self._read(which, Style.ALL, SamplingParams(max_tokens=10), prompt="a", media=media)
        self.loop.tick([0] * passes)
        for _ in range(turns):
            self.loop.settle()
            if self.worker is not None:
                self.worker.receive()
                self.worker.turn()
        if what == "end":
            self._note_moment(reader, what)
            reader.holder.end()
        else:
            self._stop(reader, what)

    @recorded(which=WHICH, is_new=st.booleans(), wait=WAIT, timeout=st.sampled_from((None, None, 0.5)))
    def open_with(self, which: int, is_new: bool, wait: bool | None, timeout: float | None) -> None:
        """A session that begins with a picture; or with the history of another session, and so with its payloads."""
        idle = [holder for holder in self.open_holders if not holder.is_busy]
        if is_new or not idle:
            self._open(wait, timeout, HISTORIES[-1], messages_of(HISTORIES[-1]))
            return
        lender = pick(idle, which)
        assert lender.session is not None, "it is open"
        self._open(wait, timeout, committed(lender), lender.session.history)

    @precondition(lambda self: self.worker is not None and any(not holder.is_busy for holder in self.open_holders))
    @recorded(which=st.integers(0, 2), what=st.sampled_from(("abort", "cancel", "end")))
    def cross(self, which: int, what: str) -> None:
        """A short request is stopped when the worker has finished it, and the engine does not know yet.

        If that does not come about soon, it goes on.
        """
        reader = self._read(which, Style.ALL, SamplingParams(max_tokens=1), prompt="a")
        if not self._flow_to_the_finish(reader):
            return
        self.rare.saw(f"{what} crosses the finish")
        if what == "end":
            reader.holder.end()
        else:
            self._stop(reader, what)

    def _flow_to_the_finish(self, reader: Reader) -> bool:
        was_there = False
        for _ in range(ROUNDS_TO_FINISH):
            self._flow(1)
            generation, worker = reader.generation, self.worker
            if reader.over or generation is None or worker is None:
                return False
            is_there = reader.entered and generation.request_id in worker.step_loop.requests
            if was_there and not is_there:
                return generation.outcome is None and len(worker.to_engine) > 0
            was_there = is_there
        return False

    @precondition(lambda self: self.readers)
    @recorded(which=WHICH, what=st.sampled_from(("abort", "cancel", "go on", "abort by id", "fail")))
    def stop_reading(self, which: int, what: str) -> None:
        """Also of a request that is over; the latest is the first to be chosen."""
        self._stop(pick(latest_first(self.readers), which), what)

    def _stop(self, reader: Reader, what: str) -> None:
        generation = reader.generation
        has_id = generation is not None and generation._request_id is not None
        if what == "cancel":
            self._note_moment(reader, what)
            reader.scope.cancel()
        elif what == "go on":
            reader.go_on.set()
        elif generation is None or (reader.over and not reader.entered) or (what != "abort" and not has_id):
            pass  # there is nothing yet, or it was refused, or has no id
        elif what != "fail":
            self._note_moment(reader, "abort")
            self._abort(reader, generation, by_id=what == "abort by id")
        elif self.worker is not None:  # the worker cannot sample for it: it fails alone
            self._note_moment(reader, what)
            self.worker.runner.fail_requests.add(generation.request_id)
            self.troubles.requests.add(generation.request_id)

    def _abort(self, reader: Reader, generation: Generation, *, by_id: bool) -> None:
        session = reader.holder.session
        is_in_flight = session is not None and session.generation is generation
        is_going = is_in_flight and session is not None and session.phase in GOING
        is_to_end = generation.outcome is None and (is_going or not is_in_flight)
        reader.aborted = True
        ended = self.engine.abort(generation.request_id) if by_id else generation.abort()
        assert ended == is_to_end, f"abort() said {ended} of {generation}"
        again = self.engine.abort(generation.request_id) if by_id else generation.abort()
        assert not again, f"a second abort() said {again} of {generation}"
        check_aborted(reader)

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
                holder.end()

    @precondition(lambda self: self.open_holders)
    @recorded(which=WHICH, turns=st.integers(0, 2))
    def replace_history(self, which: int, turns: int) -> None:
        """Refused while the session has a request without an outcome."""
        holder = pick(self.open_holders, which)
        session, history = holder.session, HISTORIES[turns]
        assert session is not None, "it is open"
        is_busy = session.generation is not None and session.generation.outcome is None
        last_id = self.engine.gate.mint()
        try:
            session.replace_history(messages_of(history))
        except SessionBusy:
            assert is_busy, f"it has no request, and is busy: {session}"
            self.rare.saw("a history is replaced in the middle of a request")
        except EngineOverloaded:  # judged where there was no room (PayloadWatch)
            self.rare.saw("a history has no room for its pictures")
        else:
            assert not is_busy, f"the history of {session} is replaced under its request"
            holder.replaced.append((last_id, history))
            self.rare.saw("a history is replaced")

    # ---- what the environment asks --------------------------------------------------------------------------------

    @property
    def in_use(self) -> bool:
        return bool(self.readers or self.calls or self.holders)

    def _let_go(self) -> None:
        for reader in self.readers:
            reader.go_on.set()
        self._run_out(lambda: all(reader.over for reader in self.readers), "readers wait for ever")
        for holder in self.holders:
            holder.leave.set()
        self._run_out(lambda: not self.running_holders and not self.running_calls, "callers wait for ever")

    @property
    def open_holders(self) -> list[Holder]:
        return [holder for holder in self.holders if holder.is_open]

    @property
    def running_holders(self) -> list[Holder]:
        return [holder for holder in self.holders if not holder.over]

    @property
    def running_readers(self) -> list[Reader]:
        return [reader for reader in self.readers if not reader.over]

    def _read(
        self,
        which: int,
        style: Style,
        params: SamplingParams,
        *,
        prompt: str = "to be",
        keep_partial: bool = False,
        timeout: float | None = None,
        wait: bool | None = True,
        media: str = "",
    ) -> Reader:
        idle = [holder for holder in self.open_holders if not holder.is_busy]
        holder = pick(idle if which < 3 and idle else self.open_holders, which)
        params = replace(params, cache_salt=SALTS[len(self.readers) % len(SALTS)])
        reader = Reader(holder, prompt, params, style, keep_partial, timeout, wait, media)
        holder.readers.append(reader)
        self.readers.append(reader)
        self.loop.start_soon(reader.run, name=f"reader-{len(self.readers)}")
        return reader

    def _open(
        self,
        wait: bool | None,
        timeout: float | None = None,
        history: tuple[Turn, ...] = (),
        messages: list[dict[str, Any]] | None = None,
    ) -> None:
        overflow: Overflow = "drop_oldest_turns" if len(self.holders) % 2 else "refuse"
        holder = Holder(self.engine, wait, timeout, overflow, history, messages)
        self.holders.append(holder)
        self.loop.start_soon(holder.run, name=f"holder-{len(self.holders)}")

    def _note_moment(self, reader: Reader, what: str) -> None:
        session, generation, worker = reader.holder.session, reader.generation, self.worker
        if generation is None or session is None or reader.over:
            return
        if not reader.entered:
            where = "while it is prepared" if session.generation is generation else "while it waits in line"
            self.rare.saw(f"{what} {where}")
        elif session.attached and worker is not None and session.id not in worker.step_loop.sessions:
            self.rare.saw(f"{what} before the worker has seen ADD_SESSION")
        elif generation.outcome is not None:
            self.rare.saw(f"{what} after the outcome, before it is read")
        if reader.media and (moment := self._image_moment(reader)):
            self.rare.saw(f"{what} {moment}")

    def _image_moment(self, reader: Reader) -> str | None:
        """How far the payloads of a request have come."""
        link, worker, generation = self.engine.gate.link, self.worker, reader.generation
        if not reader.entered:
            return self.payloads.stages.get(reader.task) if reader.task is not None else None
        if link is None or worker is None or generation is None or generation.outcome is not None:
            return None
        if link._unsent:
            return "before its payloads are sent"
        if generation.request_id in [sequence.request for sequence in parked(worker)]:
            return "while it is parked"
        return "with payloads in the socket" if len(worker.payloads) else None

    def _check_blocked(self) -> None:
        super()._check_blocked()
        for reader in self.running_readers:
            check_deadline(reader)

    def _check(self) -> None:
        """What must hold whenever nothing can run."""
        super()._check()
        for reader in self.readers:
            if reader.over and not reader.checked:
                check_reader(reader, LIMITS.max_model_len, self.troubles)
                reader.checked = True
        for holder in self.holders:
            check_holder(holder, self.troubles)
        worker = self.worker
        is_well = worker is not None and worker.health is Health.WELL and not worker.payloads.is_broken
        if worker is not None and is_well and self.engine.gate.link is not None:
            sessions = [holder.session for holder in self.holders if holder.session is not None]
            check_worker(self.engine, worker, sessions)
            self.payloads.check_at_rest()
            self._check_stuck()

    # ---- for a machine that asks for more than answers ------------------------------------------------------------

    def _check_stuck(self) -> None:
        """Nothing moves, and the worker is well: all that was asked for is done."""
