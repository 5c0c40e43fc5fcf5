"""An engine whose model takes images: how these travel to the worker, what fails on the way, and their books."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition

from trioengine.core.messages import Fatal, FatalCode
from trioengine.testing.fuzz.environment import Environment
from trioengine.testing.fuzz.image_states import ImageStates
from trioengine.testing.fuzz.payload_watch import PayloadWatch
from trioengine.testing.fuzz.program import recorded
from trioengine.testing.fuzz.world import IMAGE_LIMITS
from trioengine.testing.simulated_worker import Health
from trioengine.testing.simulation import SealFailure


class PicturesEnvironment(Environment):
    """Payloads are counted after every rule. Who uses the engine has the rules that send pictures."""

    limits = IMAGE_LIMITS

    def __init__(self) -> None:
        super().__init__()
        self.payloads = PayloadWatch(self.engine, self.simulation, self.loop.crashes, self.rare.saw)
        self._watch_all(self.payloads.watches)
        self._watch_all(ImageStates(self.rare.saw).watches)
        self.troubles.dropped = self.payloads.dropped
        self.shows = True

    # ---- rules ----------------------------------------------------------------------------------------------------

    @recorded(initialize, shows=st.booleans())
    def choose(self, shows: bool) -> None:
        """Half of the programs have no pictures, so that what they do besides is not done less often."""
        self.shows = shows
        if shows:
            self._make_room()

    def _make_room(self) -> None:
        """Prepare bounds other than those of payloads: there will be pictures."""

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

    @precondition(lambda self: self.shows and self.in_use)
    @recorded(what=st.sampled_from(("create", "write", "send")))
    def fail_system(self, what: str) -> None:
        """The next memfd cannot be made, or not be written; or the next descriptor cannot be sent."""
        if what != "send":
            self.simulation.failing_seals = [SealFailure[what.upper()]]
        elif self.worker is not None:
            self._harm()
            self.worker.fail_send()

    # ---- checks ---------------------------------------------------------------------------------------------------

    @property
    def is_well(self) -> bool:
        """Whether the worker is, and takes what it is sent, so that whatever is asked of it is done at rest."""
        worker = self.worker
        is_well = worker is not None and worker.health is Health.WELL and not worker.payloads.is_broken
        return is_well and self.engine.gate.link is not None

    def _look(self) -> None:
        super()._look()
        self.payloads.check()

    def _check_blocked(self) -> None:
        super()._check_blocked()
        self.payloads.check_blocked()

    def _check(self) -> None:
        self.payloads.check()
        super()._check()
        if self.is_well:
            self.payloads.check_at_rest()

    def _finish(self) -> None:
        super()._finish()
        self.payloads.check()
        self.payloads.check_at_the_end()
