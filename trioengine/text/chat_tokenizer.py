"""Conversations to token ids: a tokenizer together with a chat template, and the places of images in a prompt.

Text in a message can never become a special token. Strings in it that look like special tokens are replaced by
private-use characters before rendering. The rendering is then split at real special tokens only, the strings are put
back, and each piece is encoded as ordinary text, so that contents without such strings get exactly the ids that the
model's reference tokenizer gives.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from trioengine.core.errors import ModelError, RequestRejected
from trioengine.core.image import VISION_MODEL, Image, ImageProcessing, is_image_part
from trioengine.core.types import TokenIds
from trioengine.text.chat_template import NO_VARIABLES, ChatTemplate
from trioengine.text.literals import any_of
from trioengine.text.messages import IMAGE_PART, Message, text_part
from trioengine.text.prompt_end import ADD_PROMPT, CONTINUE, PromptEnd, cut_at_mark, marked
from trioengine.text.tokenizer import Tokenizer
from trioengine.text.tool_calls import form_of
from trioengine.text.tools import with_shown_calls

_FIRST, _ESCAPE = 0x100000, "\U0010fffd"  # plane 16, private use; such characters in a content are escaped
_PRIVATE = re.compile("[\U00100000-\U0010fffd]")
_PROTECTED = re.compile(f"{_ESCAPE}(.)|[\U00100000-\U0010fffc]", re.DOTALL)


class ChatTokenizer:
    """The public `engine.tokenizer`. Safe for threads.

    `images` is the preprocessing of images, None for a model of texts only. `image_refusal` is the reason, naming the
    `model`, why images are refused; it is empty if they are accepted. `takes_tools`: the template prints tools;
    `prints_calls`: it prints an assistant's tool calls; `tool_form` is the form in which the model writes calls.
    `template_source` is empty without a template.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        images: ImageProcessing | None = None,
        model: str = "the model",
    ) -> None:
        if images is not None and tokenizer.special_tokens.get(images.image_token) != images.image_token_id:
            shown = f"{images.image_token!r:.60} ({images.image_token_id})"
            raise ModelError(f"the image token {shown} is not among the tokenizer's special tokens")
        self.tokenizer = tokenizer
        self.images = images
        self.image_refusal = _image_refusal(template, images, model)
        self._template = template
        self.takes_tools = template is not None and template.prints_tools()
        self.prints_calls = template is not None and template.prints_calls()
        self.template_source = "" if template is None else template.source
        self.tool_form = form_of(self.template_source)
        self._takes_parts_only = template is not None and template.takes_parts_only()
        self._specials = sorted(tokenizer.special_tokens, key=len, reverse=True)
        self._placeholders = {text: chr(_FIRST + index) for index, text in enumerate(self._specials)}
        special = any_of(self._specials)
        self._special = re.compile(special)
        # thirty times slower: the alternatives have no common first character that `re` could search for
        self._unsafe = re.compile(f"{special}|{_PRIVATE.pattern}")

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text; special tokens in it are parsed, none is added."""
        return self.tokenizer.encode(text)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> list[int]:
        """Return the token ids of a conversation as a prompt. Raises RequestRejected for bad messages.

        `continue_final_message` leaves the last message, an assistant's, open; `add_generation_prompt` is false then.
        """
        end = PromptEnd.of({ADD_PROMPT: add_generation_prompt, CONTINUE: continue_final_message})
        rendering = self.render(messages, end=end, variables=variables)
        return self.encode_rendering(rendering).tolist()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        end: PromptEnd = PromptEnd.GENERATION_PROMPT,
        variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> str:
        """Return the text of a conversation with its contents protected, for `encode_rendering`."""
        if self._template is None:
            raise RequestRejected("no_chat_template", "the model has no chat template: give token ids", param="prompt")
        images = list(image_parts(messages))
        if images and self.image_refusal:
            raise RequestRejected("images_not_supported", f"messages: {self.image_refusal}", param="messages")
        is_open = end is PromptEnd.OPEN_MESSAGE
        protected = list(map(self._protect_message, marked(messages) if is_open else messages))
        adds_prompt = end is PromptEnd.GENERATION_PROMPT
        rendering = self._template.render(
            protected, add_generation_prompt=adds_prompt, variables=self._protect_all(variables)
        )
        rendering = cut_at_mark(rendering) if is_open else rendering
        return rendering if self.images is None else expand_images(rendering, images, self.images)

    def encode_rendering(self, rendering: str) -> TokenIds:
        """Return the token ids of a rendering, or of the end of one, from a special token on.

        Raises RequestRejected for a token outside of the model's vocabulary.
        """
        ids = self.tokenizer.encode_pieces(rendering, partial(_PROTECTED.sub, self._show))
        vocab_size = self.tokenizer.vocab_size
        if (last := max(ids, default=-1)) >= vocab_size:
            message = f"prompt: token {last} is beyond the model's vocabulary of {vocab_size}"
            raise RequestRejected("invalid_value", message, param="prompt")
        return ids

    def protect(self, text: str) -> str:
        """Return the text with placeholders for all strings that look like special tokens."""
        unsafe = self._unsafe if _PRIVATE.search(text) else self._special
        return unsafe.sub(self._hide, text)

    def _protect_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message as the template gets it: its parts have no images, as a handle is not a text."""
        protected: dict[str, Any] = {}
        if "tool_calls" in message:
            message = with_shown_calls(message, self.tool_form, takes_tools=self.takes_tools)
        for field, value in message.items():
            if isinstance(value, str):
                protected[field] = self.protect(value)
            elif field == "content" and isinstance(value, Sequence):
                protected[field] = [IMAGE_PART if is_image_part(part) else self._protect_all(part) for part in value]
            else:
                protected[field] = self._protect_all(value)
        if self._takes_parts_only and isinstance(text := protected.get("content"), str):
            protected["content"] = [text_part(text)]
        return protected

    def _protect_all(self, value: Any) -> Any:
        """Protect every string in a value, keys included: templates print names and arguments as well as contents."""
        if isinstance(value, str):
            return self.protect(value)
        if isinstance(value, Mapping):
            return {self._protect_all(key): self._protect_all(entry) for key, entry in value.items()}
        if isinstance(value, Sequence):
            return [self._protect_all(entry) for entry in value]
        return value

    def _hide(self, match: re.Match[str]) -> str:
        text = match.group()
        return self._placeholders.get(text) or _ESCAPE + text

    def _show(self, match: re.Match[str]) -> str:
        if escaped := match.group(1):
            return str(escaped)
        index = ord(match.group()) - _FIRST
        return self._specials[index] if index < len(self._specials) else match.group()


def _image_refusal(template: ChatTemplate | None, images: ImageProcessing | None, model: str) -> str:
    if images is None:
        return f"{model} takes no images; {VISION_MODEL} does"
    if template is not None and not template.prints_images(images.image_token):
        return f"the chat template of {model} takes no images"
    return ""


# ---- images -------------------------------------------------------------------------------------------------------


class TileSpan(NamedTuple):
    """The image tokens of one tile: the index of the first one among the prompt's token ids, and their number."""

    start: int
    length: int


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image of a prompt; `name` is the place of its part for error messages: prompt[0].content[1]."""

    image: Image
    name: str
    spans: tuple[TileSpan, ...]  # one for each tile, ascending


class ImagePart(NamedTuple):
    """An image, the index of its message, and the index of its part in the message's content."""

    message: int
    part: int
    image: Image


def image_parts(messages: Iterable[Message]) -> Iterator[ImagePart]:
    """Yield the images in the contents of messages, in order."""
    for index, message in enumerate(messages):
        content = message.get("content")
        for place, part in enumerate(content) if isinstance(content, Sequence) and not isinstance(content, str) else ():
            if is_image_part(part):
                yield ImagePart(index, place, part["image"])


def num_image_tokens(image: Image, processing: ImageProcessing) -> int:
    """Return the number of image tokens of all tiles."""
    return processing.num_tiles(image.info.width, image.info.height) * processing.tokens_per_tile


def expand_images(rendering: str, images: Sequence[ImagePart], processing: ImageProcessing) -> str:
    """Replace each image token of a rendering by the text of its image.

    Every image token is the template's, as contents are protected. Raises RequestRejected if their number is not the
    number of images.
    """
    before, *pieces = rendering.split(processing.image_token)
    if len(pieces) != len(images):
        problem = f"the model's chat template shows {len(pieces)} images in place of the {len(images)} there are"
        raise RequestRejected("template_error", f"messages: {problem}", param="messages")
    texts = [processing.prompt_text(part.image.info.width, part.image.info.height) for part in images]
    return before + "".join([text + piece for text, piece in zip(texts, pieces, strict=True)])


def place_images(
    ids: TokenIds, images: Iterable[tuple[str, Image]], processing: ImageProcessing
) -> tuple[PlacedImage, ...]:
    """Locate the tokens of named images, given in their order, among the token ids of a prompt."""
    spans = _tile_spans(ids, processing)
    counts = [(name, image, processing.num_tiles(image.info.width, image.info.height)) for name, image in images]
    return tuple([PlacedImage(image, name, tuple(islice(spans, count))) for name, image, count in counts])


def _tile_spans(ids: TokenIds, processing: ImageProcessing) -> Iterator[TileSpan]:
    """Yield the span of every tile; image tokens come from images only."""
    end = 0
    while True:
        start = ids.index(processing.image_token_id, end)
        end = start + processing.tokens_per_tile
        yield TileSpan(start, processing.tokens_per_tile)
