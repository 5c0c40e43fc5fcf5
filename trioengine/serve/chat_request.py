"""The request of a chat completion: fields are supported, without effect, or refused by name; others are reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from trioengine.actors.engine import Engine
from trioengine.core.errors import EngineOverloaded, RequestRejected
from trioengine.core.grammar import Grammar
from trioengine.core.sampling_params import SamplingParams
from trioengine.serve.errors import ClientError
from trioengine.serve.parsing import as_served, either, load_body, load_object
from trioengine.serve.reading import check_supported, read, sampling_params, unknown_names
from trioengine.serve.requests import (
    AssistantMessage,
    ChatCompletionRequest,
    ImagePart,
    JsonObjectFormat,
    JsonSchemaFormat,
    Message,
    RefusalPart,
    StructuredOutputs,
    TextFormat,
    TextPart,
)

# Fields without effect on an answer; any value will do.
HARMLESS = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
    }
)
# Fields that would change the answer and are not implemented, with the values that do not.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "echo": (False,),
    "add_generation_prompt": (True,),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1, 1.0),
    "modalities": (["text"],),
    "n": (1,),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}
FIELDS = frozenset({*ChatCompletionRequest.__struct_encode_fields__, *HARMLESS, *UNSUPPORTED})
_STREAM_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "continuous_usage_stats": (False,),
    "include_obfuscation": (False,),
}
_ROLES = {"developer": "system"}  # of OpenAI, and the templates' names for them
EngineMessage: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request whose body was checked."""

    messages: Sequence[Mapping[str, Any]]
    params: SamplingParams
    stream: bool
    include_usage: bool  # in a stream
    request_id: str | None  # the client's own, for /abort_request
    grammar_field: str  # the path of the field that has the grammar, if any
    unknown: tuple[str, ...] = ()  # fields that were passed over


def parse_chat_request(body: bytes, model: str, image_refusal: str) -> ChatRequest:
    """Parse the body of a request to `model`, the only one. Raises ClientError or RequestRejected.

    `image_refusal` is the reason why the model takes no images, or empty.
    """
    fields = load_body(body)
    given = read(fields, ChatCompletionRequest)
    check_model(given.model, model)
    check_supported(fields, UNSUPPORTED)
    return ChatRequest(
        messages=engine_messages(given.messages, image_refusal),
        params=_params(given),
        stream=bool(given.stream),
        include_usage=_include_usage(given, fields),
        request_id=given.request_id,
        grammar_field=_grammar_field(given),
        unknown=unknown_names(fields, FIELDS),
    )


def check_model(name: str | None, model: str) -> None:
    """Raise ClientError for a model other than this one; None stands for this one."""
    if name not in (None, model):
        message = f"model {name!r:.120} not found; this server serves {model!r}"
        raise ClientError("model_not_found", message, param="model")


def _include_usage(given: ChatCompletionRequest, fields: Mapping[str, Any]) -> bool:
    options = given.stream_options
    if options is None:
        return False
    if not given.stream:
        raise ClientError("invalid_value", "stream_options is for stream=true only", param="stream_options")
    check_supported(fields["stream_options"], _STREAM_UNSUPPORTED, "stream_options")
    return bool(options.include_usage)


def _params(given: ChatCompletionRequest) -> SamplingParams:
    max_tokens = given.max_tokens if given.max_completion_tokens is None else given.max_completion_tokens
    logprobs = given.top_logprobs
    if not given.logprobs and logprobs is not None:
        raise ClientError("invalid_value", "top_logprobs needs logprobs=true", param="top_logprobs")
    if given.logprobs and logprobs is None:
        logprobs = 0
    return sampling_params(given, max_tokens=max_tokens, logprobs=logprobs, grammar=_grammar(given))


def _grammar_field(given: ChatCompletionRequest) -> str:
    """Return the path of the field that has the grammar."""
    if given.structured_outputs is not None:
        return "structured_outputs"
    has_schema = isinstance(given.response_format, JsonSchemaFormat)
    return "response_format.json_schema.schema" if has_schema else "response_format"


def _grammar(given: ChatCompletionRequest) -> Grammar | None:
    """Return the grammar of the answer, if any."""
    form, outputs = given.response_format, given.structured_outputs
    if outputs is not None and not (form is None or isinstance(form, TextFormat)):
        message = "structured_outputs and response_format do not go together"
        raise ClientError("invalid_value", message, param="structured_outputs")
    try:
        if outputs is not None:
            return _structured(outputs)
        if isinstance(form, JsonSchemaFormat):
            return Grammar.json_schema(form.json_schema.schema)
        return Grammar.json_object() if isinstance(form, JsonObjectFormat) else None
    except RequestRejected as exc:
        where = _grammar_field(given)
        raise ClientError(exc.code, f"{where}: {exc.message}", param=where) from None


def _structured(outputs: StructuredOutputs) -> Grammar:
    given = {name: value for name, value in msgspec.structs.asdict(outputs).items() if value not in (None, False)}
    match list(given.items()):
        case [("json", schema)]:
            is_text = isinstance(schema, str)
            return Grammar.json_schema(load_object(schema, "structured_outputs.json") if is_text else schema)
        case [("regex", pattern)]:
            return Grammar.regex(pattern)
        case [("choice", choices)]:
            return Grammar.choice(choices)
        case [("grammar", grammar)]:
            return Grammar.lark(grammar)
        case [("json_object", _)]:
            return Grammar.json_object()
        case _:
            message = f"structured_outputs must have one of {either(outputs.__struct_fields__)}, and only one"
            raise ClientError("invalid_value", message, param="structured_outputs")


# ---- messages ------------------------------------------------------------------------------------------------------


def image_refusal(engine: Engine, model: str) -> str:
    """Return the reason why the engine takes no images, with the model's served name; empty if it takes images.

    It is also empty while the model is not loaded: then the engine refuses the request.
    """
    try:
        return as_served(engine.tokenizer.image_refusal, engine.config.model, model)
    except EngineOverloaded:
        return ""


def engine_messages(messages: Sequence[Message], refusal: str) -> list[EngineMessage]:
    """Return the messages for the engine. A content is one string, or a list of parts if it has images.

    Raises ClientError; for images with the message `refusal` unless that is empty.
    """
    return [_engine_message(message, f"messages[{index}]", refusal) for index, message in enumerate(messages)]


def _engine_message(message: Message, where: str, refusal: str) -> EngineMessage:
    role = str(message.__struct_config__.tag)
    content: object = message.content
    if not isinstance(message.content, str):
        content = _joined(message.content or (), f"{where}.content", refusal)
    if isinstance(message, AssistantMessage):
        content = content or message.refusal or ""
        if message.tool_calls:
            param = f"{where}.tool_calls"
            raise ClientError("unsupported_parameter", f"this server does not support {param}", param=param)
    return {"role": _ROLES.get(role, role), "content": content}


def _joined(
    parts: Sequence[TextPart | RefusalPart | ImagePart], where: str, refusal: str
) -> str | list[Mapping[str, Any]]:
    """Return the text, or with images a list of parts."""
    texts = [_text_of(part) for part in parts if not isinstance(part, ImagePart)]
    if len(texts) == len(parts):
        return "".join(texts)
    if refusal:
        index = next(index for index, part in enumerate(parts) if isinstance(part, ImagePart))
        raise ClientError("images_not_supported", f"{where}[{index}]: {refusal}", param=f"{where}[{index}]")
    return [msgspec.to_builtins(part) for part in parts]


def _text_of(part: TextPart | RefusalPart) -> str:
    return part.text if isinstance(part, TextPart) else part.refusal
