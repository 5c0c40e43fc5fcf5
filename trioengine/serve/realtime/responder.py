"""Runs a connection's responses, one at a time, on an engine session that is no more than a cache of its items."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack

import trio

from trioengine.actors.engine import Engine
from trioengine.actors.generation import Generation
from trioengine.actors.session import Session
from trioengine.core.errors import EngineError
from trioengine.core.lifecycle import Cause
from trioengine.serve.log_fields import REQUEST_ID, about
from trioengine.serve.problem import ClientError, problem_of
from trioengine.serve.realtime.response import Response
from trioengine.text.conversation import check_length

logger = logging.getLogger("trioengine")


class Responder:
    """`begin` and `cancel` are synchronous; `run` does the work. Cancelling `run` ends the engine session at once."""

    def __init__(self, engine: Engine, label: str) -> None:
        self._engine = engine
        self._label = label
        self._active: Response | None = None
        self._generation: Generation | None = None
        self._session: Session | None = None
        self._changed = trio.Event()

    def check_idle(self) -> None:
        """Raises ClientError while there is an active response."""
        if self._active is not None:
            message = f"the conversation has an active response: {self._active.id}"
            raise ClientError("conversation_already_has_active_response", message)

    def begin(self, response: Response) -> None:
        """Run this response, whose order was checked. Raises ClientError while there is another."""
        self.check_idle()
        self._active = response
        response.begin()
        self._notify()

    def cancel(self, response_id: object) -> None:
        """Cancel the active response; None: whichever it is. Raises ClientError if there is none, or another."""
        if self._active is None or (response_id is not None and response_id != self._active.id):
            raise ClientError("response_cancel_not_active", "there is no such active response", param="response_id")
        self._active.cancelled = True
        if self._generation is not None:
            self._generation.abort()

    async def idle(self) -> None:
        """Wait until no response is active."""
        while self._active is not None:
            await self._changed.wait()

    async def run(self) -> None:
        """Answer until cancelled."""
        async with AsyncExitStack() as sessions:
            try:
                while True:
                    while self._active is None:
                        await self._changed.wait()
                    await self._respond(self._active, sessions)
                    self._active = None
                    self._notify()
            finally:
                if self._session is not None:
                    self._session.end(Cause.DISCONNECT)

    async def _respond(self, response: Response, sessions: AsyncExitStack) -> None:
        try:
            if self._session is None or self._session.end_cause is not None:
                self._session = await sessions.enter_async_context(self._engine.open_session(label=self._label))
            with about(REQUEST_ID, response.id):
                await self._stream(self._session, response)
        except Exception as exc:
            if not isinstance(exc, EngineError):
                logger.exception("response %s crashed", response.id)
            response.fail(problem_of(exc))

    async def _stream(self, session: Session, response: Response) -> None:
        messages = response.order.messages
        check_length(messages, self._engine.limits.max_model_len, self._engine.tokenizer)  # before they are copied
        prompt = _extension(session, messages)
        async with session.generate(prompt, response.order.params, keep_partial=True) as generation:
            self._generation = generation
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
                self._generation = None
        response.finish(generation.completion)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


def _extension(session: Session, messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """What the session's history lacks of these messages; a history that they do not extend is replaced."""
    history = session.history
    if len(history) < len(messages) and messages[: len(history)] == history:
        return messages[len(history) :]
    session.replace_history(messages[:-1])
    return messages[-1:]
