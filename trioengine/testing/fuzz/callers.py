"""Programs that use the engine, as tasks: one holds a session, one reads an answer, one calls something once.

They follow the machine's rules and record the chunks, outcomes and errors that they get. They check the facts that only
they can see: the deltas add up, nothing comes after the end, an error is one of the documented ones.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import trio

from trioengine.actors.engine import Engine
from trioengine.actors.generation import Generation
from trioengine.actors.session import Session
from trioengine.core.errors import (
    EngineAsleep,
    EngineClosed,
    EngineError,
    EngineOverloaded,
    Outcome,
    SessionEnded,
    TimedOut,
)
from trioengine.core.sampling_params import Overflow, SamplingParams
from trioengine.core.types import Cause, Chunk, Completion
from trioengine.testing.fuzz import inside
from trioengine.testing.fuzz.conversations import Turn, check_dropped, content_of, media_of, messages_of, raw_turn
from trioengine.testing.fuzz.faults import Life
from trioengine.testing.fuzz.request_log import FOR_A_REQUEST, check_not_admitted, check_refused
from trioengine.testing.fuzz.timeouts import check_timed_out
from trioengine.testing.fuzz.tools import Offered, joined
from trioengine.testing.toy_model import PreparationFailed

UNPREPARED = "it cannot be prepared"  # a prompt


class Style(enum.Enum):
    """How a reader reads."""

    ALL = "all"  # chunk by chunk, to the end
    RESULT = "result"  # `await generation.result()`
    FIRST = "first"  # leaves after the first chunk
    NONE = "none"  # leaves at once
    STALLED = "stalled"  # reads nothing until `go_on` is set, and then as one that TRIES
    RAISES = "raises"  # its body raises after the first chunk
    TRIES = "tries"  # every other read is cancelled


class Oops(Exception):
    """Raised by the body of a reader."""


@dataclass
class SessionHolder:
    """A task that opens a session and holds it until `leave` is set."""

    life: Life
    engine: Engine
    wait: bool | None
    timeout: float | None = None
    overflow: Overflow = "refuse"
    history: tuple[Turn, ...] = ()  # that it is opened with, as `messages`
    messages: list[dict[str, Any]] | None = None
    adapter: str | None = None  # the name of the one that it asks for, if the engine has it
    adapter_path: str | None = None  # of the one that it has
    deadline: float = math.inf  # of opening it
    session: Session | None = None
    error: EngineError | None = None
    ended: bool = False
    left: bool = False
    over: bool = False
    readers: list[Reader] = field(default_factory=list)
    replaced: list[tuple[int, tuple[Turn, ...]]] = field(default_factory=list)  # after which id, by which turns
    leave: trio.Event = field(default_factory=trio.Event)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)

    def __repr__(self) -> str:
        return f"<holder of {self.session or 'no session'}, wait={self.wait}, {'over' if self.over else 'running'}>"

    async def run(self) -> None:
        if self.timeout is not None:
            self.deadline = trio.current_time() + self.timeout
        try:
            with self.scope:
                await self._hold()
        except (EngineOverloaded, EngineAsleep, EngineClosed, TimedOut) as exc:
            assert self.session is None, "only entering is refused"
            check_not_admitted(exc, self.engine, wait=self.wait, deadline=self.deadline)
            self.error = exc
        except SessionEnded as exc:
            assert self.session is None and self.wait is not False, "only a session in the line is ended so"
            self.error = exc
        finally:
            self.over = True
            self.life.end()

    async def _hold(self) -> None:
        adapter = self.adapter if self.adapter in self.engine.adapters else None
        self.adapter_path = None if adapter is None else self.engine.adapters[adapter]
        opening = self.engine.open_session(
            wait=self.wait,
            timeout=self.timeout,
            overflow=self.overflow,
            history=self.messages,
            adapter=adapter,
        )
        async with opening as session:
            self.session = session
            try:
                await self.leave.wait()
            finally:
                self.left = True
        await session.ended()

    def end(self) -> None:
        """End the session, if it was opened."""
        if self.session is not None:
            self.ended = True
            self.session.end()

    @property
    def waits(self) -> bool:
        """Whether it waits for a slot, or for room for its images."""
        return self.session is None and not self.over

    @property
    def is_open(self) -> bool:
        """Whether a request can be asked for."""
        return self.session is not None and self.session.end_cause is None

    @property
    def is_busy(self) -> bool:
        """Whether it has a request, or one on its way in."""
        return any(not reader.over for reader in self.readers)

    @property
    def gave_up(self) -> bool:
        """Whether it did anything that ends its session."""
        return self.ended or self.leave.is_set() or self.scope.cancel_called


@dataclass
class Reader:
    """A task with one request of a session."""

    life: Life
    holder: SessionHolder
    prompt: str
    params: SamplingParams
    style: Style
    keep_partial: bool
    timeout: float | None
    wait: bool | None
    media: str = ""  # names of pictures
    label: str = ""
    raw: tuple[int, ...] = ()  # token ids, in the place of the prompt
    tools: Offered | None = None
    results: tuple[Turn, ...] = ()  # of calls, before the prompt, which may be empty then
    generation: Generation | None = None
    error: EngineError | None = None
    task: trio.lowlevel.Task | None = None
    chunks: list[Chunk] = field(default_factory=list)
    outcome_at_leaving: Outcome | None = None
    deadline: float = math.inf
    entered: bool = False
    aborted: bool = False
    left: bool = False
    over: bool = False
    checked: bool = False
    go_on: trio.Event = field(default_factory=trio.Event)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)

    def __repr__(self) -> str:
        how = f"style={self.style.value}, wait={self.wait}, timeout={self.timeout}"
        return f"<{self.label or 'reader'} of {self.generation} in {self.holder.session}, {how}>"

    async def run(self) -> None:
        session, self.task = self.holder.session, trio.lowlevel.current_task()
        assert session is not None, "readers are started on open sessions"
        if self.timeout is not None:
            self.deadline = trio.current_time() + self.timeout
        try:
            with self.scope:
                self.generation = session.generate(
                    self.raw or (messages_of(self.turns) if self.results else self.prompt),
                    self.params,
                    media=media_of(content_of(self.media, self.prompt)),
                    keep_partial=self.keep_partial,
                    timeout=self.timeout,
                    wait=self.wait,
                    label=self.label,
                    **({} if self.tools is None else self.tools.arguments),
                )
                async with self.generation as generation:
                    self.entered = True
                    try:
                        await self._read(generation)
                    finally:
                        self.left, self.outcome_at_leaving = True, generation.outcome
                in_time = trio.current_time() < self.deadline
                assert inside.is_settled(generation) or not in_time, "leaving waits until the worker has let go"
        except EngineError as exc:
            self.error = exc
            if isinstance(exc, TimedOut):
                check_timed_out(exc, self.generation)
            self._judge(exc, session)
        except (Oops, PreparationFailed):
            pass
        finally:
            self.over = True
            self.life.end()

    def _judge(self, error: EngineError, session: Session) -> None:
        """Check an error in the step in which it is raised."""
        check_refused(error, self.holder.engine, FOR_A_REQUEST, wait=self.wait, deadline=self.deadline)
        if not self.entered:
            check_dropped(error, session)

    async def _read(self, generation: Generation) -> None:
        if self.style is Style.STALLED:
            await self.go_on.wait()
        if self.style is Style.NONE:
            return
        if self.style is Style.RESULT:
            completion = await generation.result()
            assert completion.cause is not Cause.TIMEOUT, "its timeout has ended it, and no error was raised"
            assert generation.outcome is not None, f"{generation} has no outcome, and result() returned"
            assert completion == generation.completion, "result() is the completion"
            return
        try:
            while (chunk := await self._next(generation)) is not None:
                self.chunks.append(chunk)
                assert chunk.text or chunk.token_ids or chunk.tool_calls, "an empty chunk"
                if self.style is Style.FIRST:
                    return
                if self.style is Style.RAISES:
                    raise Oops
        except EngineError:
            is_read = generation.outcome is None or not inside.has_unread(generation)
            assert is_read, f"its error is raised before its last chunk: {generation}"
            raise
        assert not inside.is_timed_out(generation), "its timeout has ended it, and no error was raised"
        self._check_sum(generation)
        assert await anext(generation, None) is None, "it was read to its end, and there is more"

    async def _next(self, generation: Generation) -> Chunk | None:
        if self.style in (Style.TRIES, Style.STALLED):
            with trio.CancelScope() as scope:
                scope.cancel()
                await anext(generation, None)
        return await anext(generation, None)

    def _check_sum(self, generation: Generation) -> None:
        completion = generation.completion
        text = "".join(chunk.text for chunk in self.chunks)
        token_ids = tuple(token for chunk in self.chunks for token in chunk.token_ids)
        assert text == completion.text, f"the chunks give {text!r}, the completion {completion.text!r}"
        assert token_ids == completion.token_ids, "the chunks give other tokens than the completion"
        logprobs = tuple(each for chunk in self.chunks for each in chunk.logprobs or ())
        assert logprobs == (completion.logprobs or ()), "the chunks give other logprobs than the completion"
        calls = joined(delta for chunk in self.chunks for delta in chunk.tool_calls)
        assert calls == completion.tool_calls, f"the chunks give {calls}, the completion {completion.tool_calls}"

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns of its prompt."""
        if self.raw:
            return (raw_turn(self.raw),)
        asked = (("user", content_of(self.media, self.prompt)),) if self.prompt or not self.results else ()
        return (*self.results, *asked)

    @property
    def answered_params(self) -> SamplingParams:
        """Its parameters, with the grammar of a call that is forced."""
        grammar = None if self.tools is None else self.tools.grammar
        return self.params if grammar is None else replace(self.params, grammar=grammar)

    @property
    def is_stalled(self) -> bool:
        """Whether it reads nothing, whatever there is."""
        return self.style is Style.STALLED and not self.go_on.is_set()

    @property
    def causes(self) -> set[Cause]:
        """The causes by which its request may have been aborted: its own actions, its holder's, and its timeout."""
        left_early = self.left and self.outcome_at_leaving is None
        causes = set()
        if self.aborted or left_early or self.scope.cancel_called or self.holder.gave_up:
            causes.add(Cause.CLIENT)
        if trio.current_time() >= self.deadline:
            causes.add(Cause.TIMEOUT)
        return causes


Task = TypeVar("Task", bound=SessionHolder | Reader)


@dataclass(eq=False)
class Call:
    """A task that awaits one call; `allowed` are the errors that are documented for it."""

    life: Life
    name: str
    function: Callable[[], Awaitable[Any]]
    allowed: tuple[type[EngineError], ...]
    timeout: float | None = None
    deadline: float = math.inf
    result: Completion | bool | None = None
    error: EngineError | None = None
    over: bool = False
    task: trio.lowlevel.Task | None = None
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)

    async def run(self) -> None:
        self.task = trio.lowlevel.current_task()
        if self.timeout is not None:
            self.deadline = trio.current_time() + self.timeout
        try:
            with self.scope:
                self.result = await self.function()
        except self.allowed as exc:
            self.error = exc
        finally:
            self.over = True
            self.life.end()


def latest_first(tasks: list[Task]) -> list[Task]:
    """Those that are over come last."""
    return [task for task in tasks[::-1] if not task.over] + [task for task in tasks[::-1] if task.over]
