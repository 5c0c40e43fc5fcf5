"""The response of a chat completion: whole, or as the frames of a stream."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii  # json.dumps of a string, without its set-up
from typing import Any

from trioengine.core.types import Chunk, Completion, FinishReason, Logprobs, Usage
from trioengine.serve.errors import Problem
from trioengine.serve.ids import new_id, unix_time
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
    skip_special_tokens: bool = True
    id: str = field(default_factory=lambda: new_id("chatcmpl-"))
    created: int = field(default_factory=unix_time)

    def whole(self, completion: Completion, parser: AnswerParser | None) -> bytes:
        """Render a chat.completion; a `parser` divides the answer into its parts."""
        message: dict[str, Any] = {"role": "assistant", "content": completion.text, "refusal": None}
        if parser is not None:
            message |= _message_of([*parser.feed(completion.text), *parser.finish()])
        choice = {
            "index": 0,
            "message": message,
            "logprobs": self.logprobs(completion.logprobs),
            "finish_reason": finish_reason(completion, has_calls=parser is not None and parser.has_calls),
        }
        shown = {**self.head("chat.completion"), "choices": [choice], "usage": self.usage(completion, parser)}
        return json.dumps(shown).encode()

    def usage(self, completion: Completion, parser: AnswerParser | None) -> dict[str, Any]:
        usage = usage_json(completion.usage)
        if parser is not None and parser.splits_reasoning:
            count = self._num_reasoning_tokens(completion, parser.num_reasoning_characters)
            usage["completion_tokens_details"] = {"reasoning_tokens": count}
        return usage

    def _num_reasoning_tokens(self, completion: Completion, num_characters: int | None) -> int:
        """Return the number of the tokens up to the one that completes these characters; None stands for all."""
        ids = completion.token_ids
        if num_characters is None:
            return len(ids)

        def length(count: int) -> int:
            return len(self.tokenizer.decode(ids[:count], skip_special_tokens=self.skip_special_tokens))

        return bisect_left(range(len(ids)), num_characters, key=length)

    def head(self, name: str) -> dict[str, Any]:
        return {"id": self.id, "object": name, "created": self.created, "model": self.model}

    def logprobs(self, logprobs: Iterable[Logprobs] | None) -> dict[str, Any] | None:
        if self.top_logprobs is None:
            return None
        return {"content": logprobs_content(logprobs or (), self.top_logprobs, self.tokenizer), "refusal": None}


class ChatFrames:
    """Renders the frames of one stream; the parts that they have in common are rendered once."""

    __slots__ = (
        "_after",
        "_before",
        "_include_usage",
        "_logprobs",
        "_num_calls",
        "_shape",
        "_text_after",
        "_text_before",
        "_usage_before",
        "opening",
    )

    def __init__(self, shape: ChatShape, *, include_usage: bool) -> None:
        self._shape = shape
        self._include_usage = include_usage
        self._num_calls = 0
        self._logprobs: list[Logprobs] = []  # of tokens that no frame has shown yet
        head = json.dumps(shape.head("chat.completion.chunk"))[:-1]
        self._before = f'data: {head}, "choices": [{{"index": 0, "delta": '.encode()
        self._usage_before = f'data: {head}, "choices": [], "usage": '.encode()
        self._after = b'], "usage": null}\n\n' if include_usage else b"]}\n\n"
        self._text_before = self._before + b'{"content": '
        self._text_after = b'}, "logprobs": null, "finish_reason": null}' + self._after
        self.opening = self._frame('{"role": "assistant", "content": ""}')

    def delta(self, chunk: Chunk) -> bytes:
        """Render a chunk; b"" for one without text and log-probabilities."""
        if not chunk.logprobs:
            return self.text(chunk.text)
        delta = json.dumps({"content": chunk.text})
        return self._frame(delta, logprobs=json.dumps(self._shape.logprobs(chunk.logprobs)))

    def text(self, text: str) -> bytes:
        """Render a text without log-probabilities; b"" for an empty one."""
        return self._text_before + encode_basestring_ascii(text).encode() + self._text_after if text else b""

    def parts(self, parts: Iterable[AnswerPart], logprobs: Iterable[Logprobs] | None) -> bytes:
        """Render reasoning, text and tool calls; log-probabilities come with the next frame that there is."""
        self._logprobs.extend(logprobs or ())
        return b"".join([self._with_logprobs(json.dumps(self._delta_of(part))) for part in parts])

    def _with_logprobs(self, delta: str) -> bytes:
        logprobs, self._logprobs = self._logprobs, []
        return self._frame(delta, logprobs=json.dumps(self._shape.logprobs(logprobs)) if logprobs else "null")

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

    def end(self, completion: Completion, parser: AnswerParser | None = None) -> bytes:
        """Render the finish reason, the usage if requested, and the end of the stream."""
        usage = b""
        if self._include_usage:
            usage = self._usage_before + json.dumps(self._shape.usage(completion, parser)).encode() + b"}\n\n"
        reason = finish_reason(completion, has_calls=parser is not None and parser.has_calls)
        unshown = self._with_logprobs('{"content": ""}') if self._logprobs else b""
        return unshown + self._frame("{}", finish_reason=f'"{reason}"') + usage + DONE

    def _frame(self, delta: str, *, logprobs: str = "null", finish_reason: str = "null") -> bytes:
        """Render an event of fields in JSON."""
        shown = f'{delta}, "logprobs": {logprobs}, "finish_reason": {finish_reason}}}'
        return self._before + shown.encode() + self._after


def finish_reason(completion: Completion, *, has_calls: bool) -> str:
    """Return why it ended, as OpenAI names it."""
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


def usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def logprobs_content(logprobs: Iterable[Logprobs], top: int, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Render each token, the end token included, with the `top` best of its position, best first."""
    return [_position(position, top, tokenizer) for position in logprobs]


def _position(position: Logprobs, top: int, tokenizer: Tokenizer) -> dict[str, Any]:
    chosen = next(iter(position))
    best = sorted(position, key=position.__getitem__, reverse=True)[:top]
    alternatives = [_token(token_id, position[token_id], tokenizer) for token_id in best]
    return {**_token(chosen, position[chosen], tokenizer), "top_logprobs": alternatives}


def _token(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    if tokenizer.is_byte_level:
        data = tokenizer.bytes_of((token_id,))
        text = data.decode(errors="replace")
    else:
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        data = text.encode()
    return {"token": text, "logprob": max(logprob, LEAST), "bytes": list(data)}
