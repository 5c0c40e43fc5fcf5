"""POST /v1/chat/completions: a conversation is answered by one choice, or by several."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from trioengine.actors.engine import Engine
from trioengine.core.types import Chunk, Completion, Usage
from trioengine.serve.chat_request import FIELDS, ChatRequest, ServedModel, parse_chat_request
from trioengine.serve.chat_response import KEEP_ALIVE, ChatFrames, ChatShape
from trioengine.serve.choices import Choice, Choices
from trioengine.serve.http import STREAM_HEADERS, Headers, HttpRequest, StreamingResponse
from trioengine.serve.limits import InFlight
from trioengine.serve.parsing import LONG_JSON, in_thread_if
from trioengine.serve.requests import ChatCompletionRequest
from trioengine.serve.responses import ChatCompletion, ChatCompletionChunk
from trioengine.serve.routes import Operation
from trioengine.serve.shown import Result, fingerprint
from trioengine.serve.unknown_fields import UnknownFields
from trioengine.text.reasoning import AnswerParser, ReasoningForm
from trioengine.text.tool_calls import ToolForm

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
        completion = _ChatCompletion(self._engine, self._in_flight, chat, request, headers)
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
        request: HttpRequest,
        headers: Headers,
    ) -> None:
        self._shape = ChatShape(
            chat.model.name,
            engine.runtime.files.model.tokenizer,
            chat.params.logprobs,
            fingerprint(engine, chat.model.name),
            chat.shown,
            chat.params.skip_special_tokens,
        )
        super().__init__(
            engine, in_flight, chat, [chat.messages], self._shape.id, request, headers, chat.variables or None
        )
        self._form = chat.answer_form
        self._continued = chat.continued
        self._in_reasoning = False  # the prompt has opened it; known once the engine has the prompt
        self._parsers: dict[int, AnswerParser | None] = {}
        self._names = {"prompt": "messages", "grammar": chat.grammar_field}

    def _on_admitted(self, choice: Choice) -> None:
        super()._on_admitted(choice)
        if choice.is_first and (tags := self._form.reasoning) is not None:
            prompt = self._engine.runtime.sessions.prompt_text(choice.session.id)[-PROMPT_END:]
            self._in_reasoning = tags.is_open_after(prompt, self._continued)

    def _rendered(self, results: Sequence[Result], usage: Usage) -> bytes:
        return self._shape.whole(results, usage, [self._parser() for _ in results])

    def _frames(self, index: int) -> ChatFrames:
        parser = self._parsers[index] = self._parser()
        return ChatFrames(self._shape, index, parser)

    def _last_frame(self, usage: Usage, completions: Sequence[Completion]) -> bytes:
        return self._shape.last_frame(usage, completions, [self._parsers[index] for index in range(len(completions))])

    def _takes_long(self, parts: Sequence[Chunk | Completion]) -> bool:
        """Whether there are many log-probabilities, or long answers whose reasoning is counted."""
        num_tokens = 0 if self._form.reasoning is None else sum(len(each.token_ids) for each in parts)
        return num_tokens > MANY_TOKENS or super()._takes_long(parts)

    def _parser(self) -> AnswerParser | None:
        """Return a parser of an answer; None for one that is a text and nothing else."""
        return None if self._form.is_plain else AnswerParser(self._form, in_reasoning=self._in_reasoning)
