"""Mutants of requests with several choices, of text completions, and of tool calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import trio
from mutant import Mutant, replaced

from trioengine.actors.gate import Gate
from trioengine.actors.request import Request
from trioengine.aio.concurrency import Notifier
from trioengine.core.types import Cause, Usage
from trioengine.serve import choices
from trioengine.serve.chat_response import ChatFrames
from trioengine.serve.choices import Choice, Choices
from trioengine.serve.completion_logprobs import CompletionLogprobs
from trioengine.serve.key_sessions import SessionShare
from trioengine.text.tool_calls import CallArguments, CallBegin, ToolCallParser


def _search_on_behind(step_tail: Any) -> Any:
    def mutant(self: ToolCallParser) -> bool:
        found: bool = step_tail(self)
        if not found:
            self._searched = len(self._buffer)
        return found

    return mutant


def _drop_after_name(parts: Any) -> Any:
    def mutant(self: ChatFrames, given: list[Any]) -> bytes:
        lost = {at + 1 for at, part in enumerate(given) if isinstance(part, CallBegin)}
        rendered: bytes = parts(self, [part for at, part in enumerate(given) if at not in lost])
        return rendered

    return mutant


def _send_arguments_again(end: Any) -> Any:
    def mutant(self: ChatFrames, completion: Any) -> bytes:
        if self._parser is not None and self._parser.has_calls:
            again = self._parts([CallArguments(completion.text[-1:])])
            return again + bytes(end(self, completion))
        return bytes(end(self, completion))

    return mutant


def _leave_others_waiting(run: Any) -> Any:
    async def mutant(self: Choices, choice: Choice, body: Any) -> None:
        admitted, choice.admitted = choice.admitted, trio.Event()
        try:
            await run(self, choice, body)
        finally:
            if self._failure is None:
                admitted.set()

    return mutant


def _end_only_failed(end_all: Any) -> Any:
    def mutant(self: Choices, cause: Cause) -> None:
        if cause is not Cause.CLIENT:
            end_all(self, cause)

    return mutant


def _keep_claims(answer: Any) -> Any:
    async def mutant(self: Choices, choice: Choice, body: Any) -> None:
        self._give_up_claim = None
        await answer(self, choice, body)

    return mutant


def _claim_one(claiming: Any) -> Any:
    @contextmanager
    def mutant(self: Gate, count: int) -> Iterator[Callable[[], None]]:
        with claiming(self, 1) as give_up:
            give_up()
            yield lambda: None

    return mutant


def _count_each_prompt(usage: Any) -> Any:
    def mutant(self: Choices) -> Usage:
        found: Usage = usage.fget(self)
        prompts = [self._completions[choice.index].usage.prompt_tokens for choice in self._choices]
        return Usage(sum(prompts), found.completion_tokens, found.cached_tokens)

    return property(mutant)


def _read_the_echo_again(read_text_nowait: Any) -> Any:
    def mutant(self: Request) -> str:
        text: str = read_text_nowait(self)
        self._has_read_prompt = self._has_prompt_logprobs
        return text

    return mutant


def _shift(prompt: Any) -> Any:
    def mutant(self: CompletionLogprobs, *args: Any) -> Any:
        lists = prompt(self, *args)
        return {**lists, "token_logprobs": [*lists["token_logprobs"][1:], None]}

    return mutant


def _wake_nobody(using: Any) -> Any:
    @asynccontextmanager
    async def mutant(self: SessionShare) -> AsyncIterator[None]:
        changed = self._all.changed
        try:
            async with using(self):
                try:
                    yield
                finally:
                    self._all.changed = Notifier()
        finally:
            self._all.changed = changed

    return mutant


_http = partial(Mutant, machine="HttpMachine")
CHOICE_MUTANTS = (
    _http(
        "F76",
        "the end tag of a tool call that comes in two pieces is missed",
        replaced(ToolCallParser, "_step_tail", _search_on_behind),
        shows="the model's",
    ),
    _http(
        "F77",
        "the arguments of a tool call that come with its name are lost",
        replaced(ChatFrames, "_parts", _drop_after_name),
        shows="the calls are",
    ),
    _http(
        "F77b",
        "the last piece of the arguments of a tool call is sent twice",
        replaced(ChatFrames, "end", _send_arguments_again),
        shows="the calls are",
    ),
    _http(
        "F78",
        "the prompts behind one that fails wait on",
        replaced(Choices, "_run", _leave_others_waiting),
        shows="are never answered|never end|are in flight, the worker has none",
    ),
    _http(
        "F79",
        "a choice that fails does not end the others",
        replaced(Choices, "_end_all", _end_only_failed),
        shows="has failed, and others go on|an answer that has begun is refused",
    ),
    _http(
        "F80",
        "the slots of a request with several choices stay claimed when they are taken",
        replaced(Choices, "_answer", _keep_claims),
        shows="slots are claimed|are free|are to have a slot, or none",
    ),
    _http(
        "F80b",
        "some choices are admitted, and one is refused",
        replaced(Gate, "claiming", _claim_one),
        shows="are to have a slot, or none|has failed, and others go on",
    ),
    _http(
        "F81",
        "the usage counts the prompt for each of its choices",
        replaced(Choices, "_usage", _count_each_prompt),
        shows="the usage counts",
    ),
    _http(
        "F82",
        "an echoed prompt is sent again by the next worker",
        replaced(Request, "read_text_nowait", _read_the_echo_again),
        shows="the model's",
    ),
    _http(
        "F83",
        "all choices have one seed",
        replaced(choices, "_numbered", lambda numbered: lambda params, number: params),
        shows="the model's",
    ),
    _http(
        "F84",
        "each token of a prompt has the log-probability of the next one",
        replaced(CompletionLogprobs, "prompt", _shift),
        shows="the logprobs of a token are",
    ),
    Mutant(
        "F85",
        "a tool call that was cut is completed",
        replaced(ToolCallParser, "is_cut", lambda is_cut: property(lambda self: False)),
        shows="an item of it is",
        machine="RealtimeMachine",
    ),
    _http(
        "F111",
        "a prompt that waits for its request's only session is not woken",
        replaced(SessionShare, "using", _wake_nobody),
        shows="never answered|wait forever",
    ),
)
