"""POST /v1/embeddings: the vectors of texts, as OpenAI has them."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import Any

from trioengine.actors.embedding import EmbeddingCall, embedding_size, input_token_ids, listed
from trioengine.actors.engine import Engine
from trioengine.actors.generation import Generation
from trioengine.aio.concurrency import NEVER
from trioengine.core.embedding import bytes_of, check_dimensions, vector_of
from trioengine.core.errors import SessionEnded
from trioengine.core.sampling_params import EMBEDDING, replace_valid
from trioengine.core.types import Cause
from trioengine.serve.asked_model import ServedNames
from trioengine.serve.auth import salted
from trioengine.serve.body import Body
from trioengine.serve.chat_request import HARMLESS
from trioengine.serve.completion_request import prompts_of
from trioengine.serve.errors import RequestAborted
from trioengine.serve.http import Headers, HttpRequest, HttpResponse, StreamingResponse
from trioengine.serve.ids import new_id
from trioengine.serve.limits import InFlight
from trioengine.serve.log_fields import REQUEST_ID, SESSION
from trioengine.serve.parsing import LONG_JSON, in_thread_if, load_body
from trioengine.serve.reading import check_supported, read, unknown_names
from trioengine.serve.requests import EmbeddingsRequest
from trioengine.serve.responses import EmbeddingList
from trioengine.serve.routes import Operation
from trioengine.serve.unknown_fields import UnknownFields

OPERATION = Operation(
    "Embed texts: a vector for each, by an embedding model",
    body=EmbeddingsRequest,
    example={"input": ["What is the capital of France?", "Paris"]},
    responses={200: EmbeddingList},
    errors=(404, 409, 429),
)
MANY_NUMBERS = 10_000  # in a response; more are rendered in a thread
_SIZES = {"float": 17, "base64": 16 / 3}  # bytes of a number in a response, at most
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {"messages": (), "truncate_prompt_tokens": ()}
FIELDS = frozenset({*EmbeddingsRequest.__struct_encode_fields__, *HARMLESS, *_UNSUPPORTED})


class Embeddings:
    """The handler of the route."""

    def __init__(self, engine: Engine, model: str, in_flight: InFlight, unknown_fields: UnknownFields) -> None:
        self._engine = engine
        self._model = model
        self._in_flight = in_flight
        self._unknown_fields = unknown_fields

    async def __call__(self, request: HttpRequest) -> StreamingResponse:
        is_long = len(request.body) > LONG_JSON
        given, prompts, unknown = await in_thread_if(is_long, self._engine.ports, partial(self._parse, request.body))
        headers = self._unknown_fields.report(unknown, FIELDS)
        answer = _Answer(self._engine, self._model, self._in_flight, given, prompts, request, headers)
        return StreamingResponse(answer.write)

    def _parse(self, body: bytes) -> tuple[EmbeddingsRequest, list[list[int]], tuple[str, ...]]:
        """Return the request, the token ids of its inputs, and unknown fields. Raises ClientError, RequestRejected."""
        fields, engine = load_body(body), self._engine
        given = read(fields, EmbeddingsRequest)
        ServedNames(self._model, {}).asked(given.model)
        check_supported(fields, _UNSUPPORTED)
        check_dimensions(given.dimensions, embedding_size(engine.runtime))
        inputs = listed(prompts_of(given.input, "input"), "input")
        prompts = input_token_ids(inputs, "input", engine.tokenizer, engine.limits)
        return given, prompts, unknown_names(fields, FIELDS)


class _Answer:
    """One request in progress."""

    def __init__(
        self,
        engine: Engine,
        model: str,
        in_flight: InFlight,
        given: EmbeddingsRequest,
        prompts: Sequence[list[int]],
        request: HttpRequest,
        headers: Headers,
    ) -> None:
        self._engine = engine
        self._model = model
        self._in_flight = in_flight
        self._dimensions = given.dimensions
        self._format = given.encoding_format or "float"
        self._request_id = given.request_id
        self._num_tokens = sum(map(len, prompts))
        self._num_numbers = len(prompts) * (given.dimensions or embedding_size(engine.runtime))
        self._id = new_id("embd-")
        self._held = request.held
        self._sessions = request.sessions
        self._headers = headers
        params = replace_valid(EMBEDDING, cache_salt=given.cache_salt or "")
        self._call = EmbeddingCall(
            engine.runtime,
            prompts,
            deadline=NEVER,
            wait=False,
            label=self._id,
            params=salted(params, request.cache_salt),
            around=self._counted,
        )

    async def write(self, body: Body) -> HttpResponse:
        """Run all inputs. A client that disconnects ends them."""
        SESSION.set(self._id)
        body.on_disconnect = partial(self._call.end, Cause.DISCONNECT)
        if self._held is not None:
            self._held.take(round(self._num_numbers * _SIZES[self._format]))  # the response, until it is sent
        try:
            vectors = await self._call.run()
        except SessionEnded as exc:
            raise RequestAborted(Cause(exc.cause)) from None
        render = partial(self._rendered, vectors)
        content = await in_thread_if(self._num_numbers > MANY_NUMBERS, self._engine.ports, render)
        return HttpResponse(200, content, headers=self._headers)

    @asynccontextmanager
    async def _counted(self, generation: Generation) -> AsyncIterator[None]:
        """Count a request as a session of its key, and register it under the ids by which it can be aborted."""
        ids = filter(None, (self._id, REQUEST_ID.get(), self._request_id))
        async with nullcontext() if self._sessions is None else self._sessions.using():
            with self._in_flight.running(ids, generation):
                yield

    def _rendered(self, vectors: Sequence[bytes]) -> bytes:
        data = ", ".join(
            f'{{"object": "embedding", "index": {index}, "embedding": {self._vector(vector)}}}'
            for index, vector in enumerate(vectors)
        )
        usage = {"prompt_tokens": self._num_tokens, "total_tokens": self._num_tokens}
        end = json.dumps({"model": self._model, "usage": usage})[1:]
        return f'{{"object": "list", "data": [{data}], {end}'.encode()

    def _vector(self, data: bytes) -> str:
        vector = vector_of(data, self._dimensions)
        if self._format == "base64":
            return f'"{b64encode(bytes_of(vector)).decode()}"'
        return f"[{', '.join(map('{:.9g}'.format, vector))}]"  # nine digits are a float32 exactly
