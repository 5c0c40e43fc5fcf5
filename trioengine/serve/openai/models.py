"""GET /v1/models: the one model that is served."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import unquote

from trioengine.actors.engine import Engine
from trioengine.core.errors import EngineOverloaded
from trioengine.serve.http import Request, Response, json_response
from trioengine.serve.openai.chat_request import check_model

MODELS = "/v1/models"


class Models:
    """The handlers; `created` is when the server was."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine = engine
        self._model = model
        self._created = int(time.time())

    async def list(self, request: Request) -> Response:
        return json_response(200, {"object": "list", "data": [self._to_json()]})

    async def retrieve(self, request: Request) -> Response:
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
