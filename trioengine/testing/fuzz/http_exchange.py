"""Requests of the HTTP machine's clients, and the responses to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import h11

from trioengine.testing.fuzz.answers import Answer, reference
from trioengine.testing.fuzz.conversations import Content, FuzzPrompt, chat_content, prompt_of
from trioengine.testing.fuzz.faults import Life
from trioengine.testing.fuzz.grammars import GRAMMARS
from trioengine.testing.fuzz.http_books import Request, Use
from trioengine.testing.fuzz.shapes import ChatStream, Head


@dataclass(frozen=True)
class Ask:
    """A chat completion: the only message, and the fields beside it."""

    content: Content
    max_tokens: int
    streams: bool
    stop: str | None = None
    min_tokens: int = 0
    stop_token: int | None = None
    top_logprobs: int | None = None
    has_usage: bool = False  # in its stream
    request_id: str | None = None  # in its body
    grammar: str = ""  # its name

    @property
    def prompt(self) -> FuzzPrompt:
        return prompt_of((("user", self.content),))

    def expected(self, max_model_len: int) -> Answer:
        """The model's answer, if there is room for one and its grammar can be compiled."""
        grammar = GRAMMARS[self.grammar].grammar if self.grammar and not self.has_bad_grammar else None
        token_ids, images = self.prompt
        length = min(max_model_len - len(token_ids), self.max_tokens)
        stop = () if self.stop is None else (self.stop,)
        ends = () if self.stop_token is None else (self.stop_token,)
        return reference(
            token_ids, length, stop, min_tokens=self.min_tokens, stop_token_ids=ends, images=images, grammar=grammar
        )

    @property
    def has_bad_grammar(self) -> bool:
        """Whether it has a grammar that cannot be compiled."""
        return bool(self.grammar) and GRAMMARS[self.grammar].is_bad

    def fields(self, model: str) -> dict[str, Any]:
        """The body of the request; fields that would change nothing are left out."""
        given: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": chat_content(self.content)}],
            "max_tokens": self.max_tokens,
            "stream": self.streams,
        }
        more = {
            "stop": self.stop,
            "min_tokens": self.min_tokens or None,
            "stop_token_ids": None if self.stop_token is None else [self.stop_token],
            "logprobs": None if self.top_logprobs is None else True,
            "top_logprobs": self.top_logprobs,
            "stream_options": {"include_usage": True} if self.has_usage else None,
            "request_id": self.request_id,
        }
        given |= GRAMMARS[self.grammar].fields if self.grammar else {}
        return given | {name: value for name, value in more.items() if value is not None}


Judge = Callable[[Head, bytes, Life], bool]  # False: the response is an error, to be judged like others


@dataclass(eq=False)
class Exchange:
    """A request, and its response so far."""

    life: Life
    request: Request
    use: Use  # of the server's limits
    chosen_id: str
    sent_at: float
    ask: Ask | None = None
    number: int = 0  # of its prompt
    judge: Judge | None = None  # of the response to another request
    is_prompt: bool = False  # it is answered at once
    stream: ChatStream | None = None
    protocol: h11.Connection = field(default_factory=lambda: h11.Connection(h11.CLIENT))
    head: Head | None = None
    body: bytes = b""
    unsent: bytes = b""  # the rest of the request
    is_continued: bool = False  # the server has asked for the body
    since: float | None = None  # when all had come to rest with this request at the server
    most_texts: int | None = None  # events that can come of an answer that was whole while the client read nothing
    is_aborted: bool = False  # an operator has aborted requests with one of its ids

    @property
    def stream_id(self) -> str | None:
        """The server's id, once an event of its stream has come."""
        return None if self.stream is None else self.stream.id

    @property
    def ids(self) -> set[str]:
        """The ids by which an operator can abort it: the server's, if it has come, and the client's."""
        return set() if self.ask is None else {*filter(None, (self.chosen_id, self.ask.request_id, self.stream_id))}

    @property
    def status(self) -> int:
        return 0 if self.head is None else self.head.status
