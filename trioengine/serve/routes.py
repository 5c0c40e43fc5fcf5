"""The plain HTTP routes: is it alive, is it ready, what is it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from trioengine import __version__
from trioengine.actors.engine import Engine
from trioengine.core.lifecycle import Power
from trioengine.serve.http import Handler, Request, Response, json_response, problem_response
from trioengine.serve.problem import INVALID_REQUEST, Problem

REALTIME = "/v1/realtime"
HOME = (
    f"trioengine {__version__}: a language model engine. Connect a WebSocket to {REALTIME} (the text part of OpenAI's "
    "Realtime protocol). GET /health says whether the engine lives, /ready whether it admits requests, /version its "
    "version.\n"
)

Routes: TypeAlias = Mapping[str, Mapping[str, Handler]]  # path -> method -> handler


def routes(engine: Engine) -> Routes:
    """The routes of an engine."""

    async def home(request: Request) -> Response:
        return Response(200, HOME.encode(), b"text/plain; charset=utf-8")

    async def health(request: Request) -> Response:
        if engine.statistics().power is Power.CLOSED:
            return json_response(503, {"status": "closed"})
        return json_response(200, {"status": "ok"})

    async def ready(request: Request) -> Response:
        power = engine.statistics().power
        return json_response(200 if power is Power.AWAKE else 503, {"state": power.value})

    async def version(request: Request) -> Response:
        return json_response(200, {"version": __version__})

    handlers = {"/": home, "/health": health, "/ready": ready, "/version": version}
    return {path: {"GET": handler, "HEAD": handler} for path, handler in handlers.items()}


def find(routes: Routes, request: Request) -> Handler | Response:
    """The handler of a request, or the response when there is none."""
    if request.path == REALTIME:
        return upgrade_required()
    methods = routes.get(request.path)
    if methods is None:
        return not_found(request.path)
    handler = methods.get(request.method)
    if handler is None:
        message = f"{request.path} is not for {request.method[:16]}"
        response = problem_response(405, Problem(INVALID_REQUEST, "method_not_allowed", message))
        return Response(405, response.body, headers=((b"allow", ", ".join(methods).encode()),))
    return handler


def not_found(path: str) -> Response:
    return problem_response(404, Problem(INVALID_REQUEST, "not_found", f"there is no {path[:80]}"))


def upgrade_required() -> Response:
    problem = Problem(INVALID_REQUEST, "upgrade_required", f"{REALTIME} is a WebSocket endpoint (version 13)")
    response = problem_response(426, problem)
    headers = ((b"upgrade", b"websocket"), (b"connection", b"upgrade"), (b"sec-websocket-version", b"13"))
    return Response(426, response.body, headers=headers)
