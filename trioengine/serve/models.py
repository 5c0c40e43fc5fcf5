"""The served model and its tokenizer: GET /v1/models, POST /tokenize and /detokenize (as vLLM has them)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import unquote

from trioengine.actors.engine import Engine
from trioengine.core.checks import integer
from trioengine.core.errors import EngineOverloaded, RequestRejected
from trioengine.serve.chat_protocol import check_model, parse_messages
from trioengine.serve.errors import ClientError
from trioengine.serve.http import HttpRequest, HttpResponse, json_response
from trioengine.serve.ids import unix_time
from trioengine.serve.parsing import flag_of, in_thread_if, is_number, known_fields, load_object, text_of
from trioengine.text.conversation import Prompt, check_length

MODELS = "/v1/models"
_TOKENIZE = ("model", "prompt", "messages", "add_special_tokens", "add_generation_prompt", "return_token_strs")
_DETOKENIZE = ("model", "tokens")


class Models:
    """Handlers that describe the model; `created` is the time at which the server was made."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine = engine
        self._model = model
        self._created = unix_time()

    async def list(self, request: HttpRequest) -> HttpResponse:
        return json_response(200, {"object": "list", "data": [self._to_json()]})

    async def retrieve(self, request: HttpRequest) -> HttpResponse:
        check_model(unquote(request.path.removeprefix(MODELS + "/")), self._model)
        return json_response(200, self._to_json())

    def _to_json(self) -> dict[str, Any]:
        try:
            max_model_len = self._engine.limits.max_model_len
        except EngineOverloaded:  # not known yet
            max_model_len = None
        return {
            "id": self._model,
            "object": "model",
            "created": self._created,
            "owned_by": "trioengine",
            "max_model_len": max_model_len,
        }


class Tokenization:
    """Handlers that tokenize texts or messages, and decode token ids."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine = engine
        self._model = model

    async def tokenize(self, request: HttpRequest) -> HttpResponse:
        return await self._run(request, self._tokenize)

    async def detokenize(self, request: HttpRequest) -> HttpResponse:
        return await self._run(request, self._detokenize)

    async def _run(self, request: HttpRequest, function: Callable[[bytes], dict[str, Any]]) -> HttpResponse:
        is_long = len(request.body) > self._engine.ports.thread_threshold

        def respond(body: bytes) -> HttpResponse:
            return json_response(200, function(body))  # JSON of a long result takes as long as the result

        return await in_thread_if(is_long, self._engine.ports, partial(respond, request.body))

    def _tokenize(self, body: bytes) -> dict[str, Any]:
        fields = self._fields(body, _TOKENIZE)
        tokenizer = self._engine.tokenizer
        name = "prompt" if "prompt" in fields else "messages"
        ids = self._ids_of_text(fields) if name == "prompt" else self._ids_of_messages(fields)
        self._check_count(ids, name)
        with_strings = flag_of(fields.get("return_token_strs"), "return_token_strs")
        return {
            "count": len(ids),
            "max_model_len": self._engine.limits.max_model_len,
            "tokens": ids,
            "token_strs": [tokenizer.tokenizer.token_string(id) for id in ids] if with_strings else None,
        }

    def _ids_of_text(self, fields: Mapping[str, Any]) -> list[int]:
        for name in ("messages", "add_generation_prompt"):
            if name in fields:
                raise ClientError("invalid_value", f"{name} does not go with prompt", param=name)
        text = text_of(fields["prompt"], "prompt")
        self._check_length(text, "prompt")
        add_special = flag_of(fields.get("add_special_tokens", True), "add_special_tokens")
        tokenizer = self._engine.tokenizer.tokenizer
        return tokenizer.surrounded(tokenizer.encode(text)) if add_special else tokenizer.encode(text)

    def _ids_of_messages(self, fields: Mapping[str, Any]) -> list[int]:
        if "messages" not in fields:
            message = "give a prompt, or messages: a list of at least one"
            raise ClientError("missing_parameter", message, param="messages")
        messages = parse_messages(fields["messages"], "images are not tokenized here; usage.prompt_tokens counts them")
        self._check_length(messages, "messages")
        if flag_of(fields.get("add_special_tokens"), "add_special_tokens"):
            message = "add_special_tokens is for prompt: the chat template has messages' own"
            raise ClientError("invalid_value", message, param="add_special_tokens")
        add_prompt = flag_of(fields.get("add_generation_prompt", True), "add_generation_prompt")
        return self._engine.tokenizer.apply_chat_template(messages, add_generation_prompt=add_prompt)

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

    def _detokenize(self, body: bytes) -> dict[str, Any]:
        tokens = self._fields(body, _DETOKENIZE).get("tokens")
        if not isinstance(tokens, list):
            raise ClientError("invalid_type", "tokens must be a list of token ids", param="tokens")
        self._check_count(tokens, "tokens")
        tokenizer = self._engine.tokenizer
        for index, token_id in enumerate(tokens):
            try:
                integer(token_id, 0, tokenizer.tokenizer.vocab_size - 1)
            except ValueError as exc:
                code = "invalid_value" if is_number(token_id) else "invalid_type"
                raise ClientError(code, f"tokens[{index}] {exc}", param=f"tokens[{index}]") from None
        return {"prompt": tokenizer.decode(tokens, skip_special_tokens=False)}

    def _fields(self, body: bytes, names: tuple[str, ...]) -> dict[str, Any]:
        """Return the fields that are not null."""
        given = load_object(body, "the body")
        fields = {name: value for name, value in given.items() if value is not None}
        known_fields(fields, names)
        check_model(fields.get("model"), self._model)
        return fields
