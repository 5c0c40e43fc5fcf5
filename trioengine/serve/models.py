"""The served model and its tokenizer: GET /v1/models, POST /tokenize and /detokenize (as vLLM has them)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar
from urllib.parse import unquote

from trioengine.actors.engine import Engine
from trioengine.core.errors import EngineOverloaded, RequestRejected
from trioengine.serve.asked_model import ServedNames, adapted_name
from trioengine.serve.chat_request import ServedModel, engine_messages
from trioengine.serve.errors import ClientError
from trioengine.serve.http import HttpRequest, HttpResponse, json_response
from trioengine.serve.ids import unix_time
from trioengine.serve.parsing import in_thread_if, load_body
from trioengine.serve.reading import read, unknown_names
from trioengine.serve.requests import DetokenizeRequest, TokenizeRequest
from trioengine.serve.responses import DetokenizeResponse, ModelList, TokenizeResponse, TokenizerInfo
from trioengine.serve.responses import Model as ModelResponse
from trioengine.serve.routes import BELOW, Operation, Routes, get, post
from trioengine.serve.unknown_fields import UnknownFields
from trioengine.text.conversation import Prompt, check_length
from trioengine.text.prompt_end import OPTIONS
from trioengine.text.tool_calls import ToolForm

MODELS = "/v1/models"
T = TypeVar("T", TokenizeRequest, DetokenizeRequest)
_NO_IMAGES = "images are not tokenized here; usage.prompt_tokens counts them"

_LIST = Operation("List the model that is served, and its adapters", responses={200: ModelList})
_RETRIEVE = Operation("Describe the model", responses={200: ModelResponse}, errors=(404,))
_TOKENIZE = Operation(
    "Convert a text or messages to token ids",
    body=TokenizeRequest,
    example={"prompt": "Hello", "return_token_strs": True},
    responses={200: TokenizeResponse},
    errors=(404, 422),
)
_INFO = Operation("Describe the tokenizer", responses={200: TokenizerInfo})
_DETOKENIZE = Operation(
    "Convert token ids to a text",
    body=DetokenizeRequest,
    example={"tokens": [72, 105]},
    responses={200: DetokenizeResponse},
    errors=(404,),
)


def model_routes(
    engine: Engine, model: str, unknown_fields: UnknownFields, tool_form: ToolForm | None = None
) -> Routes:
    """Return the routes of the model and its tokenizer; `tool_form` as in ChatCompletions."""
    models, tokenization = Models(engine, model), Tokenization(engine, model, unknown_fields, tool_form)
    return {
        MODELS: get(models.list, _LIST),
        f"{MODELS}/{BELOW}": get(models.retrieve, _RETRIEVE),
        "/tokenizer_info": get(tokenization.info, _INFO),
        "/tokenize": post(tokenization.tokenize, _TOKENIZE),
        "/detokenize": post(tokenization.detokenize, _DETOKENIZE),
    }


class Models:
    """Handlers that describe the model; `created` is the time at which the server was made."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine = engine
        self._model = model
        self._created = unix_time()

    async def list(self, request: HttpRequest) -> HttpResponse:
        names = [self._model, *(adapted_name(self._model, adapter) for adapter in self._engine.adapters)]
        return json_response(200, {"object": "list", "data": [self._to_json(name) for name in names]})

    async def retrieve(self, request: HttpRequest) -> HttpResponse:
        name = unquote(request.path.removeprefix(MODELS + "/"))
        return json_response(200, self._to_json(ServedNames.of(self._engine, self._model).asked(name).name))

    def _to_json(self, name: str) -> dict[str, Any]:
        try:
            max_model_len = self._engine.limits.max_model_len
        except EngineOverloaded:  # not known yet
            max_model_len = None
        runtime = self._engine.runtime
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "trioengine",
            "parent": None if name == self._model else self._model,
            "max_model_len": max_model_len,
            "default_sampling_params": dict(runtime.files.sampling_defaults) if runtime.has_model else {},
        }


class Tokenization:
    """Handlers that tokenize texts or messages, and decode token ids."""

    def __init__(self, engine: Engine, model: str, unknown_fields: UnknownFields, tool_form: ToolForm | None) -> None:
        self._engine = engine
        self._model = model
        self._unknown_fields = unknown_fields
        self._tool_form = tool_form

    async def tokenize(self, request: HttpRequest) -> HttpResponse:
        return await self._run(request, TokenizeRequest, self._tokenize)

    async def info(self, request: HttpRequest) -> HttpResponse:
        tokenizer, max_model_len = self._engine.tokenizer, self._engine.limits.max_model_len
        strings, ends = tokenizer.tokenizer.token_string, self._engine.runtime.files.model.eos_token_ids
        special = sorted((token_id, text) for text, token_id in tokenizer.tokenizer.special_tokens.items())
        shown = {
            "tokenizer_class": type(tokenizer.tokenizer).__name__,
            "chat_template": tokenizer.template_source or None,
            "vocab_size": tokenizer.tokenizer.vocab_size,
            "model_max_length": max_model_len,
            "eos_token": strings(next(iter(ends))) if len(ends) == 1 else None,
            "added_tokens_decoder": {str(id): {"content": text, "special": True} for id, text in special},
        }
        return json_response(200, shown)

    async def detokenize(self, request: HttpRequest) -> HttpResponse:
        return await self._run(request, DetokenizeRequest, self._detokenize)

    async def _run(self, request: HttpRequest, type_: type[T], function: Callable[[T], dict[str, Any]]) -> HttpResponse:
        is_long = len(request.body) > self._engine.ports.thread_threshold

        def respond(body: bytes) -> HttpResponse:
            fields, known = load_body(body), type_.__struct_encode_fields__
            given = read(fields, type_)
            ServedNames.of(self._engine, self._model).asked(given.model)
            headers = self._unknown_fields.report(unknown_names(fields, known), known)
            response = json_response(200, function(given))  # JSON of a long result takes as long as the result
            return replace(response, headers=headers)

        return await in_thread_if(is_long, self._engine.ports, partial(respond, request.body))

    def _tokenize(self, given: TokenizeRequest) -> dict[str, Any]:
        tokenizer = self._engine.tokenizer
        name = "messages" if given.prompt is None else "prompt"
        ids = self._ids_of_messages(given) if given.prompt is None else self._ids_of_text(given, given.prompt)
        self._check_count(ids, name)
        strings = [tokenizer.tokenizer.token_string(id) for id in ids] if given.return_token_strs else None
        max_model_len = self._engine.limits.max_model_len
        return {"count": len(ids), "max_model_len": max_model_len, "tokens": ids, "token_strs": strings}

    def _ids_of_text(self, given: TokenizeRequest, text: str) -> list[int]:
        for name in ("messages", *OPTIONS):
            if getattr(given, name) is not None:
                raise ClientError("invalid_value", f"{name} does not go with prompt", param=name)
        self._check_length(text, "prompt")
        tokenizer = self._engine.tokenizer.tokenizer
        ids = tokenizer.encode(text)
        return ids if given.add_special_tokens is False else tokenizer.surrounded(ids)

    def _ids_of_messages(self, given: TokenizeRequest) -> list[int]:
        if given.messages is None:
            message = "give a prompt, or messages: a list of at least one"
            raise ClientError("missing_parameter", message, param="messages")
        model = ServedModel.of(self._engine, self._model, self._tool_form)
        is_continued = bool(given.continue_final_message)
        messages = engine_messages(given.messages, replace(model, image_refusal=_NO_IMAGES), is_continued=is_continued)
        self._check_length(messages, "messages")
        if given.add_special_tokens:
            message = "add_special_tokens is for prompt: the chat template has messages' own"
            raise ClientError("invalid_value", message, param="add_special_tokens")
        return self._engine.tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=given.add_generation_prompt is not False,
            continue_final_message=is_continued,
        )

    def _check_length(self, prompt: Prompt, name: str) -> None:
        """Raise ClientError for a prompt beyond the context: tokenizing takes a hundred bytes of memory for each."""
        try:
            check_length(prompt, self._engine.limits.max_model_len, self._engine.tokenizer)
        except RequestRejected as exc:
            raise ClientError(exc.code, exc.message.replace("prompt", name, 1), param=name) from None

    def _check_count(self, tokens: Sequence[object], name: str) -> None:
        """Raise ClientError for more tokens than the context holds, each of which may be a hundred bytes of text."""
        most = self._engine.limits.max_model_len
        if len(tokens) > most:
            message = f"{name}: {len(tokens)} tokens, the context is {most}"
            raise ClientError("context_length_exceeded", message, param=name)

    def _detokenize(self, given: DetokenizeRequest) -> dict[str, Any]:
        self._check_count(given.tokens, "tokens")
        tokenizer = self._engine.tokenizer
        most = tokenizer.tokenizer.vocab_size - 1
        for index, token_id in enumerate(given.tokens):
            if token_id > most:
                param = f"tokens[{index}]"
                message = f"{param} must be an integer from 0 to {most}, got {token_id}"
                raise ClientError("invalid_value", message, param=param)
        return {"prompt": tokenizer.decode(given.tokens, skip_special_tokens=False)}
