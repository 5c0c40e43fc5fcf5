"""The description of a server in OpenAPI 3.1 (https://spec.openapis.org/oas/v3.1.1), made from its table of routes.

The schemas of bodies are made from the structs in `requests` and `responses`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct

from trioengine import __version__
from trioengine.serve.auth import Role
from trioengine.serve.responses import ErrorBody
from trioengine.serve.routes import BELOW, REALTIME, Operation, Route, Routes

Json: TypeAlias = dict[str, Any]
_SCHEMAS = "#/components/schemas/{name}"
_ID = "{id}"  # stands in a path for everything below it
_KEYS: Mapping[str, Json] = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "Authorization: Bearer KEY"},
    "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key", "description": "X-Api-Key: KEY"},
}
_CLIENTS = {
    Role.ANYONE: "Every client.",
    Role.USER: "Clients with a key, if keys are configured.",
    Role.OPERATOR: "Clients with a key for operators, if keys are configured.",
}
_ERRORS: Mapping[int, str] = {
    400: "The body, a field or a parameter cannot be used, or the request breaks HTTP/1.1.",
    401: "The key is missing or not accepted.",
    403: "The Host, the Origin or the role of the key does not allow it.",
    404: "Not found: the model, the checkpoint, the session or the route.",
    408: "The body did not come in time.",
    409: "The state of the engine does not allow it.",
    410: "Events that the client has not got are kept no longer.",
    413: "The body is too large.",
    415: "The body is compressed.",
    422: "The model cannot answer this request.",
    426: "The route is for WebSockets.",
    429: "Too many requests at the moment; the request may be sent again.",
    431: "The head of the request is too large.",
    500: "The request failed.",
    501: "The Transfer-Encoding is not supported.",
    503: "The engine is not available at the moment; the request may be sent again.",
}
_OF_EVERY_ROUTE = (400, 403, 408, 413, 415, 431, 500, 501, 503)
_OF_A_KEY = (401, 429)
_RETRIED = (429, 503)
_RETRY_AFTER = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}}}
_STREAM = "An event. The data of the last one is `[DONE]`, not JSON. An error after the first one is an event as well."


def describe(routes: Routes, *, has_keys: bool, root: str = "") -> Json:
    """Return the document that describes these routes."""
    paths = {_path(key): _path_item(key, route, has_keys) for key, route in routes.items()}
    components: Json = {"schemas": _schemas(routes.values()), "responses": dict(_error_responses())}
    if has_keys:
        components["securitySchemes"] = dict(_KEYS)
    return {
        "openapi": "3.1.1",
        "info": {
            "title": "trioengine",
            "version": __version__,
            "summary": "A language model engine with OpenAI's API",
            "description": "HEAD is answered wherever GET is. Each response has an X-Request-Id.",
        },
        "servers": [{"url": root or "/"}],
        "tags": [{"name": role.value, "description": text} for role, text in _CLIENTS.items()],
        "paths": paths,
        "components": components,
    }


def _path(key: str) -> str:
    return key.removesuffix(BELOW) + _ID if key.endswith(BELOW) else key


def _path_item(key: str, route: Route, has_keys: bool) -> Json:
    method, operation = next(iter(route.handlers)).lower(), route.operation
    name = re.sub(r"\W+", "_", _path(key)).strip("_") or "home"
    item: Json = {"operationId": f"{method}_{name}", "summary": operation.summary, "tags": [route.role.value]}
    if parameters := list(_parameters(key, operation)):
        item["parameters"] = parameters
    if operation.body is not None:
        content: Json = {"schema": _ref(operation.body), "example": operation.example}
        item["requestBody"] = {"required": True, "content": {"application/json": content}}
    needs_key = has_keys and route.role is not Role.ANYONE
    if needs_key:
        item["security"] = [{name: []} for name in _KEYS]
    item["responses"] = _responses(key, operation, _OF_A_KEY if needs_key else ())
    return {method: item}


def _parameters(key: str, operation: Operation) -> Iterator[Json]:
    if key.endswith(BELOW):
        yield {"name": _ID.strip("{}"), "in": "path", "required": True, "schema": {"type": "string"}}
    for name, type_ in operation.parameters.items():
        (schema,), _ = msgspec.json.schema_components([type_], ref_template=_SCHEMAS)
        yield {"name": name, "in": "query", "description": schema.pop("description", ""), "schema": schema}


def _responses(key: str, operation: Operation, more: tuple[int, ...]) -> Json:
    """Return the responses by status; one that may also be an error has two schemas."""
    shown: dict[int, Json] = {}
    for status in (*_OF_EVERY_ROUTE, *operation.errors, *more):
        shown[status] = {"$ref": f"#/components/responses/{status}"}
    for status, struct in operation.responses.items():
        is_error = status in shown
        schema = {"anyOf": [_ref(struct), _ref(ErrorBody)]} if is_error else _ref(struct)
        shown[status] = _response(status, {"application/json": {"schema": schema}})
    content: Json = {text: {"schema": {"type": "string"}} for text in operation.texts}
    if operation.events is not None:
        content["text/event-stream"] = {"schema": _events(operation.events)}
    if content:
        shown.setdefault(200, _response(200, {}))["content"].update(content)
    if key == REALTIME:
        shown[101] = {"description": "The connection becomes a WebSocket."}
    return {str(status): shown[status] for status in sorted(shown)}


def _events(struct: type[Struct]) -> Json:
    """Return the schema of one event, with the members that OpenAPI 3.2 gives to it."""
    content = {"anyOf": [_ref(struct), _ref(ErrorBody)]}
    chunk = {"type": "string", "contentMediaType": "application/json", "contentSchema": content}
    data = {"anyOf": [chunk, {"enum": ["[DONE]"]}]}
    return {"type": "object", "description": _STREAM, "properties": {"data": data}, "required": ["data"]}


def _response(status: int, content: Json) -> Json:
    response: Json = {"description": _ERRORS.get(status, "The answer."), "content": content}
    return {**response, "headers": _RETRY_AFTER} if status in _RETRIED else response


def _error_responses() -> Iterator[tuple[str, Json]]:
    for status in _ERRORS:
        yield str(status), _response(status, {"application/json": {"schema": _ref(ErrorBody)}})


# ---- schemas -------------------------------------------------------------------------------------------------------


def _ref(struct: type[Struct]) -> Json:
    return {"$ref": _SCHEMAS.format(name=struct.__name__)}


def _schemas(routes: Iterable[Route]) -> Json:
    """Return the schemas of all bodies and parameters, and of the structs in them, by name."""
    types = [type_ for route in routes for type_ in _types(route.operation)]
    return msgspec.json.schema_components([ErrorBody, *types], ref_template=_SCHEMAS)[1]


def _types(operation: Operation) -> Iterator[Any]:
    yield from operation.parameters.values()
    yield from operation.responses.values()
    yield from (struct for struct in (operation.body, operation.events) if struct is not None)
