"""The items of a conversation: messages of texts and images, calls of functions, and the outputs of such calls."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypeAlias

from trioengine.actors.images import KeptImages
from trioengine.serve.ids import new_id
from trioengine.serve.limits import size_of, size_of_json_text
from trioengine.serve.requests import FunctionCall, ToolCall

ITEM_SIZE = 512  # bytes of memory of an item, beside its texts
IMAGE_SIZE = 512  # bytes of memory of an image, whose data the engine keeps
IMAGE = "input_image"
Part: TypeAlias = str | Mapping[str, Any]  # a text, or an image in the engine's form


class ItemStatus(enum.Enum):
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"


class Role(enum.Enum):
    """The role of the chat message that an item becomes."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


PART_TYPES = {
    Role.SYSTEM: ("input_text",),
    Role.USER: ("input_text", IMAGE),
    Role.ASSISTANT: ("output_text", "text"),
}


@dataclass(slots=True)
class Item(ABC):
    """Base class of items. An item in progress grows; the images of one in a conversation are kept."""

    role: Role
    _: KW_ONLY
    id: str = field(default_factory=lambda: new_id("item_"))
    status: ItemStatus = ItemStatus.COMPLETED
    _deltas: list[str] = field(default_factory=list)  # received since the text was last joined
    _kept: KeptImages | None = None  # while it is in a conversation

    @property
    @abstractmethod
    def size(self) -> int:
        """The bytes of memory."""

    @property
    @abstractmethod
    def message(self) -> dict[str, Any]:
        """The item as a chat message."""

    @property
    @abstractmethod
    def is_empty(self) -> bool:
        """Whether prompts leave it out."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Return the item as clients see it: images without their bytes."""

    @property
    def has_images(self) -> bool:
        return False

    def grow(self, delta: str) -> None:
        """Append to the text of an item in progress."""
        self._deltas.append(delta)

    def keep(self) -> None:
        """Keep the images in the engine until `release`."""
        if self.has_images:
            self._kept = KeptImages([self.message])

    def release(self) -> None:
        if self._kept is not None:
            self._kept.release()

    def _joined(self, text: str) -> str:
        """Return the text with the deltas, which are taken."""
        deltas, self._deltas = self._deltas, []
        return "".join([text, *deltas])

    def _shown(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"id": self.id, "object": "realtime.item", "type": kind, "status": self.status.value, **fields}


@dataclass(slots=True)
class MessageItem(Item):
    """A message. The only part of an assistant's item grows while the item is in progress.

    An image is the client's part until the engine keeps its bytes, then the engine's; `message` holds either form.
    """

    _parts: list[Part]

    @property
    def parts(self) -> list[Part]:
        if self._deltas:
            self._parts = [self._joined("".join(self.texts_of(self._parts)))]
        return self._parts

    @staticmethod
    def texts_of(parts: Iterable[Part]) -> list[str]:
        return [part for part in parts if isinstance(part, str)]

    @property
    def texts(self) -> list[str]:
        """The parts that are texts; all parts of an assistant's item are."""
        return self.texts_of(self.parts)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def has_images(self) -> bool:
        return any(not isinstance(part, str) for part in self._parts)

    @property
    def is_empty(self) -> bool:
        """Whether it is an assistant's item without text, which prompts leave out."""
        return self.role is Role.ASSISTANT and not self.text

    @property
    def size(self) -> int:
        return ITEM_SIZE + size_of_parts(self.parts)

    @property
    def message(self) -> dict[str, Any]:
        """The item as a chat message, whose content is a list of parts if it has images."""
        content = [_text_part(part) if isinstance(part, str) else part for part in self.parts]
        return {"role": self.role.value, "content": content if self.has_images else self.text}

    def take_images(self, message: Mapping[str, Any]) -> None:
        """Replace the images by the images of `message`, which is this message in the engine's form."""
        if self.has_images:
            self._parts = [part["text"] if part["type"] == "text" else part for part in message["content"]]

    def truncate(self, content_index: int, text_end: int) -> None:
        """Keep the first `text_end` characters of this part, and drop all later parts."""
        texts = self.texts
        is_cut = text_end < len(texts[content_index]) or content_index < len(texts) - 1
        self._parts = [*texts[:content_index], texts[content_index][:text_end]]
        if is_cut:
            self.status = ItemStatus.INCOMPLETE

    def to_json(self) -> dict[str, Any]:
        kind = PART_TYPES[self.role][0]
        content = [
            {"type": kind, "text": part} if isinstance(part, str) else {"type": IMAGE, "image_url": None}
            for part in self.parts
        ]
        return self._shown("message", role=self.role.value, content=content)


@dataclass(slots=True)
class FunctionCallItem(Item):
    """A call of a function by the model; the arguments, which are JSON, grow while the item is in progress."""

    role: Role = field(default=Role.ASSISTANT, init=False)
    name: str
    _arguments: str = ""
    call_id: str = field(default_factory=lambda: new_id("call_"))

    @property
    def arguments(self) -> str:
        if self._deltas:
            self._arguments = self._joined(self._arguments)
        return self._arguments

    @property
    def is_empty(self) -> bool:
        """Whether the call is not whole: prompts leave it out."""
        return self.status is not ItemStatus.COMPLETED

    @property
    def size(self) -> int:
        """The bytes of memory, also of the values in the arguments: each prompt has them."""
        return ITEM_SIZE + size_of(self.name) + size_of(self.call_id) + size_of_json_text(self.arguments)

    @property
    def call(self) -> ToolCall:
        """The call as a member of a chat message."""
        return ToolCall(FunctionCall(self.name, self.arguments), id=self.call_id)

    @property
    def message(self) -> dict[str, Any]:
        """The message that the call is added to, where it does not follow another one of the assistant's."""
        return {"role": self.role.value, "content": ""}

    def to_json(self) -> dict[str, Any]:
        return self._shown("function_call", name=self.name, call_id=self.call_id, arguments=self.arguments)


@dataclass(slots=True)
class FunctionCallOutputItem(Item):
    """The client's result of a call."""

    role: Role = field(default=Role.TOOL, init=False)
    call_id: str
    output: str

    @property
    def is_empty(self) -> bool:
        return False

    @property
    def size(self) -> int:
        return ITEM_SIZE + size_of(self.call_id) + size_of(self.output)

    @property
    def message(self) -> dict[str, Any]:
        return {"role": self.role.value, "content": self.output, "tool_call_id": self.call_id}

    def to_json(self) -> dict[str, Any]:
        return self._shown("function_call_output", call_id=self.call_id, output=self.output)


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def size_of_parts(parts: Iterable[Part]) -> int:
    """Return the bytes of memory."""
    return sum(size_of(part) if isinstance(part, str) else IMAGE_SIZE for part in parts)
