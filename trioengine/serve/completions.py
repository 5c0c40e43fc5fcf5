"""POST /v1/completions: one answer for each prompt, which the model continues as it is, without a chat template."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import trio

from trioengine.actors.engine import Engine
from trioengine.actors.session import Session
from trioengine.core.errors import EngineError, RequestRejected
from trioengine.core.types import Cause, Completion, Usage
from trioengine.serve.access_log import REQUEST_ID, SESSION
from trioengine.serve.auth import salted
from trioengine.serve.body import Body
from trioengine.serve.chat import finished, in_fields
from trioengine.serve.chat_response import DONE, KEEP_ALIVE, error_frames, usage_json
from trioengine.serve.completion_request import FIELDS, CompletionRequest, parse_completion_request
from trioengine.serve.errors import ClientError, RequestAborted, problem_of
from trioengine.serve.http import STREAM_HEADERS, Headers, HttpRequest, HttpResponse, StreamingResponse
from trioengine.serve.ids import new_id, unix_time
from trioengine.serve.limits import InFlight
from trioengine.serve.parsing import LONG_JSON, in_thread_if
from trioengine.serve.requests import CompletionBody
from trioengine.serve.responses import TextCompletion, TextCompletionChunk
from trioengine.serve.routes import Operation
from trioengine.serve.unknown_fields import UnknownFields
from trioengine.text.conversation import check_length

logger = logging.getLogger("trioengine")
OPERATION = Operation(
    "Continue prompts as they are, whole or streamed",
    body=CompletionBody,
    example={"prompt": "The capital of France is", "max_tokens": 16},
    responses={200: TextCompletion},
    events=TextCompletionChunk,
    errors=(404, 409, 422, 429),
)
MAX_PROMPTS = 128


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
        if len(given.prompts) > MAX_PROMPTS:
            message = f"prompt has {len(given.prompts)} prompts; at most {MAX_PROMPTS} are accepted"
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

    def whole(self, completions: Sequence[Completion]) -> bytes:
        choices = [_choice(index, each.text, each.finish_reason.value) for index, each in enumerate(completions)]
        return json.dumps({**self._head(choices), "usage": _usage(completions)}).encode()

    def frame(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return f"data: {json.dumps({**self._head(choices), **more})}\n\n".encode()

    def _head(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}
        return {**head, "choices": choices}


def _choice(index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


def _usage(completions: Sequence[Completion]) -> dict[str, Any]:
    """The sums over all answers."""
    usages = [completion.usage for completion in completions]
    return usage_json(
        Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in usages),
            completion_tokens=sum(usage.completion_tokens for usage in usages),
            cached_tokens=sum(usage.cached_tokens for usage in usages),
            queue_time=0.0,
            prefill_time=0.0,
        )
    )


class _Answers:
    """The answers of one request, each in a session of its own. All end when one of them fails."""

    def __init__(
        self,
        engine: Engine,
        in_flight: InFlight,
        given: CompletionRequest,
        prompts: list[list[int]],
        model: str,
        request: HttpRequest,
        headers: Headers,
    ) -> None:
        self._engine = engine
        self._in_flight = in_flight
        self._prompts = prompts
        self._params = salted(given.params, request.cache_salt)
        self._include_usage = given.include_usage
        self._request_id = given.request_id
        self._shape = _Shape(model)
        self._headers = headers  # of a whole response
        self._sessions: list[Session] = []
        self._completions: dict[int, Completion] = {}
        self._failure: Exception | None = None  # the first one
        self._first_admitted = trio.Event()  # the other prompts wait for slots behind the first one

    async def whole(self, body: Body) -> HttpResponse:
        """Run all prompts, and return their answers in one piece."""
        await self._run_all(body, streams=False)
        return HttpResponse(200, self._shape.whole(self._in_order), headers=self._headers)

    async def stream(self, body: Body) -> None:
        """Run all prompts, and send chunks as they come. Errors after the first piece are sent in the stream."""
        try:
            await self._run_all(body, streams=True)
        except Exception as exc:
            if not body.started:
                raise
            if not isinstance(exc, (ClientError, EngineError, RequestAborted)):
                logger.exception("%s crashed", self._shape.id)
            await body.send(error_frames(problem_of(exc)), is_last=True)
            return
        usage = self._shape.frame([], usage=_usage(self._in_order)) if self._include_usage else b""
        await body.send(usage + DONE, is_last=True)

    @property
    def _in_order(self) -> list[Completion]:
        return [self._completions[index] for index in range(len(self._completions))]

    async def _run_all(self, body: Body, *, streams: bool) -> None:
        SESSION.set(self._shape.id)  # until the connection's next request, so that the access log has it as well
        body.on_disconnect = partial(self._end_all, Cause.DISCONNECT)
        prompts, self._prompts = self._prompts, []
        async with trio.open_nursery() as nursery:
            for index, prompt in enumerate(prompts):
                nursery.start_soon(self._run, index, prompt, body if streams else None)
        if self._failure is not None:
            raise self._failure

    def _end_all(self, cause: Cause) -> None:
        for session in self._sessions:
            session.end(cause)

    async def _run(self, index: int, prompt: list[int], body: Body | None) -> None:
        """Answer one prompt; its failure ends the others, between two pieces."""
        try:
            if index:
                await self._first_admitted.wait()
            if self._failure is None:
                await self._answer(index, prompt, body)
        except Exception as exc:
            self._failure = self._failure or exc
            self._end_all(Cause.CLIENT)
        finally:
            self._first_admitted.set()

    async def _answer(self, index: int, prompt: list[int], body: Body | None) -> None:
        ids = filter(None, (self._shape.id, REQUEST_ID.get(), self._request_id))  # for /abort_request
        label = f"{self._shape.id}-{index}"
        wait = None if index else False  # the others wait for slots where the first one got one
        try:
            session = self._engine.open_session(label=label, wait=wait)
            self._sessions.append(session)
            async with session:
                generation = session.generate(prompt, self._params, wait=wait)
                with self._in_flight.running(ids, generation):
                    async with generation:
                        self._first_admitted.set()
                        if body is None:
                            await generation.wait_settled()
                        else:
                            async for chunk in generation:
                                await self._send(body, index, chunk.text)
                        completion = finished(generation)
        except RequestRejected as exc:
            raise in_fields(exc, {"grammar": "structured_outputs"}) from None
        self._completions[index] = completion
        if body is not None:
            await self._send(body, index, "", completion.finish_reason.value)

    async def _send(self, body: Body, index: int, text: str, finish_reason: str | None = None) -> None:
        if text or finish_reason is not None:
            more = {"usage": None} if self._include_usage else {}
            await body.send(self._shape.frame([_choice(index, text, finish_reason)], **more))
