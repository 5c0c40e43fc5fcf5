"""The request of a chat completion: fields are supported, without effect, or refused by name; others are reported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import msgspec

from trioengine.actors.engine import Engine
from trioengine.core.errors import EngineOverloaded, RequestRejected
from trioengine.core.grammar import Grammar
from trioengine.core.sampling_params import SamplingParams
from trioengine.serve.asked_model import AskedModel, ServedNames
from trioengine.serve.chat_tools import parse_tools, with_calls
from trioengine.serve.errors import ClientError
from trioengine.serve.parsing import as_served, either, load_body, load_object, shown
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
    ToolMessage,
    WithChoices,
)
from trioengine.serve.shown import Shown
from trioengine.text.prompt_end import HAS_CALLS, OPTIONS, PromptEnd, not_continued
from trioengine.text.reasoning import AnswerForm, ReasoningForm
from trioengine.text.tool_calls import HERMES, ToolForm, form_of
from trioengine.text.tools import Tools, with_instructions

# Fields without effect on an answer; any value will do.
HARMLESS = frozenset(
    {
        "metadata",
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
    "echo": (False,),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1, 1.0),
    "modalities": (["text"],),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}
FIELDS = frozenset({*ChatCompletionRequest.__struct_encode_fields__, *HARMLESS, *UNSUPPORTED})
_STREAM_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "include_obfuscation": (False,),
}
_NO_EFFORT = "none"
_ROLES = {"developer": "system"}  # of OpenAI, and the templates' names for them
EngineMessage: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request whose body was checked."""

    model: AskedModel
    messages: Sequence[Mapping[str, Any]]
    params: SamplingParams
    n: int  # choices
    stream: bool
    shown: Shown
    request_id: str | None  # the client's own, for /abort_request
    grammar_field: str  # the path of the field that has the grammar, if any
    variables: Mapping[str, Any]  # of the chat template
    answer_form: AnswerForm
    continued: str  # the text of the last message, if the answer continues that
    unknown: tuple[str, ...] = ()  # fields that were passed over


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The properties of the served model on which the parsing of a request depends."""

    names: ServedNames
    image_refusal: str  # the reason why it takes no images, or empty
    template: str = ""  # its chat template
    takes_tools: bool = False  # its chat template prints them
    tool_form: ToolForm = HERMES
    reasoning_form: ReasoningForm | None = None  # None: its reasoning is text

    @classmethod
    def of(
        cls, engine: Engine, name: str, tool_form: ToolForm | None, reasoning_form: ReasoningForm | None = None
    ) -> ServedModel:
        """The model of an engine, under the name that clients use; while it loads, nothing else is known of it."""
        names = ServedNames.of(engine, name)
        try:
            tokenizer = engine.tokenizer
        except EngineOverloaded:
            return cls(names, "")
        refusal = as_served(tokenizer.image_refusal, engine.config.model, name)
        template = tokenizer.template_source
        form = tool_form or form_of(template)
        return cls(names, refusal, template, tokenizer.takes_tools, form, reasoning_form)


def parse_chat_request(body: bytes, model: ServedModel) -> ChatRequest:
    """Parse the body of a request to `model`, the only one. Raises ClientError or RequestRejected."""
    fields = load_body(body)
    given = read(fields, ChatCompletionRequest)
    asked = model.names.asked(given.model)
    check_supported(fields, UNSUPPORTED)
    tools, skipped = parse_tools(given, model.tool_form)
    messages: Sequence[Mapping[str, Any]] = engine_messages(
        given.messages, model, is_continued=bool(given.continue_final_message)
    )
    if tools is not None and not model.takes_tools:
        messages = with_instructions(messages, tools.instructions)
    grammar = _placed_grammar(given, tools)
    return ChatRequest(
        model=asked,
        messages=messages,
        params=_params(given, grammar.grammar),
        n=given.n or 1,
        stream=bool(given.stream),
        shown=shown_parts(given, fields),
        request_id=given.request_id,
        grammar_field=grammar.field,
        variables=_variables(given, tools, model),
        answer_form=AnswerForm(
            None if tools is None else tools.form,
            model.reasoning_form if grammar.grammar is None else None,  # which holds from the first token on
        ),
        continued=str(messages[-1]["content"]) if given.continue_final_message else "",
        unknown=(*unknown_names(fields, FIELDS), *skipped),
    )


def _variables(given: ChatCompletionRequest, tools: Tools | None, model: ServedModel) -> Mapping[str, Any]:
    """Return the variables for the chat template. Raises ClientError for an effort of which it does not know."""
    variables = dict(given.chat_template_kwargs or {})
    for name in OPTIONS:
        if name in variables:
            param = f"chat_template_kwargs.{name}"
            raise ClientError("invalid_value", f"{param} must be given as {name}, a field of its own", param=param)
    PromptEnd.of(options := {name: getattr(given, name) for name in OPTIONS})
    variables |= {name: value for name, value in options.items() if value is not None}
    if tools is not None and model.takes_tools:
        variables["tools"] = tools.variable
    effort = given.reasoning_effort
    if effort is not None and "reasoning_effort" in model.template:
        variables["reasoning_effort"] = effort
    elif effort not in (None, _NO_EFFORT):
        message = f"reasoning_effort must be {shown(_NO_EFFORT)} for this model, got {shown(effort)}"
        raise ClientError("unsupported_parameter", message, param="reasoning_effort")
    return variables


def shown_parts(given: WithChoices, fields: Mapping[str, Any]) -> Shown:
    """Return the optional parts of the response. Raises ClientError."""
    options = given.stream_options
    if options is not None:
        if not given.stream:
            raise ClientError("invalid_value", "stream_options is for stream=true only", param="stream_options")
        check_supported(fields["stream_options"], _STREAM_UNSUPPORTED, "stream_options")
    return Shown(
        usage=options is not None and bool(options.include_usage),
        running_usage=options is not None and bool(options.continuous_usage_stats),
        token_ids=bool(given.return_token_ids),
        tokens_as_ids=bool(given.return_tokens_as_token_ids),
        timings=bool(given.timings_per_token),
    )


def _params(given: ChatCompletionRequest, grammar: Grammar | None) -> SamplingParams:
    max_tokens = given.max_tokens if given.max_completion_tokens is None else given.max_completion_tokens
    logprobs = given.top_logprobs
    if not given.logprobs and logprobs is not None:
        raise ClientError("invalid_value", "top_logprobs needs logprobs=true", param="top_logprobs")
    if given.logprobs and logprobs is None:
        logprobs = 0
    return sampling_params(given, max_tokens=max_tokens, logprobs=logprobs, grammar=grammar)


class PlacedGrammar(NamedTuple):
    """The grammar of an answer, if any, and the path of the field that has it, which errors name."""

    grammar: Grammar | None
    field: str


def _placed_grammar(given: ChatCompletionRequest, tools: Tools | None) -> PlacedGrammar:
    """Return the grammar of the answer. Raises ClientError for a bad one, and for two of them."""
    placed = _given_grammar(given)
    if tools is None or tools.grammar is None:
        return placed
    if placed.grammar is not None:
        message = f"tool_choice that forces a call does not go with {placed.field}"
        raise ClientError("invalid_value", message, param="tool_choice")
    return PlacedGrammar(tools.grammar, "tools")


def _given_grammar(given: ChatCompletionRequest) -> PlacedGrammar:
    form, outputs = given.response_format, given.structured_outputs
    if outputs is None and isinstance(form, JsonSchemaFormat):
        field = "response_format.json_schema.schema"
        with _naming(field):
            return PlacedGrammar(Grammar.json_schema(form.json_schema.schema), field)
    if outputs is None:
        return PlacedGrammar(Grammar.json_object() if isinstance(form, JsonObjectFormat) else None, "response_format")
    if not (form is None or isinstance(form, TextFormat)):
        message = "structured_outputs and response_format do not go together"
        raise ClientError("invalid_value", message, param="structured_outputs")
    return PlacedGrammar(structured_grammar(outputs), "structured_outputs")


@contextmanager
def _naming(field: str) -> Iterator[None]:
    """Raise the refusal of a grammar as an error of this field."""
    try:
        yield
    except RequestRejected as exc:
        raise ClientError(exc.code, f"{field}: {exc.message}", param=field) from None


def structured_grammar(outputs: StructuredOutputs) -> Grammar:
    """Return the grammar in vLLM's form. Raises ClientError."""
    with _naming("structured_outputs"):
        return _structured(outputs)


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


def engine_messages(
    messages: Sequence[Message], model: ServedModel, *, is_continued: bool = False
) -> list[EngineMessage]:
    """Return the messages for the engine. A content is one string, or a list of parts if it has images.

    Raises ClientError for images, unless the model takes them, and RequestRejected for a last message that is to be
    continued and has calls, which become a part of its text if the chat template does not print them.
    """
    last = messages[-1] if messages else None
    if is_continued and isinstance(last, AssistantMessage) and last.tool_calls:
        raise not_continued(HAS_CALLS)
    return [_engine_message(message, f"messages[{index}]", model) for index, message in enumerate(messages)]


def _engine_message(message: Message, where: str, model: ServedModel) -> EngineMessage:
    role = str(message.__struct_config__.tag)
    content: object = message.content
    if not isinstance(message.content, str):
        content = _joined(message.content or (), f"{where}.content", model.image_refusal)
    made: EngineMessage = {"role": _ROLES.get(role, role), "content": content}
    if isinstance(message, ToolMessage) and message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
    if isinstance(message, AssistantMessage):
        made["content"] = content or message.refusal or ""
        reasoning = message.reasoning_content or message.reasoning
        if reasoning and "reasoning_content" in model.template:
            made["reasoning_content"] = reasoning
        return with_calls(made, message.tool_calls or (), model.tool_form, takes_tools=model.takes_tools)
    return made


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
