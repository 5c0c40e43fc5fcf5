"""Routes: the table of an HTTP server, how a request finds its handler, and the plain routes of an engine.

Each route is described beside its handler: /openapi.json and /docs are made from this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from msgspec import Struct

from trioengine import __version__
from trioengine.actors.engine import Engine
from trioengine.core.lifecycle import Power
from trioengine.core.wording import did_you_mean
from trioengine.serve.auth import Role
from trioengine.serve.errors import INVALID_REQUEST, ClientError, Problem
from trioengine.serve.http import Handler, HttpRequest, HttpResponse, error_response, json_response, problem_response
from trioengine.serve.metrics import CONTENT_TYPE, Metrics
from trioengine.serve.parsing import read_query
from trioengine.serve.realtime.handshake import PARAMETERS
from trioengine.serve.responses import Health, NotReady, Ready, Unhealthy, Version

REALTIME = "/v1/realtime"
BELOW = "*"  # at the end of a path: all paths that begin so
_SHOWN = 80  # characters of a path in a message
_ASLEEP = (Power.FALLING_ASLEEP, Power.ASLEEP, Power.WAKING, Power.UPDATING)


@dataclass(frozen=True, slots=True)
class Operation:
    """The requests of a route, and the responses to them, beside the errors that every route may answer with."""

    summary: str = ""  # in one line
    parameters: Mapping[str, Any] = field(default_factory=dict)  # of the query, and their types
    body: type[Struct] | None = None
    example: Mapping[str, Any] | None = None  # a body
    responses: Mapping[int, type[Struct]] = field(default_factory=dict)  # in JSON
    texts: tuple[str, ...] = ()  # other content types, with the status 200
    events: type[Struct] | None = None  # of a stream, with the status 200
    errors: tuple[int, ...] = ()  # further statuses


@dataclass(frozen=True, slots=True)
class Route:
    """The handlers of a path, by method, and the clients that may use it."""

    handlers: Mapping[str, Handler]
    role: Role = Role.USER
    operation: Operation = Operation()


Routes: TypeAlias = Mapping[str, Route]  # by path


def get(handler: Handler, operation: Operation, role: Role = Role.USER) -> Route:
    return Route({"GET": handler, "HEAD": handler}, role, operation)


def post(handler: Handler, operation: Operation, role: Role = Role.USER) -> Route:
    return Route({"POST": handler}, role, operation)


def find_route(routes: Routes, path: str) -> Route | None:
    """Return the route of a path: its own, or one for everything below."""
    below = (route for key, route in routes.items() if key.endswith(BELOW) and path.startswith(key[: -len(BELOW)]))
    return routes.get(path) or next(below, None)


def find_handler(routes: Routes, request: HttpRequest) -> Handler | HttpResponse:
    """Return the handler of a request, or the response that refuses it."""
    route = find_route(routes, request.path)
    if route is None:
        return _not_found(request.path, routes)
    handler = route.handlers.get(request.method)
    if handler is None:
        return _method_not_allowed(request, ", ".join(route.handlers))
    try:
        read_query(request.query, route.operation.parameters)
    except ClientError as exc:
        return error_response(exc)
    return handler


def upgrade_required() -> HttpResponse:
    problem = Problem(
        INVALID_REQUEST,
        "upgrade_required",
        f"{REALTIME} is a WebSocket endpoint: connect with ws:// or wss://, version 13",
    )
    response = problem_response(426, problem)
    headers = ((b"upgrade", b"websocket"), (b"connection", b"upgrade"), (b"sec-websocket-version", b"13"))
    return replace(response, headers=headers)


def _not_found(path: str, routes: Routes) -> HttpResponse:
    """Name the nearest route, or all of them."""
    known = sorted(routes)
    hint = did_you_mean(path, known) or f"; the routes are {', '.join(known)}"
    return problem_response(404, Problem(INVALID_REQUEST, "not_found", f"no route {path[:_SHOWN]!r}{hint}"))


def _method_not_allowed(request: HttpRequest, allowed: str) -> HttpResponse:
    message = f"method {request.method[:16]} is not allowed for {request.path[:_SHOWN]}; allowed: {allowed}"
    response = problem_response(405, Problem(INVALID_REQUEST, "method_not_allowed", message))
    return replace(response, headers=((b"allow", allowed.encode()),))


def plain_routes(engine: Engine, metrics: Metrics) -> Routes:
    """Return the routes for the state, version and metrics of an engine."""

    async def health(request: HttpRequest) -> HttpResponse:
        if engine.statistics().power is Power.CLOSED:
            return _unavailable({"status": "closed"})
        if not engine.runtime.is_responsive:
            return _unavailable({"status": "unresponsive"})
        return json_response(200, {"status": "ok"})

    async def ready(request: HttpRequest) -> HttpResponse:
        state = {"state": state_of(engine)}
        return json_response(200, state) if engine.runtime.gate.is_awake else _unavailable(state)

    async def version(request: HttpRequest) -> HttpResponse:
        return json_response(200, {"version": __version__})

    async def scrape(request: HttpRequest) -> HttpResponse:
        return HttpResponse(200, metrics.render(), CONTENT_TYPE)

    async def no_upgrade(request: HttpRequest) -> HttpResponse:
        return upgrade_required()

    return {
        REALTIME: get(no_upgrade, _REALTIME),
        "/health": get(health, _HEALTH, Role.ANYONE),
        "/ready": get(ready, _READY, Role.ANYONE),
        "/version": get(version, Operation("Name the version", responses={200: Version})),
        "/metrics": get(scrape, Operation("Show the metrics, for Prometheus", texts=("text/plain",))),
    }


_REALTIME = Operation(
    "Connect a WebSocket: OpenAI's Realtime protocol, its text and images",
    parameters=PARAMETERS,
    errors=(404, 410, 426),
)
_HEALTH = Operation("Report whether the engine lives", responses={200: Health, 503: Unhealthy})
_READY = Operation("Report whether requests are admitted", responses={200: Ready, 503: NotReady})


def state_of(engine: Engine) -> str:
    """Return the power as clients see it: asleep from the moment requests are refused until all tags are awake."""
    power = engine.runtime.gate.power
    is_asleep = power in _ASLEEP or (power is Power.AWAKE and not engine.runtime.gate.is_awake)
    return Power.ASLEEP.value if is_asleep else power.value


def _unavailable(content: Mapping[str, str]) -> HttpResponse:
    return replace(json_response(503, content), headers=((b"retry-after", b"1"),))
