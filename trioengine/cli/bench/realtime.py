"""OpenAI's Realtime protocol over WebSocket, text only."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import quote

import trio

from trioengine.aio.nursery import open_unwrapped_nursery
from trioengine.aio.websocket import Closed, Rejected, WebSocket
from trioengine.cli.bench.config import BenchConfig
from trioengine.cli.bench.http_client import Address, BackendError, refusal
from trioengine.cli.bench.sample import Stopwatch

CLOSE_TIMEOUT = 5.0  # seconds


class Realtime:
    """A connection with one user message and one response."""

    def __init__(self, address: Address, config: BenchConfig, model: str | None) -> None:
        self._address = address
        self._path = config.path + (f"?model={quote(model, safe='')}" if model is not None else "")
        self._response: dict[str, Any] = {
            "max_output_tokens": config.random_output_len,
            "temperature": config.temperature,
        }
        if config.ignore_eos:
            self._response["ignore_eos"] = True

    async def ask(self, prompt: str, watch: Stopwatch) -> None:
        """As in Backend."""
        async with connected(self._address, self._path) as websocket:
            try:
                await self._converse(websocket, prompt, watch)
            except (ValueError, KeyError, TypeError, AttributeError) as exc:
                raise BackendError(f"an event of the server is not understood: {exc}") from exc

    async def _converse(self, websocket: WebSocket, prompt: str, watch: Stopwatch) -> None:
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": prompt}]}
        websocket.send(json.dumps({"type": "conversation.item.create", "item": item}))
        websocket.send(json.dumps({"type": "response.create", "response": self._response}))
        await websocket.flushed()
        watch.sent()
        while True:
            event = json.loads(await websocket.read())
            match event["type"]:
                case "response.output_text.delta":
                    watch.text()
                case "response.done":
                    watch.event()
                    _take(event["response"], watch)
                    return
                case "error":
                    raise BackendError(str(event["error"]["message"]))


@asynccontextmanager
async def connected(address: Address, path: str) -> AsyncIterator[WebSocket]:
    """A WebSocket, with a goodbye after the block. Raises BackendError, also for what breaks in the block."""
    try:
        async with address.connect() as stream, open_unwrapped_nursery() as nursery:
            headers = [(name.encode(), value.encode()) for name, value in address.headers]
            websocket = WebSocket(stream)
            await websocket.shake_hands(address.host, path, headers)
            nursery.start_soon(websocket.write)
            yield websocket
            await _say_goodbye(websocket)
            nursery.cancel_scope.cancel()
    except Rejected as exc:
        raise BackendError(f"the WebSocket handshake failed: {refusal(exc.status, exc.body)}") from exc
    except Closed as exc:
        raise BackendError(f"the server's WebSocket was {exc}") from exc


@asynccontextmanager
async def idle_sessions(address: Address, path: str, count: int) -> AsyncIterator[None]:
    """So many WebSockets in the block that say nothing. Raises BackendError where one cannot be had, or is lost."""

    async def sit(task_status: trio.TaskStatus[None]) -> None:
        async with connected(address, path) as websocket:
            await websocket.read()
            task_status.started()
            while True:
                await websocket.read()

    async with open_unwrapped_nursery() as nursery:
        for _ in range(count):
            await nursery.start(sit)
        yield
        nursery.cancel_scope.cancel()


async def _say_goodbye(websocket: WebSocket) -> None:
    """And wait for the answer, in vain at most for CLOSE_TIMEOUT."""
    websocket.close()
    with trio.move_on_after(CLOSE_TIMEOUT), suppress(Closed):
        while True:
            await websocket.read()


def _take(response: dict[str, Any], watch: Stopwatch) -> None:
    details = response.get("status_details") or {}
    if response["status"] not in ("completed", "incomplete"):
        raise BackendError(f"the response was {response['status']}: {details.get('error') or details.get('reason')}")
    usage = response["usage"]
    watch.usage(usage["input_tokens"], usage["output_tokens"])
