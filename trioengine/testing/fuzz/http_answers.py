"""The answers of the routes with choices, whole or as the events of a stream, written from docs/http.md."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trioengine.testing.fuzz.shapes import check_problem, has_fields
from trioengine.testing.toy_model import END_OF_TEXT, IM_END, IM_START, toy_logprobs

_SPECIAL = {END_OF_TEXT: "<|endoftext|>", IM_START: "<|im_start|>", IM_END: "<|im_end|>"}
_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


@dataclass(frozen=True)
class Dialect:
    """A route, and the names in its responses."""

    path: str
    id_prefix: str
    whole: str  # the object
    chunk: str  # the object of an event


CHAT = Dialect("/v1/chat/completions", "chatcmpl-", "chat.completion", "chat.completion.chunk")
TEXT = Dialect("/v1/completions", "cmpl-", "text_completion", "text_completion")


@dataclass(frozen=True)
class Form:
    """The form of the response that a request asks for."""

    dialect: Dialect
    model: str
    num_choices: int
    top_logprobs: int | None  # None: without log-probabilities
    has_usage: bool  # at the end of its stream
    shows_ids: bool
    echoes: tuple[str, ...] = ()  # the prompts of the choices, if they come first


@dataclass
class Choice:
    """One choice, or the part of it that has come."""

    text: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)  # names and arguments
    finish_reason: str | None = None
    logprobs: list[Any] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    prompt_ids: list[int] | None = None
    is_begun: bool = False  # an event of it has come


@dataclass
class Given:
    """A response, or the part of it that has come."""

    choices: list[Choice]
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None


def _check_head(found: Mapping[str, Any], name: str, form: Form) -> None:
    assert found["object"] == name and found["model"] == form.model, f"no {name} of {form.model}: {found}"
    assert str(found["id"]).startswith(form.dialect.id_prefix) and isinstance(found["created"], int), f"it is {found}"
    assert re.fullmatch("fp_[0-9a-f]{12}", found["system_fingerprint"]), f"its fingerprint: {found}"


def _check_usage(usage: object) -> dict[str, Any]:
    names = ("prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details")
    found = dict(has_fields(usage, names, "the usage"))
    assert found["total_tokens"] == found["prompt_tokens"] + found["completion_tokens"], f"the sum in {found}"
    has_fields(found["prompt_tokens_details"], ("cached_tokens",), "the details of the prompt")
    return found


def _logprobs(found: object, form: Form) -> list[Any]:
    """Return the entry of each token: of a text completion its values in the four lists."""
    if form.dialect is CHAT:
        return list(has_fields(found, ("content", "refusal"), "the logprobs")["content"])
    lists = has_fields(found, _LISTS, "the logprobs")
    return list(zip(*(lists[name] for name in _LISTS), strict=True))


def _take_logprobs(choice: Choice, found: object, form: Form) -> None:
    assert found is None or form.top_logprobs is not None, f"log-probabilities that were not asked for: {found}"
    choice.logprobs += [] if found is None else _logprobs(found, form)


def _take_call(choice: Choice, call: Mapping[str, Any], *, is_whole: bool) -> None:
    """Take a call, or a piece of one: the first piece has its name, and the others have its arguments."""
    is_new = call.get("index", len(choice.calls)) == len(choice.calls)
    index = () if is_whole else ("index",)
    if is_new:
        has_fields(call, (*index, "id", "type", "function"), "a call")
        assert call["type"] == "function" and str(call["id"]).startswith("call_"), f"the call is {call}"
        function = has_fields(call["function"], ("name", "arguments"), "a function")
        assert is_whole or not function["arguments"], f"a call begins with arguments: {call}"
        choice.calls.append((function["name"], function["arguments"]))
        return
    has_fields(call, ("index", "function"), "a piece of a call")
    more = has_fields(call["function"], ("arguments",), "a function")["arguments"]
    assert more and call["index"] == len(choice.calls) - 1, f"after {choice.calls} comes {call}"
    name, arguments = choice.calls[-1]
    choice.calls[-1] = name, arguments + more


# ---- whole responses ------------------------------------------------------------------------------------------------


def check_whole(body: Mapping[str, Any], form: Form) -> Given:
    """Check a response, and return the choices in it."""
    dialect, ids = form.dialect, ("prompt_token_ids",) if form.shows_ids and form.dialect is CHAT else ()
    names = ("id", "object", "created", "model", "system_fingerprint", "choices", "usage")
    has_fields(body, (*names, *ids), "a completion")
    _check_head(body, dialect.whole, form)
    indices = [choice["index"] for choice in body["choices"]]
    assert indices == [*range(form.num_choices)], f"{form.num_choices} choices are due, and not {indices}"
    choices = [_whole_choice(choice, form) for choice in body["choices"]]
    for choice in choices if ids else ():
        choice.prompt_ids = body["prompt_token_ids"]
    return Given(choices, _check_usage(body["usage"]))


def _whole_choice(found: Mapping[str, Any], form: Form) -> Choice:
    content = "message" if form.dialect is CHAT else "text"
    ids = _ids_of_choice(form, has_prompt=form.dialect is TEXT)
    has_fields(found, ("index", content, "logprobs", "finish_reason", "stop_reason", *ids), "a choice")
    choice = Choice(finish_reason=found["finish_reason"], token_ids=found.get("token_ids", []))
    if form.dialect is CHAT:
        _take_message(choice, found["message"])
    else:
        choice.text, choice.prompt_ids = found["text"], found.get("prompt_token_ids")
    assert (found["logprobs"] is None) == (form.top_logprobs is None), f"the log-probabilities of {found}"
    _take_logprobs(choice, found["logprobs"], form)
    return choice


def _ids_of_choice(form: Form, *, has_prompt: bool) -> tuple[str, ...]:
    return ("token_ids", *(("prompt_token_ids",) if has_prompt else ())) if form.shows_ids else ()


def _take_message(choice: Choice, message: Mapping[str, Any]) -> None:
    calls = ("tool_calls",) if "tool_calls" in message else ()
    has_fields(message, ("role", "content", "refusal", *calls), "a message")
    assert (message["role"], message["refusal"]) == ("assistant", None), f"the message is {message}"
    assert (message["content"] is None) <= bool(calls), f"neither a text nor a call: {message}"
    choice.text = message["content"] or ""
    for call in message["tool_calls"] if calls else ():
        _take_call(choice, call, is_whole=True)


# ---- streams --------------------------------------------------------------------------------------------------------


class AnswerStream:
    """The events of a stream as they come; raises AssertionError for one that is out of order or out of shape."""

    def __init__(self, form: Form) -> None:
        self.given = Given([Choice() for _ in range(form.num_choices)])
        self.is_done = False  # [DONE] has come
        self.num_texts = 0  # events that have text
        self._form = form
        self._common: tuple[str, int] | None = None  # id and time of all chunks
        self._rest = b""

    @property
    def id(self) -> str | None:
        """The id of all chunks, once one has come."""
        return None if self._common is None else self._common[0]

    @property
    def _is_ended(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.given.choices)

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the body."""
        *frames, self._rest = (self._rest + data).split(b"\n\n")
        for frame in frames:
            self._take(frame.decode())

    def end(self) -> Given:
        """The body is over: return the answer."""
        assert not self._rest, f"a torn event: {self._rest!r}"
        assert self.is_done, f"the stream ends without [DONE]: {self.given}"
        return self.given

    def _take(self, frame: str) -> None:
        assert not self.is_done, f"after [DONE] comes {frame}"
        if frame == ": keep-alive":
            return
        assert frame.startswith("data: "), f"an event of another kind: {frame}"
        data, given = frame.removeprefix("data: "), self.given
        if data == "[DONE]":
            is_whole = self._is_ended and (given.usage is not None) == self._form.has_usage
            assert given.error is not None or is_whole, f"[DONE] comes too early: {given}"
            self.is_done = True
            return
        event = json.loads(data)
        assert given.error is None and given.usage is None, f"after the end comes {event}"
        if "error" in event:
            assert not self._is_ended, f"after the end comes {event}"
            given.error = check_problem(has_fields(event, ("error",), "an event")["error"])
            return
        self._take_chunk(event)

    def _take_chunk(self, event: Mapping[str, Any]) -> None:
        form = self._form
        names = {"id", "object", "created", "model", "system_fingerprint", "choices"}
        names |= {"usage"} if form.has_usage else set()
        has_fields(event, names | ({"prompt_token_ids"} & {*event} if form.dialect is CHAT else set()), "a chunk")
        _check_head(event, form.dialect.chunk, form)
        common = event["id"], event["created"]
        assert self._common in (None, common), f"the chunks before had {self._common}: {event}"
        self._common = common
        if not event["choices"]:
            assert self._is_ended and form.has_usage, f"a chunk without choices: {event}"
            self.given.usage = _check_usage(event["usage"])
            return
        assert event.get("usage") is None, f"a usage before the end: {event}"
        (found,) = event["choices"]
        assert found["index"] in range(form.num_choices), f"another index: {event}"
        choice = self.given.choices[found["index"]]
        assert choice.finish_reason is None, f"after the finish reason comes {found}"
        self._take_prompt(choice, (event if form.dialect is CHAT else found).get("prompt_token_ids"))
        self._take_choice(choice, found)

    def _take_prompt(self, choice: Choice, prompt_ids: list[int] | None) -> None:
        """The first event of a choice has the token ids of its prompt, if they are asked for."""
        is_due = self._form.shows_ids and not choice.is_begun
        assert (prompt_ids is not None) == is_due, f"the ids of the prompt are {prompt_ids}, after {choice}"
        choice.prompt_ids = choice.prompt_ids if prompt_ids is None else prompt_ids

    def _take_choice(self, choice: Choice, found: Mapping[str, Any]) -> None:
        """Take an event of a choice; that with the finish reason has nothing of the answer."""
        form, reason, is_first = self._form, found["finish_reason"], not choice.is_begun
        content = "delta" if form.dialect is CHAT else "text"
        ids = {"token_ids", "prompt_token_ids"} & {*found} if form.shows_ids else set()
        end = () if reason is None else ("stop_reason",)
        has_fields(found, {"index", content, "logprobs", "finish_reason", *end, *ids}, "a choice")
        choice.is_begun, choice.finish_reason = True, reason
        _take_logprobs(choice, found["logprobs"], form)
        choice.token_ids += found.get("token_ids", [])
        assert reason is None or not (found["logprobs"] or found.get("token_ids")), f"the end has tokens: {found}"
        if form.dialect is CHAT:
            self._take_delta(choice, found["delta"], is_first=is_first, is_last=reason is not None)
            return
        text, echo = found["text"], form.echoes[found["index"]] if form.echoes and is_first else None
        assert echo in (None, text), f"the prompt is {echo!r}, and the first event {found}"
        assert not (reason and text), f"the end has a text: {found}"
        self.num_texts += bool(text)
        choice.text += text

    def _take_delta(self, choice: Choice, delta: Mapping[str, Any], *, is_first: bool, is_last: bool) -> None:
        if is_first or is_last:
            expected = {"role": "assistant", "content": ""} if is_first else {}
            assert delta == expected, f"the first or last delta is {delta}"
            assert not (is_first and is_last), f"the first event is the last one: {choice}"
        elif "tool_calls" in delta:
            (call,) = has_fields(delta, ("tool_calls",), "a delta")["tool_calls"]
            _take_call(choice, call, is_whole=False)
        else:
            has_fields(delta, ("content",), "a delta")
            has_tokens = self._form.top_logprobs is not None or self._form.shows_ids  # a text may come later than these
            assert delta["content"] or has_tokens, f"an empty delta: {delta}"
            self.num_texts += 1
            choice.text += delta["content"]


# ---- the model's own arithmetic -------------------------------------------------------------------------------------


def text_of(token_ids: Sequence[int]) -> str:
    """The text of a prompt of token ids, with the special tokens among them."""
    return "".join(_SPECIAL.get(each) or chr(each) for each in token_ids)


def check_logprobs(found: Sequence[Any], form: Form, prompt: Sequence[int], token_ids: Sequence[int]) -> None:
    """Compare the log-probabilities of a choice with the toy model's; an echoed prompt comes first."""
    top = form.top_logprobs
    assert top is not None, "they were asked for"
    if form.dialect is CHAT:
        expected: list[Any] = [_chat_entry(each, top) for each in token_ids]
    else:
        expected = [*_text_entries(prompt, token_ids, top)][0 if form.echoes else len(prompt) :]
    assert len(found) == len(expected), f"{len(found)} logprobs, the choice has {len(expected)} tokens"
    for entry, due in zip(found, expected, strict=True):
        assert entry == due, f"the logprobs of a token are {entry}, and not {due}"


def _chat_entry(token_id: int, top: int) -> dict[str, Any]:
    values = toy_logprobs(token_id, max(top, 1))
    best = [_shown_token(each, values[each]) for each in list(values)[:top]]
    return {**_shown_token(token_id, values[token_id]), "top_logprobs": best}


def _shown_token(token_id: int, logprob: float) -> dict[str, Any]:
    data = _SPECIAL[token_id].encode() if token_id in _SPECIAL else bytes((token_id,))
    return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}


def _text_entries(prompt: Sequence[int], token_ids: Sequence[int], top: int) -> Iterator[tuple[Any, ...]]:
    """The entries of a prompt's tokens, of which the first has no log-probabilities, and of its answer's."""
    offset = 0
    for place, token_id in enumerate((*prompt, *token_ids)):
        values = {text_of((each,)): value for each, value in toy_logprobs(token_id, top).items()}
        name = text_of((token_id,))
        yield (name, values[name], values, offset) if place else (name, None, None, offset)
        offset += len(name) if place < len(prompt) or token_id not in _SPECIAL else 0  # hidden in an answer
