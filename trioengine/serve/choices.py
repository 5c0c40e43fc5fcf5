"""The choices of one request: each in an engine session of its own, whole or streamed. All end when one of them fails.

The choices of a prompt share its prefill: the first one is posted to the worker, and the others when it has its first
token, so that they find the prompt in the prefix cache.
"""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import trio

from trioengine.actors.engine import Engine
from trioengine.actors.generation import Generation, Unread
from trioengine.actors.session import Session, further_choice
from trioengine.core.checks import MAX_INT64
from trioengine.core.errors import EngineError, RequestRejected, SessionEnded
from trioengine.core.sampling_params import SamplingParams, replace_valid
from trioengine.core.types import Cause, Chunk, Completion, FinishReason, Usage
from trioengine.serve.asked_model import AskedModel
from trioengine.serve.auth import salted
from trioengine.serve.body import Body
from trioengine.serve.chat_response import DONE, error_frames
from trioengine.serve.errors import ClientError, RequestAborted, problem_of
from trioengine.serve.http import Headers, HttpRequest, HttpResponse
from trioengine.serve.limits import InFlight
from trioengine.serve.log_fields import REQUEST_ID, SESSION
from trioengine.serve.parsing import in_thread_if
from trioengine.serve.response_bytes import ID_SIZE, ResponseBytes, size_of_logprobs
from trioengine.serve.shown import Result, Shown
from trioengine.text.conversation import Prompt

logger = logging.getLogger("trioengine")
MANY_LOGPROBS = 1000  # entries of log-probabilities; more are rendered in a thread


class Asked(Protocol):
    """The fields that the requests of all routes with choices have in common."""

    @property
    def model(self) -> AskedModel: ...

    @property
    def params(self) -> SamplingParams: ...

    @property
    def n(self) -> int: ...

    @property
    def shown(self) -> Shown: ...

    @property
    def request_id(self) -> str | None: ...


class Frames(Protocol):
    """Renders the events of one choice in a stream."""

    reads_text_only: bool  # its deltas need no token ids and no log-probabilities

    @property
    def num_unshown(self) -> int:
        """The number of tokens whose log-probabilities come with the next event."""
        ...

    def opening(self, prompt_token_ids: Sequence[int]) -> bytes:
        """The event that is sent with the first delta, if any."""
        ...

    def text(self, text: str) -> bytes: ...

    def delta(self, chunk: Chunk) -> bytes: ...

    def end(self, completion: Completion) -> bytes: ...


@dataclass(slots=True, eq=False)
class Choice:
    """One choice, which may wait for its turn."""

    index: int
    session: Session
    generation: Generation
    after: trio.Event | None  # it waits for a slot once this is set; None: it is refused if no slot is free
    is_first: bool  # of its prompt
    admitted: trio.Event = field(default_factory=trio.Event)  # or over


class Choices(abc.ABC):
    """The choices of one request in progress: `n` for each prompt. A prompt is dropped once the engine has it."""

    _names: Mapping[str, str] = {}  # of the client's fields, by the engine's
    _keeps_text = False  # of the prompts, to the end of the request

    def __init__(
        self,
        engine: Engine,
        in_flight: InFlight,
        asked: Asked,
        prompts: Sequence[Prompt],
        id: str,
        request: HttpRequest,
        headers: Headers,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        """`headers` are for a whole response, `variables` for the chat template."""
        self._engine = engine
        self._in_flight = in_flight
        self._kept = ResponseBytes(request.held)  # the body is dropped, and its bytes given back when it is prepared
        self._sessions = request.sessions
        self._prompts = prompts
        self._num_unprepared = len(prompts)
        self._adapter = asked.model.adapter
        self._params = salted(asked.params, request.cache_salt)
        self._n = asked.n
        self._shown = asked.shown
        self._request_id = asked.request_id
        self._id = id
        self._headers = headers
        self._variables = variables
        self._choices: Sequence[Choice] = ()
        self._completions: dict[int, Completion] = {}
        self._failure: Exception | None = None  # the first one
        self._num_sent = 0  # choices whose events were all sent
        self._give_up_claim: Callable[[], None] | None = None  # on a slot for each choice of the first prompt
        self._is_closed = False  # the end of the stream was sent

    # ---- supplied by the routes -------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _rendered(self, results: Sequence[Result], usage: Usage) -> bytes:
        """The body of a whole response."""

    @abc.abstractmethod
    def _frames(self, index: int) -> Frames: ...

    @abc.abstractmethod
    def _last_frame(self, usage: Usage, completions: Sequence[Completion]) -> bytes:
        """The last event, which comes after the events of all choices, if there is one."""

    # ---- shared -----------------------------------------------------------------------------------------------------

    async def whole(self, body: Body) -> HttpResponse:
        """Run all choices, and return them in one piece."""
        await self._run_all(body, streams=False)
        results = [
            Result(self._completions[choice.index], choice.generation.prompt_token_ids if self._needs_prompt else ())
            for choice in self._choices
        ]
        takes_long = self._takes_long([result.completion for result in results])
        render = partial(self._rendered, results, self._usage)
        content = await in_thread_if(takes_long, self._engine.ports, render)
        self._kept.add(len(content))
        return HttpResponse(200, content, headers=self._headers)

    async def stream(self, body: Body) -> None:
        """Run all choices, and send chunks as they come. Errors after the first piece are sent in the stream."""
        try:
            await self._run_all(body, streams=True)
        except Exception as exc:
            if not body.started:
                raise
            if not isinstance(exc, (ClientError, EngineError, RequestAborted)):
                logger.exception("%s crashed", self._id)
            await body.send(error_frames(problem_of(exc)), is_last=True)
            return
        if not self._is_closed:
            await body.send(await self._closing(), is_last=True)

    @property
    def _needs_prompt(self) -> bool:
        """Whether the response depends on the token ids of the prompts, or their numbers."""
        return self._shown.token_ids or self._shown.running_usage

    @property
    def _usage(self) -> Usage:
        """The sums: each prompt counts once."""
        usages = [self._completions[choice.index].usage for choice in self._choices]
        firsts = usages[:: self._n]
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in firsts),
            completion_tokens=sum(usage.completion_tokens for usage in usages),
            cached_tokens=sum(usage.cached_tokens for usage in firsts),
        )

    async def _closing(self) -> bytes:
        """Render the end of the stream."""
        completions = [self._completions[choice.index] for choice in self._choices]
        render = partial(self._last_frame, self._usage, completions)
        return await in_thread_if(self._takes_long(completions), self._engine.ports, render) + DONE

    def _takes_long(self, parts: Sequence[Chunk | Completion]) -> bool:
        """Whether there are so many log-probabilities that they are rendered in a thread."""
        num_positions = sum(len(each.logprobs or ()) + len(each.prompt_logprobs or ()) for each in parts)
        return num_positions * (1 + (self._params.logprobs or 0)) > MANY_LOGPROBS

    async def _run_all(self, body: Body, *, streams: bool) -> None:
        SESSION.set(self._id)  # until the connection's next request, so that the access log has it as well
        body.on_disconnect = partial(self._end_all, Cause.DISCONNECT)
        sent_to = body if streams else None
        if len(self._prompts) * self._n == 1:
            self._choices = self._made()
            await self._answer(self._choices[0], sent_to)
            return
        if self._sessions is not None:
            self._sessions.claim(self._n)
        with self._engine.runtime.gate.claiming(self._n) as self._give_up_claim:
            self._choices = self._made()
            async with trio.open_nursery() as nursery:
                for choice in self._choices:
                    nursery.start_soon(self._run, choice, sent_to)
        if self._failure is not None:
            try:
                raise self._failure
            finally:
                self._failure = None  # whose traceback has this frame: a cycle would keep the bytes of a bad image

    def _made(self) -> list[Choice]:
        """Return all choices, none of them begun.

        The choices of the first prompt are refused if one of them finds no free slot. The other prompts wait for slots
        behind it, and their further choices behind their first one.
        """
        choices: list[Choice] = []
        prompts, self._prompts = self._prompts, ()
        for prompt in prompts:
            wait = None if choices else False
            first: Choice | None = None
            for number in range(self._n):
                index = len(choices)
                label = self._id if len(prompts) * self._n == 1 else f"{self._id}-{index}"
                session = self._engine.open_session(
                    label=label, wait=wait, chat_template_kwargs=self._variables, adapter=self._adapter
                )
                params = _numbered(self._params, number)
                if first is None:
                    generation = session.generate(prompt, params, wait=wait)
                    made = first = Choice(index, session, generation, choices[0].admitted if choices else None, True)
                else:
                    generation = further_choice(session, first.generation, params, wait=wait)
                    made = Choice(index, session, generation, None if wait is False else first.admitted, False)
                choices.append(made)
        return choices

    def _end_all(self, cause: Cause) -> None:
        for choice in self._choices:
            choice.session.end(cause)

    async def _run(self, choice: Choice, body: Body | None) -> None:
        """Answer with one choice; its failure ends the others, between two pieces."""
        try:
            if choice.after is not None:
                await choice.after.wait()
            async with nullcontext() if self._sessions is None else self._sessions.using():
                if self._failure is None:
                    await self._answer(choice, body)
        except Exception as exc:
            self._failure = self._failure or exc
            self._end_all(Cause.CLIENT)
        finally:
            choice.admitted.set()

    async def _answer(self, choice: Choice, body: Body | None) -> None:
        ids = filter(None, (self._id, REQUEST_ID.get(), self._request_id))  # for /abort_request
        generation = choice.generation
        if self._give_up_claim is not None and choice.index < self._n:
            self._give_up_claim()  # both slots are taken in this step
        try:
            async with choice.session:
                with self._in_flight.running(ids, generation):
                    async with generation:
                        self._on_admitted(choice)
                        if body is None:
                            await self._finish(generation)
                            completion = self._completions[choice.index] = finished(generation)
                            if self._shown.token_ids:
                                self._kept.add(ID_SIZE * (completion.usage.prompt_tokens + len(completion.token_ids)))
                        else:
                            await self._send_all(choice, body)
        except RequestRejected as exc:
            raise in_fields(exc, self._names) from None
        except SessionEnded as exc:  # while it waited for a slot
            raise RequestAborted(Cause(exc.cause)) from None

    def _on_admitted(self, choice: Choice) -> None:
        choice.admitted.set()
        self._num_unprepared -= choice.is_first
        if not self._num_unprepared and not self._keeps_text:
            self._kept.drop_body()

    async def _finish(self, generation: Generation) -> None:
        """Wait until a request is over. Log-probabilities are counted as they come; others wake no task for a token."""
        if self._params.logprobs is not None or self._params.prompt_logprobs is not None:
            async for chunk in generation:
                self._kept.add(size_of_logprobs(chunk))
        await generation.wait_settled()

    async def _send_all(self, choice: Choice, body: Body) -> None:
        """Send the events of a choice, and with the last one of all choices the end of the stream."""
        frames, generation = self._frames(choice.index), choice.generation
        sink = _Sink(frames, body, self._kept, MANY_LOGPROBS // (1 + (self._params.logprobs or 0)))
        prompt_token_ids = generation.prompt_token_ids if self._needs_prompt else ()
        self._kept.add(ID_SIZE * len(prompt_token_ids))
        unsent = frames.opening(prompt_token_ids)
        async for chunk in generation:
            is_last = generation.outcome is not None and generation.outcome.is_complete
            with sink.pausing():
                delta = await self._delta(frames, chunk)
            if is_last:
                unsent += delta  # sent together with the end
                break
            if delta:
                await self._send(body, unsent + delta)
                unsent = b""
                generation.set_sink(sink.take_and_send)
        completion = self._completions[choice.index] = finished(generation)
        ending_takes_long = frames.num_unshown > sink.most_tokens
        unsent += await in_thread_if(ending_takes_long, self._engine.ports, partial(frames.end, completion))
        self._is_closed = self._num_sent == len(self._choices) - 1
        if self._is_closed:
            unsent += await self._closing()
        await self._send(body, unsent, is_last=self._is_closed)
        self._num_sent += 1

    async def _delta(self, frames: Frames, chunk: Chunk) -> bytes:
        """Render a chunk that the reading task has: it may be a long backlog of a slow client, or the prompt's part."""
        self._kept.add(size_of_logprobs(chunk))
        takes_long = not frames.reads_text_only and self._takes_long((chunk,))
        return await in_thread_if(takes_long, self._engine.ports, partial(frames.delta, chunk))

    async def _send(self, body: Body, piece: bytes, *, is_last: bool = False) -> None:
        with self._kept.keeping(len(piece)):
            await body.send(piece, is_last=is_last)


class _Sink:
    """Sends text in the step in which it comes, while the socket takes it: no task is woken for a token.

    A backlog with many log-probabilities is left to the reading task, and so is all else while that renders.
    """

    __slots__ = ("_body", "_frames", "_is_paused", "_kept", "_num_declined", "most_tokens")

    def __init__(self, frames: Frames, body: Body, kept: ResponseBytes, most_tokens: int) -> None:
        """`most_tokens` is the number of tokens whose log-probabilities may be rendered here."""
        self.most_tokens = most_tokens
        self._frames = frames
        self._body = body
        self._kept = kept
        self._is_paused = False
        self._num_declined = 0  # steps since the reading task has read: each has brought a token, or none

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Take nothing within the block, which begins when the reading task has read."""
        self._is_paused, self._num_declined = True, 0
        try:
            yield
        finally:
            self._is_paused = False

    def take_and_send(self, unread: Unread) -> bool:
        """Send the unread part; False if it has to wait for the reading task."""
        if self._is_paused or not self._body.can_send_now:
            self._num_declined += 1
            return False
        frames = self._frames
        if frames.reads_text_only:
            delta = frames.text(unread.read_text_nowait())
        elif self._num_declined + frames.num_unshown > self.most_tokens:
            return False
        else:
            chunk = unread.read_nowait()
            self._kept.add(size_of_logprobs(chunk))
            delta = frames.delta(chunk)
        if delta:
            self._body.send_now(delta)
        return True


def _numbered(params: SamplingParams, number: int) -> SamplingParams:
    """Return the parameters of this choice of a prompt, which has a seed of its own."""
    if params.seed is None or not number:
        return params
    seed = params.seed + number
    return replace_valid(params, seed=seed if seed <= MAX_INT64 else seed - 2 * (MAX_INT64 + 1))


def in_fields(error: RequestRejected, names: Mapping[str, str]) -> RequestRejected:
    """Return the error with the client's names, by the engine's."""
    for name, path in names.items():
        if error.message.startswith(name):
            param = None if error.param is None else error.param.replace(name, path, 1)
            return RequestRejected(error.code, error.message.replace(name, path, 1), param=param)
    return error


def finished(generation: Generation) -> Completion:
    """Return the completion of a request that is over. Raises EngineError or RequestAborted."""
    completion = generation.completion
    if completion.finish_reason is FinishReason.ABORT:
        raise RequestAborted(completion.cause)
    return completion
