"""Embeddings of texts: each is a request in a session of its own, and a call has some of them under way at a time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, TypeAlias

import trio

from trioengine.actors.admission import admit
from trioengine.actors.generation import Generation
from trioengine.actors.request import Request
from trioengine.actors.runtime import Runtime
from trioengine.actors.session_actor import SessionActor
from trioengine.actors.session_opening import SessionOpening
from trioengine.aio.concurrency import Deadline
from trioengine.core.checks import BYTES, kind_of, rejected
from trioengine.core.embedding import MAX_INPUTS, Embeddings, check_dimensions, vector_of
from trioengine.core.errors import RequestRejected, SessionEnded
from trioengine.core.messages import Ready
from trioengine.core.sampling_params import EMBEDDING, SamplingParams
from trioengine.core.types import Cause, Usage
from trioengine.text.chat_tokenizer import ChatTokenizer
from trioengine.text.raw_prompt import raw_token_ids

EmbeddingInput: TypeAlias = str | Sequence[int]
Around: TypeAlias = Callable[[Generation], AbstractAsyncContextManager[None]]
AT_ONCE = 64  # inputs of a call that have a slot, or wait for one


def embedding_size(runtime: Runtime) -> int:
    """Return the numbers in an embedding. Raises RequestRejected if the model generates texts instead."""
    size = runtime.files.model.embedding_size
    if size is None:
        raise RequestRejected("embeddings_not_supported", "the model generates texts: it is not an embedding model")
    return size


def listed(inputs: EmbeddingInput | Sequence[EmbeddingInput], name: str = "inputs") -> Sequence[Any]:
    """Return the inputs, unchecked: one text, the token ids of one, or a list of such. Raises RequestRejected."""
    if isinstance(inputs, BYTES) or not isinstance(inputs, Sequence):
        raise rejected(name, f"must be a text, token ids, or a list of these, got {kind_of(inputs)}")
    if isinstance(inputs, str) or (inputs and isinstance(inputs[0], int)):
        return (inputs,)
    if not 1 <= len(inputs) <= MAX_INPUTS:
        raise rejected(name, f"must have 1 to {MAX_INPUTS} entries, got {len(inputs)}")
    return inputs


def input_token_ids(
    inputs: Sequence[EmbeddingInput], name: str, tokenizer: ChatTokenizer, limits: Ready
) -> list[list[int]]:
    """Return the token ids of each input. Raises RequestRejected, with the index of the input if there are several."""
    found: list[list[int]] = []
    for index, given in enumerate(inputs):
        where = name if len(inputs) == 1 else f"{name}[{index}]"
        if isinstance(given, str) and not given:
            raise RequestRejected("empty_prompt", f"{where} is empty", param=where)
        found.append(raw_token_ids(given, where, tokenizer, limits, EMBEDDING.max_tokens))
    return found


async def embed_all(
    runtime: Runtime,
    inputs: EmbeddingInput | Sequence[EmbeddingInput],
    dimensions: int | None,
    *,
    deadline: Deadline,
    wait: bool | None,
    label: str | None,
) -> Embeddings:
    """Return the embeddings of all inputs: see Engine.embed."""
    dimensions = check_dimensions(dimensions, embedding_size(runtime))
    given, ports = listed(inputs), runtime.ports
    is_long = sum(len(each) for each in given if isinstance(each, str)) > ports.thread_threshold
    tokenize = partial(input_token_ids, given, "inputs", runtime.files.tokenizer, runtime.limits)
    prompts = await ports.run_in_thread(tokenize) if is_long else tokenize()
    vectors = await EmbeddingCall(runtime, prompts, deadline=deadline, wait=wait, label=label).run()
    return Embeddings(tuple(vector_of(each, dimensions) for each in vectors), Usage(sum(map(len, prompts)), 0, 0))


@asynccontextmanager
async def _alone(generation: Generation) -> AsyncIterator[None]:
    yield


class EmbeddingCall:
    """The inputs of one call on their way: the first one that fails ends all."""

    def __init__(
        self,
        runtime: Runtime,
        inputs: Sequence[Sequence[int]],
        *,
        deadline: Deadline,
        wait: bool | None,
        label: str | None,
        params: SamplingParams = EMBEDDING,
        around: Around = _alone,
    ) -> None:
        """`around` is entered around the request of each input.

        `wait` is as in Session.generate. The inputs behind the first one wait in any case, also for the next worker and
        for the end of a sleep, as requests do that have been admitted.
        """
        self._runtime = runtime
        self._inputs = inputs
        self._deadline = deadline
        self._wait = wait
        self._label = label
        self._params = params
        self._around = around
        self._sessions: dict[SessionActor, None] = {}
        self._vectors: dict[int, bytes] = {}
        self._is_admitted = trio.Event()  # the first input
        self._failure: Exception | None = None

    async def run(self) -> list[bytes]:
        """Return the embedding of each input, in little-endian float32. Raises the error of the first one that fails.

        Cancelled, all are aborted.
        """
        left = iter(enumerate(self._inputs))
        async with trio.open_nursery() as nursery:
            for _ in range(min(AT_ONCE, len(self._inputs))):
                nursery.start_soon(self._embed_each, left, nursery.cancel_scope)
        if self._failure is not None:
            try:
                raise self._failure
            finally:
                self._failure = None  # whose traceback has this frame
        return [self._vectors[index] for index in range(len(self._inputs))]

    def end(self, cause: Cause) -> None:
        """Abort the inputs that are under way, for this cause."""
        for session in tuple(self._sessions):
            session.end(cause)

    async def _embed_each(self, left: Iterator[tuple[int, Sequence[int]]], scope: trio.CancelScope) -> None:
        try:
            for index, token_ids in left:
                if index:
                    await self._is_admitted.wait()
                self._vectors[index] = await self._embed(token_ids, self._wait if index == 0 else True)
        except Exception as exc:
            self._failure = self._failure or exc
            scope.cancel()

    async def _embed(self, token_ids: Sequence[int], wait: bool | None) -> bytes:
        runtime = self._runtime
        session = runtime.new_session(SessionOpening(wait=wait, deadline=self._deadline, by_request=True))
        request = Request(
            self._params,
            session=session,
            observers=runtime.observers,
            deadline=self._deadline,
            wait=wait,
            label=self._label,
        )
        generation = Generation(request, partial(admit, runtime, session, request, token_ids, ()))
        for observer in runtime.observers:
            observer.request_created(generation)
        self._sessions[session] = None
        try:
            async with self._around(generation), generation:
                self._is_admitted.set()
                completion = await generation.result()
        finally:
            session.end()
            del self._sessions[session]
        if request.embedding is None:
            raise SessionEnded(f"the request was aborted ({completion.cause})", cause=str(completion.cause))
        return request.embedding
