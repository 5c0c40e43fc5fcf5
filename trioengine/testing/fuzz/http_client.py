"""A client of the HTTP server: sends requests, takes in the responses, and checks when they come."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from typing import Any

import h11

from trioengine.serve.body import KEEP_ALIVE
from trioengine.serve.config import ServeConfig
from trioengine.testing.fuzz.faults import InjectedFaults, Life
from trioengine.testing.fuzz.http_answers import AnswerStream
from trioengine.testing.fuzz.http_books import KEYS, HttpBooks, Request
from trioengine.testing.fuzz.http_exchange import Ask, Exchange, Judge
from trioengine.testing.fuzz.http_judge import ResponseJudge
from trioengine.testing.fuzz.shapes import Head
from trioengine.testing.simulated_peer import BUFFERED, PeerState, SimulatedPeer

UNASKED = (b"HTTP/1.1 503 ", b"HTTP/1.1 408 ")  # come without a request: too many connections
FRAMINGS = ("whole", "chunked", "pieces", "expect")
MORE_TEXTS = 3  # that can come beyond those on their way: one that waits, one that is torn, and the rest in one piece


class HttpClient(SimulatedPeer):
    """Assertions are raised from where its bytes arrive."""

    def __init__(
        self, books: HttpBooks, key: str, max_model_len: int, faults: InjectedFaults, clock: Callable[[], float]
    ) -> None:
        super().__init__()
        self.num_answers = 0
        self.key = key
        self.use = books.connected(lambda: self.stream.closed)
        self._books = books
        self._max_model_len = max_model_len
        self._faults = faults
        self._clock = clock
        self._exchanges: deque[Exchange] = deque()  # whose responses have not come whole
        self._unasked = b""
        self._has_ended = False  # it has sent its last request
        self._spoilt = False  # it has sent bytes that are not a request
        self._is_last = False  # the server has announced that it closes the connection
        self._judge = ResponseJudge(books, self.use, max_model_len, faults, clock)
        self._answered_after = clock()  # when it sent the last request that was answered, or connected
        self._heard_at = clock()  # when bytes last came
        self._idle_since: float | None = None  # when it came to rest without a request
        self._full_since: tuple[int, float] | None = None  # bytes that wait for it, and since when

    # ---- requests ---------------------------------------------------------------------------------------------------

    def ask(self, ask: Ask, framing: str = "whole") -> None:
        """A request, whatever is in progress."""
        stream = AnswerStream(ask.form(self._books.model)) if ask.streams else None
        body = json.dumps(ask.fields(self._books.model), separators=(",", ":")).encode()
        request = Request("POST", ask.dialect.path, body, self.key)
        answers = [ask.expected(index, self._max_model_len).token_ids for index in range(ask.num_choices)]
        numbers = tuple(
            self._books.asked(self.key, prompt.token_ids, answers[place * ask.n : (place + 1) * ask.n])
            for place, prompt in enumerate(ask.rendered)
        )
        self._send(request, framing, ask=ask, stream=stream, numbers=numbers)

    def request(self, request: Request, judge: Judge, *, is_prompt: bool = True) -> None:
        """Any other request, which is answered at once unless it may wait for the worker."""
        self._send(request, "whole", judge=judge, is_prompt=is_prompt)

    def _send(self, request: Request, framing: str, **more: Any) -> None:
        ask = more.get("ask")
        use = self._books.sent(request, lambda: self.stream.closed, 1 if ask is None else ask.num_choices)
        chosen_id = f"chosen-{len(request.body) % 3}"  # several requests may have the same
        more["is_continued"] = framing != "expect"
        exchange = Exchange(Life(self._faults), request, use, chosen_id, self._clock(), **more)
        self._exchanges.append(exchange)
        self._idle_since = None
        headers = [("host", "localhost"), ("x-request-id", chosen_id)]
        if request.key is not None:
            scheme = "Bearer " if request.key_header == "authorization" else ""
            headers.append((request.key_header, scheme + request.key))
        if request.accept is not None:
            headers.append(("accept", request.accept))
        if request.method == "POST":
            is_chunked = framing == "chunked"
            length = ("transfer-encoding", "chunked") if is_chunked else ("content-length", str(len(request.body)))
            headers += [length, ("expect", "100-continue")] if framing == "expect" else [length]
        send = exchange.protocol.send
        head = send(h11.Request(method=request.method, target=request.target, headers=headers)) or b""
        half = len(request.body) // 2 if framing in ("pieces", "chunked") else 0
        parts = [part for part in (request.body[:half], request.body[half:]) if part]
        bodies = [send(h11.Data(data=part)) or b"" for part in parts]
        bodies.append(send(h11.EndOfMessage()) or b"")
        now = {"pieces": 1, "expect": 0}.get(framing, len(bodies))
        exchange.unsent = b"".join(bodies[now:])
        self._put(head + b"".join(bodies[:now]))

    def send_raw(self, data: bytes, judge: Judge, *, is_last: bool) -> None:
        """Send the bytes of a request with the first key; `is_last`: the server closes the connection after it."""
        request = Request("GET", repr(data), b"", KEYS[0])
        exchange = Exchange(
            Life(self._faults),
            request,
            self._books.sent(request, lambda: self.stream.closed),
            "",
            self._clock(),
            judge=judge,
            is_prompt=True,
            is_continued=True,
        )
        exchange.protocol.send(h11.Request(method="GET", target="/", headers=[("host", "localhost")]))
        exchange.protocol.send(h11.EndOfMessage())
        self._exchanges.append(exchange)
        self._has_ended |= is_last
        self._idle_since = None
        self._put(data)

    def _put(self, data: bytes) -> None:
        self.to_server.put(data)

    @property
    def has_unsent(self) -> bool:
        """Whether the rest of a request can be sent."""
        return self.is_there and not self._spoilt and any(exchange.unsent for exchange in self._exchanges)

    def send_rest(self) -> None:
        """Send the rest of a request."""
        exchange = next(exchange for exchange in self._exchanges if exchange.unsent)
        unsent, exchange.unsent, exchange.since = exchange.unsent, b"", None
        self._put(unsent)

    def send_garbage(self) -> None:
        """Send bytes that are not a request."""
        self._spoilt = True
        self._put(b"\xff" * 8 + b"\r\n\r\n")

    @property
    def is_active(self) -> bool:
        return bool(self._exchanges)

    @property
    def waits_for_answer(self) -> bool:
        """Whether the server has a whole request of a client that reads."""
        return self.is_heard and bool(self._exchanges) and not self._exchanges[0].unsent

    @property
    def is_heard(self) -> bool:
        """Whether it reads, and the server has not closed the connection."""
        return self.peer_state is PeerState.WELL and not self.stream.is_over

    @property
    def can_send(self) -> bool:
        is_open = self.is_there and not (self.stream.is_over or self._spoilt or self._is_last or self._has_ended)
        return is_open and not (self._exchanges and self._exchanges[-1].unsent)

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """The requests without a whole response."""
        return tuple(self._exchanges)

    def close(self) -> None:
        self.hang_up()

    # ---- promptness -------------------------------------------------------------------------------------------------

    def check_at_rest(self) -> None:
        """Each timeout that has passed has had its effect. Requests that wait for the worker may wait."""
        now, limits = self._clock(), self._books.config
        self._check_reading(now, limits)
        if self._exchanges or not self.is_heard:
            self._idle_since = None
        assert not (self._is_last and self.is_heard), "the connection is not closed after the last response"
        if not self.is_heard or self._spoilt:
            return
        if self._exchanges:
            self._check_first(self._exchanges[0], now, limits)
            return
        assert not self._books.is_closing, "the server is closed, and keeps an idle connection open"
        if self._idle_since is None:
            self._idle_since = now
        timeout = limits.idle_timeout if self.num_answers else limits.handshake_timeout
        waits = now - self._idle_since
        assert waits < timeout, f"a connection is idle for {waits:g} s, and open"

    def _check_first(self, exchange: Exchange, now: float, limits: ServeConfig) -> None:
        """Check the request that is at the server."""
        if exchange.since is None:
            exchange.since = now
        waits = now - exchange.since
        assert exchange.is_continued, f"the server does not ask for the body of {exchange.request}"
        if exchange.unsent:
            assert waits < limits.body_timeout, f"for {waits:g} s it waits for the body of {exchange.request}"
            return
        assert not exchange.is_prompt, f"never answered: {exchange.request}"
        if exchange.stream is not None:
            silence = now - max(exchange.since, self._heard_at)
            assert silence < KEEP_ALIVE, f"a stream is silent for {silence:g} s, without a keep-alive"

    def _check_reading(self, now: float, limits: ServeConfig) -> None:
        """A client that reads nothing, and has as much to read as fits, is disconnected in time."""
        waiting = len(self.to_client)
        if self.peer_state is not PeerState.STALLED or waiting < BUFFERED or self.stream.is_over:
            self._full_since = None
        elif self._full_since is None or self._full_since[0] != waiting:
            self._full_since = waiting, now
        else:
            waits = now - self._full_since[1]
            most = limits.send_timeout + KEEP_ALIVE
            assert waits < most, f"a client reads nothing for {waits:g} s, and is connected"

    def check_kept(self) -> None:
        """The worker has come to rest: of an answer that a stalled client does not read, the text is one more piece."""
        stream = self._exchanges[0].stream if self._exchanges else None
        ask = self._exchanges[0].ask if self._exchanges else None
        if self.peer_state is not PeerState.STALLED or stream is None or ask is None or ask.has_parts:
            return
        if self._exchanges[0].most_texts is None:
            on_their_way = bytes(self.to_client).count(b'{"content"')
            self._exchanges[0].most_texts = stream.num_texts + on_their_way + MORE_TEXTS

    def on_end(self) -> None:
        """The server has closed the connection: check that it had to."""
        limits, waits = self._books.config, self._clock() - self._answered_after
        is_displaced = self.use.most_connections > limits.max_connections
        is_late = waits >= min(limits.handshake_timeout, limits.send_timeout)
        is_bad = self._is_last or self._spoilt or self.peer_state is PeerState.LISTENING
        assert is_displaced or is_late or is_bad or self._faults.closing, (
            f"the server closes the connection of {[exchange.request for exchange in self._exchanges]}"
        )
        super().on_end()

    # ---- responses --------------------------------------------------------------------------------------------------

    def _arrive(self, data: bytes) -> None:
        self._heard_at = self._clock()
        while data and self._exchanges:
            data = self._take(self._exchanges[0], data)
        self._unasked += data
        is_refusal = self.num_answers == 0 and any(
            self._unasked[: len(line)] == line[: len(self._unasked)] for line in UNASKED
        )
        assert not self._unasked or self._spoilt or is_refusal, f"bytes without a request: {self._unasked[:200]!r}"
        self._is_last |= bool(self._unasked)

    def _take(self, exchange: Exchange, data: bytes) -> bytes:
        """Take the bytes into a response; those behind its end."""
        exchange.protocol.receive_data(data)
        while (event := exchange.protocol.next_event()) is not h11.NEED_DATA:
            match event:
                case h11.InformationalResponse():
                    assert event.status_code == 100 and not exchange.is_continued, f"it was not asked for: {event}"
                    exchange.is_continued = True
                    if self.has_unsent:
                        self.send_rest()
                case h11.Response():
                    exchange.head = Head(event.status_code, list(event.headers))
                    self._is_last = exchange.head.is_last
                case h11.Data():
                    self._take_body(exchange, bytes(event.data))
                case h11.EndOfMessage():
                    self._exchanges.popleft()
                    exchange.use.is_over = True
                    self.num_answers += 1
                    self._answered_after = exchange.sent_at
                    assert exchange.head is not None, "a response has a head"
                    self._judge.check(exchange, exchange.head, is_spoilt=self._spoilt)
                    return exchange.protocol.trailing_data[0]
                case _:
                    raise AssertionError(f"the server sent {event!r}")
        return b""

    def _take_body(self, exchange: Exchange, data: bytes) -> None:
        if exchange.stream is None or exchange.status != 200:
            exchange.body += data
            return
        exchange.stream.feed(data)
        assert exchange.ask is not None, "only an answer is streamed"
        for index, choice in enumerate(exchange.stream.given.choices):
            self._judge.check_part(exchange.ask, index, choice)
        most = exchange.most_texts
        assert most is None or exchange.stream.num_texts <= most, (
            f"a stalled client gets {exchange.stream.num_texts} texts, and not at most {most}: they are not merged"
        )
