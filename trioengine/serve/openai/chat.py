"""POST /v1/chat/completions: one answer in an engine session of its own, which ends with its client."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from trioengine.actors.engine import Engine
from trioengine.actors.generation import Generation
from trioengine.core.errors import EngineError, RequestRejected
from trioengine.core.types import Cause, Completion, FinishReason
from trioengine.serve.access_log import REQUEST_ID, SESSION
from trioengine.serve.auth import salted
from trioengine.serve.body import Body
from trioengine.serve.errors import ClientError, RequestAborted, problem_of
from trioengine.serve.http import Request, Response, StreamingResponse
from trioengine.serve.limits import Held, InFlight
from trioengine.serve.openai.request import ChatRequest, image_refusal, parse_chat_request
from trioengine.serve.openai.response import KEEP_ALIVE, ChatFrames, ChatShape, error_frames
from trioengine.serve.parsing import LONG_JSON, in_thread_if

logger = logging.getLogger("trioengine")
MANY_LOGPROBS = 1000  # entries; more are rendered in a thread


class ChatCompletions:
    """The handler."""

    def __init__(self, engine: Engine, model: str, in_flight: InFlight) -> None:
        self._engine = engine
        self._model = model
        self._in_flight = in_flight

    async def __call__(self, request: Request) -> StreamingResponse:
        refusal = image_refusal(self._engine, self._model)
        parse = partial(parse_chat_request, request.body, self._model, refusal)
        chat = await in_thread_if(len(request.body) > LONG_JSON, self._engine.ports, parse)
        answer = _Answer(self._engine, self._in_flight, chat, self._model, request.cache_salt, request.held)
        if chat.stream:
            return StreamingResponse(answer.stream, keep_alive=KEEP_ALIVE)
        return StreamingResponse(answer.whole)


class _Answer:
    """One answer on its way. The messages are let go of when the engine has them."""

    def __init__(
        self,
        engine: Engine,
        in_flight: InFlight,
        chat: ChatRequest,
        model: str,
        cache_salt: bytes,
        held: Held | None,
    ) -> None:
        self._engine = engine
        self._in_flight = in_flight
        self._held = held  # the body's bytes
        self._messages: Sequence[Mapping[str, Any]] = chat.messages
        self._params = salted(chat.params, cache_salt)
        self._include_usage = chat.include_usage
        self._chosen_id = chat.request_id
        self._shape = ChatShape(model, engine.runtime.model.tokenizer, chat.params.logprobs)

    async def whole(self, body: Body) -> Response:
        """The answer in one piece."""
        async with self._generation(body) as generation:
            await generation.wait_settled()  # reading would wake this task for every token
            completion = _finished(generation)
        num_logprobs = len(completion.logprobs or ()) * (1 + (self._params.logprobs or 0))
        render = partial(self._shape.whole, completion)
        return Response(200, await in_thread_if(num_logprobs > MANY_LOGPROBS, self._engine.ports, render))

    async def stream(self, body: Body) -> None:
        """The answer as it comes. What goes wrong after the first piece is told in the stream."""
        try:
            async with self._generation(body) as generation:
                await self._send_all(generation, body)
        except Exception as exc:
            if not body.started:
                raise
            if not isinstance(exc, (ClientError, EngineError, RequestAborted)):
                logger.exception("%s crashed", self._shape.id)
            await body.send(error_frames(problem_of(exc)))

    async def _send_all(self, generation: Generation, body: Body) -> None:
        frames = ChatFrames(self._shape, include_usage=self._include_usage)
        reader = _Reader(generation, frames, body)
        unsent = frames.opening
        async for chunk in generation:
            delta = frames.delta(chunk)
            if generation.outcome is not None and generation.outcome.is_complete:
                unsent += delta  # the end goes along
                break
            if delta:
                await body.send(unsent + delta)
                unsent = b""
                generation.set_sink(reader.take_and_send)
        await body.send(unsent + frames.end(_finished(generation)))

    @asynccontextmanager
    async def _generation(self, body: Body) -> AsyncIterator[Generation]:
        """The request in its session; refused, it says so in the client's terms."""
        SESSION.set(self._shape.id)  # until the connection's next request: the line of this one says so, too
        try:
            async with self._engine.open_session(label=self._shape.id, wait=False) as session:
                body.on_disconnect = partial(session.end, Cause.DISCONNECT)
                generation = session.generate(self._take_messages(), self._params, wait=False)
                with self._in_flight.running(self._ids, generation):
                    async with generation:
                        if self._held is not None:
                            self._held.give_all_back()
                        yield generation
        except RequestRejected as exc:
            raise _of_messages(exc) from None

    @property
    def _ids(self) -> Iterator[str]:
        """By which the request may be aborted: its own, that of the header X-Request-Id, and that of its body."""
        return filter(None, (self._shape.id, REQUEST_ID.get(), self._chosen_id))

    def _take_messages(self) -> Sequence[Mapping[str, Any]]:
        messages, self._messages = self._messages, ()
        return messages


class _Reader:
    """Sends what is offered of a generation."""

    __slots__ = ("_body", "_frames", "_generation", "_has_logprobs")

    def __init__(self, generation: Generation, frames: ChatFrames, body: Body) -> None:
        self._generation = generation
        self._has_logprobs = generation.params.logprobs is not None
        self._frames = frames
        self._body = body

    def take_and_send(self) -> bool:
        if not self._body.can_send_now:
            return False
        frames, generation = self._frames, self._generation
        delta = (
            frames.delta(generation.read_nowait()) if self._has_logprobs else frames.text(generation.read_text_nowait())
        )
        if delta:
            self._body.send_now(delta)
        return True


def _of_messages(error: RequestRejected) -> RequestRejected:
    """The error with `messages`, as the client calls them, in place of `prompt`."""
    if not error.message.startswith("prompt"):
        return error
    param = None if error.param is None else error.param.replace("prompt", "messages", 1)
    return RequestRejected(error.code, error.message.replace("prompt", "messages", 1), param=param)


def _finished(generation: Generation) -> Completion:
    """The answer, if it came to its end. Raises EngineError or RequestAborted."""
    completion = generation.completion
    if completion.finish_reason is FinishReason.ABORT:
        raise RequestAborted(completion.cause)
    return completion
