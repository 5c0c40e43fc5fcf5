"""Requests of the HTTP machine's clients, and the responses to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import h11

from trioengine.core.grammar import Grammar
from trioengine.testing.fuzz.answers import Answer, reference
from trioengine.testing.fuzz.conversations import Content, FuzzPrompt, chat_content, prompt_of
from trioengine.testing.fuzz.faults import Life
from trioengine.testing.fuzz.grammars import GRAMMARS
from trioengine.testing.fuzz.http_answers import CHAT, TEXT, AnswerStream, Dialect, Form, text_of
from trioengine.testing.fuzz.http_books import Request, Use
from trioengine.testing.fuzz.shapes import Head
from trioengine.testing.fuzz.tools import TOOL_USES, Parts, ToolUse, parts_of

RAW_PROMPTS: Mapping[str, tuple[str | tuple[int, ...], ...]] = {  # of text completions: texts, or token ids
    "text": ("be",),
    "texts": ("be", "a", "be"),
    "chunks and token": ("be" * 8 + "a",),  # its log-probabilities are whole before the first token of the answer
    "common prefix": ("be" * 4, "be" * 4 + "a"),
    "too long": ("a", "be" * 60),
    "ids": ((98, 258, 101),),
    "lists of ids": ((97,), (98, 257)),
}
HOT = 2.0  # a temperature at which the toy model's tokens depend on the seed


@dataclass(frozen=True)
class Ask:
    """A request with choices: a chat, or with `prompts` a text completion; and the fields beside these."""

    content: Content  # of the last message
    max_tokens: int
    streams: bool
    stop: str | None = None
    min_tokens: int = 0
    stop_token: int | None = None
    top_logprobs: int | None = None
    has_usage: bool = False  # in its stream
    request_id: str | None = None  # in its body
    grammar: str = ""  # its name
    n: int = 1  # choices for each prompt
    seed: int | None = None  # of a hot request; others are greedy
    shows_ids: bool = False
    tools: str = ""  # the name of a use of tools
    tool_form: str = "hermes"
    prompts: tuple[str | tuple[int, ...], ...] = ()  # texts and token ids
    echo: bool = False  # of these

    @property
    def dialect(self) -> Dialect:
        return TEXT if self.prompts else CHAT

    @property
    def num_choices(self) -> int:
        return self.n * max(1, len(self.prompts))

    @property
    def use(self) -> ToolUse | None:
        """The tools that it offers, which may be hidden."""
        return TOOL_USES[self.tools] if self.tools else None

    @property
    def rendered(self) -> tuple[FuzzPrompt, ...]:
        """Its prompts."""
        if self.prompts:
            return tuple(FuzzPrompt(_ids_of(prompt), ()) for prompt in self.prompts)
        before = () if self.use is None else self.use.prompt
        return (prompt_of((*before, ("user", self.content))),)

    @property
    def has_parts(self) -> bool:
        """Whether its stream has other events than those with the text of one answer."""
        return bool(self.prompts or self.tools) or self.n > 1

    @property
    def is_scored(self) -> bool:
        """Whether its prompts take nothing from the prefix cache."""
        return self.echo and (self.top_logprobs is not None or not self.max_tokens)

    def form(self, model: str) -> Form:
        """The form of its response."""
        echoes = tuple(text_of(_ids_of(prompt)) for prompt in self.prompts for _ in range(self.n)) if self.echo else ()
        return Form(
            self.dialect,
            model,
            self.num_choices,
            self.top_logprobs,
            self.has_usage and self.streams,
            self.shows_ids,
            echoes,
        )

    def expected(self, index: int, max_model_len: int) -> Answer:
        """The model's answer in a choice, if there is room for one, and its grammar can be compiled."""
        token_ids, images = self.rendered[index // self.n]
        return reference(
            token_ids,
            min(max_model_len - len(token_ids), self.max_tokens),
            () if self.stop is None else (self.stop,),
            min_tokens=self.min_tokens,
            stop_token_ids=() if self.stop_token is None else (self.stop_token,),
            images=images,
            grammar=self._grammar,
            seed=0 if self.seed is None else (self.seed + index % self.n + 2**63) % 2**64 - 2**63,
        )

    def parts(self, text: str) -> Parts:
        """The parts of an answer: its text, and calls if it may have some."""
        return Parts(text, ()) if self.use is None or self.use.choice == "none" else parts_of(text, self.tool_form)

    @property
    def _grammar(self) -> Grammar | None:
        if self.use is not None:
            return self.use.grammar(self.tool_form)
        return GRAMMARS[self.grammar].grammar if self.grammar and not self.has_bad_grammar else None

    @property
    def has_bad_grammar(self) -> bool:
        """Whether it has a grammar that cannot be compiled."""
        return bool(self.grammar) and GRAMMARS[self.grammar].is_bad

    def fields(self, model: str) -> dict[str, Any]:
        """The body of the request; fields that would change nothing are left out."""
        given: dict[str, Any] = {"model": model}
        if self.prompts:
            given["prompt"] = self.prompts[0] if len(self.prompts) == 1 else self.prompts
        else:
            history = () if self.use is None else self.use.messages
            given["messages"] = [*history, {"role": "user", "content": chat_content(self.content)}]
        given |= {"max_tokens": self.max_tokens, "stream": self.streams}
        more = {
            "stop": self.stop,
            "min_tokens": self.min_tokens or None,
            "stop_token_ids": None if self.stop_token is None else [self.stop_token],
            "stream_options": {"include_usage": True} if self.has_usage and self.streams else None,
            "request_id": self.request_id,
            "n": self.n if self.n > 1 else None,
            "seed": self.seed,
            "temperature": None if self.seed is None else HOT,
            "return_token_ids": self.shows_ids or None,
            "echo": self.echo or None,
        }
        if self.prompts:
            more["logprobs"] = self.top_logprobs
        elif self.top_logprobs is not None:
            more |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        given |= GRAMMARS[self.grammar].fields if self.grammar else {}
        given |= {} if self.use is None else self.use.fields()
        return given | {name: value for name, value in more.items() if value is not None}


def _ids_of(prompt: str | tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prompt.encode()) if isinstance(prompt, str) else prompt


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
    numbers: tuple[int, ...] = ()  # of its prompts
    judge: Judge | None = None  # of the response to another request
    is_prompt: bool = False  # it is answered at once
    stream: AnswerStream | None = None
    protocol: h11.Connection = field(default_factory=lambda: h11.Connection(h11.CLIENT))
    head: Head | None = None
    body: bytes = b""
    unsent: bytes = b""  # the rest of the request
    is_continued: bool = False  # the server has asked for the body
    since: float | None = None  # when all had come to rest with this request at the server
    most_texts: int | None = None  # events that can come of an answer that was whole while the client read nothing
    is_aborted: bool = False  # an operator has aborted requests with one of its ids

    @property
    def num_choices(self) -> int:
        """How many requests of the engine it may have."""
        return 0 if self.ask is None else self.ask.num_choices

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
