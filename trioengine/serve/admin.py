"""Routes for operators: invariants and aborts, sleep and wake, and other weights.

A change of power is answered when it is done. A client that disconnects abandons its wait, not the change.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, cast

import trio
from msgspec import Meta

from trioengine.actors.engine import Engine
from trioengine.actors.power_change import Level, Mode, ModeName, path_of
from trioengine.core.config import MAX_SECONDS
from trioengine.core.errors import InvariantError, RequestRejected
from trioengine.core.power import Tag
from trioengine.core.wording import brief
from trioengine.serve.asked_model import adapted_name
from trioengine.serve.auth import Role
from trioengine.serve.choices import in_fields
from trioengine.serve.errors import SERVER_ERROR, ClientError, Problem
from trioengine.serve.http import HttpRequest, HttpResponse, json_response, problem_response
from trioengine.serve.limits import InFlight
from trioengine.serve.parsing import flag_in, load_body, number_in, one_of, parameters_of, some_of
from trioengine.serve.reading import read_known
from trioengine.serve.requests import AbortRequest, LoadAdapterRequest, UnloadAdapterRequest, UpdateWeightsRequest
from trioengine.serve.responses import Aborted, Adapters, Invariants, PowerState
from trioengine.serve.routes import Operation, Routes, get, post

_LEVELS = ("1", "2")
_MODES = tuple(mode.value for mode in Mode)
_TAGS = frozenset(tag.value for tag in Tag)
_SLEEP = Operation(
    "Release the engine's memory",
    parameters={
        "level": Annotated[
            Literal["1", "2"],
            Meta(description="1 (the default): weights move to host memory; 2: a fresh worker takes the place."),
        ],
        "mode": Annotated[
            Literal["abort", "wait", "keep"],
            Meta(description="Treatment of the requests in flight; default: abort."),
        ],
        "timeout": Annotated[float, Meta(ge=0, le=MAX_SECONDS, description="Seconds, with mode=wait.")],
    },
    responses={200: PowerState},
    errors=(409,),
)
_WAKE_UP = Operation(
    "Take the engine's memory back",
    parameters={
        "tags": Annotated[list[Tag], Meta(description="The parts to wake; default: all.")],
        "reload": Annotated[bool, Meta(description="Whether discarded weights are loaded again; default: true.")],
    },
    responses={200: PowerState},
    errors=(409,),
)
_UPDATE_WEIGHTS = Operation(
    "Load other weights",
    body=UpdateWeightsRequest,
    example={"name": "finetuned", "mode": "keep"},
    responses={200: PowerState},
    errors=(404, 409),
)
_LOAD_ADAPTER = Operation(
    "Load a LoRA adapter",
    body=LoadAdapterRequest,
    example={"lora_name": "sql", "lora_path": "sql-adapter"},
    responses={200: Adapters},
    errors=(404, 409),
)
_UNLOAD_ADAPTER = Operation(
    "Unload a LoRA adapter",
    body=UnloadAdapterRequest,
    example={"lora_name": "sql"},
    responses={200: Adapters},
    errors=(404,),
)
_ABORT_REQUEST = Operation(
    "End one request, or all",
    body=AbortRequest,
    example={"request_id": "my-own-id"},
    responses={200: Aborted},
)
_INVARIANTS = Operation("Check that the engine's books balance", responses={200: Invariants})
_IS_SLEEPING = Operation("Report the tags that sleep", responses={200: PowerState})


def admin_routes(engine: Engine, model: str, in_flight: InFlight, weights_dir: str | None) -> Routes:
    """Return the routes of an engine for operators; `model` is its name for clients."""
    operator, power = OperatorHandlers(engine, in_flight), PowerHandlers(engine, weights_dir)
    adapters = AdapterHandlers(engine, model, weights_dir)
    wake_up = post(power.wake_up, _WAKE_UP, Role.OPERATOR)
    return {
        "/debug/invariants": get(operator.invariants, _INVARIANTS, Role.OPERATOR),
        "/abort_request": post(operator.abort_request, _ABORT_REQUEST, Role.OPERATOR),
        "/sleep": post(power.sleep, _SLEEP, Role.OPERATOR),
        "/wake_up": wake_up,
        "/wakeup": wake_up,
        "/v1/load_lora_adapter": post(adapters.load, _LOAD_ADAPTER, Role.OPERATOR),
        "/v1/unload_lora_adapter": post(adapters.unload, _UNLOAD_ADAPTER, Role.OPERATOR),
        "/update_weights": post(power.update_weights, _UPDATE_WEIGHTS, Role.OPERATOR),
        "/is_sleeping": get(power.is_sleeping, _IS_SLEEPING, Role.OPERATOR),
    }


class OperatorHandlers:
    """Handlers that inspect an engine and abort its requests."""

    def __init__(self, engine: Engine, in_flight: InFlight) -> None:
        self._engine = engine
        self._in_flight = in_flight

    async def invariants(self, request: HttpRequest) -> HttpResponse:
        """Return the counts and the number of tasks; 500 with an invariant that is violated; 503 without a worker."""
        try:
            await self._engine.check_invariants()
        except InvariantError as exc:
            return problem_response(500, Problem(SERVER_ERROR, "invariant_violated", str(exc)))
        statistics = self._engine.statistics()
        names = [field.name for field in dataclasses.fields(statistics) if field.repr]  # not fields for /metrics alone
        counts = {name: getattr(statistics, name) for name in names} | {"power": statistics.power.value}
        tasks = trio.lowlevel.current_statistics().tasks_living
        return json_response(200, {"ok": True, "statistics": counts, "tasks": tasks})

    async def abort_request(self, request: HttpRequest) -> HttpResponse:
        """Return how many requests this call aborts; 0 is not an error, as they may have finished."""
        given = read_known(load_body(request.body), AbortRequest)
        if bool(given.abort_all) == (given.request_id is not None):
            raise ClientError("invalid_value", "give request_id, or abort_all: true", param="request_id")
        if given.request_id is None:
            return json_response(200, {"aborted": self._engine.abort_all()})
        return json_response(200, {"aborted": self._in_flight.abort(given.request_id)})


class PowerHandlers:
    """Handlers that change an engine's power or weights.

    They raise RequestRejected for a bad argument, TransitionFailed where the engine cannot make the change.
    """

    def __init__(self, engine: Engine, weights_dir: str | None) -> None:
        self._engine = engine
        self._weights_dir = weights_dir

    async def sleep(self, request: HttpRequest) -> HttpResponse:
        given = parameters_of(request, _SLEEP.parameters)
        level = cast("Level", int(one_of(given, "level", _LEVELS)))
        mode = cast("ModeName", one_of(given, "mode", _MODES))
        await self._engine.sleep(level, mode=mode, timeout=number_in(given, "timeout", 0, MAX_SECONDS))
        return self._state()

    async def wake_up(self, request: HttpRequest) -> HttpResponse:
        given = parameters_of(request, _WAKE_UP.parameters)
        tags, reload = some_of(given, "tags", _TAGS), flag_in(given, "reload", default=True)
        await self._engine.wake(None if tags is None else [Tag(tag) for tag in tags], reload=reload)
        return self._state()

    async def update_weights(self, request: HttpRequest) -> HttpResponse:
        """Load a checkpoint by its name, which is looked up in a thread; a disconnect until then changes nothing."""
        given = read_known(load_body(request.body), UpdateWeightsRequest)
        path = await self._engine.ports.run_in_thread(find_checkpoint, self._weights_dir, given.name)
        mode = given.mode or Mode.ABORT.value
        await self._engine.update_weights(str(path), mode=mode, timeout=given.timeout)
        return self._state()

    async def is_sleeping(self, request: HttpRequest) -> HttpResponse:
        return self._state()

    def _state(self) -> HttpResponse:
        """Return vLLM's `is_sleeping`, and more."""
        state = self._engine.power
        shown = {
            "is_sleeping": bool(state.asleep),
            "level": state.level,
            "tags": sorted(tag.value for tag in state.asleep),
            "power": state.power.value,
            "weight_version": state.weight_version,
        }
        return json_response(200, shown)


class AdapterHandlers:
    """Handlers that load and unload LoRA adapters; clients name one as `MODEL:NAME`."""

    def __init__(self, engine: Engine, model: str, weights_dir: str | None) -> None:
        self._engine, self._model, self._weights_dir = engine, model, weights_dir

    async def load(self, request: HttpRequest) -> HttpResponse:
        given = read_known(load_body(request.body), LoadAdapterRequest)
        find = partial(find_checkpoint, self._weights_dir, given.lora_path, field="lora_path")
        path = await self._engine.ports.run_in_thread(find)
        try:
            await self._engine.load_adapter(given.lora_name, path)
        except RequestRejected as exc:
            raise in_fields(exc, {"name": "lora_name", "path": "lora_path"}) from None
        return self._shown()

    async def unload(self, request: HttpRequest) -> HttpResponse:
        given = read_known(load_body(request.body), UnloadAdapterRequest)
        try:
            self._engine.unload_adapter(given.lora_name)
        except RequestRejected as exc:
            raise in_fields(exc, {"adapter": "lora_name"}) from None
        return self._shown()

    def _shown(self) -> HttpResponse:
        return json_response(200, {"models": [adapted_name(self._model, name) for name in self._engine.adapters]})


def find_checkpoint(weights_dir: str | None, name: str, field: str = "name") -> Path:
    """Return the path of the checkpoint of this name in a directory. Raises ClientError about the field.

    A name is not a path, and must lead to a place inside the directory even if it is a link. The engine checks the
    contents. Call it in a thread: it accesses the file system.
    """
    if weights_dir is None:
        raise ClientError("no_weights_dir", "the server was started without --weights-dir: it has no other weights")
    if name in ("", ".", "..") or set(name) & set("/\\") or not name.isprintable():
        raise _invalid(field, f"must be printable, and name a checkpoint under --weights-dir, got {brief(name)}")
    try:
        directory = Path(weights_dir).resolve(strict=True)
        path = (directory / name).resolve(strict=True)
    except (OSError, RuntimeError):  # it does not exist, or is a link to itself
        raise _not_found(field, name) from None
    if directory not in path.parents:
        raise _not_found(field, name)
    try:
        path_of(path)
    except RequestRejected:  # its message would disclose the path
        raise _invalid(field, f"leads to a path that is too long or not printable, got {brief(name)}") from None
    return path


def _invalid(field: str, problem: str) -> ClientError:
    return ClientError("invalid_value", f"{field} {problem}", param=field)


def _not_found(field: str, name: str) -> ClientError:
    """The same error for a path elsewhere: it does not disclose whether one exists."""
    return ClientError("weights_not_found", f"checkpoint {brief(name)} not found under --weights-dir", param=field)
