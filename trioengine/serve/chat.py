"""POST /v1/chat/completions: each completion runs in an engine session of its own, which ends with its client."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from trioengine.actors.engine import Engine
from trioengine.actors.generation import Generation
from trioengine.actors.ports import Ports
from trioengine.actors.session import Session
from trioengine.core.errors import EngineError, RequestRejected
from trioengine.core.types import Cause, Completion, FinishReason
from trioengine.serve.access_log import REQUEST_ID, SESSION
from trioengine.serve.auth import salted
from trioengine.serve.body import Body
from trioengine.serve.chat_request import FIELDS, ChatRequest, ServedModel, parse_chat_request
from trioengine.serve.chat_response import KEEP_ALIVE, ChatFrames, ChatShape, error_frames
from trioengine.serve.errors import ClientError, RequestAborted, problem_of
from trioengine.serve.http import STREAM_HEADERS, Headers, HttpRequest, HttpResponse, StreamingResponse
from trioengine.serve.limits import InFlight
from trioengine.serve.parsing import LONG_JSON, in_thread_if
from trioengine.serve.requests import ChatCompletionRequest
from trioengine.serve.responses import ChatCompletion, ChatCompletionChunk
from trioengine.serve.routes import Operation
from trioengine.serve.unknown_fields import UnknownFields
from trioengine.text.reasoning import AnswerParser, ReasoningForm
from trioengine.text.tool_calls import ToolForm

logger = logging.getLogger("trioengine")
OPERATION = Operation(
    "Answer a conversation, whole or streamed",
    body=ChatCompletionRequest,
    example={"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32, "stream": True},
    responses={200: ChatCompletion},
    events=ChatCompletionChunk,
    errors=(404, 409, 422, 429),
)
PROMPT_END = 256  # characters of a prompt that may show that a reasoning is open
MANY_TOKENS = 4096  # of an answer whose reasoning is counted; the tokens of longer ones are counted in a thread
MANY_LOGPROBS = 1000  # entries of log-probabilities; more are rendered in a thread


class ChatCompletions:
    """The handler of the route."""

    def __init__(
        self,
        engine: Engine,
        model: str,
        in_flight: InFlight,
        unknown_fields: UnknownFields,
        tool_form: ToolForm | None = None,
        reasoning_form: ReasoningForm | None = None,
    ) -> None:
        """`tool_form` is the form of tool calls; None: as the chat template shows it. None: reasoning is text."""
        self._engine = engine
        self._model = model
        self._in_flight = in_flight
        self._unknown_fields = unknown_fields
        self._tool_form = tool_form
        self._reasoning_form = reasoning_form

    async def __call__(self, request: HttpRequest) -> StreamingResponse:
        model = ServedModel.of(self._engine, self._model, self._tool_form, self._reasoning_form)
        parse = partial(parse_chat_request, request.body, model)
        chat = await in_thread_if(len(request.body) > LONG_JSON, self._engine.ports, parse)
        headers = self._unknown_fields.report(chat.unknown, FIELDS)
        completion = _ChatCompletion(self._engine, self._in_flight, chat, self._model, request, headers)
        if chat.stream:
            return StreamingResponse(completion.stream, headers=STREAM_HEADERS + headers, keep_alive=KEEP_ALIVE)
        return StreamingResponse(completion.whole)


class _ChatCompletion:
    """One completion in progress. Its messages are dropped once the engine has them."""

    def __init__(
        self,
        engine: Engine,
        in_flight: InFlight,
        chat: ChatRequest,
        model: str,
        request: HttpRequest,
        headers: Headers,
    ) -> None:
        self._engine = engine
        self._in_flight = in_flight
        self._held = request.held  # accounts for the bytes of the body; the body itself is dropped
        self._messages: Sequence[Mapping[str, Any]] = chat.messages
        self._params = salted(chat.params, request.cache_salt)
        self._include_usage = chat.include_usage
        self._shape = ChatShape(
            model, engine.runtime.model.tokenizer, chat.params.logprobs, chat.params.skip_special_tokens
        )
        self._request_id = chat.request_id
        self._grammar_field = chat.grammar_field
        self._variables = chat.variables
        self._form = chat.answer_form
        self._continued = chat.continued
        self._in_reasoning = False  # the prompt has opened it; known once the engine has the prompt
        self._headers = headers  # of a whole response

    async def whole(self, body: Body) -> HttpResponse:
        """Run the request, and return the completion in one piece."""
        async with self._generation(body) as generation:
            parser = self._parser()
            await generation.wait_settled()  # reading would wake this task for every token
            completion = finished(generation)
        num_logprobs = len(completion.logprobs or ()) * (1 + (self._params.logprobs or 0))
        render = partial(self._shape.whole, completion, parser)
        is_long = num_logprobs > MANY_LOGPROBS or _takes_long(completion, parser)
        content = await in_thread_if(is_long, self._engine.ports, render)
        return HttpResponse(200, content, headers=self._headers)

    async def stream(self, body: Body) -> None:
        """Run the request, and send chunks as they come. Errors after the first piece are sent in the stream."""
        try:
            async with self._generation(body) as generation:
                await self._send_all(generation, body)
        except Exception as exc:
            if not body.started:
                raise
            if not isinstance(exc, (ClientError, EngineError, RequestAborted)):
                logger.exception("%s crashed", self._shape.id)
            await body.send(error_frames(problem_of(exc)), is_last=True)

    async def _send_all(self, generation: Generation, body: Body) -> None:
        frames = ChatFrames(self._shape, include_usage=self._include_usage)
        if (parser := self._parser()) is not None:
            await _send_parts(generation, frames, parser, body, self._engine.ports)
            return
        sink = _Sink(generation, frames, body)
        unsent = frames.opening
        async for chunk in generation:
            delta = frames.delta(chunk)
            if generation.outcome is not None and generation.outcome.is_complete:
                unsent += delta  # sent together with the end
                break
            if delta:
                await body.send(unsent + delta)
                unsent = b""
                generation.set_sink(sink.take_and_send)
        await body.send(unsent + frames.end(finished(generation)), is_last=True)

    def _parser(self) -> AnswerParser | None:
        """Return the parser of the answer; None for one that is a text and nothing else."""
        return None if self._form.is_plain else AnswerParser(self._form, in_reasoning=self._in_reasoning)

    @asynccontextmanager
    async def _generation(self, body: Body) -> AsyncIterator[Generation]:
        """Open a session for the request, and abort it when the client disconnects. Errors name the client's fields."""
        SESSION.set(self._shape.id)  # until the connection's next request, so that the access log has it as well
        ids = filter(None, (self._shape.id, REQUEST_ID.get(), self._request_id))  # for /abort_request
        try:
            async with self._open_session() as session:
                body.on_disconnect = partial(session.end, Cause.DISCONNECT)
                generation = session.generate(self._take_messages(), self._params, wait=False)
                with self._in_flight.running(ids, generation):
                    async with generation:
                        if self._held is not None:
                            self._held.give_all_back()
                        if (tags := self._form.reasoning) is not None:
                            prompt = self._engine.runtime.prompt_text(session.id)[-PROMPT_END:]
                            self._in_reasoning = tags.is_open_after(prompt, self._continued)
                        yield generation
        except RequestRejected as exc:
            raise in_fields(exc, {"prompt": "messages", "grammar": self._grammar_field}) from None

    def _open_session(self) -> Session:
        return self._engine.open_session(label=self._shape.id, wait=False, chat_template_kwargs=self._variables or None)

    def _take_messages(self) -> Sequence[Mapping[str, Any]]:
        messages, self._messages = self._messages, ()
        return messages


async def _send_parts(
    generation: Generation, frames: ChatFrames, parser: AnswerParser, body: Body, ports: Ports
) -> None:
    """Send chunks as they come, divided into reasoning, text and tool calls."""
    unsent = frames.opening
    async for chunk in generation:
        unsent += frames.parts(parser.feed(chunk.text), chunk.logprobs)
        if generation.outcome is not None and generation.outcome.is_complete:
            break
        if unsent:
            await body.send(unsent)
            unsent = b""
    completion = finished(generation)
    unsent += frames.parts(parser.finish(), None)
    render = partial(frames.end, completion, parser)
    end = await in_thread_if(_takes_long(completion, parser), ports, render)
    await body.send(unsent + end, is_last=True)


def _takes_long(completion: Completion, parser: AnswerParser | None) -> bool:
    """Whether the count of the reasoning's tokens decodes a long answer."""
    return parser is not None and parser.splits_reasoning and len(completion.token_ids) > MANY_TOKENS


class _Sink:
    """Sends text in the step in which it comes, while the socket takes it: no task is woken for a token."""

    __slots__ = ("_body", "_frames", "_generation", "_has_logprobs")

    def __init__(self, generation: Generation, frames: ChatFrames, body: Body) -> None:
        self._generation = generation
        self._has_logprobs = generation.params.logprobs is not None
        self._frames = frames
        self._body = body

    def take_and_send(self) -> bool:
        """Send the unread text; False if it has to wait for the reading task."""
        if not self._body.can_send_now:
            return False
        frames, generation = self._frames, self._generation
        delta = (
            frames.delta(generation.read_nowait()) if self._has_logprobs else frames.text(generation.read_text_nowait())
        )
        if delta:
            self._body.send_now(delta)
        return True


def in_fields(error: RequestRejected, names: Mapping[str, str]) -> RequestRejected:
    """Return the error with the client's names, by the engine's."""
    for name, field in names.items():
        if error.message.startswith(name):
            param = None if error.param is None else error.param.replace(name, field, 1)
            return RequestRejected(error.code, error.message.replace(name, field, 1), param=param)
    return error


def finished(generation: Generation) -> Completion:
    """Return the completion of a request that is over. Raises EngineError or RequestAborted."""
    completion = generation.completion
    if completion.finish_reason is FinishReason.ABORT:
        raise RequestAborted(completion.cause)
    return completion
