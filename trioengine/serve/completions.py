"""POST /v1/completions: choices for each prompt, which the model continues as it is, without a chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

from trioengine.actors.engine import Engine
from trioengine.core.errors import RequestRejected
from trioengine.core.types import Chunk, Completion, Usage
from trioengine.serve.chat_response import KEEP_ALIVE, usage_json
from trioengine.serve.choices import Choices
from trioengine.serve.completion_request import FIELDS, CompletionRequest, parse_completion_request
from trioengine.serve.errors import ClientError
from trioengine.serve.http import STREAM_HEADERS, Headers, HttpRequest, StreamingResponse
from trioengine.serve.ids import new_id, unix_time
from trioengine.serve.limits import InFlight
from trioengine.serve.parsing import LONG_JSON, in_thread_if
from trioengine.serve.requests import CompletionBody
from trioengine.serve.responses import TextCompletion, TextCompletionChunk
from trioengine.serve.routes import Operation
from trioengine.serve.unknown_fields import UnknownFields
from trioengine.text.conversation import check_length

OPERATION = Operation(
    "Continue prompts as they are, whole or streamed",
    body=CompletionBody,
    example={"prompt": "The capital of France is", "max_tokens": 16},
    responses={200: TextCompletion},
    events=TextCompletionChunk,
    errors=(404, 409, 422, 429),
)
MAX_CHOICES = 128


class Completions:
    """The handler of the route."""

    def __init__(self, engine: Engine, model: str, in_flight: InFlight, unknown_fields: UnknownFields) -> None:
        self._engine = engine
        self._model = model
        self._in_flight = in_flight
        self._unknown_fields = unknown_fields

    async def __call__(self, request: HttpRequest) -> StreamingResponse:
        is_long = len(request.body) > LONG_JSON
        given, prompts = await in_thread_if(is_long, self._engine.ports, partial(self._parse, request.body))
        headers = self._unknown_fields.report(given.unknown, FIELDS)
        answers = _Answers(self._engine, self._in_flight, given, prompts, self._model, request, headers)
        if given.stream:
            return StreamingResponse(answers.stream, headers=STREAM_HEADERS + headers, keep_alive=KEEP_ALIVE)
        return StreamingResponse(answers.whole)

    def _parse(self, body: bytes) -> tuple[CompletionRequest, list[list[int]]]:
        given = parse_completion_request(body, self._model)
        count = len(given.prompts)
        if count * given.n > MAX_CHOICES:
            message = f"prompt has {count} prompts; at most {MAX_CHOICES // given.n} are accepted"
            if given.n > 1:
                message += f" with n {given.n}"
            raise ClientError("invalid_value", message, param="prompt")
        names = ["prompt"] if len(given.prompts) == 1 else [f"prompt[{index}]" for index in range(len(given.prompts))]
        return given, [self._token_ids(prompt, name) for prompt, name in zip(given.prompts, names, strict=True)]

    def _token_ids(self, prompt: str | list[int], name: str) -> list[int]:
        """Return the token ids of a prompt, which the engine will take. Raises RequestRejected with this name."""
        tokenizer, limits = self._engine.tokenizer, self._engine.limits
        try:
            check_length(prompt, limits.max_model_len, tokenizer)
        except RequestRejected as exc:
            raise RequestRejected(exc.code, exc.message.replace("prompt", name, 1), param=name) from None
        ids = prompt if isinstance(prompt, list) else tokenizer.tokenizer.surrounded(tokenizer.encode(prompt))
        if not ids:
            raise RequestRejected("empty_prompt", f"{name} is empty", param=name)
        if len(ids) >= limits.max_model_len:
            message = f"{name}: {len(ids)} tokens leave no room for an answer in a context of {limits.max_model_len}"
            raise RequestRejected("context_length_exceeded", message, param=name)
        if max(ids) >= limits.vocab_size:
            message = f"{name} must hold token ids from 0 to {limits.vocab_size - 1}, got {max(ids)}"
            raise RequestRejected("invalid_value", message, param=name)
        return ids


@dataclass(frozen=True, slots=True)
class _Shape:
    """The fields that all parts of one response have in common."""

    model: str
    id: str = field(default_factory=lambda: new_id("cmpl-"))
    created: int = field(default_factory=unix_time)

    def whole(self, completions: Sequence[Completion], usage: Usage) -> bytes:
        choices = [_choice(index, each.text, each.finish_reason.value) for index, each in enumerate(completions)]
        return json.dumps({**self.head(choices), "usage": usage_json(usage)}).encode()

    def frame(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return f"data: {json.dumps({**self.head(choices), **more})}\n\n".encode()

    def head(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}
        return {**head, "choices": choices}


def _choice(index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


class _Frames:
    """Renders the events of one choice of a stream."""

    __slots__ = ("_index", "_more", "_shape", "opening", "reads_text_only")

    def __init__(self, shape: _Shape, index: int, *, include_usage: bool) -> None:
        self._shape = shape
        self._index = index
        self._more: dict[str, Any] = {"usage": None} if include_usage else {}
        self.opening = b""
        self.reads_text_only = True

    def text(self, text: str) -> bytes:
        return self._shape.frame([_choice(self._index, text, None)], **self._more) if text else b""

    def delta(self, chunk: Chunk) -> bytes:
        return self.text(chunk.text)

    def end(self, completion: Completion) -> bytes:
        return self._shape.frame([_choice(self._index, "", completion.finish_reason.value)], **self._more)


class _Answers(Choices):
    """The answers of one request."""

    _names = MappingProxyType({"grammar": "structured_outputs"})

    def __init__(
        self,
        engine: Engine,
        in_flight: InFlight,
        given: CompletionRequest,
        prompts: Sequence[list[int]],
        model: str,
        request: HttpRequest,
        headers: Headers,
    ) -> None:
        self._shape = _Shape(model)
        super().__init__(engine, in_flight, given, prompts, self._shape.id, request, headers)

    def _rendered(self, completions: Sequence[Completion], usage: Usage) -> bytes:
        return self._shape.whole(completions, usage)

    def _frames(self, index: int) -> _Frames:
        return _Frames(self._shape, index, include_usage=self._include_usage)

    def _usage_frame(self, usage: Usage) -> bytes:
        return self._shape.frame([], usage=usage_json(usage))
