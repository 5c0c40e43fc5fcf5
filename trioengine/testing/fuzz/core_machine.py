"""The core alone under hypothesis: real tables, ledger and connections against a small model."""

from __future__ import annotations

import zlib
from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition

from trioengine.core import messages
from trioengine.core.config import WorkerConfig
from trioengine.core.connection import Connection, Role
from trioengine.core.ledger import Ledger, RequestState
from trioengine.core.lifecycle import Action, Attachment, Event
from trioengine.core.messages import Message, TokensRow
from trioengine.core.sampling_params import ResolvedParams
from trioengine.core.types import FinishReason, token_ids
from trioengine.testing.fuzz.core_model import (
    LOST,
    REFUSED,
    SETTLEMENTS,
    ModelSession,
    ModelWorker,
    Settlement,
    row_of,
)
from trioengine.testing.fuzz.machine import Machine
from trioengine.testing.fuzz.program import pick, recorded

SESSION_SLOTS = 3
WHICH = st.integers(0, 3)
CONFIGURE = messages.Configure(WorkerConfig("model"))
PARAMS = ResolvedParams(max_tokens=8, seed=0)


class CoreMachine(Machine):
    """Rules are actions of callers, of the worker and of its pipe; the models decide which are legal."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.sessions: list[ModelSession] = []
        self.last_id = 0
        self.sent = 0  # crc32 of all that was written
        self._start_worker()

    @property
    def checksum(self) -> str:
        return f"{self.sent:08x}"

    # ---- callers --------------------------------------------------------------------------------------------------

    @recorded(initialize, sessions=st.integers(1, SESSION_SLOTS), turns=st.integers(0, 2))
    def begin(self, sessions: int, turns: int) -> None:
        """Open sessions, most of them already added to the worker."""
        for _ in range(sessions):
            self._open()
            for _ in range(turns):
                self._reserve(self.sessions[-1])
                self._commit(self.sessions[-1])
                self._move_all()
                self._generate(*self._running[-1], "last row")
                self._move_all()

    @precondition(lambda self: self.ledger.sessions < SESSION_SLOTS)
    @recorded()
    def open(self) -> None:
        self._open()

    @precondition(lambda self: self._idle)
    @recorded(which=WHICH, commit=st.booleans())
    def reserve(self, which: int, commit: bool) -> None:
        session = pick(self._idle, which)
        self._reserve(session)
        if commit:
            self._commit(session)

    @precondition(lambda self: self._preparing)
    @recorded(which=WHICH)
    def commit(self, which: int) -> None:
        self._commit(pick(self._preparing, which))

    @precondition(lambda self: self._preparing)
    @recorded(which=WHICH)
    def refuse(self, which: int) -> None:
        self._apply(pick(self._preparing, which), Event.REFUSE, REFUSED)

    @precondition(lambda self: self.sessions)
    @recorded(which=WHICH)
    def abort(self, which: int) -> None:
        self._apply(pick(self._any, which), Event.ABORT)

    @precondition(lambda self: self._detachable)
    @recorded(which=WHICH)
    def detach(self, which: int) -> None:
        """The worker is to forget the session, which lives on."""
        self._apply(pick(self._detachable, which), Event.DETACH)

    @precondition(lambda self: self._suspended)
    @recorded(which=WHICH, goes_on=st.booleans())
    def resume(self, which: int, goes_on: bool) -> None:
        """Or it is given up."""
        session = pick(self._suspended, which)
        if goes_on:
            self._apply(session, Event.RESUME)
            self._stand(session, RequestState.WAITING)
        else:
            self._apply(session, Event.GIVE_UP, LOST)

    @precondition(lambda self: self.sessions)
    @recorded(which=WHICH)
    def end(self, which: int) -> None:
        self._apply(pick(self._any, which), Event.END)

    # ---- the worker and its pipe ----------------------------------------------------------------------------------

    @precondition(lambda self: self._running)
    @recorded(which=WHICH, what=st.sampled_from(("last row", "failure", "row")))
    def generate(self, which: int, what: str) -> None:
        """The worker reports a row or a failure of a request that it runs."""
        self._generate(*pick(self._running, which), what)

    @recorded(way=st.sampled_from(("down", "up")), count=st.integers(1, 300))
    def move(self, way: str, count: int) -> None:
        """So many bytes arrive, at the worker or at the engine."""
        self._move(way, count)

    @recorded()
    def settle(self) -> None:
        """Until no byte is on its way."""
        self._move_all()
        self._check_rest()

    @recorded()
    def audit(self) -> None:
        """Ask the worker for its sessions: those that are posted now, even if messages are still on their way."""
        self.audits[self._mint()] = {session.id for session in self.sessions if session.held and not session.let_go}
        self._send("down", messages.Audit(self.last_id))

    @precondition(lambda self: any(session.held for session in self.sessions))
    @recorded()
    def die(self) -> None:
        """All bytes on their way are lost; the next incarnation is ready."""
        if self.wires["down"]:
            self.coverage.saw("a worker dies with bytes on their way to it")
        if self.engine_end.has_partial_frame:
            self.coverage.saw("a worker's last frame is torn")
        self._start_worker()
        for session in self.sessions:
            self._apply(session, Event.WORKER_LOST)

    def _finish(self) -> None:
        for session in self.sessions:
            self._apply(session, Event.END)
        self._move_all()
        self._check_rest()
        left = (len(self.worker.requests), self.ledger.in_flight, self.ledger.sessions)
        assert left == (0, 0, 0), f"left are sessions on the worker, request slots, session slots: {left}"

    # ---- who can be chosen ----------------------------------------------------------------------------------------

    @property
    def _idle(self) -> list[ModelSession]:
        idle = (session for session in self.sessions if not session.in_flight and not session.ended)
        return [session for session in idle if not session.let_go]

    @property
    def _preparing(self) -> list[ModelSession]:
        return [session for session in self.sessions if session.preparing]

    @property
    def _detachable(self) -> list[ModelSession]:
        """On the worker; nothing is being prepared for it when it is to forget everything."""
        return [session for session in self._any if session.held and not (session.let_go or session.preparing)]

    @property
    def _suspended(self) -> list[ModelSession]:
        return [session for session in self.sessions if session.suspended]

    @property
    def _any(self) -> list[ModelSession]:
        """Those with a slot, and one that is gone."""
        return sorted(self.sessions, key=lambda session: session.freed)[: self.ledger.sessions + 1]

    @property
    def _running(self) -> list[tuple[int, int]]:
        return [(session, request) for session, request in self.worker.requests.items() if request is not None]

    # ---- steps ----------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self.ledger.open_session()
        self.sessions.append(ModelSession(self._mint()))
        self._check()

    def _reserve(self, session: ModelSession) -> None:
        self.ledger.receive()
        session.begin(self._mint())
        self._apply(session, Event.RESERVE)

    def _commit(self, session: ModelSession) -> None:
        self._stand(session, RequestState.WAITING)
        self._apply(session, Event.COMMIT)

    def _generate(self, session: int, request: int, what: str) -> None:
        if what != "row":
            self.worker.requests[session] = None
        if what == "failure":
            self._send("up", messages.RequestFailed(session, request, "code", "message"))
        else:
            self._send("up", row_of(session, request, FinishReason.STOP if what == "last row" else None))

    def _mint(self) -> int:
        self.last_id += 1
        return self.last_id

    # ---- bytes ----------------------------------------------------------------------------------------------------

    def _start_worker(self) -> None:
        self.engine_end, self.worker_end = Connection(Role.ENGINE), Connection(Role.WORKER)
        self.wires = {"down": bytearray(), "up": bytearray()}
        self.worker = ModelWorker()
        self.audits: dict[int, set[int]] = {}  # sessions that each must find
        self._send("down", CONFIGURE)
        self._move_all()

    def _send(self, way: str, message: Message) -> None:
        data = (self.engine_end if way == "down" else self.worker_end).send(message)
        self.sent = zlib.crc32(data, self.sent)
        self.wires[way] += data

    def _move_all(self) -> None:
        while self.wires["down"] or self.wires["up"]:
            self._move("down")
            self._move("up")

    def _move(self, way: str, count: int | None = None) -> None:
        wire, end = self.wires[way], self.worker_end if way == "down" else self.engine_end
        end.receive_data(wire[:count])
        del wire[:count]
        while (message := end.next_message()) is not None:
            if way == "up":
                self._hear(message)
            elif (answer := self.worker.handle(message)) is not None:
                self._send("up", answer)

    def _hear(self, message: Message) -> None:
        match message:
            case messages.Tokens((row,)):
                self._hear_row(self._session(row.session), row)
            case messages.RequestFailed(session):
                self._apply(self._session(session), Event.FINISH, (Action.SETTLE_AS_REPORTED, FinishReason.ERROR))
            case messages.SessionEnded(session):
                self._apply(self._session(session), Event.SESSION_ENDED)
            case messages.Audited(audit, sessions):
                expected = self.audits.pop(audit)
                assert set(sessions) == expected, f"the worker holds {set(sessions)}, audited for {expected}"

    def _hear_row(self, session: ModelSession, row: TokensRow) -> None:
        assert session.in_flight and session.request == row.request, f"{row}, and its slot is not taken: {session}"
        if session.stand is RequestState.WAITING:
            self._stand(session, RequestState.RUNNING)
        if row.finish_reason is FinishReason.STOP and session.given_up:
            self.coverage.saw("an end crosses the finish" if session.ended else "a stop crosses the finish")
        if row.finish_reason is not None:
            self._apply(session, Event.FINISH, (Action.SETTLE_AS_REPORTED, row.finish_reason))

    def _session(self, id: int) -> ModelSession:
        return next(session for session in self.sessions if session.id == id)

    # ---- the table's actions, and the invariants --------------------------------------------------------------------

    def _apply(self, session: ModelSession, event: Event, said: Settlement | None = None) -> None:
        session.learn(event, said)
        before = session.lifecycle.phase, session.lifecycle.attachment
        actions = session.lifecycle.apply(event)
        self.coverage.session_moved(session, *before, event)
        for action in actions:
            self._do(action, session, said)
        self._check()

    def _do(self, action: Action, session: ModelSession, said: Settlement | None) -> None:
        match action:
            case Action.POST_ADD_SESSION:
                self._send("down", messages.AddSession(session.id))
            case Action.POST_ADD_MESSAGE:
                self._send("down", messages.AddMessage(session.id, session.request, 0, token_ids((1,)), PARAMS, ()))
            case Action.POST_STOP_SESSION:
                self._send("down", messages.StopSession(session.id, session.request))
            case Action.POST_END_SESSION:
                self._send("down", messages.EndSession(session.id))
            case Action.SUSPEND:
                self._stand(session, RequestState.SUSPENDED)
            case Action.FREE_SESSION:
                assert session.id not in self.worker.requests, f"freed, and on the worker: {session}"
                session.freed += 1
                self.ledger.free_session()
            case _:
                settlement = SETTLEMENTS.get(action, said)
                assert settlement is not None, f"{action.value}, and nothing was: {session}"
                session.settled.append(settlement)
                self.ledger.settle(session.stand, settlement[1])

    def _stand(self, session: ModelSession, stand: RequestState) -> None:
        self.ledger.move(session.stand, stand)
        session.stand = stand

    def _check(self) -> None:
        """After every event."""
        ledger, sessions = self.ledger, self.sessions
        ledger.check()
        for session in sessions:
            assert session.settled == session.due, f"settled too early, too late or wrongly: {session}"
            assert session.freed == (session.ended and not session.held), (
                f"freed too early, too late or twice: {session}"
            )
        stands = Counter(session.stand for session in sessions if session.in_flight)
        reasons = Counter(reason for session in sessions for _, reason in session.due)
        due = [stands[stand] for stand in RequestState]
        due += [reasons[FinishReason.STOP], reasons[FinishReason.ABORT], reasons[FinishReason.ERROR]]
        books = [ledger.preparing, ledger.waiting, ledger.running, ledger.suspended]
        books += [ledger.finished, ledger.aborted, ledger.failed]
        assert books == due, f"the books count {books} requests, due is {due}"
        slots = sum(not session.freed for session in sessions)
        assert ledger.sessions == slots, f"{ledger.sessions} session slots are taken, by {slots} sessions"

    def _check_rest(self) -> None:
        """With nothing on its way, no action is missing, and both ends hold the same sessions."""
        for session in self.sessions:
            assert not (session.ended and session.held), f"ended, and the worker did not get END_SESSION: {session}"
            assert not (session.in_flight and session.given_up), (
                f"given up, and the worker did not get STOP_SESSION: {session}"
            )
        held = {session.id: session.running for session in self.sessions if session.held}
        attached = {session.id for session in self.sessions if session.lifecycle.attachment is not Attachment.DETACHED}
        assert self.worker.requests == held, f"the worker holds {self.worker.requests}, it must hold {held}"
        assert attached == self.engine_end.sessions == self.worker_end.sessions == set(held), f"attached: {attached}"
        assert not self.audits, f"not answered: {self.audits}"
