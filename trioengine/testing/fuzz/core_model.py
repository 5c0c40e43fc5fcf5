"""The small model of the core: a session with the state that it must have, and a worker that follows the protocol."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from trioengine.core import messages
from trioengine.core.ledger import RequestState
from trioengine.core.lifecycle import Action, Event, SessionLifecycle
from trioengine.core.messages import Message, TokensRow
from trioengine.core.types import FinishReason, Usage, token_ids

Settlement: TypeAlias = tuple[Action, FinishReason]  # how the table settles, and the finish reason in the ledger

ABORTED = Action.SETTLE_ABORTED, FinishReason.ABORT
REFUSED = Action.SETTLE_REFUSED, FinishReason.ERROR
LOST = Action.SETTLE_LOST, FinishReason.ERROR
SETTLEMENTS = {settlement[0]: settlement for settlement in (ABORTED, REFUSED, LOST)}

READY = messages.Ready(
    "model", "cpu", "float32", vocab_size=8, max_model_len=64, kv_blocks_total=0, block_size=8, kernels="none"
)
USAGE = Usage(0, 0, 0)
STATISTICS = messages.WorkerStatistics(*[0] * 11)


@dataclass
class ModelSession:
    """A session and its expected state; `freed` and `settled` record the actions of the table."""

    id: int
    lifecycle: SessionLifecycle = field(default_factory=SessionLifecycle)
    ended: bool = False
    held: bool = False  # added since the last death, and SESSION_ENDED has not arrived
    let_go: bool = False  # END_SESSION was sent for it
    freed: int = 0
    request: int = 0  # the latest
    in_flight: bool = False  # its slot is taken
    stand: RequestState = RequestState.PREPARING
    given_up: bool = False  # aborted, or the session ended
    due: list[Settlement] = field(default_factory=list)  # of each request that is over
    settled: list[Settlement] = field(default_factory=list)

    @property
    def preparing(self) -> bool:
        return self.in_flight and self.stand is RequestState.PREPARING

    @property
    def suspended(self) -> bool:
        """Whether its request is to go on, and no worker has it."""
        return self.in_flight and not self.preparing and not self.held and not self.given_up

    @property
    def running(self) -> int | None:
        """The request that the worker has, or will have."""
        return self.request if self.in_flight and not self.preparing else None

    def begin(self, request: int) -> None:
        self.request, self.in_flight, self.stand, self.given_up = request, True, RequestState.PREPARING, False

    def learn(self, event: Event, said: Settlement | None) -> None:
        """Apply an event: a request is over when it is settled, or given up where no worker can report it."""
        self.ended |= event is Event.END
        is_added = event in (Event.COMMIT, Event.RESUME)
        self.held = is_added or (self.held and event not in (Event.SESSION_ENDED, Event.WORKER_LOST))
        self.let_go = self.held and (self.let_go or event in (Event.END, Event.DETACH))
        self.given_up |= event in (Event.ABORT, Event.END)
        if said is None and self.given_up and (self.preparing or not self.held):
            said = ABORTED
        if self.in_flight and said is not None:
            self.in_flight = False
            self.due.append(said)


class ModelWorker:
    """A worker as the protocol leaves it: the sessions that it holds, each with its request or None."""

    def __init__(self) -> None:
        self.requests: dict[int, int | None] = {}

    def handle(self, message: Message) -> Message | None:
        """The answer, if there is one."""
        match message:
            case messages.Configure():
                return READY
            case messages.Audit(audit):
                return messages.Audited(audit, tuple(self.requests), (), 0, 0, 0, 0)
            case messages.AddSession(session) if session not in self.requests:
                self.requests[session] = None
            case messages.AddMessage(session, request) if self.requests.get(session, request) is None:
                self.requests[session] = request
            case messages.StopSession(session, request) if session in self.requests:
                if self.requests[session] == request:
                    self.requests[session] = None
                    return row_of(session, request, FinishReason.ABORT)
            case messages.EndSession(session) if session in self.requests:
                del self.requests[session]
                return messages.SessionEnded(session, STATISTICS)
            case _:
                raise AssertionError(f"the engine broke the protocol: {message}")
        return None


def row_of(session: int, request: int, finish_reason: FinishReason | None) -> Message:
    ids = token_ids(() if finish_reason is FinishReason.ABORT else (2,))
    return messages.Tokens((TokensRow(session, request, ids, None, finish_reason, USAGE),), STATISTICS)
