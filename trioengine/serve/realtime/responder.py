"""Runs a connection's responses, one at a time, on an engine session that is no more than a cache of its items."""

from __future__ import annotations

from contextlib import AsyncExitStack

from trioengine.actors.session import Session
from trioengine.aio.nursery import Notifier
from trioengine.core.types import Cause
from trioengine.serve.problem import ClientError
from trioengine.serve.realtime.answering import Answering, failing
from trioengine.serve.realtime.response import Response


class Responder:
    """`begin` is synchronous; `run` does the work. Cancelling `run` ends the engine session at once."""

    def __init__(self, answering: Answering, label: str) -> None:
        self._answering = answering
        self._label = label
        self._active: Response | None = None
        self._session: Session | None = None
        self._changes = Notifier()

    @property
    def active(self) -> tuple[Response, ...]:
        return () if self._active is None else (self._active,)

    def check_room(self) -> None:
        """Raises ClientError while there is an active response."""
        if self._active is not None:
            message = f"the conversation has an active response: {self._active.id}"
            raise ClientError("conversation_already_has_active_response", message)

    def begin(self, response: Response) -> None:
        """Run this response, whose order was checked. Raises ClientError while there is another."""
        self.check_room()
        self._active = response
        response.begin()
        self._changes.notify()

    async def idle(self) -> None:
        """Wait until no response is active."""
        while self._active is not None:
            await self._changes.wait()

    async def run(self) -> None:
        """Answer until cancelled."""
        async with AsyncExitStack() as sessions:
            try:
                while True:
                    while self._active is None:
                        await self._changes.wait()
                    await self._respond(self._active, sessions)
                    self._active = None
                    self._changes.notify()
            finally:
                if self._active is not None:
                    self._active.release()
                if self._session is not None:
                    self._session.end(Cause.DISCONNECT)

    async def _respond(self, response: Response, sessions: AsyncExitStack) -> None:
        with failing(response):
            if self._session is None or self._session.end_cause is not None:
                self._session = await sessions.enter_async_context(
                    self._answering.engine.open_session(label=self._label, wait=False)
                )
            await self._answering.answer(self._session, response)
