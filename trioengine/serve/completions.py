"""POST /v1/completions: choices for each prompt, which the model continues as it is, without a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import MappingProxyType

from trioengine.actors.engine import Engine
from trioengine.core.types import Completion, Usage
from trioengine.serve.asked_model import ServedNames
from trioengine.serve.chat_response import KEEP_ALIVE
from trioengine.serve.choices import Choices
from trioengine.serve.completion_logprobs import PromptText
from trioengine.serve.completion_request import FIELDS, CompletionRequest, parse_completion_request
from trioengine.serve.completion_response import CompletionFrames, CompletionShape
from trioengine.serve.errors import ClientError
from trioengine.serve.http import STREAM_HEADERS, Headers, HttpRequest, StreamingResponse
from trioengine.serve.limits import InFlight
from trioengine.serve.parsing import LONG_JSON, in_thread_if
from trioengine.serve.requests import CompletionBody
from trioengine.serve.responses import TextCompletion, TextCompletionChunk
from trioengine.serve.routes import Operation
from trioengine.serve.shown import Result, fingerprint
from trioengine.serve.unknown_fields import UnknownFields
from trioengine.text.raw_prompt import raw_token_ids

OPERATION = Operation(
    "Continue prompts as they are, whole or streamed",
    body=CompletionBody,
    example={"prompt": "The capital of France is", "max_tokens": 16},
    responses={200: TextCompletion},
    events=TextCompletionChunk,
    errors=(404, 409, 422, 429),
)
MAX_CHOICES = 128
MAX_SCORES = 262_144  # log-probabilities of prompts in a response: they are rendered at once


class Completions:
    """The handler of the route."""

    def __init__(self, engine: Engine, model: str, in_flight: InFlight, unknown_fields: UnknownFields) -> None:
        self._engine = engine
        self._model = model
        self._in_flight = in_flight
        self._unknown_fields = unknown_fields

    async def __call__(self, request: HttpRequest) -> StreamingResponse:
        is_long = len(request.body) > LONG_JSON
        parsed = await in_thread_if(is_long, self._engine.ports, partial(self._parse, request.body))
        given, prompts, texts = parsed
        headers = self._unknown_fields.report(given.unknown, FIELDS)
        answers = _Answers(self._engine, self._in_flight, given, prompts, texts, request, headers)
        if given.stream:
            return StreamingResponse(answers.stream, headers=STREAM_HEADERS + headers, keep_alive=KEEP_ALIVE)
        return StreamingResponse(answers.whole)

    def _parse(self, body: bytes) -> tuple[CompletionRequest, list[list[int]], list[PromptText]]:
        """Return the request, the token ids of its prompts, and their texts if the response depends on them."""
        given = parse_completion_request(body, ServedNames.of(self._engine, self._model))
        count = len(given.prompts)
        if count * given.n > MAX_CHOICES:
            message = f"prompt has {count} prompts; at most {MAX_CHOICES // given.n} are accepted"
            if given.n > 1:
                message += f" with n {given.n}"
            raise ClientError("invalid_value", message, param="prompt")
        names = ["prompt"] if len(given.prompts) == 1 else [f"prompt[{index}]" for index in range(len(given.prompts))]
        max_tokens = given.params.max_tokens
        tokenizer, limits = self._engine.tokenizer, self._engine.limits
        prompts = [
            raw_token_ids(prompt, name, tokenizer, limits, max_tokens)
            for prompt, name in zip(given.prompts, names, strict=True)
        ]
        needs_texts = given.echo or given.params.logprobs is not None
        num_scores = sum(map(len, prompts)) * (1 + (given.params.prompt_logprobs or 0))
        if given.params.prompt_logprobs is not None and num_scores > MAX_SCORES:
            message = f"prompt: {num_scores} log-probabilities are to be echoed; at most {MAX_SCORES} are accepted"
            raise ClientError("invalid_value", message, param="prompt")
        return given, prompts, [self._text(prompt) for prompt in given.prompts] if needs_texts else []

    def _text(self, prompt: str | list[int]) -> PromptText:
        """Return the text of a prompt that `raw_token_ids` accepts."""
        tokenizer = self._engine.tokenizer.tokenizer
        if isinstance(prompt, str):
            return PromptText(prompt, len(tokenizer.surroundings[0]))
        return PromptText(tokenizer.decode(prompt, skip_special_tokens=False))


class _Answers(Choices):
    """The answers of one request."""

    _names = MappingProxyType({"grammar": "structured_outputs"})

    def __init__(
        self,
        engine: Engine,
        in_flight: InFlight,
        given: CompletionRequest,
        prompts: Sequence[list[int]],
        texts: Sequence[PromptText],
        request: HttpRequest,
        headers: Headers,
    ) -> None:
        self._shape = CompletionShape(
            given.model.name,
            engine.tokenizer.tokenizer,
            fingerprint(engine, given.model.name),
            given.shown,
            given.params.skip_special_tokens,
            has_logprobs=given.params.logprobs is not None,
            echo=given.echo,
            prompts=texts,
            n=given.n,
        )
        super().__init__(engine, in_flight, given, prompts, self._shape.id, request, headers)
        self._keeps_text = bool(texts)

    def _rendered(self, results: Sequence[Result], usage: Usage) -> bytes:
        return self._shape.whole(results, usage)

    def _frames(self, index: int) -> CompletionFrames:
        return CompletionFrames(self._shape, index)

    def _last_frame(self, usage: Usage, completions: Sequence[Completion]) -> bytes:
        return self._shape.last_frame(usage, completions)

    @property
    def _needs_prompt(self) -> bool:
        return super()._needs_prompt or self._shape.has_prompt_logprobs
