"""HTTP/1.1 without I/O: the operations that a driver performs, the bytes of a request, and a response read from bytes.

Sockets are named by numbers. The parser is lenient where servers differ, and part of each finding's script.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

T = TypeVar("T")


class Close(Enum):
    """How a client leaves: an orderly close, a reset, or the end of its own side alone."""

    FIN = "fin"
    RST = "rst"
    HALF = "half"


class End(Enum):
    """Why bytes were not received."""

    TIMEOUT = "timeout"
    CLOSED = "closed"
    RESET = "reset"


@dataclass(frozen=True)
class Connect:
    """Open a connection; the result is whether it succeeded."""

    client: int


@dataclass(frozen=True)
class Send:
    """Send bytes; the result is whether all were taken before `timeout` (seconds)."""

    client: int
    data: bytes
    timeout: float


@dataclass(frozen=True)
class Receive:
    """Wait for bytes, `timeout` seconds at most; the result is bytes, or an End."""

    client: int
    timeout: float


@dataclass(frozen=True)
class Leave:
    """Close a connection; one that is closed already is left alone."""

    client: int
    how: Close


@dataclass(frozen=True)
class Wait:
    """Let `seconds` pass."""

    seconds: float


@dataclass(frozen=True)
class Now:
    """The result is the monotonic time in seconds."""


@dataclass(frozen=True)
class Signal:
    """Send a signal to a process of the server, as STOP or KILL; the result is whether its id is known."""

    name: str
    process: str = "server"  # or worker; or relay, where the driver has started the server


@dataclass(frozen=True)
class Figures:
    """The result is the process's (RSS in bytes, open descriptors), or None if its id is not known."""


@dataclass(frozen=True)
class Limit:
    """Let a process have `spare` MiB of memory or descriptors more; None lifts the limit. The result is its success.

    This and the operations below are for drivers that have started the server.
    """

    process: str
    resource: str  # memory or files
    spare: int | None


@dataclass(frozen=True)
class Pipes:
    """Change the way in which the relay passes bytes between the engine and its worker."""

    way: str


@dataclass(frozen=True)
class Ended:
    """Wait for the end of a process, `timeout` seconds at most; the result is its exit status, None if it runs.

    The status of a worker is 0: it is the server's child.
    """

    process: str
    timeout: float


@dataclass(frozen=True)
class Restart:
    """End the server and its worker, and start them again; the result is the new host and port."""


@dataclass(frozen=True)
class ReadLog:
    """The result is the text that the server has logged since the last ReadLog."""


Operation = Connect | Send | Receive | Leave | Wait | Now | Signal | Figures | Limit | Pipes | Ended | Restart | ReadLog
Action = Generator[Operation, Any, T]


def request_bytes(host: str, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> bytes:
    """Return a request whose connection ends with its response."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close", "Accept: */*"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    elif method == "POST":
        lines.append("Content-Length: 0")
    return "\r\n".join([*lines, "", ""]).encode() + (body or b"")


@dataclass
class Response:
    """A response read from bytes as they arrive: JSON, text, or server-sent events."""

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    events: list[str] = field(default_factory=list)  # the data of server-sent events
    received: int = 0  # bytes
    ended: bool = False  # as its framing promises
    end: End | None = None  # of the connection
    _buffer: bytes = b""
    _line: bytes = b""

    def feed(self, data: bytes) -> None:
        """Take bytes of the connection."""
        self.received += len(data)
        self._buffer += data
        while self.status is None and b"\r\n\r\n" in self._buffer:
            self._read_head()
        if self.status is not None:
            self._read_body()

    def finish(self, end: End) -> None:
        """Take the end of the connection, which ends a body without a length."""
        self.end = end
        if end is End.CLOSED and self.status is not None and not self._is_framed():
            self.ended = True

    @property
    def is_over(self) -> bool:
        return self.ended or self.end is not None

    def _is_framed(self) -> bool:
        return "content-length" in self.headers or self.headers.get("transfer-encoding", "").lower() == "chunked"

    def _read_head(self) -> None:
        head, self._buffer = self._buffer.split(b"\r\n\r\n", 1)
        first, *lines = head.decode("latin-1").split("\r\n")
        words = first.split(" ")
        status = int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
        if 100 <= status < 200:
            return
        self.status = status
        pairs = (line.partition(":") for line in lines)
        self.headers = {name.strip().lower(): value.strip() for name, _, value in pairs}

    def _read_body(self) -> None:
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            self._read_chunks()
            return
        self._take(self._buffer)
        self._buffer = b""
        length = self.headers.get("content-length", "")
        self.ended = self.ended or (length.isdigit() and len(self.body) >= int(length))

    def _read_chunks(self) -> None:
        while not self.ended and b"\r\n" in self._buffer:
            line, rest = self._buffer.split(b"\r\n", 1)
            size = int(line.split(b";")[0] or b"0", 16)
            if size == 0:
                self.ended = True
            elif len(rest) < size + 2:
                return
            else:
                self._take(rest[:size])
                self._buffer = rest[size + 2 :]

    def _take(self, data: bytes) -> None:
        self.body += data
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self.events.append(line[5:].strip().decode("utf-8", "replace"))


@dataclass
class Answer:
    """A completion as its client got it."""

    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    logprobs: list[float] = field(default_factory=list)
    error: str | None = None
    pieces: int = 0  # chunks with text
    done: bool = False  # the end of the stream was announced, or the response is whole

    @property
    def cached_tokens(self) -> int:
        details = (self.usage or {}).get("prompt_tokens_details") or {}
        return int(details.get("cached_tokens") or 0)


def answer_of(response: Response) -> Answer:
    """Read a completion, streamed or not, from the part of its response that has arrived."""
    answer = Answer()
    if "text/event-stream" in response.headers.get("content-type", ""):
        answer.done = "[DONE]" in response.events
        for data in response.events:
            if data != "[DONE]":
                _add(answer, json_of(data))
    elif response.ended:
        answer.done = True
        _add(answer, json_of(response.body.decode("utf-8", "replace")))
    return answer


def _add(answer: Answer, value: Any) -> None:
    if not isinstance(value, dict):
        return
    if value.get("error"):
        answer.error = json.dumps(value["error"])[:300]
    answer.usage = value.get("usage") or answer.usage
    for choice in value.get("choices") or []:
        part = choice.get("delta") or choice.get("message") or {}
        text = part.get("content") or choice.get("text") or ""
        answer.text += text
        answer.pieces += bool(text)
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        entries = (choice.get("logprobs") or {}).get("content") or []
        answer.logprobs += [round(float(entry.get("logprob", 0)), 3) for entry in entries]


def json_of(text: str) -> Any:
    """Return the value of a JSON text, None if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def metrics_of(text: str) -> dict[str, float]:
    """Return the samples of a Prometheus page, summed over their labels."""
    totals: dict[str, float] = {}
    for line in text.splitlines():
        key, _, value = line.strip().rpartition(" ")
        name = key.partition("{")[0]
        try:
            number = float(value)
        except ValueError:
            continue
        if name and not name.startswith("#"):
            totals[name] = totals.get(name, 0.0) + number
    return totals


def count_in(value: Any, key: str) -> float:
    """Sum the numbers and flags under `key` anywhere in a JSON value."""
    if isinstance(value, list):
        return sum(count_in(each, key) for each in value)
    if not isinstance(value, dict):
        return 0.0
    own = value.get(key)
    rest = sum(count_in(each, key) for name, each in value.items() if name != key)
    return rest + (float(own) if isinstance(own, int | float) else 0.0)
