"""Private state of the client library, for the fuzzer, whose other modules read no private attributes of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, cast

from wsproto import frame_protocol, utilities

from trioengine.client.client import Client
from trioengine.client.generation import Generation
from trioengine.client.session import Session, SessionProxy
from trioengine.testing.fuzz import inside


def left_over(client: Client) -> dict[str, int]:
    """How many of each kind are registered at a client; all are 0 when its sessions are over."""
    connections, requests = client._connections, client._requests
    return {"connections": len(connections._open), "requests": len(requests._unsettled)}


def left_in(session: object) -> dict[str, int]:
    """The same of a session, whose calls are over."""
    state = _proxy(session)
    in_flight = state._request is not None and not state._request.settled.is_set()
    return {"requests being entered": len(state._entering), "requests in flight": int(in_flight)}


def response_id(generation: object) -> str:
    """The server's id of a response, which is greater than those of all before it; empty if there is none."""
    return generation.response_id or "" if isinstance(generation, Generation) else ""


def _proxy(session: object) -> SessionProxy:
    return cast("Session", session)._state


@contextmanager
def repeatable() -> Iterator[None]:
    """Within, WebSockets have the same key and mask each time; the mask leaves texts as they are."""
    taken: Any = SimpleNamespace(urandom=bytes)
    with ExitStack() as stack:
        for module in (frame_protocol, utilities):
            stack.enter_context(inside.replaced(module, "os", lambda _: taken))
        yield
