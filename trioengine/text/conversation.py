"""A conversation: its turns, and the token ids that they have become. The single owner of a session's history.

The next prompt is the rendering of all the turns. Where its text extends the text that is tokenized already, only the
extension is tokenized and appended to the ids, so that the worker can reuse the results that it computed for them.
Where it does not (a template that strips parts of earlier turns, an edited history), the whole text is tokenized.

The content of an output in `history` is its text as the reader saw it. A special token inside the output (with
`ignore_eos`, a model can go on after its end token) is left out of that text, or is ordinary text in it with
`skip_special_tokens=False`. The next prompt contains the same text: after such an output the whole prompt is tokenized,
as in a conversation that begins with this `history`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeGuard, cast

from trioengine.core.checks import BYTES, check_unicode, kind_of
from trioengine.core.errors import RequestRejected
from trioengine.core.image import Image
from trioengine.core.sampling_params import retained
from trioengine.core.types import TokenIds, token_ids
from trioengine.text.chat_template import NO_VARIABLES
from trioengine.text.chat_tokenizer import ChatTokenizer, PlacedImage, image_parts, num_image_tokens, place_images
from trioengine.text.messages import Message, Turns, checked_messages, copied
from trioengine.text.prompt_end import OPTIONS, PromptEnd, with_answer
from trioengine.text.tokenized_turns import TokenizedTurns
from trioengine.text.tools import Tools, with_instructions

Prompt: TypeAlias = str | Sequence[Message] | Sequence[int]

_MAX_VALUES = 10_000  # that are measured; more are much work in any case
_IMAGE = 1 << 13  # an image costs as much to prepare as this many characters: the text of its tokens


@dataclass(frozen=True, slots=True)
class Prepared:
    """A tokenized prompt: the whole conversation, without its `dropped_turns` oldest turns."""

    token_ids: TokenIds
    messages: tuple[Message, ...] | None  # None for raw token ids
    rendering: str  # of the messages
    dropped_turns: int = 0
    images: tuple[PlacedImage, ...] = ()  # in their order in the prompt


class Conversation:
    """The committed turns. `prepare` changes nothing and may run in a thread; `commit` adds the prepared turn."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        history: Sequence[Message] | None = None,
        variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> None:
        """`variables` are for the chat template: see `checked_variables`."""
        self.tokenizer = tokenizer
        self.set_variables(variables)
        self._messages: tuple[Message, ...] = ()
        self._turns: TokenizedTurns | None = None  # of a chat; None: the whole conversation has to be tokenized
        self._raw_ids: TokenIds | None = None  # of a conversation of raw token ids
        self.images: tuple[Image, ...] = ()  # of the committed turns
        if history is not None:
            self.replace(history)

    def set_variables(self, variables: Mapping[str, Any]) -> None:
        """Set the variables for the chat template of the prompts that follow: see `checked_variables`."""
        self._variables = {name: value for name, value in variables.items() if name not in OPTIONS}
        self._end = PromptEnd.of(variables)

    @property
    def history(self) -> list[dict[str, Any]]:
        """A copy of the turns as chat messages; empty for a conversation of raw token ids.

        A content with images is a list of parts, with the same Image objects as in the caller's messages.
        """
        history: list[dict[str, Any]] = copied(self._messages)
        return history

    def work(self, prompt: Prompt, tools: Tools | None = None) -> int:
        """Estimate the work of `prepare`, in characters and tokens of the committed turns, the prompt and the tools."""
        shown = 0 if tools is None else sum(_measure([*tools.variable]))
        num_tokens = self._turns.num_tokens if self._turns is not None else len(self._raw_ids or ())
        return _length(self._messages) + num_tokens + _length(prompt) + shown

    def replace(self, history: Sequence[Message]) -> None:
        """Replace the whole conversation. Raises RequestRejected for bad messages, and then changes nothing."""
        self._messages = self._checked(history, "history")
        self.images = self._found(self._messages)
        self._turns = self._raw_ids = None

    def prepare(
        self, prompt: Prompt, limit: int | None = None, retention_ratio: float = 1.0, tools: Tools | None = None
    ) -> Prepared:
        """Return the conversation with this prompt, which `check_length` has accepted, and with these tools.

        With a `limit` in tokens, a chat that exceeds it loses its oldest turns, as few as possible, until it fits
        `retention_ratio` of the limit; where that is impossible, all turns but the newest. Raises RequestRejected,
        naming the faulty place.
        """
        if len(prompt) == 0:
            raise RequestRejected("empty_prompt", "prompt is empty", param="prompt")
        if isinstance(prompt, str):
            if not prompt.isascii():
                check_unicode(prompt, "prompt[0].content")
            added: tuple[Message, ...] = ({"role": "user", "content": prompt},)
        elif isinstance(prompt[0], Mapping):
            added = self._checked(cast("Sequence[Message]", prompt), "prompt")
        else:
            return self._prepare_raw(cast("Sequence[int]", prompt))
        if self._raw_ids is not None:
            problem = "the session holds raw token ids, and takes no messages"
            raise RequestRejected("mixed_prompts", f"prompt: {problem}", param="prompt")
        messages = (*self._messages, *added)
        if limit is None:
            return self._tokenized(messages, tools=tools)
        may_fit = retention_ratio < 1.0 and _least_tokens(messages, self.tokenizer) <= limit
        if may_fit and len((whole := self._tokenized(messages, tools=tools)).token_ids) <= limit:
            return whole
        return self._shortened(Turns.of(messages), retained(limit, retention_ratio), tools)

    def commit(self, prepared: Prepared, output: TokenIds, text: str, answer: Message | None = None) -> None:
        """Add a turn: the prompt, and the output of these ids and this text.

        `answer` has the fields of the assistant's message; None: its content is the text.
        """
        if prepared.messages is None:
            self._raw_ids = prepared.token_ids + output
            return
        self._turns = TokenizedTurns(self.tokenizer, prepared.token_ids, prepared.rendering, output, text)
        self._messages = with_answer(prepared.messages, self._end, {"content": text} if answer is None else answer)
        self.images = self._found(self._messages)

    # ---- chat -----------------------------------------------------------------------------------------------------

    def _shortened(self, turns: Turns, limit: int, tools: Tools | None) -> Prepared:
        def length_fits(count: int) -> bool:
            return _least_tokens(turns.without(count), self.tokenizer) <= limit

        def without(count: int) -> Prepared:
            return self._tokenized(turns.without(count), count, turns.dropped(count), tools)

        def fits(count: int) -> bool:
            return len(without(count).token_ids) <= limit

        candidates = range(turns.max_dropped)
        first = bisect_left(candidates, True, key=length_fits)  # before any tokenizing
        prepared = without(first)
        if len(prepared.token_ids) <= limit or first == turns.max_dropped:
            return prepared
        return without(bisect_left(candidates, True, lo=first + 1, key=fits))

    def _tokenized(
        self,
        messages: tuple[Message, ...],
        dropped_turns: int = 0,
        dropped: range = range(0),
        tools: Tools | None = None,
    ) -> Prepared:
        """Render and tokenize the messages that are left after the messages of the `dropped` indices are dropped."""
        shown, variables = messages, self._variables
        if tools is not None and self.tokenizer.takes_tools:
            variables = {**variables, "tools": tools.variable}
        elif tools is not None:
            shown = with_instructions(messages, tools.instructions)
        rendering = self.tokenizer.render(shown, end=self._end, variables=variables)
        ids = self._extended(rendering)
        if not ids:
            raise RequestRejected("empty_prompt", "prompt: the chat template renders it to nothing", param="prompt")
        processing = self.tokenizer.images
        images = () if processing is None else place_images(ids, self._named_images(messages, dropped), processing)
        return Prepared(ids, messages, rendering, dropped_turns, images)

    def _named_images(self, messages: tuple[Message, ...], dropped: range) -> Iterator[tuple[str, Image]]:
        """Yield the images with the places of their parts; the conversation's own messages are the history."""
        for part in image_parts(messages):
            index = part.message + (len(dropped) if part.message >= dropped.start else 0)
            added = index - len(self._messages)
            message = f"prompt[{added}]" if added >= 0 else f"history[{index}]"
            yield f"{message}.content[{part.part}]", part.image

    def _found(self, messages: Sequence[Message]) -> tuple[Image, ...]:
        return () if self.tokenizer.images is None else tuple(part.image for part in image_parts(messages))

    def _checked(self, messages: Sequence[Message], name: str) -> tuple[Message, ...]:
        return checked_messages(messages, name, image_refusal=self.tokenizer.image_refusal)

    def _extended(self, rendering: str) -> TokenIds:
        """Return the token ids of a rendering; the ids of its beginning are reused where possible."""
        turns = self._turns  # another thread may replace them
        known = turns.tokenized() if turns is not None else None
        if known is None or not known.token_ids or not rendering.startswith(known.rendering):
            return self.tokenizer.encode_rendering(rendering)
        rest = rendering[len(known.rendering) :]
        ids = known.token_ids[:]
        if known.closing and rest.startswith(known.closing):
            rest = rest[len(known.closing) :]
        elif known.closing:  # the template closes a turn differently
            del ids[-1]
        ids.extend(self.tokenizer.encode_rendering(rest))
        return ids

    # ---- raw token ids --------------------------------------------------------------------------------------------

    def _prepare_raw(self, prompt: Sequence[int]) -> Prepared:
        if self._messages:
            raise RequestRejected(
                "mixed_prompts", "prompt: the session holds chat messages, and takes no token ids", param="prompt"
            )
        self._check_token_ids(prompt)
        ids = token_ids(self._raw_ids or ())
        ids.extend(prompt)
        return Prepared(ids, None, "")

    def _check_token_ids(self, prompt: Sequence[int]) -> None:
        vocab_size, images = self.tokenizer.tokenizer.vocab_size, self.tokenizer.images
        for index, token_id in enumerate(prompt):
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
                problem = f"must be a token id from 0 to {vocab_size - 1}, got {token_id!r:.60}"
            elif images is not None and token_id == images.image_token_id:
                problem = f"is {token_id}, the image token; images are given in messages"
            else:
                continue
            raise RequestRejected("invalid_value", f"prompt[{index}] {problem}", param="prompt")


# ---- the size of a prompt -----------------------------------------------------------------------------------------


def check_length(prompt: Prompt, limit: int, tokenizer: ChatTokenizer) -> None:
    """Raise RequestRejected unless it is a prompt, and its length allows it to have at most `limit` tokens."""
    if isinstance(prompt, BYTES) or not isinstance(prompt, Sequence):
        problem = f"must be a string, messages or token ids, got {kind_of(prompt)}"
        raise RequestRejected("invalid_value", f"prompt {problem}", param="prompt")
    least = _least_tokens(prompt, tokenizer)
    if least > limit:
        problem = f"at least {least} tokens, the context is {limit}"
        raise RequestRejected("context_length_exceeded", f"prompt: {problem}", param="prompt")


def newest_turn(prompt: Prompt) -> Prompt:
    """Return the part of a prompt, checked or not, that is left when all turns that can be dropped are dropped."""
    return Turns.of(prompt).newest if _is_chat(prompt) else prompt


def _length(prompt: Prompt) -> int:
    """Return the characters of a text, the size of messages (an image has an equivalent), or the number of ids."""
    if not _is_chat(prompt):
        return len(prompt)
    num_images = sum(1 for _ in image_parts(_mappings(prompt)))
    return sum(_measure([*prompt])) + num_images * _IMAGE


def _least_tokens(prompt: Prompt, tokenizer: ChatTokenizer) -> int:
    """Return a lower bound of the prompt's tokens."""
    if isinstance(prompt, str):
        return len(prompt) // tokenizer.tokenizer.max_token_bytes
    if _is_chat(prompt):  # each message takes a token at least
        num_characters = _contents_length(prompt)
        if tokenizer.prints_calls:
            num_characters += _measure(list(_printed_calls(prompt))).num_characters
        num_text_tokens = num_characters // tokenizer.tokenizer.max_token_bytes
        return max(len(prompt), num_text_tokens + _num_image_tokens(prompt, tokenizer))
    return len(prompt)


def _num_image_tokens(prompt: Sequence[Message], tokenizer: ChatTokenizer) -> int:
    if tokenizer.images is None or tokenizer.image_refusal:
        return 0
    return sum(num_image_tokens(part.image, tokenizer.images) for part in image_parts(_mappings(prompt)))


def _is_chat(prompt: object) -> TypeGuard[Sequence[Message]]:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _mappings(prompt: Sequence[Message]) -> Iterator[Message]:
    """Yield the messages of a prompt that is not checked yet."""
    return (entry for entry in prompt if isinstance(entry, Mapping))


def _contents_length(prompt: Sequence[Message]) -> int:
    """Return the number of characters in the texts of all contents."""
    return sum(_content_length(entry.get("content")) for entry in _mappings(prompt))


class _Measure(NamedTuple):
    """The size of values: the characters of their strings, and the number of values in them."""

    num_characters: int
    num_values: int


def _measure(values: list[Any]) -> _Measure:
    """Measure values that are not checked yet, up to a number of values. Takes over the list."""
    num_characters = num_values = 0
    while values and num_values < _MAX_VALUES:
        value = values.pop()
        num_values += 1
        if isinstance(value, str):
            num_characters += len(value)
        elif isinstance(value, Mapping):
            values += [*value, *value.values()]
        elif isinstance(value, list | tuple):
            values += value
    return _Measure(num_characters, num_values)


def _printed_calls(prompt: Sequence[Message]) -> Iterator[object]:
    """Yield the names and the arguments of the calls that a template prints which prints calls."""
    for entry in _mappings(prompt):
        calls = entry.get("tool_calls") if entry.get("role") == "assistant" else None
        for call in calls if isinstance(calls, list | tuple) else ():
            function = call.get("function") if isinstance(call, Mapping) else None
            if isinstance(function, Mapping) and isinstance(function.get("arguments"), Mapping):
                yield function.get("name")
                yield function["arguments"]


def _content_length(content: object) -> int:
    if isinstance(content, str):
        return len(content)
    parts = content if isinstance(content, Sequence) else ()
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
    return sum(len(text) for text in texts if isinstance(text, str))
