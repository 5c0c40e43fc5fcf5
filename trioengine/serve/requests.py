"""The bodies of requests, one struct each: they are read by these types, and described by them in /openapi.json.

Members that a struct does not have are passed over in messages and parts, which clients send back as they got them; in
a body they are reported.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct

from trioengine.core.checks import MAX_COUNT
from trioengine.core.config import MAX_SECONDS
from trioengine.core.sampling_params import (
    MAX_CACHE_SALT,
    MAX_LOGIT_BIAS,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    NUMBERS,
)
from trioengine.core.tools import MAX_TOOLS, NAME_PATTERN

MAX_ID = 128  # characters
MAX_METADATA = 16  # members
MAX_N = 16


def _bounds(name: str, description: str = "", least: float | None = None) -> Meta:
    """The bounds of a number among the sampling parameters."""
    _, low, high = NUMBERS[name]
    return Meta(ge=low if least is None else least, le=high, description=description or None)


_TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
_N: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_N, description="Choices for each prompt; 1 by default.")]


# ---- messages ------------------------------------------------------------------------------------------------------


class TextPart(Struct, tag="text", tag_field="type"):
    text: str


class RefusalPart(Struct, tag="refusal", tag_field="type"):
    """A part of an answer that a client sends back."""

    refusal: str


class ImageUrl(Struct):
    url: Annotated[str, Meta(description="A data: URL in base64: nothing is fetched.")]
    detail: Annotated[Literal["auto", "low", "high", "original"] | None, Meta(description="Without effect.")] = None


class ImagePart(Struct, tag="image_url", tag_field="type"):
    image_url: ImageUrl


_Texts: TypeAlias = str | Annotated[list[TextPart], Meta(min_length=1)]


class SystemMessage(Struct, tag="system", tag_field="role"):
    content: _Texts
    name: str | None = None


class DeveloperMessage(Struct, tag="developer", tag_field="role"):
    """Instructions, as a system message has them."""

    content: _Texts
    name: str | None = None


class UserMessage(Struct, tag="user", tag_field="role"):
    content: str | Annotated[list[TextPart | ImagePart], Meta(min_length=1)]
    name: str | None = None


class FunctionCall(Struct):
    name: str
    arguments: Annotated[str, Meta(description="JSON of an object.")]


class ToolCall(Struct):
    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"


class AssistantMessage(Struct, tag="assistant", tag_field="role"):
    content: str | Annotated[list[TextPart | RefusalPart], Meta(min_length=1)] | None = None
    refusal: str | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: Annotated[str | None, Meta(description="Given to chat templates that print it.")] = None
    reasoning: Annotated[str | None, Meta(description="The same by its later name.")] = None


class ToolMessage(Struct, tag="tool", tag_field="role"):
    """The result of a tool call."""

    content: _Texts
    tool_call_id: str | None = None
    name: str | None = None


Message: TypeAlias = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage
Messages: TypeAlias = Annotated[list[Message], Meta(min_length=1)]


# ---- bodies --------------------------------------------------------------------------------------------------------


_PROMPTS = Meta(
    min_length=1, description="Texts, or lists of token ids, each of which is a prompt; or the token ids of one prompt."
)

_INPUTS = Meta(
    min_length=1, description="Texts, or lists of token ids, each of which is embedded; or the token ids of one text."
)


class Sampling(Struct, kw_only=True):
    """Sampling parameters, by the names that OpenAI and vLLM have for them."""

    temperature: Annotated[float, _bounds("temperature", "0: greedy")] | None = None
    top_p: Annotated[float, _bounds("top_p")] | None = None
    top_k: Annotated[int, _bounds("top_k", "0 or -1: all tokens")] | None = None
    min_p: Annotated[float, _bounds("min_p")] | None = None
    repetition_penalty: Annotated[float, _bounds("repetition_penalty")] | None = None
    presence_penalty: Annotated[float, _bounds("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, _bounds("frequency_penalty")] | None = None
    seed: Annotated[int, _bounds("seed")] | None = None
    stop: (
        str
        | Annotated[
            list[Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]], Meta(max_length=MAX_STOP_STRINGS)
        ]
        | None
    ) = None
    stop_token_ids: Annotated[list[_TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    min_tokens: Annotated[int, _bounds("min_tokens")] | None = None
    ignore_eos: bool | None = None
    logit_bias: (
        Annotated[dict[_TokenId, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_LOGIT_BIAS)] | None
    ) = None
    skip_special_tokens: bool | None = None
    cache_salt: Annotated[str, Meta(max_length=MAX_CACHE_SALT)] | None = None
    num_speculative_tokens: Annotated[int, _bounds("num_speculative_tokens", "drafted a step, at most")] | None = None


class TextFormat(Struct, tag="text", tag_field="type"):
    """Any text."""


class JsonObjectFormat(Struct, tag="json_object", tag_field="type"):
    """Any JSON object."""


class JsonSchema(Struct):
    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: Annotated[bool | None, Meta(description="Without effect: answers always follow the schema.")] = None


class JsonSchemaFormat(Struct, tag="json_schema", tag_field="type"):
    json_schema: JsonSchema


class StructuredOutputs(Struct):
    """vLLM's form of a grammar; exactly one field is given."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: Annotated[str, Meta(description="In llguidance's variant of Lark.")] | None = None
    json_object: bool | None = None


class Function(Struct):
    name: Annotated[str, Meta(pattern=NAME_PATTERN)]
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, Meta(description="A JSON schema of an object.")] = None
    strict: Annotated[bool | None, Meta(description="Without effect: forced calls always follow the schema.")] = None


class FunctionTool(Struct):
    function: Function
    type: Literal["function"] = "function"


class ChosenFunction(Struct):
    name: str


class ToolChoice(Struct):
    """A call of this function is forced."""

    function: ChosenFunction
    type: Literal["function"] = "function"


class StreamOptions(Struct):
    include_usage: bool | None = None
    continuous_usage_stats: Annotated[bool | None, Meta(description="The usage so far in every event.")] = None


class WithChoices(Sampling, kw_only=True):
    """The fields that both routes with choices have."""

    model: str | None = None
    n: _N | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: Annotated[bool | None, Meta(description="Also of the prompt.")] = None
    return_tokens_as_token_ids: Annotated[bool | None, Meta(description='Tokens of logprobs as "token_id:N".')] = None
    timings_per_token: Annotated[bool | None, Meta(description="Adds `timings` at the end.")] = None
    structured_outputs: StructuredOutputs | None = None
    request_id: Annotated[str, Meta(min_length=1, max_length=MAX_ID, description="for /abort_request")] | None = None


class ChatCompletionRequest(WithChoices, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Annotated[int, _bounds("max_tokens", "goes before max_tokens", 1)] | None = None
    max_tokens: Annotated[int, _bounds("max_tokens", least=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, _bounds("logprobs")] | None = None
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    tools: Annotated[
        Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None,
        Meta(description='Functions: {"type": "function", "function": …}; other types are passed over.'),
    ] = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: Annotated[
        bool | None, Meta(description="The answer continues the last message; needs add_generation_prompt=false.")
    ] = None
    reasoning_effort: str | None = None


class CompletionBody(WithChoices, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: str | Annotated[list[str | _TokenId | Annotated[list[_TokenId], Meta(min_length=1)]], _PROMPTS]
    max_tokens: Annotated[int, _bounds("max_tokens", "16 by default; 0 with echo only")] | None = None
    echo: Annotated[bool | None, Meta(description="The prompt comes before the answer, in logprobs as well.")] = None
    logprobs: Annotated[int, _bounds("logprobs", "The best tokens of each position to show.")] | None = None


class EmbeddingsRequest(Struct, kw_only=True):
    """The body of POST /v1/embeddings."""

    input: str | Annotated[list[str | _TokenId | Annotated[list[_TokenId], Meta(min_length=1)]], _INPUTS]
    model: str | None = None
    encoding_format: Annotated[
        Literal["float", "base64"] | None, Meta(description="base64: of little-endian float32.")
    ] = None
    dimensions: Annotated[int, Meta(ge=1, le=MAX_COUNT, description="The first so many, of the length 1.")] | None = (
        None
    )
    cache_salt: Annotated[str, Meta(max_length=MAX_CACHE_SALT)] | None = None
    request_id: Annotated[str, Meta(min_length=1, max_length=MAX_ID, description="for /abort_request")] | None = None


class TokenizeRequest(Struct, kw_only=True):
    """The body of POST /tokenize: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: list[_TokenId]


class AbortRequest(Struct, kw_only=True):
    """The body of POST /abort_request: one id, or `abort_all`."""

    request_id: str | None = None
    abort_all: bool | None = None


class LoadAdapterRequest(Struct, kw_only=True):
    """The body of POST /v1/load_lora_adapter."""

    lora_name: str
    lora_path: Annotated[str, Meta(description="The name of its directory under --weights-dir.")]


class UnloadAdapterRequest(Struct, kw_only=True):
    """The body of POST /v1/unload_lora_adapter."""

    lora_name: str


class UpdateWeightsRequest(Struct, kw_only=True):
    """The body of POST /update_weights."""

    name: str
    mode: Literal["abort", "wait", "keep"] | None = None
    timeout: Annotated[float, Meta(ge=0, le=MAX_SECONDS, description="Seconds.")] | None = None
