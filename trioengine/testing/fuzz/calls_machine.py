"""An engine under hypothesis as a program calls it without a session of its own: one-shots, audits, `ready`."""

from __future__ import annotations

import math

import trio
from hypothesis import strategies as st
from hypothesis.stateful import precondition

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
from trioengine.core.sampling_params import SamplingParams
from trioengine.core.types import Cause
from trioengine.testing.fuzz.answers import check_answer
from trioengine.testing.fuzz.callers import partial_of
from trioengine.testing.fuzz.image_oracles import is_failed, is_refused
from trioengine.testing.fuzz.pictures import MEDIA, Content, content_of, media_of
from trioengine.testing.fuzz.pictures_environment import PicturesEnvironment
from trioengine.testing.fuzz.program import pick, recorded
from trioengine.testing.fuzz.prompts import prompt_of
from trioengine.testing.fuzz.refusals import FOR_A_REQUEST, FOR_AN_AUDIT, check_refused
from trioengine.testing.fuzz.world import LIMITS
from trioengine.testing.simulated_worker import Health

AUDIT_TIMEOUT = 10.0
MOST_CALLS = 8  # at once: a world with more of them takes long to come to rest
WHICH = st.integers(0, 3)
WAIT = st.sampled_from((None, True, False))
REFUSALS = (EngineOverloaded, EngineAsleep, EngineClosed, WorkerLost)


class CallsMachine(PicturesEnvironment):
    """The rules of calls that nobody reads from: each is a task, and its answer or error is judged where it ends."""

    @precondition(lambda self: not self.running_calls)
    @recorded(callers=st.integers(2, 6), first=st.integers(0, 2))
    def crowd(self, callers: int, first: int) -> None:
        """More one-shots than there are slots, those that wait for different things one after the other."""
        for number in range(first, first + callers):
            self._ask((True, None, False)[number % 3], None)

    @recorded(what=st.sampled_from(("ask", "audit", "ready", "cancel")), wait=WAIT, which=WHICH)
    def call(self, what: str, wait: bool | None, which: int) -> None:
        """`engine.generate` with a session of its own, `check_invariants`, `ready`; or one of these is cancelled."""
        if what == "ask":
            self._ask(wait, (None, None, 0.5, 8.0)[which])
        elif what == "ready":
            self._call("ready", self._ready, (EngineClosed, WorkerLost, ModelError))
        elif what == "audit":
            self._call("audit", self._audit, REFUSALS)
        elif self.running_calls:
            pick(self.running_calls, which).scope.cancel()

    def _ask(self, wait: bool | None, timeout: float | None) -> None:
        self._call("ask", lambda: self._ask_once(wait, timeout), (*REFUSALS, TimedOut), timeout)

    async def _ask_once(self, wait: bool | None, timeout: float | None, content: Content = "hi") -> None:
        params = SamplingParams(max_tokens=3)
        deadline = trio.current_time() + (math.inf if timeout is None else timeout)
        try:
            completion = await self.engine.generate("hi", params, media=media_of(content), wait=wait, timeout=timeout)
            assert completion.cause is not Cause.TIMEOUT, "its timeout has ended it, and no error was raised"
        except TimedOut as exc:
            check_refused(exc, self.engine, (), wait=wait, deadline=deadline)
            completion = partial_of(exc)
        except EngineError as exc:
            check_refused(exc, self.engine, ("sessions", *FOR_A_REQUEST), wait=wait, deadline=deadline)
            raise
        self._learn()
        is_late = trio.current_time() >= deadline
        causes = self.troubles.causes | ({Cause.TIMEOUT} if is_late else set())
        prompt, images = prompt_of((("user", content),))
        check_answer(completion, prompt, params, LIMITS.max_model_len, causes, self.troubles.paths, images)

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

    async def _ready(self) -> None:
        await self.engine.ready()
        worker = self.worker
        assert self.engine.gate.is_awake and worker is not None, "it is ready, it said, and admits nothing"
        assert worker.health is not Health.DEAD, "it is ready, it said, and its worker is dead"

    async def _audit(self) -> None:
        try:
            await self.engine.check_invariants(timeout=AUDIT_TIMEOUT)
        except EngineOverloaded as exc:
            check_refused(exc, self.engine, FOR_AN_AUDIT, wait=False)
            raise
        except InvariantError as exc:
            if not self.troubles.workers or "did not answer" not in str(exc):  # its bytes may not move in time
                raise

    # ---- for a machine that asks for more than answers ------------------------------------------------------------

    def _learn(self) -> None:
        """Take in what has been done to the engine."""
