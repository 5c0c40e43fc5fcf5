"""`trioengine sleep`, `wake` and `status`: what an operator asks of a server that runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

import trio

from trioengine.cli.bench.http_client import Address, BackendError, exchange
from trioengine.cli.json_line import json_line
from trioengine.client import address
from trioengine.client.problems import error_of
from trioengine.core.bounds import is_key, printable
from trioengine.core.errors import ConnectionLost, EngineError, InvalidConfig, RequestRejected

_KEY_REFUSALS = ("invalid_api_key", "admin_key_required")


def operate(
    url: str, admin_key: str | None, method: str, path: str, given: Mapping[str, object], *, as_json: bool
) -> None:
    """Ask, and print the state that the engine has then; interrupted, what was asked for goes on.

    `given` are parameters; those that are None are left out. Raises InvalidConfig for a URL or a key that is none,
    RequestRejected for what the server does not take, the key among it, EngineError where it cannot be done.
    """
    target = f"{_prefix(url)}{path}"
    if admin_key is not None and not is_key(admin_key):
        raise InvalidConfig.of("admin_key", "must be one key of visible ASCII characters")
    query = urlencode({name: value for name, value in given.items() if value is not None}, doseq=True)
    state = trio.run(_ask, Address.of(url, admin_key), method, f"{target}?{query}" if query else target)
    print(json_line(state) if as_json else f"{_sentence(state)}\n", end="")


def _prefix(url: str) -> str:
    """What stands before the server's own paths."""
    try:
        target = address.Address.parse(url, None).target
    except InvalidConfig as exc:
        raise InvalidConfig(str(exc).replace("url", "connect", 1), fields=("connect",)) from exc
    return target.partition("?")[0].removesuffix(address.PATH).rstrip("/")


async def _ask(server: Address, method: str, target: str) -> Mapping[str, Any]:
    try:
        async with exchange(server, method, target) as response:
            status, body = response.status, await response.read()
    except BackendError as exc:
        raise ConnectionLost(str(exc)) from exc
    try:
        content = json.loads(body)
        if status == 200:
            return {name: content[name] for name in ("is_sleeping", "level", "tags", "power", "weight_version")}
        error = error_of({"type": None, **content["error"]})
    except (ValueError, LookupError, TypeError) as exc:
        raise ConnectionLost(f"{server.host} does not answer as trioengine does: HTTP status {status}") from exc
    raise _explained(error)


def _explained(error: EngineError) -> EngineError:
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
