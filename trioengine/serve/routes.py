"""Routes: the table of an HTTP server, how a request finds its handler, and the plain routes of an engine."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from trioengine import __version__
from trioengine.actors.engine import Engine
from trioengine.core.lifecycle import Power
from trioengine.core.wording import did_you_mean
from trioengine.serve.auth import Role
from trioengine.serve.errors import INVALID_REQUEST, ClientError, Problem
from trioengine.serve.http import Handler, HttpRequest, HttpResponse, error_response, json_response, problem_response
from trioengine.serve.metrics import CONTENT_TYPE, Metrics
from trioengine.serve.parsing import read_query

REALTIME = "/v1/realtime"
HOME = (
    f"trioengine {__version__}: a language model engine. POST to /v1/chat/completions as to OpenAI, or connect a "
    f"WebSocket to {REALTIME} (the text part of OpenAI's Realtime protocol). GET /health reports whether the "
    "engine lives, /ready whether it admits requests, /metrics its metrics (Prometheus), /version its version.\n"
)
BELOW = "*"  # at the end of a path: all paths that begin so
_SHOWN = 80  # characters of a path in a message
_ASLEEP = (Power.FALLING_ASLEEP, Power.ASLEEP, Power.WAKING, Power.UPDATING)


@dataclass(frozen=True, slots=True)
class Route:
    """The handlers of a path, by method, and the names of the parameters in its query."""

    handlers: Mapping[str, Handler]
    role: Role = Role.USER
    parameters: Collection[str] = ()


Routes: TypeAlias = Mapping[str, Route]  # by path


def get(handler: Handler, role: Role = Role.USER) -> Route:
    return Route({"GET": handler, "HEAD": handler}, role)


def post(handler: Handler, role: Role = Role.USER, parameters: Collection[str] = ()) -> Route:
    return Route({"POST": handler}, role, parameters)


def find_route(routes: Routes, path: str) -> Route | None:
    """Return the route of a path: its own, or one for everything below."""
    below = (route for key, route in routes.items() if key.endswith(BELOW) and path.startswith(key[: -len(BELOW)]))
    return routes.get(path) or next(below, None)


def find_handler(routes: Routes, request: HttpRequest) -> Handler | HttpResponse:
    """Return the handler of a request, or the response that refuses it."""
    if request.path == REALTIME:
        return upgrade_required()
    route = find_route(routes, request.path)
    if route is None:
        return _not_found(request.path, routes)
    handler = route.handlers.get(request.method)
    if handler is None:
        return _method_not_allowed(request, ", ".join(route.handlers))
    try:
        read_query(request.query, route.parameters)
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
    known = sorted({*routes, REALTIME})
    hint = did_you_mean(path, known) or f"; the routes are {', '.join(known)}"
    return problem_response(404, Problem(INVALID_REQUEST, "not_found", f"no route {path[:_SHOWN]!r}{hint}"))


def _method_not_allowed(request: HttpRequest, allowed: str) -> HttpResponse:
    message = f"method {request.method[:16]} is not allowed for {request.path[:_SHOWN]}; allowed: {allowed}"
    response = problem_response(405, Problem(INVALID_REQUEST, "method_not_allowed", message))
    return replace(response, headers=((b"allow", allowed.encode()),))


def plain_routes(engine: Engine, metrics: Metrics) -> Routes:
    """Return the routes for the state, version and metrics of an engine."""

    async def home(request: HttpRequest) -> HttpResponse:
        return HttpResponse(200, HOME.encode(), b"text/plain; charset=utf-8")

    async def health(request: HttpRequest) -> HttpResponse:
        if engine.statistics().power is Power.CLOSED:
            return _unavailable({"status": "closed"})
        if not engine.runtime.is_responsive:
            return _unavailable({"status": "unresponsive"})
        return json_response(200, {"status": "ok"})

    async def ready(request: HttpRequest) -> HttpResponse:
        state = {"state": _state_of(engine)}
        return json_response(200, state) if engine.runtime.gate.is_awake else _unavailable(state)

    async def version(request: HttpRequest) -> HttpResponse:
        return json_response(200, {"version": __version__})

    async def scrape(request: HttpRequest) -> HttpResponse:
        return HttpResponse(200, metrics.render(), CONTENT_TYPE)

    return {
        "/": get(home, Role.ANYONE),
        "/health": get(health, Role.ANYONE),
        "/ready": get(ready, Role.ANYONE),
        "/version": get(version),
        "/metrics": get(scrape),
    }


def _state_of(engine: Engine) -> str:
    """Return the power as clients see it: asleep from the moment requests are refused until all tags are awake."""
    power = engine.runtime.gate.power
    is_asleep = power in _ASLEEP or (power is Power.AWAKE and not engine.runtime.gate.is_awake)
    return Power.ASLEEP.value if is_asleep else power.value


def _unavailable(content: Mapping[str, str]) -> HttpResponse:
    return replace(json_response(503, content), headers=((b"retry-after", b"1"),))
