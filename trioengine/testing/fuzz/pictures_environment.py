"""An engine under hypothesis whose model takes images: how they travel, and one-shots that have some."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition

from trioengine.actors.images import RequestImages
from trioengine.actors.link import Link
from trioengine.actors.payload import Payload, PayloadBudget
from trioengine.actors.session_state import SessionState
from trioengine.core.errors import EngineError, RequestRejected
from trioengine.core.messages import Fatal, FatalCode
from trioengine.testing.fuzz.calls_machine import WAIT, CallsMachine
from trioengine.testing.fuzz.image_oracles import is_refused_for_an_image
from trioengine.testing.fuzz.image_states import DROPPED, ImageStates
from trioengine.testing.fuzz.payload_watch import PayloadWatch
from trioengine.testing.fuzz.pictures import (
    MEDIA,
    UNREADABLE,
    Content,
    Turn,
    content_of,
    pictures_in,
    pictures_of,
)
from trioengine.testing.fuzz.program import recorded
from trioengine.testing.fuzz.world import IMAGE_LIMITS
from trioengine.testing.simulated_payload import SimulatedMemfd
from trioengine.testing.simulated_worker import SimulatedWorker
from trioengine.worker.scheduling.pictures import Pictures
from trioengine.worker.scheduling.step_loop import StepLoop

MOST_CALLS = 8  # at once: a world with more of them takes long to come to rest


class PicturesMachine(CallsMachine):
    """Payloads are counted after every rule."""

    limits = IMAGE_LIMITS

    def __init__(self) -> None:
        super().__init__()
        self._watch_payloads()
        states = ImageStates(self.rare.saw)
        self._watch(SimulatedWorker, "exit", states.of_exits)
        self._watch(StepLoop, "_end_session", states.of_ends)
        self._watch(StepLoop, "_stop_session", states.of_stops)
        self._watch(StepLoop, "_take_decoded", states.of_failures)
        self._watch(Pictures, "use", states.of_uses)
        self._watch(SessionState, "resume", states.of_resumes)

        self.shows = True

    def _watch_payloads(self) -> None:
        watch = self.payloads = PayloadWatch(self.engine, self.simulation, self.loop.crashes, self.rare.saw)
        self._watch(RequestImages, "__init__", watch.of_request_images)
        self._watch(RequestImages, "_reserve", watch.of_waits)
        self._watch(RequestImages, "_make", watch.of_payloads)
        self._watch(RequestImages, "pin", watch.of_pins)
        self._watch(RequestImages, "unpin", watch.of_unpins)
        self._watch(PayloadBudget, "reserve_now", watch.of_reservations)
        self._watch(Payload, "drop", watch.of_drops)
        self._watch(Link, "__init__", watch.of_links)
        self._watch(Link, "hand_over", watch.of_handing_over)
        self._watch(Link, "on_consumed", watch.of_consumption)
        self._watch(Link, "lose", watch.of_losses)
        self._watch(SimulatedMemfd, "pass_on", watch.of_descriptors)

    # ---- rules ----------------------------------------------------------------------------------------------------

    @recorded(initialize, shows=st.booleans())
    def choose(self, shows: bool) -> None:
        """Half of the programs have no pictures, so that what they do besides is not done less often."""
        self.shows = shows

    @precondition(lambda self: self.shows and len(self.running_calls) < MOST_CALLS)
    @recorded(media=st.sampled_from(MEDIA), wait=WAIT, timeout=st.sampled_from((None, None, 0.5)))
    def show_once(self, media: str, wait: bool | None, timeout: float | None) -> None:
        """`engine.generate` with pictures."""
        turn: Turn = ("user", content_of(media, "hi"))
        self._call("show", lambda: self._show_once(turn, wait, timeout), (EngineError,), timeout)

    async def _show_once(self, turn: Turn, wait: bool | None, timeout: float | None) -> None:
        try:
            await self._ask_once(wait, timeout, turn=turn, media=pictures_of(turn[1]))
        except RequestRejected as exc:
            self._check_rejected(exc, turn[1])

    def _check_rejected(self, error: RequestRejected, content: Content) -> None:
        is_unreadable = error.code == "invalid_image" and UNREADABLE in pictures_in(content)
        assert is_unreadable or is_refused_for_an_image(error, content, self.engine), f"{content} is refused: {error!r}"
        was_kept = self.rare.counts[DROPPED] > 0
        assert was_kept or error.code != "image_dropped", f"it was never kept, and {error!r}"

    @precondition(lambda self: self.worker is not None and self.worker.has_images)
    @recorded(what=st.sampled_from(("receive", "decode")))
    def move_payload(self, what: str) -> None:
        """One payload arrives at the worker; or one image is decoded, beside a step."""
        worker = self._worker()
        if what == "receive" or not worker.decoder:
            worker.receive_payloads(1)
        else:
            worker.decode()

    @precondition(lambda self: self.shows and self.in_use and self.worker is not None)
    @recorded()
    def break_payloads(self) -> None:
        """The payload socket breaks. The worker notices that as far as something was on its way."""
        self._harm()
        worker = self._worker()
        is_used = len(worker.payloads) > 0
        worker.break_payloads()
        if is_used and worker.reads:
            worker.give_up(Fatal(FatalCode.INTERNAL, "the payload socket broke", ""))

    # ---- what is looked at ----------------------------------------------------------------------------------------

    def _look(self) -> None:
        super()._look()
        self.payloads.check()

    def _check_blocked(self) -> None:
        super()._check_blocked()
        self.payloads.check_blocked()

    def _check(self) -> None:
        self.payloads.check()
        super()._check()

    def _finish(self) -> None:
        super()._finish()
        self.payloads.check()
        self.payloads.check_at_the_end()
