"""One response on an engine session: from the request to the outcome, or to what went wrong."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import trio

from trioengine.actors.engine import Engine
from trioengine.actors.generation import Generation
from trioengine.actors.session import Session
from trioengine.core.errors import EngineError, RequestRejected
from trioengine.core.types import Cause
from trioengine.serve.cache_salt import salted
from trioengine.serve.in_flight import InFlight
from trioengine.serve.log_fields import REQUEST_ID, about
from trioengine.serve.problem import problem_of
from trioengine.serve.realtime.item_images import naming_item
from trioengine.serve.realtime.response import Response
from trioengine.text.conversation import check_length, least_prompt

logger = logging.getLogger("trioengine")


@contextmanager
def failing(response: Response) -> Iterator[None]:
    """What is raised in here fails the response; what is logged names it."""
    with about(REQUEST_ID, response.id):
        try:
            yield
        except Exception as exc:
            if not isinstance(exc, EngineError):
                logger.exception("response %s crashed", response.id)
            response.fail(problem_of(exc))


class Answering:
    """What responses are answered with; each is known by its id while it is in flight."""

    def __init__(self, engine: Engine, in_flight: InFlight, cache_salt: bytes) -> None:
        self.engine = engine
        self._in_flight = in_flight
        self._cache_salt = cache_salt

    async def answer(self, session: Session, response: Response) -> None:
        """Make the session's history what the response goes on from, and stream its answer.

        Cancelled, it ends the session. Raises what refuses the request, or fails it.
        """
        with about(REQUEST_ID, response.id):
            messages, truncation = response.order.messages, response.order.truncation
            session.overflow, session.retention_ratio = truncation.overflow, truncation.retention_ratio
            needed = messages if session.overflow == "refuse" else least_prompt(messages)
            check_length(needed, self.engine.limits.max_model_len, self.engine.tokenizer)  # before they are copied
            extension, params = _extension(session, messages), salted(response.order.params, self._cache_salt)
            generation = session.generate(extension, params, keep_partial=True, wait=False)
            response.session = session
            num_history = len(messages) - len(extension)
            try:
                with self._in_flight.running((response.id,), generation):
                    await _stream(session, generation, response)
            except RequestRejected as exc:
                raise naming_item(exc, response.order.item_ids, num_history) from None
            finally:
                response.session = None


async def _stream(session: Session, generation: Generation, response: Response) -> None:
    async with generation:
        response.generation = generation
        try:
            if response.cancelled:
                generation.abort()
            response.begin_item()
            async for chunk in generation:
                await response.outbox.room()
                if chunk.text:
                    response.add_text(chunk.text)
        except trio.Cancelled:
            session.end(Cause.DISCONNECT)  # before the generation is left, so that this is its cause
            raise
        finally:
            response.generation = None
    response.finish(generation.completion)


def _extension(session: Session, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the session's history lacks of these messages; a history that they do not extend is replaced."""
    history = session.history
    if len(history) < len(messages) and messages[: len(history)] == history:
        return messages[len(history) :]
    session.replace_history(messages[:-1])
    return messages[-1:]
