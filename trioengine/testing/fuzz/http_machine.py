"""The HTTP server under hypothesis, and the clients that judge its answers."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import h11
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition

from trioengine.core.lifecycle import Phase
from trioengine.core.types import FinishReason
from trioengine.testing.fuzz import inside, inside_server
from trioengine.testing.fuzz.conversations import (
    FILES,
    Content,
    FuzzPrompt,
    Turn,
    chat_content,
    check_seen,
    content_of,
    is_failed,
    is_refused,
    prompt_of,
    reference,
)
from trioengine.testing.fuzz.faults import Harm, InjectedFaults, Life
from trioengine.testing.fuzz.oracles import check_worker
from trioengine.testing.fuzz.peers import WHICH
from trioengine.testing.fuzz.program import pick, recorded
from trioengine.testing.fuzz.served import ServedEnvironment
from trioengine.testing.fuzz.world import LIMITS
from trioengine.testing.simulated_peer import PeerState, SimulatedPeer

PATH, ABORT_PATH = "/v1/chat/completions", "/abort_request"
REFUSAL = b"HTTP/1.1 503 "  # comes unasked: there are too many connections
HEADERS = [("host", "localhost"), ("content-type", "application/json")]


class Operation(NamedTuple):
    """The target and the fields of an operator's request."""

    target: str
    fields: dict[str, Any]


@dataclass
class _Exchange:
    """A request, and its response so far."""

    life: Life
    content: Content  # of the only message
    max_tokens: int
    streams: bool
    operation: Operation | None = None  # an operator's; nothing else is asked then
    protocol: h11.Connection = field(default_factory=lambda: h11.Connection(h11.CLIENT))
    status: int = 0
    body: bytes = b""

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The conversation."""
        return (("user", self.content),)

    @property
    def prompt(self) -> FuzzPrompt:
        return prompt_of(self.turns)

    def to_bytes(self, model: str) -> bytes:
        """The request; more of them may be sent before its response."""
        path, fields = (PATH, self._fields(model)) if self.operation is None else self.operation
        body = json.dumps(fields).encode()
        chosen_id = f"chosen-{self.max_tokens}"  # several requests may have the same
        headers = [*HEADERS, ("content-length", str(len(body))), ("x-request-id", chosen_id)]
        events = (h11.Request(method="POST", target=path, headers=headers), h11.Data(data=body), h11.EndOfMessage())
        return b"".join(self.protocol.send(event) or b"" for event in events)

    def _fields(self, model: str) -> dict[str, Any]:
        messages = [{"role": "user", "content": chat_content(self.content)}]
        return {"model": model, "messages": messages, "max_tokens": self.max_tokens, "stream": self.streams}


class HttpClient(SimulatedPeer):
    """Assertions are raised from where its bytes arrive."""

    def __init__(self, model: str, max_model_len: int, faults: InjectedFaults) -> None:
        super().__init__()
        self.num_answers = 0
        self._model = model
        self._max_model_len = max_model_len
        self._faults = faults
        self._exchanges: deque[_Exchange] = deque()  # whose responses have not come whole
        self._unasked = b""
        self._spoilt = False  # it has sent bytes that are not a request

    def ask(self, content: Content, max_tokens: int, streams: bool) -> None:
        """A request, whatever is in progress."""
        self._send(_Exchange(Life(self._faults), content, max_tokens, streams))

    def abort(self, id: str) -> None:
        """As an operator: end a request, of whichever client."""
        self._operate(Operation(ABORT_PATH, {"request_id": id}))

    def switch(self, target: str) -> None:
        """As an operator: put the engine to sleep, or wake it."""
        self._operate(Operation(target, {}))

    def _operate(self, operation: Operation) -> None:
        self._send(_Exchange(Life(self._faults), "", 0, streams=False, operation=operation))

    def _send(self, exchange: _Exchange) -> None:
        self._exchanges.append(exchange)
        self.to_server.put(exchange.to_bytes(self._model))

    def send_garbage(self) -> None:
        """Send bytes that are not a request."""
        self._spoilt = True
        self.to_server.put(b"\xff" * 8 + b"\r\n\r\n")

    @property
    def is_active(self) -> bool:
        return bool(self._exchanges)

    @property
    def is_heard(self) -> bool:
        """Whether it reads, and the server has not closed the connection."""
        return self.peer_state is PeerState.WELL and not self.stream.is_over

    @property
    def can_send(self) -> bool:
        return self.is_there and not self.stream.is_over and not self._spoilt

    def close(self) -> None:
        self.hang_up()

    def check_at_rest(self) -> None:
        """Requests that wait for the worker may wait."""

    # ---- responses --------------------------------------------------------------------------------------------------

    def _arrive(self, data: bytes) -> None:
        while data and self._exchanges:
            data = self._take(self._exchanges[0], data)
        self._unasked += data
        is_refusal = self.num_answers == 0 and self._unasked[: len(REFUSAL)] == REFUSAL[: len(self._unasked)]
        assert not self._unasked or self._spoilt or is_refusal, f"bytes without a request: {self._unasked[:200]!r}"

    def _take(self, exchange: _Exchange, data: bytes) -> bytes:
        """Take the bytes into a response; those behind its end."""
        exchange.protocol.receive_data(data)
        while (event := exchange.protocol.next_event()) is not h11.NEED_DATA:
            match event:
                case h11.Response():
                    exchange.status = event.status_code
                case h11.Data():
                    exchange.body += bytes(event.data)
                case h11.EndOfMessage():
                    self._exchanges.popleft()
                    self._judge(exchange)
                    return exchange.protocol.trailing_data[0]
                case _:
                    raise AssertionError(f"the server sent {event!r}")
        return b""

    def _judge(self, exchange: _Exchange) -> None:
        self.num_answers += 1
        if exchange.status != 200:
            self._judge_error(exchange, json.loads(exchange.body)["error"])
        elif exchange.operation is not None:
            self._judge_operation(exchange.operation, json.loads(exchange.body))
        elif exchange.streams:
            self._judge_stream(exchange)
        else:
            (choice,) = json.loads(exchange.body)["choices"]
            self._judge_text(exchange, choice["message"]["content"], choice["finish_reason"])

    def _judge_error(self, exchange: _Exchange, error: dict[str, Any]) -> None:
        if error["code"] in ("too_many_connections", "buffers_full") or (
            error["code"] == "bad_request" and self._spoilt
        ):
            return
        if exchange.operation is not None:
            self._judge_refusal(exchange.operation, error, exchange.life)
            return
        code = error["code"]
        too_long = code == "context_length_exceeded" and self._room(exchange) <= 0
        is_bad = too_long or is_refused(code, exchange.content) or self._is_failed(exchange, code)
        assert is_bad or self._faults.excuse(code, exchange.life), f"nothing may fail by {error}"

    def _is_failed(self, exchange: _Exchange, code: str) -> bool:
        return is_failed(code, exchange.turns, self._faults.dropped)

    def _judge_operation(self, operation: Operation, answer: dict[str, Any]) -> None:
        if operation.target == ABORT_PATH:
            assert answer["aborted"] >= 0, f"an abort is answered by {answer}"
            return
        told = answer["is_sleeping"], bool(answer["tags"]), answer["level"] is not None
        assert len(set(told)) == 1, f"{operation.target} is answered by {answer}"

    def _judge_refusal(self, operation: Operation, error: dict[str, Any], life: Life) -> None:
        assert operation.target != ABORT_PATH, f"an abort is refused by {error}"
        is_loading = error["message"] == "the engine is loading"
        sleeps_deeper = error["message"].startswith("it sleeps at level 2")
        troubled = self._faults.hit(life, Harm.CLOSING, Harm.WORKERS)
        assert error["code"] == "transition_failed" or self._faults.closing, f"{operation.target}: {error}"
        assert is_loading or sleeps_deeper or troubled, f"{operation.target} is refused by {error}"

    def _judge_stream(self, exchange: _Exchange) -> None:
        *frames, rest = exchange.body.decode().split("\n\n")
        assert not rest, f"a torn event: {rest!r}"
        assert frames and frames[-1] == "data: [DONE]", f"the end of a stream is {frames[-1:]}"
        events = [json.loads(frame.removeprefix("data: ")) for frame in frames[:-1] if not frame.startswith(":")]
        text, finish_reason = "", None
        for event in events:
            assert finish_reason is None, f"after the end comes {event}"
            if "error" in event:
                code = event["error"]["code"]
                is_bad = self._is_failed(exchange, code)
                assert is_bad or self._faults.excuse(code, exchange.life), f"nothing may fail by {event}"
                self._judge_part(exchange, text)
                return
            (choice,) = event["choices"]
            text += choice["delta"].get("content") or ""
            finish_reason = choice["finish_reason"]
        self._judge_text(exchange, text, finish_reason)

    def _judge_text(self, exchange: _Exchange, text: str, finish_reason: str | None) -> None:
        check_seen(exchange.prompt.images)
        expected = self._expected(exchange)
        wanted = "stop" if expected.finish_reason is FinishReason.STOP else "length"
        assert (text, finish_reason) == (expected.text, wanted), (
            f"the answer is {text!r} and {finish_reason}, the model's is {expected.text!r}, {wanted}"
        )

    def _judge_part(self, exchange: _Exchange, text: str) -> None:
        expected = self._expected(exchange)
        assert expected.text.startswith(text), f"{text!r} is not part of the model's answer {expected.text!r}"

    def _expected(self, exchange: _Exchange) -> Any:
        token_ids, images = exchange.prompt
        return reference(token_ids, min(self._room(exchange), exchange.max_tokens), (), images=images)

    def _room(self, exchange: _Exchange) -> int:
        return self._max_model_len - len(exchange.prompt.token_ids)


SWITCHES = (
    *("/sleep?mode=keep", "/sleep?level=2&mode=keep", "/sleep", "/sleep?mode=wait", "/sleep?mode=wait&timeout=0.5"),
    *("/wake_up", "/wake_up", "/wake_up?tags=weights", "/wakeup?tags=kv_cache", "/wake_up?reload=false"),
)
PROMPTS = ("a", "be", "<|im_end|>", "be" * 60)
TOKENS = st.sampled_from((1, 3, 20))


class HttpMachine(ServedEnvironment[HttpClient]):
    """Rules are actions of clients and of the operator of the server."""

    horizon = 800.0  # past the timeout of an idle connection
    max_buffered_bytes = 280  # one or two bodies
    max_buffered_bytes_with_pictures = 950

    @recorded(initialize, ready=st.sampled_from((True, True, True, False)), clients=st.integers(1, 2))
    def begin(self, ready: bool, clients: int) -> None:
        """Mostly from a server that is ready."""
        if ready:
            self._settle()
        for _ in range(clients):
            self._connect()

    @precondition(lambda self: self.may_connect)
    @recorded()
    def connect(self) -> None:
        self._connect()

    @precondition(lambda self: self.has_speakers)
    @recorded(
        which=WHICH,
        prompt=st.sampled_from(PROMPTS),
        max_tokens=TOKENS,
        streams=st.booleans(),
        rounds=st.sampled_from((0, 0, 6, 9, 12, 15, 20)),
    )
    def ask(self, which: int, prompt: str, max_tokens: int, streams: bool, rounds: int) -> None:
        """A request, maybe while one is answered; how far it gets is given."""
        pick(self.speakers, which).ask(prompt, max_tokens, streams)
        if rounds:
            self._flow(rounds)

    @precondition(lambda self: self.shows and self.has_speakers)
    @recorded(
        which=WHICH,
        media=st.sampled_from(FILES),
        prompt=st.sampled_from(("a", "be")),
        max_tokens=TOKENS,
        streams=st.booleans(),
        rounds=st.sampled_from((0, 0, 6, 9, 12, 15, 20)),
    )
    def show(self, which: int, media: str, prompt: str, max_tokens: int, streams: bool, rounds: int) -> None:
        """The same with pictures."""
        pick(self.speakers, which).ask(content_of(media, prompt), max_tokens, streams)
        if rounds:
            self._flow(rounds)

    @precondition(lambda self: bool(self.speakers and inside_server.request_ids(self.server)))
    @recorded(which=WHICH, request=WHICH, rounds=st.sampled_from((0, 6, 9)))
    def abort(self, which: int, request: int, rounds: int) -> None:
        """An operator ends a request by its id; it may be over when that arrives."""
        idle = [client for client in self.speakers if not client.is_active]
        pick(idle or self.speakers, which).abort(pick(inside_server.request_ids(self.server), request))
        if rounds:
            self._flow(rounds)

    @precondition(lambda self: self.has_speakers)
    @recorded(which=WHICH, how=st.sampled_from(SWITCHES), rounds=st.sampled_from((0, 0, 6, 12)))
    def switch(self, which: int, how: str, rounds: int) -> None:
        """An operator puts the engine to sleep, or wakes it, and may not wait for the answer."""
        self.faults.begin(Harm.SLEEP)
        idle = [client for client in self.speakers if not client.is_active]
        pick(idle or self.speakers, which).switch(how)
        if rounds:
            self._flow(rounds)

    # ---- overrides --------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        self._join(HttpClient(self.server.model_name, LIMITS.max_model_len, self.faults))

    @property
    def _is_sleep_over(self) -> bool:
        return super()._is_sleep_over and not any(client.is_active for client in self.clients)

    def _check_blocked(self) -> None:
        super()._check_blocked()
        phases = Phase.PREPARING, Phase.RUNNING
        going = [session for session in inside.sessions(self.engine) if inside.phase(session) in phases]
        asking = [client for client in self.clients if client.peer_state is not PeerState.GONE and client.is_active]
        assert len(going) <= len(asking), f"{going} go on for {len(asking)} clients"

    def _check(self) -> None:
        super()._check()
        if self.is_well:
            check_worker(self.engine, self._worker(), inside.sessions(self.engine))
            stuck = [client for client in self.clients if client.is_active and client.is_heard]
            assert len(stuck) <= self._num_asleep, f"requests of {stuck} are never answered"
