"""Reasoning in answers: the tags around it, and a parser that splits an answer into reasoning, text and tool calls."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

from trioengine.text.stop_strings import overlap
from trioengine.text.tool_calls import HERMES, Part, ToolCallParser, ToolForm


@dataclass(frozen=True, slots=True)
class ReasoningForm:
    """The tags between which a model writes its reasoning, at the beginning of an answer."""

    begin: str
    end: str

    def is_open_after(self, prompt: str, continued: str) -> bool:
        """Whether an answer begins within the reasoning: the prompt, or its end, ends with the first tag.

        So it does if the answer continues a text that has the first tag alone; `continued` is empty otherwise.
        """
        is_open = self.begin in continued and self.end not in continued.rpartition(self.begin)[2]
        return is_open or prompt.rstrip().endswith(self.begin)


_THINK = ReasoningForm("<think>", "</think>")
REASONING_FORMS = {"deepseek_r1": _THINK, "qwen3": _THINK}
ANSWER_TAGS = frozenset({_THINK.begin, _THINK.end, HERMES.begin.strip(), HERMES.end.strip()})


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of the reasoning."""

    text: str


AnswerPart: TypeAlias = Part | Reasoning


class _State(enum.Enum):
    """The place of an answer's next character."""

    START = enum.auto()
    REASONING = enum.auto()
    ANSWER = enum.auto()


class _ReasoningParser:
    """Splits a text at the tags. The first one may be missing if the reasoning is open; the last one, if it is cut."""

    def __init__(self, form: ReasoningForm, *, is_open: bool) -> None:
        self._form = form
        self._is_open = is_open
        self._state = _State.START
        self._buffer = ""  # not given out
        self.num_characters = 0  # up to the end of the last tag, or 0

    def feed(self, text: str) -> tuple[str, str]:
        """Return the reasoning and the answer that this piece completes."""
        self._buffer += text
        if self._state is _State.START and not self._begin(is_last=False):
            return "", ""
        return self._split(is_last=False)

    def finish(self) -> tuple[str, str]:
        """Return the rest, at the end of the answer: reasoning without a last tag is all reasoning."""
        if self._state is _State.START:
            self._begin(is_last=True)
        return self._split(is_last=True)

    @property
    def is_cut(self) -> bool:
        """Whether the answer, or the part that was fed, ends within the reasoning."""
        return self._state is _State.REASONING

    def _begin(self, *, is_last: bool) -> bool:
        """Decide whether the text begins with reasoning; False if that needs more of it."""
        text, tag = self._buffer.lstrip(), self._form.begin
        if not is_last and tag.startswith(text):
            return text == tag and self._skip_tag()
        if text.startswith(tag):
            return self._skip_tag()
        self._state = _State.REASONING if self._is_open else _State.ANSWER
        return True

    def _skip_tag(self) -> bool:
        before, tag, self._buffer = self._buffer.partition(self._form.begin)
        self.num_characters = len(before) + len(tag)
        self._state = _State.REASONING
        return True

    def _split(self, *, is_last: bool) -> tuple[str, str]:
        text, self._buffer = self._buffer, ""
        if self._state is _State.ANSWER:
            return "", text
        reasoning, tag, answer = text.partition(self._form.end)
        if tag:
            self._state = _State.ANSWER
        elif not is_last:
            held = overlap(text, self._form.end)
            reasoning, self._buffer = text[: len(text) - held], text[len(text) - held :]
        self.num_characters += len(reasoning) + len(tag)
        return reasoning, answer


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The forms of the parts of an answer beside its text; None for parts that it cannot have."""

    tools: ToolForm | None = None
    reasoning: ReasoningForm | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the answer is a text and nothing else."""
        return self.tools is None and self.reasoning is None


class AnswerParser:
    """Splits an answer, piece by piece, into reasoning, text and tool calls; reasoning has no calls."""

    def __init__(self, form: AnswerForm, *, in_reasoning: bool = False) -> None:
        """`in_reasoning`: the answer begins within the reasoning, as the prompt has opened it."""
        tags = form.reasoning
        self._reasoning = None if tags is None else _ReasoningParser(tags, is_open=in_reasoning)
        self._calls = None if form.tools is None else ToolCallParser(form.tools)

    def feed(self, text: str) -> list[AnswerPart]:
        """Return the parts that this piece of the answer completes."""
        reasoning, answer = ("", text) if self._reasoning is None else self._reasoning.feed(text)
        return self._parts(reasoning, answer)

    def finish(self) -> list[AnswerPart]:
        """Return the rest, at the end of the answer."""
        reasoning, answer = ("", "") if self._reasoning is None else self._reasoning.finish()
        parts = self._parts(reasoning, answer)
        return parts if self._calls is None else [*parts, *self._calls.finish()]

    @property
    def has_calls(self) -> bool:
        """Whether there are calls, of which the last is not cut."""
        return self._calls is not None and self._calls.num_calls > 0 and not self._calls.is_cut

    @property
    def splits_reasoning(self) -> bool:
        """Whether it looks for reasoning at all."""
        return self._reasoning is not None

    @property
    def num_reasoning_characters(self) -> int | None:
        """Characters of the answer up to the end of its reasoning, tags included; None if all of it is reasoning."""
        if self._reasoning is None:
            return 0
        return None if self._reasoning.is_cut else self._reasoning.num_characters

    def _parts(self, reasoning: str, answer: str) -> list[AnswerPart]:
        parts: list[AnswerPart] = [Reasoning(reasoning)] if reasoning else []
        if answer:
            parts += [answer] if self._calls is None else self._calls.feed(answer)
        return parts
