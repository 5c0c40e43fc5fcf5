"""OpenAI's completions and chat completions, streamed."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import trio

from trioengine.aio.nursery import open_unwrapped_nursery
from trioengine.cli.bench.config import BenchConfig
from trioengine.cli.bench.load import Stopwatch
from trioengine.cli.http_client import Address, RequestFailed, describe_error, request
from trioengine.client.websocket import Closed, Rejected, WebSocket

_DATA, _DONE = b"data:", b"[DONE]"
_MAX_LINE = 1 << 20  # bytes


class Completions:
    """`POST` to the endpoint; the prompt is a user message, or for one that is not `/chat/completions` the prompt."""

    def __init__(self, address: Address, config: BenchConfig, model: str) -> None:
        self._address = address
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
        async with request(self._address, "POST", self._path, body, on_sent=watch.sent) as response:
            if response.status != 200:
                raise RequestFailed(describe_error(response.status, await response.read()))
            rest, is_over = b"", False
            while piece := await response.receive_some():  # to its very end: who closes earlier has left
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    if line.startswith(_DATA):
                        is_over = self._is_last(line[len(_DATA) :].strip(), watch)
                if len(rest) > _MAX_LINE:
                    raise RequestFailed(f"a line of the stream is longer than {_MAX_LINE} bytes")
        if not is_over:
            raise RequestFailed("the stream ended before [DONE]")

    def _is_last(self, data: bytes, watch: Stopwatch) -> bool:
        """Tell the watch what an event means; True for the end of the stream."""
        if data == _DONE:
            return True
        try:
            event = json.loads(data)
            if "error" in event:
                raise RequestFailed(str(event["error"].get("message", event["error"])))
            choices, usage = event.get("choices"), event.get("usage")
            text = choices and (choices[0]["delta"].get("content") if self._is_chat else choices[0]["text"])
            if text:
                watch.text()
            else:
                watch.event()
            if usage:
                watch.usage(usage["prompt_tokens"], usage["completion_tokens"])
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as exc:
            raise RequestFailed(f"an event of the stream is not understood: {data[:80]!r}") from exc
        return False


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
                raise RequestFailed(f"an event of the server is not understood: {exc}") from exc

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
                    raise RequestFailed(str(event["error"]["message"]))


@asynccontextmanager
async def connected(address: Address, path: str) -> AsyncIterator[WebSocket]:
    """A WebSocket, with a goodbye after the block. Raises RequestFailed, also for what breaks in the block."""
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
        raise RequestFailed(f"the WebSocket handshake failed: {describe_error(exc.status, exc.body)}") from exc
    except Closed as exc:
        raise RequestFailed(f"the server's WebSocket was {exc}") from exc


@asynccontextmanager
async def idle_sessions(address: Address, path: str, count: int) -> AsyncIterator[None]:
    """So many WebSockets in the block that say nothing. Raises RequestFailed where one cannot be had, or is lost."""

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
    websocket.say_goodbye()
    with trio.move_on_after(CLOSE_TIMEOUT), suppress(Closed):
        while True:
            await websocket.read()


def _take(response: dict[str, Any], watch: Stopwatch) -> None:
    details = response.get("status_details") or {}
    if response["status"] not in ("completed", "incomplete"):
        raise RequestFailed(f"the response was {response['status']}: {details.get('error') or details.get('reason')}")
    usage = response["usage"]
    watch.usage(usage["input_tokens"], usage["output_tokens"])


STOP_TO_ENDED = "trioengine_stop_to_ended_seconds"
KV_USAGE = "trioengine_kv_cache_usage_perc"
RUNNING, WAITING = "trioengine_num_requests_running", "trioengine_num_requests_waiting"
_LINE = re.compile(r"(trioengine_\w+)(?:\{(.*)\})? ([^ ]+)(?: \d+)?")
_BOUND = re.compile(r'(?:^|,)\s*le="([^"]+)"')


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many were at most each bound, ascending, the last one infinite; and their sum."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    sum: float

    @property
    def count(self) -> float:
        return self.counts[-1]

    def since(self, before: Histogram) -> Histogram:
        """What came after another one was taken."""
        pairs = zip(self.counts, before.counts, strict=True)
        return Histogram(self.bounds, tuple(now - then for now, then in pairs), self.sum - before.sum)

    @property
    def mean(self) -> float:
        return self.sum / self.count if self.count else 0.0

    def quantile(self, percent: float) -> float:
        """Within its bucket in proportion; the last finite bound where it is beyond that."""
        rank, low, below = self.count * percent / 100, 0.0, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=True):
            if count >= rank and count > below:
                return low if bound == float("inf") else low + (bound - low) * (rank - below) / (count - below)
            low, below = min(bound, self.bounds[-2]) if len(self.bounds) > 1 else 0.0, count
        return low


@dataclass(frozen=True, slots=True)
class Scrape:
    """One reading: the values of series without labels, by name, and the histograms."""

    values: Mapping[str, float]
    buckets: Mapping[str, Sequence[tuple[float, float]]]

    @classmethod
    def parse(cls, text: str) -> Scrape:
        """Raises ValueError for a value that is no number."""
        values: dict[str, float] = {}
        buckets: dict[str, list[tuple[float, float]]] = {}
        for line in text.splitlines():
            match = _LINE.fullmatch(line.strip())
            if match is None:
                continue
            name, labels, value = match.group(1), match.group(2) or "", float(match.group(3))
            if bound := _BOUND.search(labels):
                buckets.setdefault(name.removesuffix("_bucket"), []).append((float(bound.group(1)), value))
            elif not labels:
                values[name] = value
        return cls(values, buckets)

    def histogram(self, name: str) -> Histogram | None:
        """None where there is none of that name, or one with further labels."""
        pairs = sorted(self.buckets.get(name, ()))
        bounds, counts = tuple(bound for bound, _ in pairs), tuple(count for _, count in pairs)
        if not pairs or len(set(bounds)) < len(bounds) or f"{name}_sum" not in self.values:
            return None
        return Histogram(bounds, counts, self.values[f"{name}_sum"])


class ServerMetrics:
    """Reads a server's `/metrics`."""

    def __init__(self, address: Address, path: str) -> None:
        self._address = address
        self._path = path

    async def read(self) -> Scrape | None:
        """None where there is no such page, or it is another server's."""
        try:
            async with request(self._address, "GET", self._path) as response:
                body = await response.read()
            scrape = Scrape.parse(body.decode()) if response.status == 200 else None
        except (RequestFailed, ValueError):
            return None
        return scrape if scrape is not None and scrape.values else None
