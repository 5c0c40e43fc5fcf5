"""Runs the responses of a connection that belong to no conversation: a few at a time, each in a session of its own."""

from __future__ import annotations

import trio

from trioengine.actors.changes import Changes
from trioengine.serve.problem import ClientError
from trioengine.serve.realtime.answering import Answering, failing
from trioengine.serve.realtime.response import Response

MAX_BESIDE = 4  # at a time


class Beside:
    """`begin` is synchronous; `run` does the work. Cancelling `run` ends the engine sessions at once."""

    def __init__(self, answering: Answering, label: str) -> None:
        self._answering = answering
        self._label = label
        self._active: list[Response] = []
        self._unstarted: list[Response] = []  # of these
        self._changes = Changes()

    @property
    def active(self) -> tuple[Response, ...]:
        return tuple(self._active)

    def check_room(self) -> None:
        """Raises ClientError while so many run that there is no room for another."""
        if len(self._active) >= MAX_BESIDE:
            message = f"response.conversation: {MAX_BESIDE} responses run beside the conversation, and no more may"
            raise ClientError("too_many_responses", message, param="response.conversation")

    def begin(self, response: Response) -> None:
        """Run this response, whose order was checked. Raises ClientError if there are too many."""
        self.check_room()
        self._active.append(response)
        self._unstarted.append(response)
        response.begin()
        self._changes.notify()

    async def idle(self) -> None:
        """Wait until no response is active."""
        while self._active:
            await self._changes.wait()

    async def run(self) -> None:
        """Answer until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                for response in self._unstarted:
                    nursery.start_soon(self._respond, response)
                self._unstarted.clear()
                await self._changes.wait()

    async def _respond(self, response: Response) -> None:
        try:
            with failing(response):
                async with self._answering.engine.open_session(label=self._label) as session:
                    await self._answering.answer(session, response)
        finally:
            self._active.remove(response)
            self._changes.notify()
