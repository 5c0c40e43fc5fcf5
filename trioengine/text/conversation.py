"""A conversation: the turns, and the token ids that they have become. The one owner of a session's history.

The next prompt is the rendering of all the turns. Where its text extends the text that was rendered and answered
before, only the extension is tokenized and appended to the ids that are there, so that what the worker computed for
them is used again; where it does not (a template that strips something of earlier turns, an edited history), all of it
is tokenized.

An answer's content in `history` is its text as the reader saw it. A special token inside it (`ignore_eos` lets a model
go on after its end token) is hidden there, or shown as ordinary text with `skip_special_tokens=False`. The next prompt
has that content, too: after such an answer all is tokenized, as for a conversation that begins with this `history`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard

from trioengine.core.arguments import kind_of
from trioengine.core.errors import RequestRejected
from trioengine.core.image import Image
from trioengine.core.sampling_params import retained
from trioengine.core.types import TokenIds, token_ids
from trioengine.text.chat_tokenizer import ChatTokenizer, ImagePart, PlacedImage, image_parts, num_image_tokens, placed
from trioengine.text.messages import BYTES, Message, Turns, checked_messages, copied
from trioengine.text.tokenizer import Detokenizer

Prompt: TypeAlias = str | Sequence[Message] | Sequence[int]

_MESSAGE = 16  # characters that a message costs as much as, beside its content
_IMAGE = 1 << 13  # and an image: the text of its tokens


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prompt, tokenized: `token_ids` are the whole of it, from the conversation's beginning.

    `messages` and `token_ids` are without the `dropped_turns` oldest turns.
    """

    token_ids: TokenIds
    messages: tuple[Message, ...] | None  # None: raw token ids
    rendering: str
    dropped_turns: int = 0
    images: tuple[PlacedImage, ...] = ()  # of the whole prompt, in their order


class Conversation:
    """The committed turns. `prepare` changes nothing and may run in a thread; `commit` takes over what it made."""

    def __init__(self, tokenizer: ChatTokenizer, history: Sequence[Message] | None = None) -> None:
        self._tokenizer = tokenizer
        self._messages: tuple[Message, ...] = ()
        self._token_ids: TokenIds = token_ids()  # empty: to be tokenized as a whole
        self._rendering = ""  # the text of these ids, but for the closing
        self._closing = ""  # the special token that the last answer ended with, if it did
        self._is_raw = False
        self._images: tuple[Image, ...] = ()
        if history is not None:
            self.replace(history)

    @property
    def history(self) -> list[dict[str, Any]]:
        """The turns as chat messages, the caller's own; empty for a conversation of raw token ids.

        A content with images is a list of parts, and the images are those that the caller gave.
        """
        history: list[dict[str, Any]] = copied(self._messages)
        return history

    @property
    def images(self) -> tuple[Image, ...]:
        """The images of the committed turns."""
        return self._images

    @property
    def size(self) -> int:
        """Characters and tokens that are there already, roughly what the next `prepare` has to go through."""
        return prompt_length(self._messages) + len(self._token_ids)

    def replace(self, history: Sequence[Message]) -> None:
        """Make these messages the conversation. Raises RequestRejected, and changes nothing, for bad ones."""
        self._messages = self._checked(history, "history")
        self._images = self._found(self._messages)
        self._token_ids, self._rendering, self._closing, self._is_raw = token_ids(), "", "", False

    def check_length(self, prompt: Prompt, limit: int) -> None:
        """Refuse, before any tokenizing, a prompt that cannot fit `limit` tokens by its length alone."""
        check_length(prompt, limit, self._tokenizer)

    def prepare(self, prompt: Prompt, limit: int | None = None, retention_ratio: float = 1.0) -> Prepared:
        """The whole prompt with this added. Raises RequestRejected, naming what is wrong with it.

        With a `limit` in tokens, a chat over it loses the fewest of its oldest turns that make it fit this part of the
        limit; where that is impossible, all but the newest.
        """
        _check_type(prompt)
        if len(prompt) == 0:
            raise RequestRejected("empty_prompt", "prompt is empty", param="prompt")
        if isinstance(prompt, str):
            return self._prepare_chat([{"role": "user", "content": prompt}], limit, retention_ratio)
        if isinstance(prompt[0], Mapping):
            return self._prepare_chat(prompt, limit, retention_ratio)  # type: ignore[arg-type]
        return self._prepare_raw(prompt)  # type: ignore[arg-type]

    def commit(self, prepared: Prepared, output: TokenIds, text: str) -> None:
        """Add the turn: the prompt, and the answer of these ids, of which the reader saw this text."""
        self._token_ids = prepared.token_ids[:]
        if prepared.messages is None:
            self._is_raw = True
            self._token_ids.extend(output)
            return
        kept, self._closing = self._fitting(output, text)
        if self._tokenizer.tokenizer.special_ids.isdisjoint(kept[:-1] if self._closing else kept):
            self._token_ids.extend(kept)
        else:
            self._token_ids = token_ids()
        self._messages = (*prepared.messages, {"role": "assistant", "content": text})
        self._images = self._found(self._messages)
        self._rendering = prepared.rendering + self._tokenizer.protect(text)

    # ---- chat -----------------------------------------------------------------------------------------------------

    def _prepare_chat(self, prompt: Sequence[Message], limit: int | None, ratio: float) -> Prepared:
        if self._is_raw:
            raise RequestRejected(
                "mixed_prompts", "prompt: the session holds raw token ids, and takes no messages", param="prompt"
            )
        turns = Turns.of((*self._messages, *self._checked(prompt, "prompt")))
        return self._without(turns, 0) if limit is None else self._fitted(turns, limit, ratio)

    def _fitted(self, turns: Turns, limit: int, ratio: float) -> Prepared:
        may_fit = ratio < 1.0 and _least_tokens(turns.messages, self._tokenizer) <= limit
        if may_fit and len((whole := self._without(turns, 0)).token_ids) <= limit:
            return whole
        return self._shortened(turns, retained(limit, ratio))

    def _shortened(self, turns: Turns, limit: int) -> Prepared:
        def length_fits(count: int) -> bool:
            return _least_tokens(turns.without(count), self._tokenizer) <= limit

        def fits(count: int) -> bool:
            return len(self._without(turns, count).token_ids) <= limit

        candidates = range(turns.most)
        first = bisect_left(candidates, True, key=length_fits)  # before these are tokenized
        prepared = self._without(turns, first)
        if len(prepared.token_ids) <= limit or first == turns.most:
            return prepared
        return self._without(turns, bisect_left(candidates, True, lo=first + 1, key=fits))

    def _without(self, turns: Turns, count: int) -> Prepared:
        """The prompt without the oldest `count` turns."""
        messages = turns.without(count)
        rendering = self._tokenizer.render(messages)
        ids = self._extended(rendering)
        if not ids:
            raise RequestRejected("empty_prompt", "prompt: the chat template renders it to nothing", param="prompt")
        return Prepared(ids, messages, rendering, count, self._placed(turns, count, ids))

    def _placed(self, turns: Turns, count: int, ids: TokenIds) -> tuple[PlacedImage, ...]:
        """The images of a prompt without the oldest `count` turns."""
        processing, dropped = self._tokenizer.images, turns.dropped(count)
        if processing is None:
            return ()
        kept = [part for part in image_parts(turns.messages) if part.message not in dropped]
        return placed(ids, [(self._name(part), part.image) for part in kept], processing)

    def _found(self, messages: Sequence[Message]) -> tuple[Image, ...]:
        return () if self._tokenizer.images is None else tuple(part.image for part in image_parts(messages))

    def _name(self, part: ImagePart) -> str:
        """The place of an image's part; the conversation's own messages are the history."""
        index = part.message - len(self._messages)
        message = f"prompt[{index}]" if index >= 0 else f"history[{part.message}]"
        return f"{message}.content[{part.part}]"

    def _checked(self, messages: Sequence[Message], name: str) -> tuple[Message, ...]:
        return checked_messages(messages, name, image_refusal=self._tokenizer.image_refusal)

    def _extended(self, rendering: str) -> TokenIds:
        if not self._token_ids or not rendering.startswith(self._rendering):
            return self._tokenizer.encode_rendering(rendering)
        rest = rendering[len(self._rendering) :]
        ids = self._token_ids[:]
        if self._closing and rest.startswith(self._closing):
            rest = rest[len(self._closing) :]
        elif self._closing:  # the template closes a turn in another way
            del ids[-1]
        ids.extend(self._tokenizer.encode_rendering(rest))
        return ids

    def _special(self, token_id: int) -> str:
        """The special token of this id; "" for an ordinary one, and for an image token, which closes nothing."""
        specials, images = self._tokenizer.tokenizer.special_tokens, self._tokenizer.images
        if images is not None and token_id == images.image_token_id:
            return ""
        return next((text for text, id in specials.items() if id == token_id), "")

    def _fitting(self, output: TokenIds, text: str) -> tuple[TokenIds, str]:
        """The ids of exactly this text, and the special token behind it, if the answer ended with one.

        They are the output's own, but for the end of an answer that a stop string cut within a token.
        """
        closing = self._special(output[-1]) if output else ""
        for ids, end in [(output, ""), (output[:-1], closing)] if closing else [(output, "")]:
            for skip in (False, True):
                if self._tokenizer.decode(ids, skip_special_tokens=skip) == text and (end or not (closing and skip)):
                    return output, end
        count, length = max(self._agreement(output, text, skip) for skip in (False, True))
        kept = output[:count]
        kept.extend(self._tokenizer.tokenizer.encode_ordinary(text[length:]))
        return kept, ""

    def _agreement(self, output: TokenIds, text: str, skip: bool) -> tuple[int, int]:
        """How many of the ids begin the text, and how many of its characters they are."""
        detokenizer = Detokenizer(self._tokenizer.tokenizer, skip_special_tokens=skip)
        agreed, at = (0, 0), 0
        for count, token_id in enumerate(output, 1):
            piece = detokenizer.feed((token_id,))
            if not text.startswith(piece, at):
                break
            at += len(piece)
            if not detokenizer.is_pending:
                agreed = (count, at)
        return agreed

    # ---- raw token ids --------------------------------------------------------------------------------------------

    def _prepare_raw(self, prompt: Sequence[int]) -> Prepared:
        if self._messages:
            raise RequestRejected(
                "mixed_prompts", "prompt: the session holds chat messages, and takes no token ids", param="prompt"
            )
        self._check_token_ids(prompt)
        ids = self._token_ids[:]
        ids.extend(prompt)
        return Prepared(ids, None, "")

    def _check_token_ids(self, prompt: Sequence[int]) -> None:
        vocab_size, images = self._tokenizer.tokenizer.vocab_size, self._tokenizer.images
        for index, token_id in enumerate(prompt):
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
                problem = f"must be a token id from 0 to {vocab_size - 1}, got {token_id!r:.60}"
            elif images is not None and token_id == images.image_token_id:
                problem = f"is {token_id}, the image token; images are given in messages"
            else:
                continue
            raise RequestRejected("invalid_value", f"prompt[{index}] {problem}", param="prompt")


def check_length(prompt: Prompt, limit: int, tokenizer: ChatTokenizer) -> None:
    """As Conversation.check_length, for a conversation that is not there yet."""
    _check_type(prompt)
    least = _least_tokens(prompt, tokenizer)
    if least > limit:
        raise RequestRejected(
            "context_length_exceeded", f"prompt: at least {least} tokens, the context is {limit}", param="prompt"
        )


def newest_turn(prompt: Prompt) -> Prompt:
    """The part of a prompt that is there also when its oldest turns are dropped."""
    return Turns.of(prompt).newest if _is_chat(prompt) else prompt


def _least_tokens(prompt: Prompt, tokenizer: ChatTokenizer) -> int:
    if isinstance(prompt, str):
        return len(prompt) // tokenizer.tokenizer.max_token_bytes
    if _is_chat(prompt):  # a message is a token at least
        num_text_tokens = _contents_length(prompt) // tokenizer.tokenizer.max_token_bytes
        return max(len(prompt), num_text_tokens + _num_image_tokens(prompt, tokenizer))
    return len(prompt)


def _num_image_tokens(prompt: Sequence[Message], tokenizer: ChatTokenizer) -> int:
    if tokenizer.images is None or tokenizer.image_refusal:
        return 0
    return sum(num_image_tokens(part.image, tokenizer.images) for part in image_parts(_mappings(prompt)))


def _check_type(prompt: object) -> None:
    if isinstance(prompt, BYTES) or not isinstance(prompt, Sequence):
        raise RequestRejected(
            "invalid_value",
            f"prompt must be a string, messages or token ids, got {kind_of(prompt)}",
            param="prompt",
        )


def prompt_length(prompt: Prompt) -> int:
    """How much there is to prepare: characters of a text, token ids, or what messages cost as characters."""
    if not _is_chat(prompt):
        return len(prompt)
    num_images = sum(1 for _ in image_parts(_mappings(prompt)))
    return len(prompt) * _MESSAGE + _contents_length(prompt) + num_images * _IMAGE


def _is_chat(prompt: Prompt) -> TypeGuard[Sequence[Message]]:
    return not isinstance(prompt, str) and isinstance(next(iter(prompt), None), Mapping)


def _contents_length(prompt: Sequence[Message]) -> int:
    """Characters."""
    return sum(_content_length(entry.get("content")) for entry in _mappings(prompt))


def _mappings(prompt: Sequence[Message]) -> Iterator[Message]:
    """The messages of a prompt that is not checked yet."""
    return (entry for entry in prompt if isinstance(entry, Mapping))


def _content_length(content: object) -> int:
    if isinstance(content, str):
        return len(content)
    parts = content if isinstance(content, Sequence) else ()
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
    return sum(len(text) for text in texts if isinstance(text, str))
