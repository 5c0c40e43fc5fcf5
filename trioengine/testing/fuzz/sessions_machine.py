"""Callers of an engine under hypothesis: sessions, requests and their readers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from trioengine.actors.generation import Generation
from trioengine.core.errors import (
    RequestRejected,
)
from trioengine.core.lifecycle import Power
from trioengine.core.sampling_params import Overflow, SamplingParams
from trioengine.core.types import Cause, FinishReason
from trioengine.testing.fuzz import inside, inside_payloads
from trioengine.testing.fuzz.callers import Reader, SessionHolder, Style
from trioengine.testing.fuzz.calls_machine import CallsMachine
from trioengine.testing.fuzz.conversations import (
    Turn,
)
from trioengine.testing.fuzz.faults import Life
from trioengine.testing.fuzz.leftovers import check_idle_session
from trioengine.testing.fuzz.oracles import (
    check_aborted,
    check_deadline,
    check_entering,
    check_holder,
    check_opening,
    check_reader,
    check_served,
    check_worker,
    num_prompt_tokens,
)
from trioengine.testing.fuzz.program import pick
from trioengine.testing.fuzz.tools import Offered
from trioengine.testing.fuzz.world import LIMITS, MORE_VARIANTS

TURN_LENGTHS = (1, 2, 3, 5, 7, 8, 9, 16, 24, 40, 95, 96, 97)  # of those in open sessions: there is room for several
NOT_ASLEEP = (Power.AWAKE, Power.DRAINING, Power.CLOSED)
SALTS = ("", "", "mine")  # of the requests in turn, as the next two
ADAPTERS = ("one=adapters/one", "two=adapters/two")  # of the engine
ADAPTER_NAMES = ("one", "one", None, "two")  # of the sessions in turn
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
        adapter = ADAPTER_NAMES[len(self.holders) % len(ADAPTER_NAMES)]
        holder = SessionHolder(Life(self.faults), self.engine, wait, timeout, overflow, history, messages, adapter)
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
