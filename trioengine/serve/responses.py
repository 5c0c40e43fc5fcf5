"""The bodies of responses, one struct each, as /openapi.json describes them; the server renders them by itself."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType

from trioengine.actors.power_change import Level
from trioengine.core.embedding import MAX_INPUTS
from trioengine.core.lifecycle import Power
from trioengine.core.power import Tag

_Count: TypeAlias = Annotated[int, Meta(ge=0)]
_Index: TypeAlias = Annotated[int, Meta(ge=0, description="Of the choice.")]
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
    prompt_tokens_details: Annotated[PromptTokensDetails, Meta(description="Not in the usage so far.")] | UnsetType = (
        UNSET
    )
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


class Timings(Struct):
    """llama.cpp's times of the prompt and of the answer; of several choices, of the one that took longest."""

    cache_n: Annotated[int, Meta(ge=0, description="Tokens of the prompt found in the prefix cache.")]
    prompt_n: Annotated[int, Meta(ge=0, description="Computed tokens of the prompt.")]
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: _Count
    predicted_ms: Annotated[float, Meta(description="From the first token to the last.")]
    predicted_per_token_ms: float
    predicted_per_second: float


_TokenIds: TypeAlias = Annotated[list[_Count], Meta(description="With return_token_ids only.")]
_StopReason: TypeAlias = Annotated[int | str | None, Meta(description="The stop string or stop token that ended it.")]


class _Response(Struct, kw_only=True):
    """The fields that all responses with choices, and the events of their streams, have in common."""

    id: Annotated[str, Meta(description="For /abort_request.")]
    created: _Time
    model: str
    system_fingerprint: Annotated[str, Meta(description="A hash of the model, its weights, and the code.")]
    timings: Annotated[Timings, Meta(description="With timings_per_token only.")] | UnsetType = UNSET


class _Chunk(_Response, kw_only=True):
    usage: (
        Annotated[Usage | None, Meta(description="With include_usage or continuous_usage_stats only.")] | UnsetType
    ) = UNSET


class Choice(Struct):
    index: _Index
    message: AnswerMessage
    logprobs: Logprobs | None
    finish_reason: _FinishReason
    stop_reason: _StopReason
    token_ids: _TokenIds | UnsetType = UNSET


class ChatCompletion(_Response, kw_only=True):
    object: Literal["chat.completion"]
    choices: Annotated[list[Choice], Meta(min_length=1)]
    usage: Usage
    prompt_token_ids: _TokenIds | UnsetType = UNSET


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
    stop_reason: _StopReason | UnsetType = UNSET
    token_ids: _TokenIds | UnsetType = UNSET


class ChatCompletionChunk(_Chunk, kw_only=True):
    """An event of a stream."""

    object: Literal["chat.completion.chunk"]
    choices: Annotated[list[ChunkChoice], Meta(max_length=1)]
    prompt_token_ids: _TokenIds | UnsetType = UNSET


# ---- completions ---------------------------------------------------------------------------------------------------


class CompletionLogprobs(Struct):
    """An entry for each token, with echo of the prompt as well; null for the first token of a prompt."""

    tokens: Annotated[list[str], Meta(description='Bytes that are not whole UTF-8 are "bytes:\\x…".')]
    token_logprobs: list[float | None]
    top_logprobs: Annotated[
        list[dict[str, float] | None], Meta(description="The best of each position, and its token.")
    ]
    text_offset: Annotated[list[_Count], Meta(description="Characters from the beginning of the prompt.")]


class _CompletionText(Struct, kw_only=True):
    index: Annotated[int, Meta(ge=0, description="Of the choice: the choices of a prompt follow each other.")]
    text: str
    logprobs: CompletionLogprobs | None
    token_ids: _TokenIds | UnsetType = UNSET
    prompt_token_ids: _TokenIds | UnsetType = UNSET


class CompletionChoice(_CompletionText, kw_only=True):
    finish_reason: Literal["stop", "length"]
    stop_reason: _StopReason


class TextCompletion(_Response, kw_only=True):
    object: Literal["text_completion"]
    choices: Annotated[list[CompletionChoice], Meta(min_length=1)]
    usage: Usage


class CompletionPiece(_CompletionText, kw_only=True):
    finish_reason: Literal["stop", "length"] | None
    stop_reason: _StopReason | UnsetType = UNSET


class TextCompletionChunk(_Chunk, kw_only=True):
    """An event of a stream."""

    object: Literal["text_completion"]
    choices: Annotated[list[CompletionPiece], Meta(max_length=1)]


# ---- embeddings ----------------------------------------------------------------------------------------------------


class Embedding(Struct):
    object: Literal["embedding"]
    index: Annotated[int, Meta(ge=0, description="Of the input.")]
    embedding: list[float] | Annotated[str, Meta(description="In base64, of little-endian float32.")]


class EmbeddingsUsage(Struct):
    prompt_tokens: _Count
    total_tokens: _Count


class EmbeddingList(Struct):
    object: Literal["list"]
    data: Annotated[list[Embedding], Meta(min_length=1, max_length=MAX_INPUTS)]
    model: str
    usage: EmbeddingsUsage


# ---- the model and its tokenizer -----------------------------------------------------------------------------------


class Model(Struct):
    id: str
    object: Literal["model"]
    created: Annotated[int, Meta(description="The start of the server, in seconds since 1970.")]
    owned_by: Literal["trioengine"]
    parent: Annotated[str | None, Meta(description="The model of an adapter; null for the model itself.")]
    max_model_len: Annotated[int | None, Meta(description="Tokens of the context; null until the engine is ready.")]
    default_sampling_params: Annotated[
        dict[str, float], Meta(description="The model's defaults of parameters that a request does not give.")
    ]


class ModelList(Struct):
    object: Literal["list"]
    data: Annotated[list[Model], Meta(min_length=1, max_length=1)]


class TokenizeResponse(Struct):
    count: _Count
    max_model_len: _Count
    tokens: list[_Count]
    token_strs: Annotated[list[str] | None, Meta(description="With return_token_strs only.")]


class AddedToken(Struct):
    content: str
    special: bool


class TokenizerInfo(Struct):
    tokenizer_class: str
    chat_template: Annotated[str | None, Meta(description="Null if the model has none.")]
    vocab_size: _Count
    model_max_length: Annotated[int, Meta(ge=0, description="Tokens of the context.")]
    eos_token: Annotated[str | None, Meta(description="Null if the model has none, or several.")]
    added_tokens_decoder: Annotated[dict[str, AddedToken], Meta(description="Special tokens, by their ids.")]


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


class Adapters(Struct):
    models: Annotated[list[str], Meta(description="The names of the model with each of its adapters.")]


class Invariants(Struct):
    ok: Literal[True]
    statistics: dict[str, int | str | None]
    tasks: Annotated[int, Meta(ge=1, description="Of the server's process.")]
