"""POST /v1/completions: choices for each prompt, which the model continues as it is, without a chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from json.encoder import encode_basestring_ascii  # json.dumps of a string, without its set-up
from types import MappingProxyType
from typing import Any

from trioengine.actors.engine import Engine
from trioengine.core.errors import RequestRejected
from trioengine.core.types import Chunk, Completion, Usage
from trioengine.serve.chat_response import KEEP_ALIVE
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
from trioengine.serve.shown import Result, Shown, fingerprint, running_usage, timings_json, usage_json
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
    fingerprint: str
    shown: Shown
    id: str = field(default_factory=lambda: new_id("cmpl-"))
    created: int = field(default_factory=unix_time)

    def whole(self, results: Sequence[Result], usage: Usage) -> bytes:
        choices = [self._choice(index, *result) for index, result in enumerate(results)]
        return json.dumps(self._ending(choices, usage, [result.completion for result in results])).encode()

    def last_frame(self, usage: Usage, completions: Sequence[Completion]) -> bytes:
        """Render the event without choices that has the usage and the timings; b"" if neither is asked for."""
        is_due = self.shown.usage or self.shown.timings
        return f"data: {json.dumps(self._ending([], usage, completions))}\n\n".encode() if is_due else b""

    def head(self) -> dict[str, Any]:
        head = {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}
        return {**head, "system_fingerprint": self.fingerprint}

    def _ending(self, choices: list[dict[str, Any]], usage: Usage, completions: Sequence[Completion]) -> dict[str, Any]:
        shown = {**self.head(), "choices": choices, "usage": usage_json(usage)}
        return {**shown, "timings": timings_json(completions)} if self.shown.timings else shown

    def _choice(self, index: int, completion: Completion, prompt_token_ids: Sequence[int]) -> dict[str, Any]:
        choice = {
            "index": index,
            "text": completion.text,
            "logprobs": None,
            "finish_reason": completion.finish_reason.value,
            "stop_reason": completion.stop_reason,
        }
        ids = {"token_ids": completion.token_ids, "prompt_token_ids": prompt_token_ids}
        return {**choice, **ids} if self.shown.token_ids else choice


class _Frames:
    """Renders the events of one choice of a stream; the parts that they have in common are rendered once."""

    __slots__ = ("_after", "_before", "_num_prompt_tokens", "_num_tokens", "_prompt", "_shown", "reads_text_only")

    def __init__(self, shape: _Shape, index: int) -> None:
        self._shown = shape.shown
        self._num_prompt_tokens = self._num_tokens = 0
        self._prompt: Sequence[int] | None = None  # until it was shown, if asked for
        head = json.dumps(shape.head())[:-1]
        self._before = f'data: {head}, "choices": [{{"index": {index}, "text": '.encode()
        self._after = b', "logprobs": null, "finish_reason": null}]'
        self._after += b', "usage": null}\n\n' if shape.shown.usage else b"}\n\n"
        self.reads_text_only = not (shape.shown.token_ids or shape.shown.running_usage)

    def opening(self, prompt_token_ids: Sequence[int]) -> bytes:
        self._num_prompt_tokens = len(prompt_token_ids)
        self._prompt = prompt_token_ids if self._shown.token_ids else None
        return b""

    def text(self, text: str) -> bytes:
        return self._before + encode_basestring_ascii(text).encode() + self._after if text else b""

    def delta(self, chunk: Chunk) -> bytes:
        if self.reads_text_only:
            return self.text(chunk.text)
        self._num_tokens += len(chunk.token_ids)
        is_shown = chunk.text or (self._shown.token_ids and chunk.token_ids)
        return self._frame(chunk.text, chunk.token_ids) if is_shown else b""

    def end(self, completion: Completion) -> bytes:
        return self._frame("", (), completion)

    def _frame(self, text: str, token_ids: Sequence[int], completion: Completion | None = None) -> bytes:
        """Render an event; the last one has the `completion`."""
        choice: dict[str, Any] = {"logprobs": None, "finish_reason": None}
        if completion is not None:
            choice |= {"finish_reason": completion.finish_reason.value, "stop_reason": completion.stop_reason}
        if self._shown.token_ids:
            choice["token_ids"] = token_ids
        if self._prompt is not None:
            choice["prompt_token_ids"], self._prompt = self._prompt, None
        usage = ""
        if self._shown.running_usage:
            usage = f', "usage": {json.dumps(running_usage(self._num_prompt_tokens, self._num_tokens))}'
        elif self._shown.usage:
            usage = ', "usage": null'
        shown = f"{encode_basestring_ascii(text)}, {json.dumps(choice)[1:]}]{usage}}}\n\n"
        return self._before + shown.encode()


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
        self._shape = _Shape(model, fingerprint(engine, model), given.shown)
        super().__init__(engine, in_flight, given, prompts, self._shape.id, request, headers)

    def _rendered(self, results: Sequence[Result], usage: Usage) -> bytes:
        return self._shape.whole(results, usage)

    def _frames(self, index: int) -> _Frames:
        return _Frames(self._shape, index)

    def _last_frame(self, usage: Usage, completions: Sequence[Completion]) -> bytes:
        return self._shape.last_frame(usage, completions)
