"""Runs the responses of a connection that belong to no conversation: a few at a time, each in a session of its own."""

from __future__ import annotations

import trio

from trioengine.aio.nursery import Notifier
from trioengine.serve.problem import ClientError
from trioengine.serve.realtime.answering import Answering, failing
from trioengine.serve.realtime.response import Response

MAX_BESIDE = 4  # at a time


class Beside:
    """Responses run in the nursery that `run_in` was given; cancelling it ends their engine sessions at once."""

    def __init__(self, answering: Answering, label: str) -> None:
        self._answering = answering
        self._label = label
        self._nursery: trio.Nursery | None = None
        self._active: list[Response] = []
        self._changes = Notifier()

    @property
    def active(self) -> tuple[Response, ...]:
        return tuple(self._active)

    def run_in(self, nursery: trio.Nursery) -> None:
        """From now on responses may begin."""
        self._nursery = nursery

    def check_room(self) -> None:
        """Raises ClientError while so many run that there is no room for another."""
        if len(self._active) >= MAX_BESIDE:
            message = f"response.conversation: {MAX_BESIDE} responses run beside the conversation, and no more may"
            raise ClientError("too_many_responses", message, param="response.conversation")

    def begin(self, response: Response) -> None:
        """Run this response, whose order was checked. Raises ClientError if there are too many."""
        assert self._nursery is not None, "what begins responses runs in it"
        self.check_room()
        self._active.append(response)
        response.begin()
        self._nursery.start_soon(self._respond, response)

    async def idle(self) -> None:
        """Wait until no response is active."""
        while self._active:
            await self._changes.wait()

    async def _respond(self, response: Response) -> None:
        try:
            with failing(response):
                async with self._answering.engine.open_session(label=self._label, wait=False) as session:
                    await self._answering.answer(session, response)
        finally:
            response.release()
            self._active.remove(response)
            self._changes.notify()
