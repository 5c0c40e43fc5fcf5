"""OpenAI's Realtime protocol over WebSocket, text only."""

from __future__ import annotations

import json
from typing import Any, cast
from urllib.parse import quote

import trio
from trio_websocket import ConnectionClosed, HandshakeError, WebSocketConnection, wrap_client_stream

from trioengine.actors.nursery import open_unwrapped_nursery
from trioengine.cli.bench.config import BenchConfig
from trioengine.cli.bench.http_client import Address, BackendError
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
        try:
            async with self._address.connect() as stream, open_unwrapped_nursery() as nursery:
                headers = [(name.encode(), value.encode()) for name, value in self._address.headers]
                wrapped = cast("trio.SocketStream", stream)  # any stream will do
                host, path = self._address.host, self._path
                websocket = await wrap_client_stream(nursery, wrapped, host, path, extra_headers=headers)
                await self._converse(websocket, prompt, watch)
                with trio.move_on_after(CLOSE_TIMEOUT):
                    await websocket.aclose()
                nursery.cancel_scope.cancel()
        except HandshakeError as exc:
            status = getattr(exc, "status_code", None)
            raise BackendError("the WebSocket handshake failed" + (f": HTTP {status}" if status else "")) from exc
        except ConnectionClosed as exc:
            raise BackendError(f"the server closed the WebSocket: {exc.reason}") from exc
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise BackendError(f"an event of the server is not understood: {exc}") from exc

    async def _converse(self, websocket: WebSocketConnection, prompt: str, watch: Stopwatch) -> None:
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": prompt}]}
        await websocket.send_message(json.dumps({"type": "conversation.item.create", "item": item}))
        await websocket.send_message(json.dumps({"type": "response.create", "response": self._response}))
        watch.sent()
        while True:
            event = json.loads(await websocket.get_message())
            match event["type"]:
                case "response.output_text.delta":
                    watch.text()
                case "response.done":
                    watch.event()
                    _take(event["response"], watch)
                    return
                case "error":
                    raise BackendError(str(event["error"]["message"]))


def _take(response: dict[str, Any], watch: Stopwatch) -> None:
    details = response.get("status_details") or {}
    if response["status"] not in ("completed", "incomplete"):
        raise BackendError(f"the response was {response['status']}: {details.get('error') or details.get('reason')}")
    usage = response["usage"]
    watch.usage(usage["input_tokens"], usage["output_tokens"])
