"""Judges the responses of the HTTP server to one client, by a model of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from trioengine.core.types import FinishReason
from trioengine.serve.connection import BEYOND_TIMEOUT
from trioengine.testing.fuzz import shapes
from trioengine.testing.fuzz.conversations import check_seen, is_failed, is_refused
from trioengine.testing.fuzz.faults import Harm, InjectedFaults
from trioengine.testing.fuzz.grammars import GRAMMARS
from trioengine.testing.fuzz.http_answers import Choice, check_logprobs, check_whole
from trioengine.testing.fuzz.http_books import SERVED_BEYOND, HttpBooks, Use
from trioengine.testing.fuzz.http_exchange import Ask, Exchange
from trioengine.testing.fuzz.shapes import Head

BEFORE_THE_HANDLER = ("too_many_connections", "too_many_sessions", "buffers_full", "key_buffers_full")
STREAM, JSON = "text/event-stream", "application/json"


class ResponseJudge:
    """Raises AssertionError for a response that the server must not give, and for a part of one."""

    def __init__(
        self,
        books: HttpBooks,
        use: Use,
        max_model_len: int,
        faults: InjectedFaults,
        clock: Callable[[], float],
    ) -> None:
        self._books = books
        self._use = use  # of the server's limits, by the client's connection
        self._max_model_len = max_model_len
        self._faults = faults
        self._clock = clock
        self._connected_at = clock()

    def check(self, exchange: Exchange, head: Head, *, is_spoilt: bool) -> None:
        """Check a whole response; `is_spoilt`: the client has sent bytes that are not a request."""
        is_beyond = _is_beyond(exchange)
        if exchange.judge is not None and not is_beyond and exchange.judge(head, exchange.body, exchange.life):
            shapes.check_head(head, head.value(b"content-type") or "", exchange.chosen_id or None)
            return
        if exchange.request.method == "HEAD":  # its error has no body
            codes = ("too_many_connections", "too_many_sessions")
            is_reached = any(self._books.is_reached(code, exchange.use, self._use) for code in codes)
            assert head.status in shapes.RETRIED and is_reached, f"{exchange.request} is answered by {head}"
            return
        if head.status != 200:
            error = shapes.has_fields(json.loads(exchange.body), ("error",), "the body")["error"]
            self._judge_refusal(exchange, head, shapes.check_problem(error, head), is_spoilt=is_spoilt)
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

    def check_part(self, ask: Ask, index: int, given: Choice) -> None:
        """Check the part of a choice that has come; its text may end with the beginning of a stop string."""
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

    def _judge_refusal(self, exchange: Exchange, head: Head, error: dict[str, Any], *, is_spoilt: bool) -> None:
        code, is_unread = error["code"], is_spoilt
        if code == "too_many_connections":
            is_unread = head.value(b"x-request-id") != exchange.chosen_id
            if exchange.chosen_id:  # else nothing shows whether it was read
                self._check_beyond(exchange, is_unread=is_unread)
        shapes.check_head(head, JSON, None if is_unread else exchange.chosen_id or None)
        if code in BEFORE_THE_HANDLER:
            assert self._books.is_reached(code, exchange.use, self._use), f"{exchange.request} is refused by {error}"
        elif code == "bad_request":
            assert is_spoilt, f"{exchange.request} is refused by {error}"
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


def _is_beyond(exchange: Exchange) -> bool:
    """Whether it is refused because its connection is beyond the limit."""
    if exchange.status != 503 or not exchange.body:  # a HEAD has no body
        return False
    return bool(json.loads(exchange.body).get("error", {}).get("code") == "too_many_connections")
