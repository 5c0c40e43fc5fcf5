"""Callers of an engine under hypothesis: one-shot calls, sessions, requests and their readers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import trio
from hypothesis import strategies as st
from hypothesis.stateful import precondition

from trioengine.actors.generation import Generation
from trioengine.core.errors import (
    EngineAsleep,
    EngineClosed,
    EngineError,
    EngineOverloaded,
    InvariantError,
    ModelError,
    RequestRejected,
    TimedOut,
    WorkerLost,
)
from trioengine.core.lifecycle import Power
from trioengine.core.sampling_params import Overflow, SamplingParams
from trioengine.core.types import Cause, FinishReason
from trioengine.testing.fuzz import inside, inside_payloads
from trioengine.testing.fuzz.answers import check_answer
from trioengine.testing.fuzz.callers import Reader, SessionHolder, Style, partial_of
from trioengine.testing.fuzz.conversations import (
    MEDIA,
    Content,
    FuzzPrompt,
    Turn,
    content_of,
    is_failed,
    is_refused,
    media_of,
    prompt_of,
)
from trioengine.testing.fuzz.environment import PicturesEnvironment
from trioengine.testing.fuzz.faults import Harm, Life
from trioengine.testing.fuzz.leftovers import check_idle_session
from trioengine.testing.fuzz.oracles import (
    check_aborted,
    check_all_aborted,
    check_deadline,
    check_entering,
    check_holder,
    check_opening,
    check_reader,
    check_served,
    check_worker,
    num_prompt_tokens,
)
from trioengine.testing.fuzz.program import pick, recorded
from trioengine.testing.fuzz.request_log import FOR_A_REQUEST, FOR_AN_AUDIT, check_refused
from trioengine.testing.fuzz.tools import Offered
from trioengine.testing.fuzz.usage_log import UsageLog
from trioengine.testing.fuzz.world import LIMITS, MORE_VARIANTS
from trioengine.testing.simulated_worker import Health
from trioengine.testing.toy_model import VOCAB_SIZE

AUDIT_TIMEOUT = 10.0
NOT_ASLEEP = (Power.AWAKE, Power.DRAINING, Power.CLOSED)
MOST_CALLS = 8  # at once: a world with more of them takes long to come to rest
WHICH = st.integers(0, 3)
WAIT = st.sampled_from((None, True, False))
LENGTHS = (
    *range(101),
    *(8, 16, 24, 48, 88, 94, 95, 96, 97) * 4,
)  # of raw prompts: often near the limits of the context and of blocks
TURN_LENGTHS = (1, 2, 3, 5, 7, 8, 9, 16, 24, 40, 95, 96, 97)  # of those in open sessions: there is room for several
REFUSALS = (EngineOverloaded, EngineAsleep, EngineClosed, WorkerLost)


class CallsMachine(PicturesEnvironment):
    """The rules of one-shot calls: each is a task, and its answer or error is judged where it ends."""

    def __init__(self) -> None:
        super().__init__()
        self.usages = UsageLog()
        self.simulation.observers.append(self.usages)
        self.engine.observers.append(self.usages)

    @precondition(lambda self: not self.running_calls)
    @recorded(callers=st.integers(2, 6), first=st.integers(0, 2), max_tokens=st.sampled_from((3, 3, 24)))
    def crowd(self, callers: int, first: int, max_tokens: int) -> None:
        """More one-shots than there are slots, those that wait for different things one after the other.

        With long answers they need more KV blocks than there are.
        """
        for number in range(first, first + callers):
            self._ask((True, None, False)[number % 3], None, max_tokens)

    @recorded(what=st.sampled_from(("ask", "audit", "ready", "cancel")), wait=WAIT, which=WHICH)
    def call(self, what: str, wait: bool | None, which: int) -> None:
        """`engine.generate` with a session of its own, `check_invariants`, `ready`; or one of these is cancelled."""
        if what == "ask":
            self._ask(wait, (None, None, 0.5, 8.0)[which])
        elif what == "ready":
            self._call("ready", self._ready, (EngineClosed, WorkerLost, ModelError))
        elif what == "audit":
            self._call("audit", self._audit, REFUSALS, AUDIT_TIMEOUT)
        elif self.running_calls:
            pick(self.running_calls, which).scope.cancel()

    @recorded(length=st.sampled_from(LENGTHS), min_tokens=st.integers(0, 3), wait=WAIT)
    def ask_raw(self, length: int, min_tokens: int, wait: bool | None) -> None:
        """`engine.generate` with token ids, among them the end of a turn; they may be too many."""
        ids = raw_ids(length)
        self._call("raw", lambda: self._ask_raw(ids, min_tokens, wait), (*REFUSALS, RequestRejected))

    async def _ask_raw(self, ids: tuple[int, ...], min_tokens: int, wait: bool | None) -> None:
        params = SamplingParams(max_tokens=3, min_tokens=min_tokens)
        try:
            await self._generate(list(ids), params, wait, None, FuzzPrompt(ids, ()))
        except RequestRejected:
            if 0 < len(ids) < LIMITS.max_model_len:
                raise

    def _ask(self, wait: bool | None, timeout: float | None, max_tokens: int = 3) -> None:
        ask = functools.partial(self._ask_once, wait, timeout, max_tokens=max_tokens)
        self._call("ask", ask, (*REFUSALS, TimedOut), timeout)

    async def _ask_once(
        self, wait: bool | None, timeout: float | None, content: Content = "hi", max_tokens: int = 3
    ) -> None:
        prompt = prompt_of((("user", content),))
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=max_tokens > 3)
        await self._generate("hi", params, wait, timeout, prompt, media_of(content))

    async def _generate(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        wait: bool | None,
        timeout: float | None,
        expected: FuzzPrompt,
        media: Sequence[Any] = (),
    ) -> None:
        life = Life(self.faults)
        deadline = trio.current_time() + (math.inf if timeout is None else timeout)
        try:
            completion = await self.engine.generate(prompt, params, media=media, wait=wait, timeout=timeout)
            assert completion.cause is not Cause.TIMEOUT, "its timeout has ended it, and no error was raised"
        except TimedOut as exc:
            check_refused(exc, self.engine, (), wait=wait, deadline=deadline)
            completion = partial_of(exc)
        except EngineError as exc:
            check_refused(exc, self.engine, ("sessions", *FOR_A_REQUEST), wait=wait, deadline=deadline)
            raise
        self._learn()
        self.usages.check(completion, len(expected.token_ids))
        is_late = trio.current_time() >= deadline
        possible = self.faults.causes(life) | ({Cause.TIMEOUT} if is_late else set())
        causes = self.requests.causes_of(self.requests.latest_of(trio.lowlevel.current_task()), possible)
        ids, images = expected
        check_answer(completion, ids, params, LIMITS.max_model_len, causes, self.faults.paths, images)

    @precondition(lambda self: self.shows and len(self.running_calls) < MOST_CALLS)
    @recorded(media=st.sampled_from(MEDIA), wait=WAIT, timeout=st.sampled_from((None, None, 0.5)))
    def show_once(self, media: str, wait: bool | None, timeout: float | None) -> None:
        """`engine.generate` with pictures."""
        content = content_of(media, "hi")
        self._call("show", lambda: self._show_once(content, wait, timeout), (EngineError,), timeout)

    async def _show_once(self, content: Content, wait: bool | None, timeout: float | None) -> None:
        try:
            await self._ask_once(wait, timeout, content)
        except RequestRejected as exc:
            self._check_rejected(exc, content)

    def _check_rejected(self, error: RequestRejected, content: Content) -> None:
        is_known = is_refused(error.code, content) or is_failed(error.code, [("user", content)], self.payloads.dropped)
        assert is_known, f"{content} is refused: {error!r}"

    def _abort_all(self, *, keep_waiting: bool) -> None:
        due = [] if keep_waiting else self.requests.undecided
        if due and inside.num_preparing(self.engine) and inside.num_in_line_for_slot(self.engine, is_session=False):
            self.coverage.saw("all are aborted, some in preparation and some in line")
        super()._abort_all(keep_waiting=keep_waiting)
        check_all_aborted(due)

    async def _ready(self) -> None:
        await self.engine.ready()
        worker = self.worker
        assert inside.is_admitting(self.engine) and worker is not None, "ready() has returned, and nothing is admitted"
        assert worker.health is not Health.DEAD, "ready() has returned, and the worker is dead"

    async def _audit(self) -> None:
        life = Life(self.faults)
        try:
            await self.engine.check_invariants(timeout=AUDIT_TIMEOUT)
        except EngineOverloaded as exc:
            check_refused(exc, self.engine, FOR_AN_AUDIT, wait=False)
            raise
        except InvariantError as exc:
            if not self.faults.hit(life, Harm.WORKERS) or "did not answer" not in str(
                exc
            ):  # its bytes may not move in time
                raise

    # ---- for a machine that asks for more than answers ------------------------------------------------------------

    def _learn(self) -> None:
        """Take in the changes that were made to the engine."""


def raw_ids(length: int) -> tuple[int, ...]:
    """So many token ids, among them special ones."""
    return tuple((position * 37 + length) % VOCAB_SIZE for position in range(length))


SALTS = ("", "", "mine")  # of the requests in turn, as the next two
LOGPROBS = (None, 2, None, None, 0)
STOP_TOKENS = ((), (), (), (), (), (), (ord("e"), ord(" ")))


class SessionsMachine(CallsMachine):
    """Holders of sessions, and readers of their requests; the rules are in the machines built on it."""

    variants = MORE_VARIANTS
    num_variants = len(MORE_VARIANTS)

    def __init__(self) -> None:
        super().__init__()
        self.holders: list[SessionHolder] = []
        self.readers: list[Reader] = []

    # ---- who there is -----------------------------------------------------------------------------------------------

    @property
    def in_use(self) -> bool:
        return bool(self.readers or self.calls or self.holders)

    @property
    def open_holders(self) -> list[SessionHolder]:
        return [holder for holder in self.holders if holder.is_open]

    @property
    def idle_holders(self) -> list[SessionHolder]:
        return [holder for holder in self.open_holders if not holder.is_busy]

    @property
    def running_holders(self) -> list[SessionHolder]:
        return [holder for holder in self.holders if not holder.over]

    @property
    def running_readers(self) -> list[Reader]:
        return [reader for reader in self.readers if not reader.over]

    # ---- actions ----------------------------------------------------------------------------------------------------

    def _read(
        self,
        which: int,
        style: Style,
        params: SamplingParams,
        *,
        prompt: str = "to be",
        raw: tuple[int, ...] = (),
        keep_partial: bool = False,
        timeout: float | None = None,
        wait: bool | None = True,
        media: str = "",
        tools: Offered | None = None,
        results: tuple[Turn, ...] = (),
    ) -> Reader:
        idle = self.idle_holders
        holder = pick(idle if which < 3 and idle else self.open_holders, which)
        number = len(self.readers)
        params = replace(
            params,
            cache_salt=SALTS[number % len(SALTS)],
            logprobs=LOGPROBS[number % len(LOGPROBS)],
            stop_token_ids=STOP_TOKENS[number % len(STOP_TOKENS)],
        )
        label = f"reader {number // 4}"  # four share one
        reader = Reader(
            *(Life(self.faults), holder, prompt, params, style, keep_partial, timeout, wait, media, label, raw),
            tools=tools,
            results=results,
        )
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
        holder = SessionHolder(Life(self.faults), self.engine, wait, timeout, overflow, history, messages)
        self.holders.append(holder)
        self.loop.start_soon(holder.run, name=f"holder-{len(self.holders)}")

    def _end(self, holder: SessionHolder) -> None:
        if holder.session is not None and (request := inside.request_of(holder.session)) is not None:
            self.requests.fix_cause([request], Cause.CLIENT)
        holder.end()

    def _stop_or_end(self, reader: Reader, what: str) -> None:
        if what == "end":
            self._note_moment(reader, what)
            self._end(reader.holder)
        else:
            self._stop(reader, what)

    def _stop(self, reader: Reader, what: str) -> None:
        generation = reader.generation
        if what == "cancel":
            self._note_moment(reader, what)
            reader.scope.cancel()
        elif what == "go on":
            reader.go_on.set()
        elif generation is None or (reader.over and not reader.entered):
            pass  # there is nothing yet, or it was refused
        elif what in ("abort by id", "fail") and not inside.has_id(generation):
            pass
        elif what != "fail":
            self._note_moment(reader, "abort")
            self._abort(reader, generation, what)
        elif self.worker is not None:  # the worker cannot sample for it: it fails alone
            self._note_moment(reader, what)
            self.worker.runner.fail_requests.add(generation.request_id)
            self.faults.requests.add(generation.request_id)

    def _abort(self, reader: Reader, generation: Generation, what: str) -> None:
        """Abort the request by its handle or its id, or all that share its label."""
        named = self._named(reader, by_label=what == "abort by label")
        if what == "abort":
            abort: Callable[[], int] = generation.abort
            going = [each for each in named if inside.is_undecided(each)]
        else:
            name = reader.label if what == "abort by label" else generation.request_id
            abort = functools.partial(self.engine.abort, name)
            going = [each for each in inside.undecided(self.engine) if each in named]
        for each in going:
            named[each].aborted = True
        self.requests.fix_cause(going, Cause.CLIENT)
        ended = abort()
        assert ended == len(going), f"abort() returned {ended} for {generation}, and {len(going)} were going"
        again = abort()
        assert not again, f"a second abort() returned {again} for {generation}"
        for ended_reader in named.values():
            check_aborted(ended_reader)

    def _named(self, reader: Reader, *, by_label: bool) -> dict[inside.Request, Reader]:
        """The reader by its request, or all readers with its label by theirs."""
        meant = [each for each in self.readers if each is reader or (by_label and each.label == reader.label)]
        begun = [each for each in meant if each.entered or not each.over]
        return {inside.record(each.generation): each for each in begun if each.generation is not None}

    def _note_moment(self, reader: Reader, what: str) -> None:
        session, generation, worker = reader.holder.session, reader.generation, self.worker
        if generation is None or session is None or reader.over:
            return
        if not reader.entered:
            where = "while it is prepared" if inside.is_in_flight(generation) else "while it waits in line"
            self.coverage.saw(f"{what} {where}")
        elif inside.is_attached(session) and worker is not None and session.id not in worker.core.sessions:
            self.coverage.saw(f"{what} before the worker has seen ADD_SESSION")
        elif generation.outcome is not None:
            self.coverage.saw(f"{what} after the outcome, before it is read")
        if reader.media and (moment := self._image_moment(reader)):
            self.coverage.saw(f"{what} {moment}")

    def _image_moment(self, reader: Reader) -> str | None:
        """How far the payloads of a request have come."""
        worker, generation = self.worker, reader.generation
        if not reader.entered:
            return self.payloads.stages.get(reader.task) if reader.task is not None else None
        is_there = inside.has_worker(self.engine) and worker is not None
        if not is_there or worker is None or generation is None or generation.outcome is not None:
            return None
        if inside_payloads.has_unsent_payloads(self.engine):
            return "before its payloads are sent"
        if generation.request_id in [sequence.request for sequence in inside.parked(worker)]:
            return "while it is parked"
        return "with payloads in the socket" if len(worker.payloads) else None

    # ---- the end, and checks ----------------------------------------------------------------------------------------

    def _let_go(self) -> None:
        for reader in self.readers:
            reader.go_on.set()
        self._run_out(lambda: not self.running_readers, lambda: f"it waits forever: {self.running_readers[0]}")
        for holder in self.holders:
            holder.leave.set()
        self._run_out(
            lambda: not self.running_holders and not self.running_calls,
            lambda: f"it waits forever: {[*self.running_holders, *(call.name for call in self.running_calls)][0]}",
        )

    def _check_blocked(self) -> None:
        super()._check_blocked()
        for reader in self.running_readers:
            check_deadline(reader)
            check_entering(reader)
        for reader in self.readers:
            generation = None if reader.checked else reader.generation
            if generation is not None and self.requests.lacks_causes(generation):
                self.requests.fix_causes(generation, self.faults.causes(reader.life) | reader.causes)
        for holder in self.running_holders:
            check_opening(holder)

    def _check(self) -> None:
        """Check the invariants that hold whenever nothing can run."""
        super()._check()
        self.usages.check_counters(self.engine)
        for reader in self.readers:
            if reader.over and not reader.checked:
                check_reader(reader, LIMITS.max_model_len, self.faults, self.requests)
                self._check_usage(reader)
                reader.checked = True
                if isinstance(reader.error, RequestRejected) and reader.error.code == "mixed_prompts":
                    self.coverage.saw("messages and token ids are mixed")
        for holder in self.holders:
            check_holder(holder, self.faults)
        if self.is_well:
            sessions = [holder.session for holder in self.holders if holder.session is not None]
            check_worker(self.engine, self._worker(), sessions)
            for holder in self.holders:
                if holder.session is not None and not holder.is_busy:
                    check_idle_session(self.engine, inside.actor(holder.session))
            self.usages.check_totals(self.engine, self._worker())
            self._check_stuck()
            if self.engine.state in NOT_ASLEEP:
                check_served(self.holders, self.readers, self.calls, self.engine.config.max_sessions)

    def _check_usage(self, reader: Reader) -> None:
        generation = reader.generation
        outcome = generation and generation.outcome
        if reader.entered and generation and outcome and outcome.finish_reason is not FinishReason.ERROR:
            self.usages.check(generation.completion, num_prompt_tokens(reader))

    def _finish(self) -> None:
        super()._finish()
        self.usages.check_finished(self.requests.whole_answers, self.requests.num_begun)

    # ---- for a machine that asks for more than answers --------------------------------------------------------------

    def _check_stuck(self) -> None:
        """Nothing moves, and the worker is well: all that was asked for is done."""
