"""Rare states of requests with images, noted where they come about.

Each method `of_…` is a `mutate` for `Machine._watch`; `watches` has them all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trioengine.client.session import SessionState
from trioengine.core.errors import RequestRejected
from trioengine.core.lifecycle import Phase
from trioengine.testing.fuzz.machine import Watch
from trioengine.testing.simulated_process import SimulatedProcess
from trioengine.testing.simulated_worker import Health, SimulatedWorker
from trioengine.worker.scheduling.engine_core import EngineCore
from trioengine.worker.scheduling.images import Picture
from trioengine.worker.scheduling.pictures import Pictures
from trioengine.worker.scheduling.sequence import Sequence, SequenceStatus

DROPPED = "a suspended request's image was dropped"
_WAITING = {SequenceStatus.WAITING_FOR_PAYLOAD: "a parked request", SequenceStatus.DECODING: "a request being decoded"}


def parked(worker: SimulatedWorker) -> list[Sequence]:
    """The worker's sequences that wait for their payloads."""
    waiters = worker.core._scheduler._waiters
    return [each for each in waiters.sequences if each.status is SequenceStatus.WAITING_FOR_PAYLOAD]


class ImageStates:
    """`saw` is told of each."""

    def __init__(self, saw: Callable[[str], None]) -> None:
        self._saw = saw

    @property
    def watches(self) -> tuple[Watch, ...]:
        """All that is watched."""
        return (
            (SimulatedProcess, "exit", self.of_exits),
            (EngineCore, "_end_session", self.of_ends),
            (EngineCore, "_stop_session", self.of_stops),
            (EngineCore, "_take_decoded", self.of_failures),
            (Pictures, "use", self.of_uses),
            (SessionState, "resume", self.of_resumes),
        )

    def of_exits(self, exit_: Any) -> Any:
        """For `SimulatedProcess.exit`."""

        def watched(worker: SimulatedProcess, exit_code: int) -> None:
            if worker.health is not Health.DEAD and len(worker.payloads):
                self._saw("a worker died with payloads in the socket")
            exit_(worker, exit_code)

        return watched

    def of_ends(self, end_session: Any) -> Any:
        """For `EngineCore._end_session`."""
        return self._of_orders(end_session, "END")

    def of_stops(self, stop_session: Any) -> Any:
        """For `EngineCore._stop_session`."""
        return self._of_orders(stop_session, "STOP")

    def _of_orders(self, order: Any, name: str) -> Any:
        def watched(loop: EngineCore, message: Any) -> Any:
            session = loop._sessions.get(message.session)
            if session is not None and session.sequence is not None and session.sequence.status in _WAITING:
                self._saw(f"{name} of {_WAITING[session.sequence.status]}")
            return order(loop, message)

        return watched

    def of_failures(self, take_decoded: Any) -> Any:
        """For `EngineCore._take_decoded`."""

        def watched(loop: EngineCore, decoded: Any) -> Any:
            failed = take_decoded(loop, decoded)
            if failed:
                self._saw("an image failed its request")
            return failed

        return watched

    def of_uses(self, use: Any) -> Any:
        """For `Pictures.use`."""

        def watched(pictures: Pictures, used: tuple[Picture, ...]) -> None:
            for picture in used:
                if picture.num_users:
                    self._saw("a picture was shared by two requests")
                elif picture.is_complete:
                    self._saw("a picture came from the encoder cache")
            use(pictures, used)

        return watched

    def of_resumes(self, resume: Any) -> Any:
        """For `SessionState.resume`."""

        def watched(session: SessionState, *args: Any) -> None:
            generation = session.generation
            resume(session, *args)
            has_images = generation is not None and generation.prepared is not None and generation.prepared.images
            if has_images and session.phase is Phase.RUNNING:
                self._saw("a resumed request resent its images")
            outcome = None if generation is None else generation.outcome
            if outcome is not None and isinstance(outcome.error, RequestRejected):
                self._saw(DROPPED)

        return watched
