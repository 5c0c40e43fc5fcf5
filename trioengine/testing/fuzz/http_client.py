"""A client of the HTTP server: sends requests, and judges the responses by a model of its own."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable
from typing import Any

import h11

from trioengine.core.types import FinishReason
from trioengine.serve.body import KEEP_ALIVE
from trioengine.serve.config import ServeConfig
from trioengine.serve.connection import BEYOND_TIMEOUT
from trioengine.testing.fuzz import shapes
from trioengine.testing.fuzz.conversations import check_seen, is_failed, is_refused
from trioengine.testing.fuzz.faults import Harm, InjectedFaults, Life
from trioengine.testing.fuzz.grammars import GRAMMARS
from trioengine.testing.fuzz.http_answers import AnswerStream, Choice, check_logprobs, check_whole
from trioengine.testing.fuzz.http_books import KEYS, SERVED_BEYOND, HttpBooks, Request
from trioengine.testing.fuzz.http_exchange import Ask, Exchange, Judge
from trioengine.testing.fuzz.shapes import Head
from trioengine.testing.simulated_peer import BUFFERED, PeerState, SimulatedPeer

UNASKED = (b"HTTP/1.1 503 ", b"HTTP/1.1 408 ")  # come without a request: too many connections
FRAMINGS = ("whole", "chunked", "pieces", "expect")
BEFORE_THE_HANDLER = ("too_many_connections", "too_many_sessions", "buffers_full", "key_buffers_full")
MORE_TEXTS = 3  # that can come beyond those on their way: one that waits, one that is torn, and the rest in one piece
STREAM, JSON = "text/event-stream", "application/json"


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
        self._connected_at = clock()
        self._answered_after = self._connected_at  # when it sent the last request that was answered, or connected
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
                    self._judge(exchange, exchange.head)
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
            self._judge_part(exchange.ask, index, choice)
        most = exchange.most_texts
        assert most is None or exchange.stream.num_texts <= most, (
            f"a stalled client gets {exchange.stream.num_texts} texts, and not at most {most}: they are not merged"
        )

    def _judge(self, exchange: Exchange, head: Head) -> None:
        is_beyond = _is_beyond(exchange)
        if exchange.judge is not None and not is_beyond and exchange.judge(head, exchange.body, exchange.life):
            shapes.check_head(head, head.value(b"content-type") or "", exchange.chosen_id or None)
            return
        if exchange.request.method == "HEAD":  # its error has no body
            codes = ("too_many_connections", "too_many_sessions")
            is_reached = any(self._books.is_reached(code, exchange.use, self.use) for code in codes)
            assert head.status in shapes.RETRIED and is_reached, f"{exchange.request} is answered by {head}"
            return
        if head.status != 200:
            error = shapes.has_fields(json.loads(exchange.body), ("error",), "the body")["error"]
            self._judge_refusal(exchange, head, shapes.check_problem(error, head))
            return
        ask, stream = exchange.ask, exchange.stream
        assert ask is not None, f"{exchange.request} is answered by {exchange.body!r}"
        assert ask.n <= self._books.most_choices, f"{ask.n} choices are answered, more than the limit"
        shapes.check_head(head, JSON if stream is None else STREAM, exchange.chosen_id)
        if stream is not None:
            given = stream.end()
        else:
            given = check_whole(json.loads(exchange.body), ask.form(self._books.model))
        if given.error is not None:
            self._judge_error(exchange, given.error)
        else:
            for index, choice in enumerate(given.choices):
                self._judge_choice(ask, index, choice)
            if given.usage is not None:
                self._judge_usage(exchange, ask, given.usage)

    def _judge_refusal(self, exchange: Exchange, head: Head, error: dict[str, Any]) -> None:
        code, is_unread = error["code"], self._spoilt
        if code == "too_many_connections":
            is_unread = head.value(b"x-request-id") != exchange.chosen_id
            if exchange.chosen_id:  # else nothing shows whether it was read
                self._check_beyond(exchange, is_unread=is_unread)
        shapes.check_head(head, JSON, None if is_unread else exchange.chosen_id or None)
        if code in BEFORE_THE_HANDLER:
            assert self._books.is_reached(code, exchange.use, self.use), f"{exchange.request} is refused by {error}"
        elif code == "bad_request":
            assert self._spoilt, f"{exchange.request} is refused by {error}"
        elif code == "request_timeout":
            waits = self._clock() - exchange.sent_at
            assert waits >= self._books.config.body_timeout, f"after {waits:g} s {exchange.request} gets {error}"
        else:
            self._judge_error(exchange, error, head.status)

    def _check_beyond(self, exchange: Exchange, *, is_unread: bool) -> None:
        """Check the refusal of a connection beyond the limit: of its first request, or because none came in time."""
        if is_unread:
            waits = self._clock() - self._connected_at
            assert waits >= BEYOND_TIMEOUT, f"after {waits:g} s {exchange.request} is refused unread"
        else:
            path = exchange.request.target.partition("?")[0]
            assert path not in SERVED_BEYOND, f"it is served beyond the limit, and refused: {exchange.request}"

    def _judge_error(self, exchange: Exchange, error: dict[str, Any], status: int = 0) -> None:
        """Judge an error of a chat completion, with its status unless its stream had begun."""
        ask, code = exchange.ask, error["code"]
        assert ask is not None, f"{exchange.request} is refused by {error}"
        assert code != "aborted" or exchange.is_aborted, f"aborted, with the ids {exchange.ids}: {exchange.request}"
        longest = max(len(prompt.token_ids) for prompt in ask.rendered)
        too_long = code == "context_length_exceeded" and longest >= self._max_model_len
        has_bad_grammar = code == "invalid_grammar" and ask.has_bad_grammar
        too_many = error["message"].startswith("n must be at most ") and ask.n > self._books.most_choices
        is_bad = has_bad_grammar or too_long or too_many or is_refused(code, ask.content) or self._is_failed(ask, code)
        assert is_bad or self._faults.excuse(code, exchange.life), f"nothing may fail by {error}"
        if code == "overloaded" and isinstance(ask.content, str):
            may_wait = len(ask.prompts) > 1 and self._faults.hit(exchange.life, Harm.WORKERS, Harm.CLOSING)
            assert status or may_wait, f"an answer that has begun is refused: {error}"
            if status == 429:
                counts = re.match(r"n: (\d+) choices need \1 ", error["message"])
                needs = 1 if counts is None else int(counts[1])
                assert needs == ask.n, f"all of its {ask.n} choices are to have a slot, or none: {error}"
                self._books.refused()

    def _is_failed(self, ask: Ask, code: str) -> bool:
        return is_failed(code, [("user", ask.content)], self._faults.dropped)

    def _judge_choice(self, ask: Ask, index: int, given: Choice) -> None:
        """Judge a whole choice."""
        prompt, images = ask.rendered[index // ask.n]
        check_seen(images)
        assert not ask.has_bad_grammar, f"its grammar cannot be compiled, and it is answered: {given.text!r}"
        expected, form = ask.expected(index, self._max_model_len), ask.form(self._books.model)
        parts = ask.parts(expected.text)
        wanted = "stop" if expected.finish_reason is FinishReason.STOP else "length"
        if parts.calls and wanted == "stop":
            wanted = "tool_calls"
        due = form.echoes[index] + parts.text if form.echoes else parts.text
        assert (given.text, given.finish_reason) == (due, wanted), (
            f"choice {index} is {given.text!r} and {given.finish_reason}, the model's is {due!r}, {wanted}"
        )
        assert given.calls == list(parts.calls), f"the calls are {given.calls}, the model's are {parts.calls}"
        if ask.use is not None and ask.use.is_forced and wanted == "tool_calls":
            ask.use.check(parts.calls)
        if ask.grammar and ask.stop is None and wanted == "stop":
            is_whole = GRAMMARS[ask.grammar].is_complete(parts.text)
            assert is_whole, f"{parts.text!r} has ended, and is not complete by its grammar"
        if ask.top_logprobs is not None:
            check_logprobs(given.logprobs, form, prompt, expected.token_ids)
        if ask.shows_ids:
            shown = given.prompt_ids, given.token_ids
            assert shown == ([*prompt], [*expected.token_ids]), f"choice {index} has the token ids {shown}"

    def _judge_usage(self, exchange: Exchange, ask: Ask, usage: dict[str, Any]) -> None:
        """A usage counts each prompt once, and the tokens of all choices."""
        counted = usage["prompt_tokens"], usage["completion_tokens"]
        answers = [ask.expected(index, self._max_model_len).token_ids for index in range(ask.num_choices)]
        due = sum(len(prompt.token_ids) for prompt in ask.rendered), sum(map(len, answers))
        assert counted == due, f"the usage counts {counted} tokens, the model {due}"
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        most = 0 if ask.is_scored else sum(map(self._books.most_cached, exchange.numbers))
        assert 0 <= cached <= most, f"{cached} tokens of the prompt are cached, and {most} were computed before"

    def _judge_part(self, ask: Ask, index: int, given: Choice) -> None:
        """Judge the part of a choice that has come; its text may end with the beginning of a stop string."""
        expected, form = ask.expected(index, self._max_model_len), ask.form(self._books.model)
        echo = form.echoes[index] if form.echoes else ""
        is_answered = given.text.removeprefix(echo) or given.calls
        assert not (is_answered and ask.has_bad_grammar), f"its grammar cannot be compiled, and it has {given.text!r}"
        parts = ask.parts(expected.text)
        most = echo + parts.text
        if ask.stop is not None and expected.finish_reason is FinishReason.STOP:
            most += ask.stop[:-1]
        assert most.startswith(given.text), f"{given.text!r} is not part of the model's answer {most!r}"
        assert len(given.calls) <= len(parts.calls), f"the calls are {given.calls}, the model's are {parts.calls}"
        for (name, arguments), call in zip(given.calls, parts.calls, strict=False):
            is_part = name == call.name and call.arguments.startswith(arguments)
            assert is_part, f"the calls are {given.calls}, the model's are {parts.calls}"


def _is_beyond(exchange: Exchange) -> bool:
    """Whether it is refused because its connection is beyond the limit."""
    if exchange.status != 503 or not exchange.body:  # a HEAD has no body
        return False
    return bool(json.loads(exchange.body).get("error", {}).get("code") == "too_many_connections")
