"""Sleep, wake and other weights, for operators.

Each is answered when it is done. A client that leaves abandons its wait, not the change.
"""

from __future__ import annotations

from typing import Any, cast

from trioengine.actors.engine import Engine
from trioengine.actors.power_change import Level, Mode, ModeName
from trioengine.actors.states import PowerState
from trioengine.core.config import MAX_SECONDS
from trioengine.core.power import Tag
from trioengine.serve.checkpoints import Checkpoints
from trioengine.serve.fields import known_fields, text_of
from trioengine.serve.http import Request, Response, json_response
from trioengine.serve.json_object import load_object
from trioengine.serve.problem import ClientError
from trioengine.serve.query import flag_in, number_in, one_of, parameters_of, some_of
from trioengine.serve.routes import Role, Routes, get, post

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
        return json_response(200, _shown(self._engine.power))


def _shown(state: PowerState) -> dict[str, Any]:
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
