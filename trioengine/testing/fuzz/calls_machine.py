"""One-shot calls of an engine under hypothesis."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

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
from trioengine.testing.fuzz import inside
from trioengine.testing.fuzz.answers import check_answer
from trioengine.testing.fuzz.conversations import (
    MEDIA,
    Content,
    FuzzPrompt,
    content_of,
    is_failed,
    is_refused,
    media_of,
    prompt_of,
)
from trioengine.testing.fuzz.environment import PicturesEnvironment
from trioengine.testing.fuzz.faults import Harm, Life
from trioengine.testing.fuzz.oracles import (
    check_all_aborted,
)
from trioengine.testing.fuzz.program import pick, recorded
from trioengine.testing.fuzz.request_log import FOR_A_REQUEST, FOR_AN_AUDIT, check_refused
from trioengine.testing.fuzz.timeouts import partial_of
from trioengine.testing.fuzz.usage_log import UsageLog
from trioengine.testing.fuzz.world import LIMITS
from trioengine.testing.simulated_worker import Health
from trioengine.testing.toy_model import VOCAB_SIZE

AUDIT_TIMEOUT = 10.0
MOST_CALLS = 8  # at once: a world with more of them takes long to come to rest
WHICH = st.integers(0, 3)
WAIT = st.sampled_from((None, True, False))
LENGTHS = (
    *range(101),
    *(8, 16, 24, 48, 88, 94, 95, 96, 97) * 4,
)  # of raw prompts: often near the limits of the context and of blocks
REFUSALS = (EngineOverloaded, EngineAsleep, EngineClosed, WorkerLost)


class CallsMachine(PicturesEnvironment):
    """The rules of one-shot calls: each is a task, and its answer or error is judged where it ends."""

    def __init__(self) -> None:
        super().__init__()
        self.usages = UsageLog()
        self.simulation.observers.append(self.usages)
        self.engine.observers.append(self.usages)

    @precondition(lambda self: not self.running_calls)
    @recorded(callers=st.integers(2, 6), first=st.integers(0, 2), max_tokens=st.sampled_from((3, 3, 24)))
    def crowd(self, callers: int, first: int, max_tokens: int) -> None:
        """More one-shots than there are slots, those that wait for different things one after the other.

        With long answers they need more KV blocks than there are.
        """
        for number in range(first, first + callers):
            self._ask((True, None, False)[number % 3], None, max_tokens)

    @recorded(what=st.sampled_from(("ask", "audit", "ready", "cancel")), wait=WAIT, which=WHICH)
    def call(self, what: str, wait: bool | None, which: int) -> None:
        """`engine.generate` with a session of its own, `check_invariants`, `ready`; or one of these is cancelled."""
        if what == "ask":
            self._ask(wait, (None, None, 0.5, 8.0)[which])
        elif what == "ready":
            self._call("ready", self._ready, (EngineClosed, WorkerLost, ModelError))
        elif what == "audit":
            self._call("audit", self._audit, REFUSALS, AUDIT_TIMEOUT)
        elif self.running_calls:
            pick(self.running_calls, which).scope.cancel()

    @recorded(length=st.sampled_from(LENGTHS), min_tokens=st.integers(0, 3), wait=WAIT)
    def ask_raw(self, length: int, min_tokens: int, wait: bool | None) -> None:
        """`engine.generate` with token ids, among them the end of a turn; they may be too many."""
        ids = raw_ids(length)
        self._call("raw", lambda: self._ask_raw(ids, min_tokens, wait), (*REFUSALS, RequestRejected))

    async def _ask_raw(self, ids: tuple[int, ...], min_tokens: int, wait: bool | None) -> None:
        params = SamplingParams(max_tokens=3, min_tokens=min_tokens)
        try:
            await self._generate(list(ids), params, wait, None, FuzzPrompt(ids, ()))
        except RequestRejected:
            if 0 < len(ids) < LIMITS.max_model_len:
                raise

    def _ask(self, wait: bool | None, timeout: float | None, max_tokens: int = 3) -> None:
        ask = functools.partial(self._ask_once, wait, timeout, max_tokens=max_tokens)
        self._call("ask", ask, (*REFUSALS, TimedOut), timeout)

    async def _ask_once(
        self, wait: bool | None, timeout: float | None, content: Content = "hi", max_tokens: int = 3
    ) -> None:
        prompt = prompt_of((("user", content),))
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=max_tokens > 3)
        await self._generate("hi", params, wait, timeout, prompt, media_of(content))

    async def _generate(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        wait: bool | None,
        timeout: float | None,
        expected: FuzzPrompt,
        media: Sequence[Any] = (),
    ) -> None:
        life = Life(self.faults)
        deadline = trio.current_time() + (math.inf if timeout is None else timeout)
        try:
            completion = await self.engine.generate(prompt, params, media=media, wait=wait, timeout=timeout)
            assert completion.cause is not Cause.TIMEOUT, "its timeout has ended it, and no error was raised"
        except TimedOut as exc:
            check_refused(exc, self.engine, (), wait=wait, deadline=deadline)
            completion = partial_of(exc)
        except EngineError as exc:
            check_refused(exc, self.engine, ("sessions", *FOR_A_REQUEST), wait=wait, deadline=deadline)
            raise
        self._learn()
        self.usages.check(completion, len(expected.token_ids))
        is_late = trio.current_time() >= deadline
        possible = self.faults.causes(life) | ({Cause.TIMEOUT} if is_late else set())
        causes = self.requests.causes_of(self.requests.latest_of(trio.lowlevel.current_task()), possible)
        ids, images = expected
        check_answer(completion, ids, params, LIMITS.max_model_len, causes, self.faults.paths, images)

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

    def _abort_all(self, *, keep_waiting: bool) -> None:
        due = [] if keep_waiting else self.requests.undecided
        if due and inside.num_preparing(self.engine) and inside.num_in_line_for_slot(self.engine, is_session=False):
            self.coverage.saw("all are aborted, some in preparation and some in line")
        super()._abort_all(keep_waiting=keep_waiting)
        check_all_aborted(due)

    async def _ready(self) -> None:
        await self.engine.ready()
        worker = self.worker
        assert inside.is_admitting(self.engine) and worker is not None, "ready() has returned, and nothing is admitted"
        assert worker.health is not Health.DEAD, "ready() has returned, and the worker is dead"

    async def _audit(self) -> None:
        life = Life(self.faults)
        try:
            await self.engine.check_invariants(timeout=AUDIT_TIMEOUT)
        except EngineOverloaded as exc:
            check_refused(exc, self.engine, FOR_AN_AUDIT, wait=False)
            raise
        except InvariantError as exc:
            if not self.faults.hit(life, Harm.WORKERS) or "did not answer" not in str(
                exc
            ):  # its bytes may not move in time
                raise

    # ---- for a machine that asks for more than answers ------------------------------------------------------------

    def _learn(self) -> None:
        """Take in the changes that were made to the engine."""


def raw_ids(length: int) -> tuple[int, ...]:
    """So many token ids, among them special ones."""
    return tuple((position * 37 + length) % VOCAB_SIZE for position in range(length))
