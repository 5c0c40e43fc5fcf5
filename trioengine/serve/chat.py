"""POST /v1/chat/completions: a conversation is answered by one choice, or by several."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from trioengine.actors.engine import Engine
from trioengine.core.types import Completion, Usage
from trioengine.serve.chat_request import FIELDS, ChatRequest, ServedModel, parse_chat_request
from trioengine.serve.chat_response import KEEP_ALIVE, ChatFrames, ChatShape
from trioengine.serve.choices import Choices
from trioengine.serve.http import STREAM_HEADERS, Headers, HttpRequest, StreamingResponse
from trioengine.serve.limits import InFlight
from trioengine.serve.parsing import LONG_JSON, in_thread_if
from trioengine.serve.requests import ChatCompletionRequest
from trioengine.serve.responses import ChatCompletion, ChatCompletionChunk
from trioengine.serve.routes import Operation
from trioengine.serve.shown import Result, fingerprint
from trioengine.serve.unknown_fields import UnknownFields
from trioengine.text.tool_calls import ToolForm

OPERATION = Operation(
    "Answer a conversation, whole or streamed",
    body=ChatCompletionRequest,
    example={"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32, "stream": True},
    responses={200: ChatCompletion},
    events=ChatCompletionChunk,
    errors=(404, 409, 422, 429),
)


class ChatCompletions:
    """The handler of the route."""

    def __init__(
        self,
        engine: Engine,
        model: str,
        in_flight: InFlight,
        unknown_fields: UnknownFields,
        tool_form: ToolForm | None = None,
    ) -> None:
        """`tool_form` is the form of tool calls; None: as the chat template shows it."""
        self._engine = engine
        self._model = model
        self._in_flight = in_flight
        self._unknown_fields = unknown_fields
        self._tool_form = tool_form

    async def __call__(self, request: HttpRequest) -> StreamingResponse:
        model = ServedModel.of(self._engine, self._model, self._tool_form)
        parse = partial(parse_chat_request, request.body, model)
        chat = await in_thread_if(len(request.body) > LONG_JSON, self._engine.ports, parse)
        headers = self._unknown_fields.report(chat.unknown, FIELDS)
        completion = _ChatCompletion(self._engine, self._in_flight, chat, self._model, request, headers)
        if chat.stream:
            return StreamingResponse(completion.stream, headers=STREAM_HEADERS + headers, keep_alive=KEEP_ALIVE)
        return StreamingResponse(completion.whole)


class _ChatCompletion(Choices):
    """One completion in progress."""

    def __init__(
        self,
        engine: Engine,
        in_flight: InFlight,
        chat: ChatRequest,
        model: str,
        request: HttpRequest,
        headers: Headers,
    ) -> None:
        self._shape = ChatShape(
            model, engine.runtime.model.tokenizer, chat.params.logprobs, fingerprint(engine, model), chat.shown
        )
        super().__init__(
            engine, in_flight, chat, [chat.messages], self._shape.id, request, headers, chat.variables or None
        )
        self._tool_form = chat.tool_form
        self._names = {"prompt": "messages", "grammar": chat.grammar_field}

    def _rendered(self, results: Sequence[Result], usage: Usage) -> bytes:
        return self._shape.whole(results, usage, self._tool_form)

    def _frames(self, index: int) -> ChatFrames:
        return ChatFrames(self._shape, index, tool_form=self._tool_form)

    def _last_frame(self, usage: Usage, completions: Sequence[Completion]) -> bytes:
        return self._shape.last_frame(usage, completions)
