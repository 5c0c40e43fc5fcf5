"""Coverage of requests with images: states of the worker's pictures and sequences, and of resumed requests."""

from __future__ import annotations

from collections.abc import Callable

from trioengine.actors.observer import Observer
from trioengine.actors.session import Session
from trioengine.core.errors import RequestRejected
from trioengine.core.lifecycle import Attachment, Event, Phase
from trioengine.core.messages import AddMessage, EndSession, FromWorker, RequestFailed, StopSession
from trioengine.testing.fuzz import inside
from trioengine.testing.simulated_worker import Handled, SimulatedWorker, WorkerObserver
from trioengine.worker.scheduling.sequence import SequenceStatus

_WAITING = {SequenceStatus.WAITING_FOR_PAYLOAD: "a parked request", SequenceStatus.DECODING: "a request being decoded"}


class ImageStates(Observer, WorkerObserver):
    """Reports each state to `saw`, by its name."""

    def __init__(self, saw: Callable[[str], None]) -> None:
        self._saw = saw

    def session_moved(self, session: object, phase: Phase, attachment: Attachment, event: Event) -> None:
        assert isinstance(session, Session), "an engine's sessions are Sessions"
        generation = inside.request_of(session)
        if generation is None:
            return
        if event is Event.RESUME and inside.prompt_payloads(generation):
            self._saw("a resumed request resent its images")
        outcome = generation.outcome
        if event is Event.GIVE_UP and outcome is not None and isinstance(outcome.error, RequestRejected):
            self._saw("a suspended request's image was dropped")

    def handling(self, worker: SimulatedWorker, event: Handled) -> None:
        match event:
            case StopSession(session) | EndSession(session):
                sequence = inside.sequence_of(worker, session)
                if sequence is not None and sequence.status in _WAITING:
                    name = "STOP" if isinstance(event, StopSession) else "END"
                    self._saw(f"{name} of {_WAITING[sequence.status]}")
            case AddMessage():
                for picture in inside.known_pictures(worker, event):
                    if picture.num_users:
                        self._saw("a picture was shared by two requests")
                    elif picture.is_complete:
                        self._saw("a picture came from the encoder cache")

    def handled(self, worker: SimulatedWorker, event: Handled, replies: list[FromWorker]) -> None:
        if not isinstance(event, AddMessage) and any(isinstance(reply, RequestFailed) for reply in replies):
            self._saw("an image failed its request")

    def dying(self, worker: SimulatedWorker) -> None:
        if len(worker.payloads):
            self._saw("a worker died with payloads in the socket")
