"""The response of a text completion: whole, or as the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii  # json.dumps of a string, without its set-up
from typing import Any, cast

from trioengine.core.types import Chunk, Completion, PromptLogprobs, Usage
from trioengine.serve.completion_logprobs import CompletionLogprobs, PromptText, TokenLists, joined
from trioengine.serve.ids import new_id, unix_time
from trioengine.serve.json_encoder import encode, encoded, encoded_list
from trioengine.serve.shown import Result, Shown, running_usage, timings_json, usage_json
from trioengine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class CompletionShape:
    """The fields that all parts of one response have in common."""

    model: str
    tokenizer: Tokenizer
    fingerprint: str
    shown: Shown
    skip_special_tokens: bool
    has_logprobs: bool
    echo: bool
    prompts: Sequence[PromptText]  # if `echo` or `has_logprobs`
    n: int  # choices for each prompt
    id: str = field(default_factory=lambda: new_id("cmpl-"))
    created: int = field(default_factory=unix_time)

    @property
    def has_prompt_logprobs(self) -> bool:
        return self.echo and self.has_logprobs

    def whole(self, results: Sequence[Result], usage: Usage) -> bytes:
        choices = [self._choice(index, *result) for index, result in enumerate(results)]
        ending = self._ending(choices, usage, [result.completion for result in results])
        return encode({**ending, "model": encoded(self.model)})

    def last_frame(self, usage: Usage, completions: Sequence[Completion]) -> bytes:
        """Render the event without choices that has the usage and the timings; b"" if neither is asked for."""
        is_due = self.shown.usage or self.shown.timings
        return f"data: {json.dumps(self._ending([], usage, completions))}\n\n".encode() if is_due else b""

    def head(self) -> dict[str, Any]:
        head = {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}
        return {**head, "system_fingerprint": self.fingerprint}

    def echoed(self, index: int) -> PromptText | None:
        """Return the prompt of the choice, if it comes before the answer."""
        return self.prompts[index // self.n] if self.echo else None

    def logprobs(self, index: int) -> CompletionLogprobs | None:
        """Return the renderer for a choice, if log-probabilities are asked for."""
        if not self.has_logprobs:
            return None
        return CompletionLogprobs(
            self.tokenizer,
            as_ids=self.shown.tokens_as_ids,
            skip_special_tokens=self.skip_special_tokens,
            offset=len(self.prompts[index // self.n].text),
        )

    def _ending(self, choices: list[dict[str, Any]], usage: Usage, completions: Sequence[Completion]) -> dict[str, Any]:
        shown = {**self.head(), "choices": choices, "usage": usage_json(usage)}
        return {**shown, "timings": timings_json(completions)} if self.shown.timings else shown

    def _choice(self, index: int, completion: Completion, prompt_token_ids: Sequence[int]) -> dict[str, Any]:
        prompt = self.echoed(index)
        choice = {
            "index": index,
            "text": encoded(completion.text if prompt is None else prompt.text + completion.text),
            "logprobs": _encoded_lists(self._all_logprobs(index, completion, prompt_token_ids)),
            "finish_reason": completion.finish_reason.value,
            "stop_reason": encoded(completion.stop_reason),
        }
        ids = {"token_ids": completion.token_ids, "prompt_token_ids": prompt_token_ids}
        return {**choice, **ids} if self.shown.token_ids else choice

    def _all_logprobs(self, index: int, completion: Completion, prompt_token_ids: Sequence[int]) -> TokenLists | None:
        renderer, prompt = self.logprobs(index), self.echoed(index)
        if renderer is None:
            return None
        answer = renderer.answer(completion.token_ids, completion.logprobs or ())
        if prompt is None:
            return answer
        return joined(renderer.prompt(prompt, prompt_token_ids, completion.prompt_logprobs or ()), answer)


class CompletionFrames:
    """Renders the events of one choice of a stream; the parts that they have in common are rendered once."""

    __slots__ = (
        "_after",
        "_before",
        "_echoed",
        "_logprobs",
        "_num_tokens",
        "_prompt_token_ids",
        "_shown",
        "_unshown_prompt",
        "reads_text_only",
    )
    num_unshown = 0  # all log-probabilities are shown at once

    def __init__(self, shape: CompletionShape, index: int) -> None:
        self._shown = shape.shown
        self._echoed = shape.echoed(index)
        self._logprobs = shape.logprobs(index)
        self._num_tokens = 0
        self._prompt_token_ids: Sequence[int] = ()
        self._unshown_prompt: Sequence[int] | None = None  # until its ids were shown, if asked for
        head = json.dumps(shape.head())[:-1]
        self._before = f'data: {head}, "choices": [{{"index": {index}, "text": '.encode()
        self._after = b', "logprobs": null, "finish_reason": null}]'
        self._after += b', "usage": null}\n\n' if shape.shown.usage else b"}\n\n"
        needs_tokens = self._logprobs is not None or shape.shown.token_ids or shape.shown.running_usage
        self.reads_text_only = not needs_tokens

    def opening(self, prompt_token_ids: Sequence[int]) -> bytes:
        """Render the echo of a prompt without log-probabilities; with them it comes with the first chunk."""
        self._prompt_token_ids = prompt_token_ids
        self._unshown_prompt = prompt_token_ids if self._shown.token_ids else None
        return self._frame(self._echoed.text) if self._echoed is not None and self._logprobs is None else b""

    def text(self, text: str) -> bytes:
        return self._before + encode_basestring_ascii(text).encode() + self._after if text else b""

    def delta(self, chunk: Chunk) -> bytes:
        if self.reads_text_only:
            return self.text(chunk.text)
        self._num_tokens += len(chunk.token_ids)
        logprobs = None
        if self._logprobs is not None and chunk.token_ids:
            logprobs = self._logprobs.answer(chunk.token_ids, chunk.logprobs or ())
        is_shown = chunk.text or logprobs or (self._shown.token_ids and chunk.token_ids)
        echo = self._scored_echo(chunk.prompt_logprobs)
        return echo + self._frame(chunk.text, chunk.token_ids, logprobs=logprobs) if is_shown else echo

    def _scored_echo(self, positions: PromptLogprobs | None) -> bytes:
        """Render the echo of a prompt with its log-probabilities."""
        if self._echoed is None or self._logprobs is None or positions is None:
            return b""
        return self._frame(
            self._echoed.text, logprobs=self._logprobs.prompt(self._echoed, self._prompt_token_ids, positions)
        )

    def end(self, completion: Completion) -> bytes:
        return self._frame("", completion=completion)

    def _frame(
        self,
        text: str,
        token_ids: Sequence[int] = (),
        *,
        logprobs: TokenLists | None = None,
        completion: Completion | None = None,
    ) -> bytes:
        """Render an event; the last one has the `completion`."""
        choice: dict[str, Any] = {"logprobs": _encoded_lists(logprobs), "finish_reason": None}
        if completion is not None:
            reason, stop_reason = completion.finish_reason.value, encoded(completion.stop_reason)
            choice |= {"finish_reason": reason, "stop_reason": stop_reason}
        if self._shown.token_ids:
            choice["token_ids"] = token_ids
        if self._unshown_prompt is not None:
            choice["prompt_token_ids"], self._unshown_prompt = self._unshown_prompt, None
        usage = b""
        if self._shown.running_usage:
            usage = b', "usage": ' + encode(running_usage(len(self._prompt_token_ids), self._num_tokens))
        elif self._shown.usage:
            usage = b', "usage": null'
        shown = encode_basestring_ascii(text).encode()
        return b"".join([self._before, shown, b", ", encode(choice)[1:], b"]", usage, b"}\n\n"])


def _encoded_lists(lists: TokenLists | None) -> dict[str, Any] | None:
    return None if lists is None else {name: encoded_list(cast("list[object]", items)) for name, items in lists.items()}
