"""The response of a chat completion: whole, or as the frames of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii  # json.dumps of a string, without its set-up
from typing import Any

from trioengine.core.types import Chunk, Completion, FinishReason, Logprobs, Usage
from trioengine.serve.errors import Problem
from trioengine.serve.ids import new_id, unix_time
from trioengine.text.tokenizer import Tokenizer
from trioengine.text.tool_calls import CallArguments, CallBegin, Part, ToolCallParser, ToolForm

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
LEAST = -9999.0  # stands for minus infinity, which JSON lacks


@dataclass(frozen=True, slots=True)
class ChatShape:
    """The fields common to all parts of one completion; `top_logprobs` is None without log-probabilities."""

    model: str
    tokenizer: Tokenizer
    top_logprobs: int | None
    id: str = field(default_factory=lambda: new_id("chatcmpl-"))
    created: int = field(default_factory=unix_time)

    def whole(self, completions: Sequence[Completion], usage: Usage, tool_form: ToolForm | None) -> bytes:
        """Render a chat.completion; with a `tool_form` the tool calls in it."""
        choices = [self._choice(index, each, tool_form) for index, each in enumerate(completions)]
        return json.dumps({**self.head("chat.completion"), "choices": choices, "usage": usage_json(usage)}).encode()

    def _choice(self, index: int, completion: Completion, tool_form: ToolForm | None) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": completion.text, "refusal": None}
        calls: list[dict[str, Any]] = []
        is_cut = False
        if tool_form is not None:
            text, calls, is_cut = _calls_in(completion.text, tool_form)
            message |= {"content": text or None, "tool_calls": calls} if calls else {"content": text}
        return {
            "index": index,
            "message": message,
            "logprobs": self.logprobs(completion.logprobs),
            "finish_reason": finish_reason(completion, has_calls=bool(calls) and not is_cut),
        }

    def usage_frame(self, usage: Usage) -> bytes:
        """Render the event that has the usage of a stream."""
        shown = {**self.head("chat.completion.chunk"), "choices": [], "usage": usage_json(usage)}
        return f"data: {json.dumps(shown)}\n\n".encode()

    def head(self, name: str) -> dict[str, Any]:
        return {"id": self.id, "object": name, "created": self.created, "model": self.model}

    def logprobs(self, logprobs: Iterable[Logprobs] | None) -> dict[str, Any] | None:
        if self.top_logprobs is None:
            return None
        return {"content": logprobs_content(logprobs or (), self.top_logprobs, self.tokenizer), "refusal": None}


class ChatFrames:
    """Renders the events of one choice of a stream; the parts that they have in common are rendered once."""

    __slots__ = (
        "_after",
        "_before",
        "_logprobs",
        "_num_calls",
        "_parser",
        "_shape",
        "_text_after",
        "_text_before",
        "opening",
        "reads_text_only",
    )

    def __init__(self, shape: ChatShape, index: int, *, include_usage: bool, tool_form: ToolForm | None = None) -> None:
        """With a `tool_form` the tool calls in the answer are rendered as such."""
        self._shape = shape
        self._parser = None if tool_form is None else ToolCallParser(tool_form)
        self.reads_text_only = self._parser is None and shape.top_logprobs is None
        self._num_calls = 0
        self._logprobs: list[Logprobs] = []  # of tokens that no frame has shown yet
        head = json.dumps(shape.head("chat.completion.chunk"))[:-1]
        self._before = f'data: {head}, "choices": [{{"index": {index}, "delta": '.encode()
        self._after = b'], "usage": null}\n\n' if include_usage else b"]}\n\n"
        self._text_before = self._before + b'{"content": '
        self._text_after = b'}, "logprobs": null, "finish_reason": null}' + self._after
        self.opening = self._frame('{"role": "assistant", "content": ""}')

    def delta(self, chunk: Chunk) -> bytes:
        """Render a chunk; b"" for one that shows nothing."""
        if self._parser is not None:
            return self._parts(self._parser.feed(chunk.text), chunk.logprobs)
        if not chunk.logprobs:
            return self.text(chunk.text)
        delta = json.dumps({"content": chunk.text})
        return self._frame(delta, logprobs=json.dumps(self._shape.logprobs(chunk.logprobs)))

    def text(self, text: str) -> bytes:
        """Render a text without log-probabilities; b"" for an empty one."""
        return self._text_before + encode_basestring_ascii(text).encode() + self._text_after if text else b""

    def _parts(self, parts: Iterable[Part], logprobs: Iterable[Logprobs] | None) -> bytes:
        """Render text and tool calls; log-probabilities come with the next frame that there is."""
        self._logprobs.extend(logprobs or ())
        return b"".join([self._with_logprobs(json.dumps(self._delta_of(part))) for part in parts])

    def _with_logprobs(self, delta: str) -> bytes:
        logprobs, self._logprobs = self._logprobs, []
        return self._frame(delta, logprobs=json.dumps(self._shape.logprobs(logprobs)) if logprobs else "null")

    def _delta_of(self, part: Part) -> dict[str, Any]:
        match part:
            case CallBegin(name):
                self._num_calls += 1
                call = {"index": self._num_calls - 1, **_call(name, "")}
            case CallArguments(text):
                call = {"index": self._num_calls - 1, "function": {"arguments": text}}
            case _:
                return {"content": part}
        return {"tool_calls": [call]}

    def end(self, completion: Completion) -> bytes:
        """Render the rest of the answer, and the finish reason."""
        parser, rest, has_calls = self._parser, b"", False
        if parser is not None:
            rest = self._parts(parser.finish(), None)
            has_calls = parser.num_calls > 0 and not parser.is_cut
        unshown = self._with_logprobs('{"content": ""}') if self._logprobs else b""
        reason = finish_reason(completion, has_calls=has_calls)
        return rest + unshown + self._frame("{}", finish_reason=f'"{reason}"')

    def _frame(self, delta: str, *, logprobs: str = "null", finish_reason: str = "null") -> bytes:
        """Render an event of fields in JSON."""
        shown = f'{delta}, "logprobs": {logprobs}, "finish_reason": {finish_reason}}}'
        return self._before + shown.encode() + self._after


def finish_reason(completion: Completion, *, has_calls: bool) -> str:
    """Return why it ended, as OpenAI names it."""
    is_stop = completion.finish_reason is FinishReason.STOP
    return "tool_calls" if has_calls and is_stop else completion.finish_reason.value


def _calls_in(answer: str, form: ToolForm) -> tuple[str, list[dict[str, Any]], bool]:
    """Return the text and the calls of an answer, and whether the last call is cut."""
    parser = ToolCallParser(form)
    text: list[str] = []
    calls: list[tuple[str, list[str]]] = []
    for part in (*parser.feed(answer), *parser.finish()):
        match part:
            case CallBegin(name):
                calls.append((name, []))
            case CallArguments(arguments):
                calls[-1][1].append(arguments)
            case _:
                text.append(part)
    return "".join(text), [_call(name, "".join(arguments)) for name, arguments in calls], parser.is_cut


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
