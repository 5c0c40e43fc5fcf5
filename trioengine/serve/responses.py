"""The bodies of responses, one struct each, as /openapi.json describes them; the server renders them by itself."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType

from trioengine.actors.power_change import Level
from trioengine.core.lifecycle import Power
from trioengine.core.power import Tag

_Count: TypeAlias = Annotated[int, Meta(ge=0)]
_Index: TypeAlias = Annotated[int, Meta(ge=0, le=0, description="Always 0: there is one choice.")]
_Time: TypeAlias = Annotated[int, Meta(description="Seconds since 1970.")]
_FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]


# ---- errors --------------------------------------------------------------------------------------------------------


class Error(Struct, kw_only=True):
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    code: str
    message: str
    param: Annotated[str | None, Meta(description="The path of the field that is wrong.")]
    retry_after: Annotated[float, Meta(ge=0, description="Seconds after which to send again.")] | UnsetType = UNSET


class ErrorBody(Struct):
    """An error, in OpenAI's form."""

    error: Error


# ---- chat completions ----------------------------------------------------------------------------------------------


class PromptTokensDetails(Struct):
    cached_tokens: Annotated[int, Meta(ge=0, description="Found in the prefix cache.")]


class CompletionTokensDetails(Struct):
    reasoning_tokens: Annotated[int, Meta(ge=0, description="Up to the end of the reasoning, its tags included.")]


class Usage(Struct):
    prompt_tokens: _Count
    completion_tokens: Annotated[int, Meta(ge=0, description="The end token included.")]
    total_tokens: _Count
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: Annotated[
        CompletionTokensDetails | UnsetType, Meta(description="With --reasoning-parser.")
    ] = UNSET


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[Annotated[int, Meta(ge=0, le=255)]]


class TokenLogprob(TopLogprob):
    top_logprobs: Annotated[list[TopLogprob], Meta(max_length=20, description="The best of this position.")]


class Logprobs(Struct):
    content: list[TokenLogprob]
    refusal: None


class CalledFunction(Struct):
    name: str
    arguments: Annotated[str, Meta(description="JSON of an object.")]


class AnswerCall(Struct):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(Struct):
    role: Literal["assistant"]
    content: Annotated[str | None, Meta(description="Null if there are only tool calls.")]
    refusal: None
    tool_calls: list[AnswerCall] | UnsetType = UNSET
    reasoning: Annotated[str | UnsetType, Meta(description="With --reasoning-parser, if there is any.")] = UNSET
    reasoning_content: Annotated[str | UnsetType, Meta(description="The same by its earlier name.")] = UNSET


class Choice(Struct):
    index: _Index
    message: AnswerMessage
    logprobs: Logprobs | None
    finish_reason: _FinishReason


class ChatCompletion(Struct):
    id: Annotated[str, Meta(description="For /abort_request.")]
    object: Literal["chat.completion"]
    created: _Time
    model: str
    choices: Annotated[list[Choice], Meta(min_length=1, max_length=1)]
    usage: Usage


class FunctionDelta(Struct):
    arguments: Annotated[str, Meta(description="A piece of the JSON.")]
    name: Annotated[str, Meta(description="With the first piece.")] | UnsetType = UNSET


class CallDelta(Struct):
    index: _Count
    function: FunctionDelta
    id: Annotated[str, Meta(description="With the first piece.")] | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class Delta(Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: Annotated[str | UnsetType, Meta(description="The same by its earlier name.")] = UNSET
    tool_calls: Annotated[list[CallDelta], Meta(min_length=1, max_length=1)] | UnsetType = UNSET


class ChunkChoice(Struct):
    index: _Index
    delta: Delta
    logprobs: Logprobs | None
    finish_reason: _FinishReason | None


class ChatCompletionChunk(Struct):
    """An event of a stream."""

    id: Annotated[str, Meta(description="For /abort_request.")]
    object: Literal["chat.completion.chunk"]
    created: _Time
    model: str
    choices: Annotated[list[ChunkChoice], Meta(max_length=1)]
    usage: Annotated[Usage | None, Meta(description="With include_usage only.")] | UnsetType = UNSET


# ---- completions ---------------------------------------------------------------------------------------------------


class CompletionChoice(Struct):
    index: Annotated[int, Meta(ge=0, description="Of the prompt.")]
    text: str
    logprobs: None
    finish_reason: Literal["stop", "length"]


class TextCompletion(Struct):
    id: Annotated[str, Meta(description="For /abort_request.")]
    object: Literal["text_completion"]
    created: _Time
    model: str
    choices: Annotated[list[CompletionChoice], Meta(min_length=1)]
    usage: Usage


class CompletionPiece(Struct):
    index: Annotated[int, Meta(ge=0, description="Of the prompt.")]
    text: str
    logprobs: None
    finish_reason: Literal["stop", "length"] | None


class TextCompletionChunk(Struct):
    """An event of a stream."""

    id: Annotated[str, Meta(description="For /abort_request.")]
    object: Literal["text_completion"]
    created: _Time
    model: str
    choices: Annotated[list[CompletionPiece], Meta(max_length=1)]
    usage: Annotated[Usage | None, Meta(description="With include_usage only.")] | UnsetType = UNSET


# ---- the model and its tokenizer -----------------------------------------------------------------------------------


class Model(Struct):
    id: str
    object: Literal["model"]
    created: Annotated[int, Meta(description="The start of the server, in seconds since 1970.")]
    owned_by: Literal["trioengine"]
    max_model_len: Annotated[int | None, Meta(description="Tokens of the context; null until the engine is ready.")]


class ModelList(Struct):
    object: Literal["list"]
    data: Annotated[list[Model], Meta(min_length=1, max_length=1)]


class TokenizeResponse(Struct):
    count: _Count
    max_model_len: _Count
    tokens: list[_Count]
    token_strs: Annotated[list[str] | None, Meta(description="With return_token_strs only.")]


class DetokenizeResponse(Struct):
    prompt: str


# ---- the state -----------------------------------------------------------------------------------------------------


class Health(Struct):
    status: Literal["ok"]


class Unhealthy(Struct):
    status: Literal["closed", "unresponsive"]


class Ready(Struct):
    state: Literal["awake"]


class NotReady(Struct):
    state: Literal["loading", "restarting", "asleep", "draining", "closed"]


class Version(Struct):
    version: str


class OpenApi(Struct):
    """A document of OpenAPI 3.1, with its other members."""

    openapi: str
    info: dict[str, Any]
    paths: dict[str, Any]
    components: dict[str, Any]


class PowerState(Struct):
    """The state of the engine after a change, or at the moment."""

    is_sleeping: bool
    level: Annotated[Level | None, Meta(description="Null if nothing sleeps.")]
    tags: Annotated[list[Tag], Meta(description="The parts that sleep.")]
    power: Power
    weight_version: Annotated[int, Meta(ge=1, description="One more for each update.")]


class Aborted(Struct):
    aborted: Annotated[int, Meta(ge=0, description="Requests that this call ends.")]


class Invariants(Struct):
    ok: Literal[True]
    statistics: dict[str, int | str | None]
    tasks: Annotated[int, Meta(ge=1, description="Of the server's process.")]
