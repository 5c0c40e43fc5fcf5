"""An engine under hypothesis with sessions, requests and their readers: what the rules of a machine do with them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trioengine.actors.generation import Generation
from trioengine.core.sampling_params import Overflow, SamplingParams
from trioengine.testing.fuzz.callers import Holder, Reader, Style
from trioengine.testing.fuzz.calls_machine import CallsMachine
from trioengine.testing.fuzz.image_states import parked
from trioengine.testing.fuzz.oracles import (
    GOING,
    check_aborted,
    check_deadline,
    check_holder,
    check_reader,
    check_worker,
)
from trioengine.testing.fuzz.pictures import Turn
from trioengine.testing.fuzz.program import pick
from trioengine.testing.fuzz.world import LIMITS

SALTS = ("", "", "mine")  # of the requests in turn


class SessionsMachine(CallsMachine):
    """Holders of sessions, and readers of their requests; the rules are in the machines built on it."""

    def __init__(self) -> None:
        super().__init__()
        self.holders: list[Holder] = []
        self.readers: list[Reader] = []

    # ---- who there is -----------------------------------------------------------------------------------------------

    @property
    def in_use(self) -> bool:
        return bool(self.readers or self.calls or self.holders)

    @property
    def open_holders(self) -> list[Holder]:
        return [holder for holder in self.holders if holder.is_open]

    @property
    def running_holders(self) -> list[Holder]:
        return [holder for holder in self.holders if not holder.over]

    @property
    def running_readers(self) -> list[Reader]:
        return [reader for reader in self.readers if not reader.over]

    # ---- what rules do ----------------------------------------------------------------------------------------------

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

    def _note_moment(self, reader: Reader, what: str) -> None:
        session, generation, worker = reader.holder.session, reader.generation, self.worker
        if generation is None or session is None or reader.over:
            return
        if not reader.entered:
            where = "while it is prepared" if session.generation is generation else "while it waits in line"
            self.rare.saw(f"{what} {where}")
        elif session.attached and worker is not None and session.id not in worker.core.sessions:
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

    # ---- the end, and what is looked at -----------------------------------------------------------------------------

    def _let_go(self) -> None:
        for reader in self.readers:
            reader.go_on.set()
        self._run_out(lambda: all(reader.over for reader in self.readers), "readers wait for ever")
        for holder in self.holders:
            holder.leave.set()
        self._run_out(lambda: not self.running_holders and not self.running_calls, "callers wait for ever")

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
        if self.is_well:
            sessions = [holder.session for holder in self.holders if holder.session is not None]
            check_worker(self.engine, self._worker(), sessions)
            self._check_stuck()

    # ---- for a machine that asks for more than answers --------------------------------------------------------------

    def _check_stuck(self) -> None:
        """Nothing moves, and the worker is well: all that was asked for is done."""
