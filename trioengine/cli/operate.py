"""`trioengine sleep`, `wake` and `status`: an operator's requests to a running server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

import trio

from trioengine.cli.http_client import RequestError, endpoint_at, fetch
from trioengine.cli.tty import json_line
from trioengine.client.address import PATH, Endpoint
from trioengine.client.problems import error_of
from trioengine.core.checks import is_key
from trioengine.core.errors import ConnectionLost, EngineError, InvalidConfig, RequestRejected
from trioengine.core.wording import printable

_STATE = ("is_sleeping", "level", "tags", "power", "weight_version")
_KEY_REFUSALS = ("invalid_api_key", "admin_key_required")


def operate(
    url: str, admin_key: str | None, method: str, path: str, given: Mapping[str, object], *, as_json: bool
) -> None:
    """Send a request to the server's operator routes, and print the state of the engine after it.

    `given` are query parameters; None leaves one out. Interrupted, the server still carries the request out. Raises
    InvalidConfig for a bad URL or key, RequestRejected if the server refuses the request or the key, EngineError if
    it cannot be carried out.
    """
    try:
        server = endpoint_at(url, admin_key)
    except InvalidConfig as exc:
        raise InvalidConfig(str(exc).replace("url", "connect", 1), fields=("connect",)) from exc
    if admin_key is not None and not is_key(admin_key):
        raise InvalidConfig.of("admin_key", "must be one key of visible ASCII characters")
    base = server.target.partition("?")[0].removesuffix(PATH).rstrip("/")
    query = urlencode({name: value for name, value in given.items() if value is not None}, doseq=True)
    state = trio.run(_request_state, server, method, f"{base}{path}?{query}" if query else f"{base}{path}")
    print(json_line(state) if as_json else f"{_sentence(state)}\n", end="")


async def _request_state(server: Endpoint, method: str, target: str) -> Mapping[str, Any]:
    try:
        status, body = await fetch(server, method, target)
    except RequestError as exc:
        raise ConnectionLost(str(exc)) from exc
    try:
        content = json.loads(body)
        if status == 200:
            return {name: content[name] for name in _STATE}
        error = error_of({"type": None, **content["error"]})
    except (ValueError, LookupError, TypeError) as exc:
        raise ConnectionLost(f"{server.authority} does not answer as trioengine does: HTTP status {status}") from exc
    raise _with_option(error)


def _with_option(error: EngineError) -> EngineError:
    """The error, which names the option --admin-key if it is about the key."""
    if isinstance(error, RequestRejected) and error.code in _KEY_REFUSALS and "--admin-key" not in error.message:
        return RequestRejected(error.code, f"{error.message} (--admin-key)")
    return error


def _sentence(state: Mapping[str, Any]) -> str:
    power, version = str(state["power"]).replace("_", " "), f"weight version {state['weight_version']}"
    if power not in ("awake", "asleep"):
        return printable(f"{power}; {version}")
    tags = state["tags"] if state["is_sleeping"] else ()
    level = f" at level {state['level']}" if tags else ""
    released = "in host memory" if state["level"] == 1 else "discarded"
    weights = f"weights {released if 'weights' in tags else 'loaded'}"
    kv_cache = f"kv cache {'released' if 'kv_cache' in tags else 'resident'}"
    return printable(f"{power}{level}: {weights}, {kv_cache}; {version}")
