"""The protocols that `bench serve` measures: OpenAI's completions over HTTP, and its Realtime protocol, text only.

Also the readings of trioengine's own `/metrics` page, which another server lacks.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import trio

from trioengine.aio.concurrency import open_unwrapped_nursery
from trioengine.aio.websocket import Closed, Rejected, WebSocket
from trioengine.cli.bench.config import BenchConfig
from trioengine.cli.bench.load import Stopwatch
from trioengine.cli.http_client import RequestError, connect, describe_error, fetch, request
from trioengine.client.address import Endpoint

STOP_TO_ENDED = "trioengine_stop_to_ended_seconds"
KV_USAGE = "trioengine_kv_cache_usage_perc"
RUNNING, WAITING = "trioengine_num_requests_running", "trioengine_num_requests_waiting"
CPU_SECONDS = "process_cpu_seconds_total"  # Prometheus' name, which other servers have as well
CLOSE_TIMEOUT = 5.0  # seconds
_DATA, _DONE = b"data:", b"[DONE]"
_MAX_LINE = 1 << 20  # bytes
_SERIES = re.compile(r"((?:trioengine|process)_\w+)(?:\{(.*)\})? ([^ ]+)(?: \d+)?")
_BOUND = re.compile(r'(?:^|,)\s*le="([^"]+)"')


class Completions:
    """OpenAI's streamed completions: `POST` to an endpoint, with the prompt as a user message if it is for chats."""

    def __init__(self, server: Endpoint, config: BenchConfig, model: str) -> None:
        self._server = server
        self._path = config.path
        self._is_chat = self._path.endswith("/chat/completions")
        self._fields: dict[str, Any] = {
            "model": model,
            "max_tokens": config.random_output_len,
            "temperature": config.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if config.ignore_eos:
            self._fields["ignore_eos"] = True

    async def ask(self, prompt: str, watch: Stopwatch) -> None:
        """As in Backend."""
        body = self._fields | (
            {"messages": [{"role": "user", "content": prompt}]} if self._is_chat else {"prompt": prompt}
        )
        async with request(self._server, "POST", self._path, body, on_sent=watch.sent) as response:
            if response.status != 200:
                raise RequestError(describe_error(response.status, await response.read()))
            rest, is_over = b"", False
            while piece := await response.receive_some():  # to its very end: closing earlier counts as a disconnect
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    if line.startswith(_DATA):
                        is_over = self._on_event(line[len(_DATA) :].strip(), watch)
                if len(rest) > _MAX_LINE:
                    raise RequestError(f"a line of the stream is longer than {_MAX_LINE} bytes")
        if not is_over:
            raise RequestError("the stream ended before [DONE]")

    def _on_event(self, data: bytes, watch: Stopwatch) -> bool:
        """Report an event to the watch; True for the end of the stream."""
        if data == _DONE:
            return True
        try:
            event = json.loads(data)
            if "error" in event:
                raise RequestError(str(event["error"].get("message", event["error"])))
            choices, usage = event.get("choices"), event.get("usage")
            text = choices and (choices[0]["delta"].get("content") if self._is_chat else choices[0]["text"])
            if text:
                watch.text()
            else:
                watch.event()
            if usage:
                watch.usage(usage["prompt_tokens"], usage["completion_tokens"])
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as exc:
            raise RequestError(f"an event of the stream is not understood: {data[:80]!r}") from exc
        return False


class Realtime:
    """OpenAI's Realtime protocol: a WebSocket for each request, with one user message and one response."""

    def __init__(self, server: Endpoint, config: BenchConfig, model: str | None) -> None:
        self._server = server
        self._path = config.path + (f"?model={quote(model, safe='')}" if model is not None else "")
        self._response: dict[str, Any] = {
            "max_output_tokens": config.random_output_len,
            "temperature": config.temperature,
        }
        if config.ignore_eos:
            self._response["ignore_eos"] = True

    async def ask(self, prompt: str, watch: Stopwatch) -> None:
        """As in Backend."""
        async with open_websocket(self._server, self._path) as websocket:
            try:
                await self._converse(websocket, prompt, watch)
            except (ValueError, KeyError, TypeError, AttributeError) as exc:
                raise RequestError(f"an event of the server is not understood: {exc}") from exc

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
                    _on_done(event["response"], watch)
                    return
                case "error":
                    raise RequestError(str(event["error"]["message"]))


def _on_done(response: dict[str, Any], watch: Stopwatch) -> None:
    details = response.get("status_details") or {}
    if response["status"] not in ("completed", "incomplete"):
        raise RequestError(f"the response was {response['status']}: {details.get('error') or details.get('reason')}")
    usage = response["usage"]
    watch.usage(usage["input_tokens"], usage["output_tokens"])


@asynccontextmanager
async def open_websocket(server: Endpoint, path: str) -> AsyncIterator[WebSocket]:
    """Open a WebSocket, and close it in order after the block.

    Raises RequestError, also for failures of the connection in the body of the block.
    """
    try:
        async with connect(server) as stream, open_unwrapped_nursery() as nursery:
            websocket = WebSocket(stream)
            await websocket.shake_hands(server.authority, path, server.headers)
            nursery.start_soon(websocket.write)
            yield websocket
            websocket.close()
            with trio.move_on_after(CLOSE_TIMEOUT), suppress(Closed):
                while True:
                    await websocket.read()
            nursery.cancel_scope.cancel()
    except Rejected as exc:
        raise RequestError(f"the WebSocket handshake failed: {describe_error(exc.status, exc.body)}") from exc
    except Closed as exc:
        raise RequestError(f"the server's WebSocket was {exc}") from exc


@asynccontextmanager
async def idle_sessions(server: Endpoint, path: str, count: int) -> AsyncIterator[None]:
    """Keep silent WebSockets open during the block. Raises RequestError if one cannot be opened, or is lost."""

    async def sit(task_status: trio.TaskStatus[None]) -> None:
        async with open_websocket(server, path) as websocket:
            await websocket.read()
            task_status.started()
            while True:
                await websocket.read()

    async with open_unwrapped_nursery() as nursery:
        for _ in range(count):
            await nursery.start(sit)
        yield
        nursery.cancel_scope.cancel()


@dataclass(frozen=True, slots=True)
class ScrapedHistogram:
    """Counts of values up to each bound, ascending, the last bound infinite; and the sum of the values."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    sum: float

    @property
    def count(self) -> float:
        return self.counts[-1]

    @property
    def mean(self) -> float:
        return self.sum / self.count if self.count else 0.0

    def since(self, before: ScrapedHistogram) -> ScrapedHistogram:
        """The values that came after another reading."""
        pairs = zip(self.counts, before.counts, strict=True)
        return ScrapedHistogram(self.bounds, tuple(now - then for now, then in pairs), self.sum - before.sum)

    def quantile(self, percent: float) -> float:
        """Interpolated within its bucket; the last finite bound if it lies beyond that."""
        rank, low, below = self.count * percent / 100, 0.0, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=True):
            if count >= rank and count > below:
                return low if bound == float("inf") else low + (bound - low) * (rank - below) / (count - below)
            low, below = min(bound, self.bounds[-2]) if len(self.bounds) > 1 else 0.0, count
        return low


@dataclass(frozen=True, slots=True)
class Scrape:
    """One reading of `/metrics`: values of series without labels, by name, and histograms; ours, and the process's.

    Format: https://prometheus.io/docs/instrumenting/exposition_formats/.
    """

    values: Mapping[str, float]
    buckets: Mapping[str, Sequence[tuple[float, float]]]

    @classmethod
    def parse(cls, text: str) -> Scrape:
        """Raises ValueError for a value that is not a number."""
        values: dict[str, float] = {}
        buckets: dict[str, list[tuple[float, float]]] = {}
        for line in text.splitlines():
            match = _SERIES.fullmatch(line.strip())
            if match is None:
                continue
            name, labels, value = match.group(1), match.group(2) or "", float(match.group(3))
            if bound := _BOUND.search(labels):
                buckets.setdefault(name.removesuffix("_bucket"), []).append((float(bound.group(1)), value))
            elif not labels:
                values[name] = value
        return cls(values, buckets)

    def histogram(self, name: str) -> ScrapedHistogram | None:
        """None if it is absent, or has further labels."""
        pairs = sorted(self.buckets.get(name, ()))
        bounds, counts = tuple(bound for bound, _ in pairs), tuple(count for _, count in pairs)
        if not pairs or len(set(bounds)) < len(bounds) or f"{name}_sum" not in self.values:
            return None
        return ScrapedHistogram(bounds, counts, self.values[f"{name}_sum"])


class ServerMetrics:
    """Reads the `/metrics` page of a server."""

    def __init__(self, server: Endpoint, path: str) -> None:
        self._server = server
        self._path = path

    async def read(self) -> Scrape | None:
        """None if the page is absent, or has nothing that is known here."""
        try:
            status, body = await fetch(self._server, "GET", self._path)
            scrape = Scrape.parse(body.decode()) if status == 200 else None
        except (RequestError, ValueError):
            return None
        return scrape if scrape is not None and scrape.values else None
