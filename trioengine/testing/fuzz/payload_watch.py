"""Payloads from the reservation of their bytes to the worker: pins, holders, and one end each; coverage of images."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from weakref import WeakSet

import trio

from trioengine.actors.engine import Engine
from trioengine.actors.observer import Observer
from trioengine.core.errors import EngineOverloaded, RequestRejected
from trioengine.core.lifecycle import Attachment, Event, Phase
from trioengine.core.messages import AddMessage, EndSession, FromWorker, RequestFailed, StopSession
from trioengine.testing.fuzz import inside, inside_payloads
from trioengine.testing.fuzz.inside_payloads import KeptImages, Link, Payload, RequestImages
from trioengine.testing.simulated_process import SimulatedMemfd
from trioengine.testing.simulated_worker import Handled, Health, SimulatedWorker, WorkerObserver
from trioengine.testing.simulation import Simulation
from trioengine.worker.scheduling.image_queue import PictureDecoded
from trioengine.worker.scheduling.sequence import SequenceStatus

SEALING = "while its images are sealed"


class SentPayloads:
    """The payloads on their way to the worker: each is consumed once, or lost once with its link."""

    def __init__(self, simulation: Simulation, complain: Callable[[str], None]) -> None:
        self._simulation = simulation
        self._complain = complain
        self._links: set[Link] = set()  # that got a payload and are not lost
        self._lost: WeakSet[Link] = WeakSet()
        self._on_their_way: dict[int, Link] = {}  # payload ids
        self._latest_id = 0

    def hand_over(self, link: Link, payload_id: int) -> None:
        """Complain unless the worker is there and the id is new."""
        if link in self._lost:
            self._complain(f"payload {payload_id} is handed to the link of a worker that was lost")
        else:
            self._links.add(link)
        if payload_id <= self._latest_id:
            self._complain(f"payload {payload_id} comes after {self._latest_id}")
        self._latest_id = payload_id
        self._on_their_way[payload_id] = link

    def consume(self, link: Link, payload_id: int) -> None:
        """Complain unless the payload was on its way."""
        if self._on_their_way.pop(payload_id, None) is not link:
            self._complain(f"payload {payload_id} is consumed, and was not on its way")

    def lose_link(self, link: Link) -> None:
        """The payloads on their way over this link are lost."""
        self._links.discard(link)
        self._lost.add(link)
        for payload_id in [id for id, owner in self._on_their_way.items() if owner is link]:
            del self._on_their_way[payload_id]

    @property
    def pinned(self) -> Iterator[Payload]:
        """The payloads that links have pinned, each as often as it is on its way."""
        for link in self._links:
            yield from inside_payloads.handed_over(link).values()

    def check(self) -> None:
        """After every rule: each link has its own, and each open descriptor is somewhere."""
        for link in self._links:
            due = {id for id, owner in self._on_their_way.items() if owner is link}
            found = inside_payloads.handed_over(link).keys()
            assert found == due, f"the link has payloads {set(found)}, on their way are {due}"
        self._check_descriptors()

    def check_at_rest(self) -> None:
        """Nothing moves, and the worker is well: it has consumed everything."""
        assert not self._on_their_way, f"the worker never consumes payloads {set(self._on_their_way)}"

    def check_at_the_end(self) -> None:
        """The engine is over."""
        assert not self._on_their_way, f"payloads {set(self._on_their_way)} are neither consumed nor lost"

    def _check_descriptors(self) -> None:
        num_found = 0
        for worker in self._simulation.workers:
            found = len(worker.payloads) + sum(payload.is_open for payload in worker.open_payloads)
            assert not found or worker.health is not Health.DEAD, f"a dead worker has {found} payloads open"
            num_found += found
        num_passed = self._simulation.num_descriptors_passed
        assert num_passed == num_found, f"{num_passed} payloads are open in workers, which have {num_found}"


class PayloadWatch(inside_payloads.PayloadEvents):
    """All payloads of one engine.

    `stages` has the requests that are on their way in with images, by their tasks; `dropped` the bytes of images that
    were dropped while they were held.
    """

    def __init__(
        self, engine: Engine, simulation: Simulation, crashes: list[Exception], saw: Callable[[str], None]
    ) -> None:
        self.stages: dict[trio.lowlevel.Task, str] = {}
        self.dropped: set[bytes] = set()
        self.kept: list[KeptImages] = []  # and not released
        self._engine = engine
        self._simulation = simulation
        self._crashes = crashes
        self._saw = saw
        self._sent = SentPayloads(simulation, self._complain)
        self._needs: dict[trio.lowlevel.Task, tuple[int, int, float]] = {}  # bytes, descriptors, since when
        self._requests: WeakSet[RequestImages] = WeakSet()
        self._num_failed_seals = 0
        self.any_made = False  # else there are no pins and holds

    # ---- events ---------------------------------------------------------------------------------------------------

    def payload_created(self, payload: Payload) -> None:
        self.any_made = True

    def images_created(self, images: RequestImages) -> None:
        self._requests.add(images)

    def room_requested(self, images: RequestImages, num_bytes: int, count: int) -> None:
        self._needs[trio.lowlevel.current_task()] = num_bytes, count, trio.current_time()

    def room_answered(self, images: RequestImages, error: BaseException | None, *, may_wait: bool) -> None:
        """Complain if a request that waits for room is refused before its time has passed."""
        task = trio.lowlevel.current_task()
        _, _, began = self._needs.pop(task)
        waited = self.stages.pop(task, None)
        match error:
            case None:
                if waited is not None:
                    self._saw("a request waited for payload room")
                self.stages[task] = SEALING
            case RequestRejected():
                self._saw("images are larger than the whole budget")
            case EngineOverloaded() if may_wait and trio.current_time() < began + inside_payloads.MAX_PAYLOAD_WAIT:
                self._complain(f"it waits for room, and got {error!r}")

    def newcomer_admitted(self, num_bytes: int) -> None:
        """Complain if it overtakes requests in line."""
        if num_waiting := len(inside_payloads.budget(self._engine).line):
            self._complain(f"a newcomer's {num_bytes} bytes are admitted, and {num_waiting} wait in the line")

    def newcomer_refused(self, num_bytes: int, count: int, error: EngineOverloaded) -> None:
        """Complain if there is room and no line."""
        task = _current_task()
        if task is not None and task in self._needs:
            self.stages[task] = "while it waits for payload room"
        if self._has_room(num_bytes, count) and not len(inside_payloads.budget(self._engine).line):
            self._complain(f"there is room for {num_bytes} bytes, and {error!r}")

    def sealing_failed(self, error: EngineOverloaded) -> None:
        """Complain unless the program has made a seal fail."""
        self._saw("an image could not be sealed")
        self._num_failed_seals += 1
        if self._num_failed_seals > self._simulation.num_failed_seals:
            self._complain(f"nothing failed, and {error!r}")

    def payloads_made(self, images: RequestImages) -> None:
        if (task := _current_task()) is not None:
            self.stages[task] = "with its images pinned"

    def image_missing(self, images: RequestImages) -> None:
        self._saw("a turn needs an image that was dropped")

    def unpinned(self, images: RequestImages) -> None:
        if (task := _current_task()) is not None:
            self.stages.pop(task, None)

    def images_kept(self, kept: KeptImages) -> None:
        self.kept.append(kept)

    def images_released(self, kept: KeptImages) -> None:
        if kept in self.kept:
            self.kept.remove(kept)

    def payload_dropped(self, payload: Payload) -> None:
        """Complain if a held payload is dropped and there is room."""
        if not inside_payloads.num_holders(payload):
            return
        budget = inside_payloads.budget(self._engine)
        _, _, num_reserved = inside_payloads.reserved(self._engine)
        count = len(budget.payloads) + num_reserved
        if budget.bytes_in_flight + budget.bytes_kept <= budget.max_bytes and count <= budget.max_count:
            self._complain(f"{payload} is held, and dropped, and there is room")
        self._saw("a payload was dropped to make room")
        assert isinstance(payload.sealed, SimulatedMemfd), "made by the simulation"
        self.dropped.add(payload.sealed.data)

    def handed_over(self, link: Link, payload_id: int) -> None:
        self._sent.hand_over(link, payload_id)

    def consumed(self, link: Link, payload_id: int) -> None:
        self._sent.consume(link, payload_id)

    def link_lost(self, link: Link) -> None:
        self._sent.lose_link(link)

    # ---- invariants -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """After every rule: each open descriptor, pin and hold has an owner, and each owner has its own."""
        budget = inside_payloads.budget(self._engine)
        budget.check()
        payloads = budget.payloads
        assert {*map(id, self._simulation.memfds)} == {id(payload.sealed) for payload in payloads}, (
            f"open are {len(self._simulation.memfds)} payloads, the budget has {payloads}"
        )
        if self.any_made:
            self._check_counts(payloads)
        self._sent.check()
        self._check_reservations()

    def _check_counts(self, payloads: Sequence[Payload]) -> None:
        pins, holds = self._pins(), self._holds()
        for payload in payloads:
            found = inside_payloads.num_pins(payload), inside_payloads.num_holders(payload)
            assert found == (pins[payload], holds[payload]), (
                f"{payload} counts {found} pins and holders, there are {pins[payload]} and {holds[payload]}"
            )
        assert all(not payload.is_dropped for payload in pins), "a payload is pinned, and dropped"

    def _check_reservations(self) -> None:
        making = sum(stage == SEALING for stage in self.stages.values())
        found, _, _ = inside_payloads.reserved(self._engine)
        # a request that was served in the line has its reservation before it runs
        assert making <= found <= making + len(self._needs), f"{found} reservations, for {making} requests"

    def _pins(self) -> Counter[Payload]:
        pins = Counter(self._sent.pinned)
        for images in self._requests:
            pins.update(inside_payloads.pinned_by(images))
        return pins

    def _holds(self) -> Counter[Payload]:
        """A session without a request holds the payloads of its conversation, and no others."""
        holds: Counter[Payload] = Counter()
        for kept in self.kept:
            holds.update(inside_payloads.kept_by(kept))
        for session in inside.sessions(self._engine):
            held, due = inside_payloads.held_by(session), inside_payloads.in_conversation(session)
            holds.update(held)
            assert due is None or {*held} == due, f"{session} holds {held}, its conversation has {due}"
        return holds

    def check_blocked(self) -> None:
        """No task can run: the first in the line has no room."""
        line = inside_payloads.budget(self._engine).line
        if len(line):
            num_bytes, count, _ = self._needs[next(iter(inside.waiting_in(line)))]
            assert not self._has_room(num_bytes, count), (
                f"{len(line)} requests wait for room, and the first has room: {num_bytes, count}"
            )

    def check_at_rest(self) -> None:
        """Nothing moves, and the worker is well: it has consumed all payloads except for suspended requests."""
        budget = inside_payloads.budget(self._engine)
        suspended = {
            each for session in inside.sessions(self._engine) for each in inside_payloads.held_by_suspended(session)
        }
        in_flight = budget.bytes_in_flight - sum(payload.num_bytes for payload in suspended)
        self._sent.check_at_rest()
        assert not in_flight, f"{in_flight} bytes of payloads are in flight, for nothing"
        assert suspended or not len(budget.line), f"{len(budget.line)} requests wait for room for payloads"

    def check_at_the_end(self) -> None:
        """The engine is over."""
        budget = inside_payloads.budget(self._engine)
        found = len(self._simulation.memfds), budget.bytes_in_flight, budget.bytes_kept, len(budget.line)
        assert found == (0, 0, 0, 0), f"payloads, bytes in flight and kept, and waiting are {found} in the end"
        self._sent.check_at_the_end()

    def _has_room(self, num_bytes: int, count: int) -> bool:
        budget = inside_payloads.budget(self._engine)
        _, reserved, num_reserved = inside_payloads.reserved(self._engine)
        pinned = [payload for payload in budget.payloads if payload.is_pinned]
        taken = sum(payload.num_bytes for payload in pinned) + reserved
        return taken + num_bytes <= budget.max_bytes and len(pinned) + num_reserved + count <= budget.max_count

    def _complain(self, complaint: str) -> None:
        self._crashes.append(AssertionError(complaint))


def _current_task() -> trio.lowlevel.Task | None:
    """None in a rule, outside of all tasks."""
    return trio.lowlevel.current_task() if trio.lowlevel.in_trio_task() else None


_WAITING = {SequenceStatus.PARKED: "a parked request", SequenceStatus.DECODING: "a request being decoded"}


class ImageStates(Observer, WorkerObserver):
    """Reports each state to `saw`, by its name."""

    def __init__(self, saw: Callable[[str], None]) -> None:
        self._saw = saw

    def session_moved(self, actor: object, phase: Phase, attachment: Attachment, event: Event) -> None:
        assert isinstance(actor, inside.SessionActor), "sessions move as actors"
        generation = inside.request_of(actor)
        if generation is None:
            return
        if event is Event.RESUME and inside_payloads.prompt_payloads(generation):
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
        elif isinstance(event, PictureDecoded) and event.error is not None:
            self._saw("an image failed after its request was stopped")

    def dying(self, worker: SimulatedWorker) -> None:
        if len(worker.payloads):
            self._saw("a worker died with payloads in the socket")
