"""What an operator may do: look into the books, and end requests."""

from __future__ import annotations

import dataclasses
from typing import Any

import trio

from trioengine.actors.engine import Engine
from trioengine.actors.statistics import Statistics
from trioengine.core.errors import InvariantError
from trioengine.serve.fields import flag_of, known_fields, text_of
from trioengine.serve.http import Request, Response, json_response, problem_response
from trioengine.serve.in_flight import InFlight
from trioengine.serve.json_object import load_object
from trioengine.serve.problem import SERVER_ERROR, ClientError, Problem
from trioengine.serve.routes import Role, Routes, get, post


class Operator:
    """The handlers."""

    def __init__(self, engine: Engine, in_flight: InFlight) -> None:
        self._engine = engine
        self._in_flight = in_flight

    async def invariants(self, request: Request) -> Response:
        """With the counts, and how many tasks there are. 500 with what does not balance; 503 without a worker."""
        try:
            await self._engine.check_invariants()
        except InvariantError as exc:
            return problem_response(500, Problem(SERVER_ERROR, "invariant_violated", str(exc)))
        tasks = trio.lowlevel.current_statistics().tasks_living
        return json_response(200, {"ok": True, "statistics": _counts(self._engine.statistics()), "tasks": tasks})

    async def abort_request(self, request: Request) -> Response:
        """How many requests this call aborts; none is no error, they may have finished."""
        fields = known_fields(load_object(request.body, "the body"), ("request_id", "abort_all"))
        id, is_all = fields.get("request_id"), flag_of(fields.get("abort_all"), "abort_all")
        if is_all == (id is not None):
            raise ClientError("invalid_value", "give request_id, or abort_all: true", param="request_id")
        if is_all:
            return json_response(200, {"aborted": self._engine.abort_all()})
        return json_response(200, {"aborted": self._in_flight.abort(text_of(id, "request_id"))})


def _counts(statistics: Statistics) -> dict[str, Any]:
    """The counts by their names; those by reason or cause are among the metrics."""
    counts = {field.name: getattr(statistics, field.name) for field in dataclasses.fields(statistics) if field.repr}
    return {**counts, "power": statistics.power.value}


def operator_routes(engine: Engine, in_flight: InFlight) -> Routes:
    """The routes of an engine."""
    operator = Operator(engine, in_flight)
    return {
        "/debug/invariants": get(operator.invariants, Role.OPERATOR),
        "/abort_request": post(operator.abort_request, Role.OPERATOR),
    }
