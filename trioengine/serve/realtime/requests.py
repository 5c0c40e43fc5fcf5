"""The events that clients send, one struct each, tagged by `type`.

Members that a struct does not have are passed over in items and parts, which clients send back as they got them; in
events, sessions and responses they are reported, unless they are known to be without effect on text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct

from trioengine.core.sampling_params import NUMBERS
from trioengine.core.tools import MAX_TOOLS
from trioengine.serve.requests import MAX_ID, MAX_METADATA, ChosenFunction, Function, Sampling

OUT_OF_BAND = "none"  # the conversation of a response that leaves nothing in the connection's
MAX_EVENT_ID = 512  # characters
MAX_ITEMS = 4096  # of a conversation, or of the input of a response
MAX_TOOLS_SIZE = 1 << 20  # bytes of memory of the tools of a session or a response
MAX_PARTS = 64  # of an item
_LEAST_TOKENS, _MOST_TOKENS = 1, NUMBERS["max_tokens"][2]
_ItemId: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_ID)]
_Position: TypeAlias = Annotated[int, Meta(ge=0)]

# Members of sessions and responses without effect on text; any value will do. The first lines are settings of
# audio, in the protocol's present and earlier forms.
HARMLESS = frozenset(
    {
        *("audio", "speed", "turn_detection", "voice"),
        *("input_audio_format", "input_audio_noise_reduction", "input_audio_transcription", "output_audio_format"),
        *("include", "prompt", "reasoning", "tracing"),
        *("client_secret", "expires_at", "id", "input_modalities", "object", "status"),  # of a session sent back
    }
)
# Members that would change the answer and are not implemented, with the values that do not.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "grammar": (),
    "logprobs": (False,),
    "max_response_output_tokens": ("inf",),  # the earlier name of max_output_tokens
    "modalities": (["text"], ["text", "audio"], ["audio", "text"]),  # the earlier name of output_modalities
    "output_modalities": (["text"], ["text", "audio"], ["audio", "text"]),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
}


# ---- items ---------------------------------------------------------------------------------------------------------


class InputText(Struct, tag="input_text", tag_field="type"):
    text: str


class OutputText(Struct, tag="output_text", tag_field="type"):
    text: str


class Text(Struct, tag="text", tag_field="type"):
    """A part of an answer, by its earlier name."""

    text: str


class InputImage(Struct, tag="input_image", tag_field="type"):
    image_url: str  # a data URL
    detail: Literal["auto", "low", "high", "original"] | None = None  # without effect


ItemPart: TypeAlias = InputText | OutputText | Text | InputImage


class MessageItem(Struct, tag="message", tag_field="type"):
    role: Literal["system", "user", "assistant"]
    content: Annotated[list[ItemPart], Meta(min_length=1, max_length=MAX_PARTS)]
    id: _ItemId | None = None
    object: Literal["realtime.item"] | None = None  # without effect, as the status
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class FunctionCall(Struct, tag="function_call", tag_field="type"):
    """A call of a function by the model, sent back or made up."""

    name: str
    arguments: str  # JSON of an object
    call_id: _ItemId | None = None
    id: _ItemId | None = None
    object: Literal["realtime.item"] | None = None  # without effect, as the status
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class FunctionCallOutput(Struct, tag="function_call_output", tag_field="type"):
    """The result of a call of a function."""

    call_id: _ItemId
    output: str
    id: _ItemId | None = None
    object: Literal["realtime.item"] | None = None  # without effect, as the status
    status: Literal["in_progress", "completed", "incomplete"] | None = None


GivenItem: TypeAlias = MessageItem | FunctionCall | FunctionCallOutput


class ItemReference(Struct, tag="item_reference", tag_field="type"):
    """A reference in the input of a response to an item of the conversation."""

    id: str


# ---- settings ------------------------------------------------------------------------------------------------------


class FlatTool(Function):
    """A function as a tool; chat completions have it as a member of the tool."""

    type: Literal["function"] = "function"


class FlatChoice(ChosenFunction):
    """A call of this function is forced."""

    type: Literal["function"] = "function"


class RetentionRatio(Struct):
    """Cut a conversation without room to this fraction of the tokens that a prompt may have."""

    type: Literal["retention_ratio"]
    retention_ratio: Annotated[float, Meta(ge=0, le=1)]


class ModelSettings(Sampling, kw_only=True):
    """The settings that sessions and responses share."""

    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=_LEAST_TOKENS, le=_MOST_TOKENS)] | Literal["inf"] | None = None
    truncation: Literal["auto", "disabled"] | RetentionRatio | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatChoice | None = None
    parallel_tool_calls: bool | None = None


class SessionSettings(ModelSettings, kw_only=True):
    type: Literal["realtime"] | None = None
    model: str | None = None


class ResponseSettings(ModelSettings, kw_only=True):
    metadata: (
        Annotated[
            dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
            Meta(max_length=MAX_METADATA),
        ]
        | None
    ) = None
    conversation: Literal["auto", "none"] | None = None
    input: Annotated[list[GivenItem | ItemReference], Meta(max_length=MAX_ITEMS)] | None = None


# ---- events --------------------------------------------------------------------------------------------------------


class _Event(Struct, kw_only=True, tag_field="type"):
    event_id: Annotated[str, Meta(max_length=MAX_EVENT_ID)] | None = None


class SessionUpdate(_Event, tag="session.update"):
    session: SessionSettings


class ItemCreate(_Event, tag="conversation.item.create"):
    item: GivenItem
    previous_item_id: str | None = None


class ItemRetrieve(_Event, tag="conversation.item.retrieve"):
    item_id: str


class ItemTruncate(_Event, tag="conversation.item.truncate"):
    item_id: str
    content_index: _Position
    text_end: _Position  # characters to keep


class ItemDelete(_Event, tag="conversation.item.delete"):
    item_id: str


class ResponseCreate(_Event, tag="response.create"):
    response: ResponseSettings | None = None


class ResponseCancel(_Event, tag="response.cancel"):
    response_id: str | None = None


ClientEvent: TypeAlias = (
    SessionUpdate | ItemCreate | ItemRetrieve | ItemTruncate | ItemDelete | ResponseCreate | ResponseCancel
)
EVENTS: Mapping[str, type[ClientEvent]] = {
    "session.update": SessionUpdate,
    "conversation.item.create": ItemCreate,
    "conversation.item.retrieve": ItemRetrieve,
    "conversation.item.truncate": ItemTruncate,
    "conversation.item.delete": ItemDelete,
    "response.create": ResponseCreate,
    "response.cancel": ResponseCancel,
}
