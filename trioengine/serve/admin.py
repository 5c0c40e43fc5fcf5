"""What an operator may do: look into the books, and end requests."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, cast

import trio

from trioengine.actors.engine import Engine
from trioengine.actors.power_change import Level, Mode, ModeName, path_of
from trioengine.actors.states import PowerState
from trioengine.actors.statistics import Statistics
from trioengine.core.bounds import brief
from trioengine.core.config import MAX_SECONDS
from trioengine.core.errors import InvariantError, RequestRejected
from trioengine.core.power import Tag
from trioengine.serve.errors import SERVER_ERROR, ClientError, Problem
from trioengine.serve.http import Request, Response, json_response, problem_response
from trioengine.serve.limits import InFlight
from trioengine.serve.parsing import (
    flag_in,
    flag_of,
    known_fields,
    load_object,
    number_in,
    one_of,
    parameters_of,
    some_of,
    text_of,
)
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


class Checkpoints:
    """Those in a directory; without one there are none."""

    def __init__(self, directory: str | None) -> None:
        self._directory = None if directory is None else Path(directory)

    def find(self, name: str) -> Path:
        """The checkpoint of this name. It touches the file system: call it in a thread. Raises ClientError.

        A name is no path, and what it leads to lies in the directory, also where it is a link. The engine takes it.
        """
        if self._directory is None:
            message = "the server was started without --weights-dir: it has no other weights"
            raise ClientError("no_weights_dir", message)
        if name in ("", ".", "..") or set(name) & set("/\\") or not name.isprintable():
            message = f"name must be that of a checkpoint under --weights-dir, printable and no path, got {brief(name)}"
            raise _invalid(message)
        try:
            directory = self._directory.resolve(strict=True)
            path = (directory / name).resolve(strict=True)
        except (OSError, RuntimeError):  # there is none, or it is a link to itself
            raise _none(name) from None
        if directory not in path.parents:
            raise _none(name)
        try:
            path_of(path)
        except RequestRejected:  # whose message tells the path
            raise _invalid(f"name leads to a path that is too long or not printable, got {brief(name)}") from None
        return path


def _invalid(message: str) -> ClientError:
    return ClientError("invalid_value", message, param="name")


def _none(name: str) -> ClientError:
    """Also for what lies elsewhere: nobody is told what there is."""
    return ClientError("weights_not_found", f"there is no checkpoint {brief(name)} under --weights-dir", param="name")


_OF_SLEEP = ("level", "mode", "timeout")  # parameters
_OF_WAKE_UP = ("tags", "reload")
_LEVELS = ("1", "2")
_MODES = tuple(mode.value for mode in Mode)
_TAGS = frozenset(tag.value for tag in Tag)


class PowerSwitch:
    """The handlers. They raise RequestRejected for a bad argument, TransitionFailed where the engine cannot do it."""

    def __init__(self, engine: Engine, checkpoints: Checkpoints) -> None:
        self._engine = engine
        self._checkpoints = checkpoints

    async def sleep(self, request: Request) -> Response:
        given = parameters_of(request, _OF_SLEEP)
        level = cast("Level", int(one_of(given, "level", _LEVELS)))
        mode = cast("ModeName", one_of(given, "mode", _MODES))
        await self._engine.sleep(level, mode=mode, timeout=number_in(given, "timeout", 0, MAX_SECONDS))
        return self._state()

    async def wake_up(self, request: Request) -> Response:
        given = parameters_of(request, _OF_WAKE_UP)
        tags, reload = some_of(given, "tags", _TAGS), flag_in(given, "reload", default=True)
        await self._engine.wake(None if tags is None else [Tag(tag) for tag in tags], reload=reload)
        return self._state()

    async def update_weights(self, request: Request) -> Response:
        """The name is looked up in a thread; a client that leaves until then has changed nothing."""
        fields = known_fields(load_object(request.body, "the body"), ("name", "mode", "timeout"))
        if fields.get("name") is None:
            raise ClientError("missing_parameter", "name is missing", param="name")
        name, mode = text_of(fields["name"], "name"), fields.get("mode")
        mode = Mode.ABORT.value if mode is None else text_of(mode, "mode")
        path = await self._engine.ports.run_in_thread(self._checkpoints.find, name)
        mode = cast("ModeName", mode)  # the engine checks it
        await self._engine.update_weights(str(path), mode=mode, timeout=fields.get("timeout"))
        return self._state()

    async def is_sleeping(self, request: Request) -> Response:
        return self._state()

    def _state(self) -> Response:
        return json_response(200, _power_json(self._engine.power))


def _power_json(state: PowerState) -> dict[str, Any]:
    """vLLM's `is_sleeping`, and more."""
    return {
        "is_sleeping": bool(state.asleep),
        "level": state.level,
        "tags": sorted(tag.value for tag in state.asleep),
        "power": state.power.value,
        "weight_version": state.weight_version,
    }


def power_routes(engine: Engine, weights_dir: str | None) -> Routes:
    """The routes of an engine."""
    switch = PowerSwitch(engine, Checkpoints(weights_dir))
    wake_up = post(switch.wake_up, Role.OPERATOR, _OF_WAKE_UP)
    return {
        "/sleep": post(switch.sleep, Role.OPERATOR, _OF_SLEEP),
        "/wake_up": wake_up,
        "/wakeup": wake_up,
        "/update_weights": post(switch.update_weights, Role.OPERATOR),
        "/is_sleeping": get(switch.is_sleeping, Role.OPERATOR),
    }
