"""Clients of a real server that leave at random moments, in every way in which clients leave."""

from __future__ import annotations

import itertools
import json
import random
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio
from trio_websocket import ConnectionClosed, HandshakeError, WebSocketConnection, wrap_client_stream

from trioengine.aio.concurrency import open_unwrapped_nursery

PROMPTS = ("Hi", "Name a colour.", "Count to ten.", "Tell me a story about a small red boat on a lake.")
MAX_TOKENS = (1, 2, 8, 32)
HTTP_WAYS = ("stays", "closes", "resets", "is silent", "closes at once", "half-closes")
WEBSOCKET_WAYS = ("stays", "stays", "closes", "resets", "is silent", "closes at once", "cancels")
ABORTING_HTTP_WAYS = ("closes", "resets", "closes at once", "half-closes")
ABORTING_WEBSOCKET_WAYS = ("closes", "resets", "closes at once")
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends RST, and forgets what was not sent


Client = Callable[[trio.SocketStream, random.Random], Awaitable[None]]


class Refused(Exception):
    """The server has no worker at the moment, or sleeps."""


class Kept:
    """Sockets of clients that have gone without a word: nobody reads them, nobody closes them until the end."""

    def __init__(self) -> None:
        self._streams: list[trio.SocketStream] = []

    def keep(self, stream: trio.SocketStream) -> None:
        self._streams.append(stream)

    async def close(self) -> None:
        for stream in self._streams:
            await trio.aclose_forcefully(stream)


@dataclass
class Soak:
    """Clients of one server. The same seed gives the same clients, though not the same moments.

    With `aborting` every client leaves before its answer is complete, half of them over HTTP, and a server that refuses
    or loses them is no failure: those are counted in `refused`, and others take their places.
    """

    port: int
    model: str
    seed: int = 0
    aborting: bool = False
    refused: int = 0
    seen: Counter[str] = field(default_factory=Counter)  # how they left
    kept: Kept = field(default_factory=Kept)

    async def run(
        self,
        sessions: int,
        connections: int,
        after: Callable[[int], None],
        goes_on: Callable[[], bool] = lambda: False,
    ) -> None:
        """Run so many sessions, and more while `goes_on()`, over so many connections at a time.

        `after` is called with the count of those that are over.
        """
        numbers = itertools.takewhile(lambda number: number < sessions or goes_on(), itertools.count())
        over = 0

        async def clients() -> None:
            nonlocal over
            for number in numbers:
                choose = random.Random(f"{self.seed}-{number}")
                client = choose.choice((self._chat, self._chat, self._realtime, self._realtime))
                if self.aborting:
                    await self._abort(self._chat if number % 2 else self._realtime, choose)
                else:
                    await self._connect(client, choose)
                over += 1
                after(over)

        async with trio.open_nursery() as nursery:
            for _ in range(connections):
                nursery.start_soon(clients)
        await self.kept.close()

    async def _connect(self, client: Client, choose: random.Random) -> None:
        stream = await trio.open_tcp_stream("127.0.0.1", self.port)
        try:
            await client(stream, choose)
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise

    async def _abort(self, client: Client, choose: random.Random) -> None:
        """One client that leaves a request behind; again while the server refuses it."""
        while True:
            try:
                return await self._connect(client, choose)
            except (Refused, ConnectionClosed, HandshakeError, trio.BrokenResourceError):
                self.refused += 1
                await trio.sleep(0.1)

    def _max_tokens(self, choose: random.Random) -> int:
        """So many that a client which aborts is gone before the last of them."""
        return 300 if self.aborting else choose.choice(MAX_TOKENS)

    # ---- HTTP -----------------------------------------------------------------------------------------------------

    async def _chat(self, stream: trio.SocketStream, choose: random.Random) -> None:
        streaming = choose.random() < 0.6
        way = choose.choice(ABORTING_HTTP_WAYS if self.aborting else HTTP_WAYS)
        self.seen[f"HTTP {'stream' if streaming else 'whole'}: {way}"] += 1
        await stream.send_all(self._request(choose, streaming))
        if way == "stays":
            answer = await self._read_all(stream)
            assert answer.startswith(b"HTTP/1.1 200 ") and b'"finish_reason"' in answer, answer
            await stream.aclose()
            return
        if way != "closes at once":
            await self._read_some(stream, choose, streaming)
        await self._leave(stream, way)

    def _request(self, choose: random.Random, streaming: bool) -> bytes:
        body = json.dumps(
            {
                "model": self.model,
                "messages": [{"role": "user", "content": choose.choice(PROMPTS)}],
                "max_tokens": self._max_tokens(choose),
                "ignore_eos": self.aborting,
                "stream": streaming,
            }
        ).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body

    async def _read_all(self, stream: trio.SocketStream) -> bytes:
        answer = b""
        while piece := await stream.receive_some():
            answer += piece
        return answer

    async def _read_some(self, stream: trio.SocketStream, choose: random.Random, streaming: bool) -> None:
        """A part of the answer; of one that comes whole, nothing: it is left while it waits."""
        if not streaming:
            await trio.sleep(choose.uniform(0.0, 0.3))
            return
        for _ in range(choose.randrange(4)):
            piece = await stream.receive_some(300)
            if self.aborting and piece.startswith((b"HTTP/1.1 503", b"HTTP/1.1 429")):
                raise Refused
            if not piece:
                return

    async def _leave(self, stream: trio.SocketStream, way: str) -> None:
        if way == "is silent":
            self.kept.keep(stream)
            return
        if way == "half-closes":
            await stream.send_eof()
            await self._read_all(stream)
        if way == "resets":
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        await trio.aclose_forcefully(stream)

    # ---- WebSocket ------------------------------------------------------------------------------------------------

    async def _realtime(self, stream: trio.SocketStream, choose: random.Random) -> None:
        way = choose.choice(ABORTING_WEBSOCKET_WAYS if self.aborting else WEBSOCKET_WAYS)
        self.seen[f"WebSocket: {way}"] += 1
        async with self._websocket(stream) as websocket:
            for _ in range(1 if self.aborting else choose.randrange(1, 3)):
                await self._ask(websocket, choose)
                if way in ("stays", "cancels"):
                    await self._until_done(websocket, cancels=way == "cancels")
            if way not in ("stays", "cancels", "closes at once"):
                for _ in range(choose.randrange(12)):
                    event = json.loads(await websocket.get_message())
                    if self.aborting and event["type"] == "error":
                        raise Refused
            if way in ("resets", "is silent"):
                await self._leave(stream, way)
            else:
                await websocket.aclose()

    @asynccontextmanager
    async def _websocket(self, stream: trio.SocketStream) -> AsyncIterator[WebSocketConnection]:
        async with open_unwrapped_nursery() as nursery:
            websocket = await wrap_client_stream(nursery, stream, "localhost", "/v1/realtime")
            yield websocket  # ConnectionClosed here is the server's fault
            nursery.cancel_scope.cancel()  # its reader: who is silent answers no ping

    async def _ask(self, websocket: WebSocketConnection, choose: random.Random) -> None:
        content = [{"type": "input_text", "text": choose.choice(PROMPTS)}]
        item = {"type": "message", "role": "user", "content": content}
        await websocket.send_message(json.dumps({"type": "conversation.item.create", "item": item}))
        response = {"max_output_tokens": self._max_tokens(choose), "ignore_eos": self.aborting}
        await websocket.send_message(json.dumps({"type": "response.create", "response": response}))

    async def _until_done(self, websocket: WebSocketConnection, *, cancels: bool) -> None:
        while (event := json.loads(await websocket.get_message()))["type"] != "response.done":
            if cancels and event["type"] == "response.created":
                await websocket.send_message(json.dumps({"type": "response.cancel"}))
            assert event["type"] != "error" or cancels, event
