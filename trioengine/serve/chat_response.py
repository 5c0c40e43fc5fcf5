"""The response of a chat completion: whole, or as the frames of a stream."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii  # json.dumps of a string, without its set-up
from typing import Any

from trioengine.core.types import Chunk, Completion, FinishReason, Logprobs, Usage
from trioengine.serve.errors import Problem
from trioengine.serve.ids import new_id, unix_time
from trioengine.serve.json_encoder import encode, encoded, encoded_list
from trioengine.serve.shown import Result, Shown, running_usage, timings_json, usage_json
from trioengine.text.reasoning import AnswerParser, AnswerPart, Reasoning
from trioengine.text.tokenizer import Tokenizer
from trioengine.text.tool_calls import CallArguments, CallBegin

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
LEAST = -9999.0  # stands for minus infinity, which JSON lacks


@dataclass(frozen=True, slots=True)
class ChatShape:
    """The fields common to all parts of one completion; `top_logprobs` is None without log-probabilities."""

    model: str
    tokenizer: Tokenizer
    top_logprobs: int | None
    fingerprint: str
    shown: Shown
    skip_special_tokens: bool
    id: str = field(default_factory=lambda: new_id("chatcmpl-"))
    created: int = field(default_factory=unix_time)

    def whole(self, results: Sequence[Result], usage: Usage, parsers: Sequence[AnswerParser | None]) -> bytes:
        """Render a chat.completion; a parser divides its answer into parts."""
        completions = [result.completion for result in results]
        made = enumerate(zip(completions, parsers, strict=True))
        choices = [self._choice(index, completion, parser) for index, (completion, parser) in made]
        usage_shown = self._usage_json(usage, completions, parsers)
        shown = {**self.head("chat.completion"), "choices": choices, "usage": usage_shown, "model": encoded(self.model)}
        if self.shown.token_ids:
            shown["prompt_token_ids"] = results[0].prompt_token_ids
        if self.shown.timings:
            shown["timings"] = timings_json(completions)
        return encode(shown)

    def _choice(self, index: int, completion: Completion, parser: AnswerParser | None) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": completion.text, "refusal": None}
        if parser is not None:
            message |= _message_of([*parser.feed(completion.text), *parser.finish()])
        choice = {
            "index": index,
            "message": encoded(message),
            "logprobs": self.logprobs(completion.logprobs),
            "finish_reason": finish_reason(completion, parser),
            "stop_reason": encoded(completion.stop_reason),
        }
        return {**choice, "token_ids": completion.token_ids} if self.shown.token_ids else choice

    def last_frame(
        self, usage: Usage, completions: Sequence[Completion], parsers: Sequence[AnswerParser | None]
    ) -> bytes:
        """Render the event without choices that has the usage and the timings; b"" if neither is asked for."""
        shown = {**self.head("chat.completion.chunk"), "choices": []}
        if self.shown.usage or self.shown.running_usage:
            shown["usage"] = self._usage_json(usage, completions, parsers)
        if self.shown.timings:
            shown["timings"] = timings_json(completions)
        is_due = self.shown.usage or self.shown.timings
        return f"data: {json.dumps(shown)}\n\n".encode() if is_due else b""

    def _usage_json(
        self, usage: Usage, completions: Sequence[Completion], parsers: Sequence[AnswerParser | None]
    ) -> dict[str, Any]:
        """Return the usage with the tokens of the reasoning, which the parsers have found, if they look for any."""
        counts = [
            self._num_reasoning_tokens(completion, parser.num_reasoning_characters)
            for completion, parser in zip(completions, parsers, strict=True)
            if parser is not None and parser.splits_reasoning
        ]
        details = {"completion_tokens_details": {"reasoning_tokens": sum(counts)}} if counts else {}
        return {**usage_json(usage), **details}

    def _num_reasoning_tokens(self, completion: Completion, num_characters: int | None) -> int:
        """Return the number of the tokens up to the one that completes these characters; None stands for all."""
        ids = completion.token_ids
        if num_characters is None:
            return len(ids)

        def length(count: int) -> int:
            return len(self.tokenizer.decode(ids[:count], skip_special_tokens=self.skip_special_tokens))

        return bisect_left(range(len(ids)), num_characters, key=length)

    def head(self, name: str) -> dict[str, Any]:
        head = {"id": self.id, "object": name, "created": self.created, "model": self.model}
        return {**head, "system_fingerprint": self.fingerprint}

    def logprobs(self, logprobs: Iterable[Logprobs] | None) -> dict[str, Any] | None:
        """Return the log-probabilities of an answer, or of a part of it, for `encode`."""
        if self.top_logprobs is None:
            return None
        top, as_ids = self.top_logprobs, self.shown.tokens_as_ids
        content = (_position(each, top, self.tokenizer, as_ids) for each in logprobs or ())
        return {"content": encoded_list(content), "refusal": None}


class ChatFrames:
    """Renders the events of one choice of a stream; the parts that they have in common are rendered once."""

    __slots__ = (
        "_after",
        "_before",
        "_logprobs",
        "_num_calls",
        "_num_prompt_tokens",
        "_num_tokens",
        "_parser",
        "_shape",
        "_text_after",
        "_text_before",
        "_token_ids",
        "reads_text_only",
    )

    def __init__(self, shape: ChatShape, index: int, parser: AnswerParser | None = None) -> None:
        """A `parser` divides the answer into its parts."""
        shown = shape.shown
        self._shape = shape
        self._parser = parser
        needs_tokens = shape.top_logprobs is not None or shown.token_ids or shown.running_usage
        self.reads_text_only = self._parser is None and not needs_tokens
        self._num_calls = 0
        self._num_prompt_tokens = 0
        self._num_tokens = 0
        self._logprobs: list[Logprobs] = []  # of tokens that no frame has shown yet
        self._token_ids: list[int] = []  # the same
        head = json.dumps(shape.head("chat.completion.chunk"))[:-1]
        self._before = f'data: {head}, "choices": [{{"index": {index}, "delta": '.encode()
        self._after = b'], "usage": null}\n\n' if shown.usage else b"]}\n\n"
        self._text_before = self._before + b'{"content": '
        self._text_after = b'}, "logprobs": null, "finish_reason": null}' + self._after

    def opening(self, prompt_token_ids: Sequence[int]) -> bytes:
        """Render the event with the role."""
        self._num_prompt_tokens = len(prompt_token_ids)
        more = b', "prompt_token_ids": ' + encode(prompt_token_ids) if self._shape.shown.token_ids else b""
        return self._frame(b'{"role": "assistant", "content": ""}', more=more)

    def delta(self, chunk: Chunk) -> bytes:
        """Render a chunk; b"" for one that shows nothing."""
        if self.reads_text_only:
            return self.text(chunk.text)
        self._num_tokens += len(chunk.token_ids)
        self._logprobs.extend(chunk.logprobs or ())
        if self._shape.shown.token_ids:
            self._token_ids.extend(chunk.token_ids)
        if self._parser is not None:
            return self._parts(self._parser.feed(chunk.text))
        return self._parts([chunk.text]) if chunk.text or self._logprobs or self._token_ids else b""

    def text(self, text: str) -> bytes:
        """Render a text without log-probabilities; b"" for an empty one."""
        return self._text_before + encode_basestring_ascii(text).encode() + self._text_after if text else b""

    def _parts(self, parts: Iterable[AnswerPart]) -> bytes:
        """Render reasoning, text and tool calls; log-probabilities and ids come with the next frame that there is."""
        return b"".join([self._frame(json.dumps(self._delta_of(part)).encode()) for part in parts])

    def _delta_of(self, part: AnswerPart) -> dict[str, Any]:
        match part:
            case CallBegin(name):
                self._num_calls += 1
                call = {"index": self._num_calls - 1, **_call(name, "")}
            case CallArguments(text):
                call = {"index": self._num_calls - 1, "function": {"arguments": text}}
            case Reasoning(text):
                return {"reasoning": text, "reasoning_content": text}
            case _:
                return {"content": part}
        return {"tool_calls": [call]}

    def end(self, completion: Completion) -> bytes:
        """Render the rest of the answer, and the finish reason."""
        rest = self._parts(self._parser.finish()) if self._parser is not None else b""
        if self._logprobs or self._token_ids:
            rest += self._frame(b'{"content": ""}')
        reason = finish_reason(completion, self._parser)
        stop_reason = f', "stop_reason": {json.dumps(completion.stop_reason)}'
        return rest + self._frame(b"{}", finish_reason=f'"{reason}"{stop_reason}'.encode())

    @property
    def num_unshown(self) -> int:
        """The number of tokens whose log-probabilities come with the next frame."""
        return len(self._logprobs)

    def _frame(self, delta: bytes, *, finish_reason: bytes = b"null", more: bytes = b"") -> bytes:
        """Render an event of fields in JSON, with the tokens that were not shown yet; `more` are further members."""
        logprobs, self._logprobs = self._logprobs, []
        token_ids, self._token_ids = self._token_ids, []
        shown = encode(self._shape.logprobs(logprobs)) if logprobs else b"null"
        parts = [self._before, delta, b', "logprobs": ', shown, b', "finish_reason": ', finish_reason]
        if token_ids:
            parts += [b', "token_ids": ', encode(token_ids)]
        parts.append(b"}")
        if self._shape.shown.running_usage:
            usage = encode(running_usage(self._num_prompt_tokens, self._num_tokens))
            parts += [b'], "usage": ', usage, more, b"}\n\n"]
        else:
            parts += [self._after[:-3], more, self._after[-3:]]
        return b"".join(parts)


def finish_reason(completion: Completion, parser: AnswerParser | None) -> str:
    """Return why it ended, as OpenAI names it."""
    has_calls = parser is not None and parser.has_calls
    is_stop = completion.finish_reason is FinishReason.STOP
    return "tool_calls" if has_calls and is_stop else completion.finish_reason.value


def _message_of(parts: Iterable[AnswerPart]) -> dict[str, Any]:
    """Return the fields of a message for the parts of an answer."""
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[tuple[str, list[str]]] = []
    for part in parts:
        match part:
            case CallBegin(name):
                calls.append((name, []))
            case CallArguments(arguments):
                calls[-1][1].append(arguments)
            case Reasoning(text):
                reasoning.append(text)
            case _:
                texts.append(part)
    message: dict[str, Any] = {"content": "".join(texts)}
    if calls:
        made = [_call(name, "".join(arguments)) for name, arguments in calls]
        message = {"content": message["content"] or None, "tool_calls": made}
    if reasoning:
        message["reasoning"] = message["reasoning_content"] = "".join(reasoning)
    return message


def _call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": new_id("call_"), "type": "function", "function": {"name": name, "arguments": arguments}}


def error_frames(problem: Problem) -> bytes:
    """Render an error in the middle of a stream, and the end of the stream."""
    return f"data: {json.dumps({'error': problem.to_json()})}\n\n".encode() + DONE


def _position(position: Logprobs, top: int, tokenizer: Tokenizer, as_ids: bool) -> dict[str, Any]:
    """Render a token, with the `top` best of its position, best first."""
    chosen = next(iter(position))
    best = sorted(position, key=position.__getitem__, reverse=True)[:top]
    alternatives = [_token(token_id, position[token_id], tokenizer, as_ids) for token_id in best]
    return {**_token(chosen, position[chosen], tokenizer, as_ids), "top_logprobs": alternatives}


def _token(token_id: int, logprob: float, tokenizer: Tokenizer, as_ids: bool) -> dict[str, Any]:
    if tokenizer.is_byte_level:
        data = tokenizer.bytes_of((token_id,))
        text = data.decode(errors="replace")
    else:
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        data = text.encode()
    shown = f"token_id:{token_id}" if as_ids else text
    return {"token": shown, "logprob": max(logprob, LEAST), "bytes": list(data)}
