"""Private state of the client library, for the fuzzer, whose other modules read no private attributes of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

from wsproto import frame_protocol, utilities

from trioengine.client.client import Client
from trioengine.client.generation import Generation
from trioengine.client.session import Session, SessionProxy
from trioengine.testing.fuzz import inside


def left_over(client: Client) -> dict[str, int]:
    """How many of each kind are registered at a client; all are 0 when its sessions are over."""
    connections, requests = client._connections, client._requests
    return {
        "connections": len(connections._open),
        "connections being opened": len(connections._opening),
        "requests": len(requests._unsettled),
    }


def left_in(session: object) -> dict[str, int]:
    """The same of a session, whose calls are over."""
    state = _proxy(session)
    in_flight = state._request is not None and not state._request.settled.is_set()
    return {"requests being entered": len(state._entering), "requests in flight": int(in_flight)}


def num_unanswered(session: object) -> int:
    """How many events of a session were not sent, or not answered."""
    posts = _proxy(session).connection.posts
    return len(posts._unsent) + len(posts._unanswered)


Outline: TypeAlias = tuple[str, str, int, str]


def outlines(session: object) -> list[Outline] | None:
    """The items of the conversation; None if the server has refused some.

    Each has its role, its text, the number of its images, and the id of a call.
    """
    conversation = _proxy(session).conversation
    if conversation._refusal is not None:
        return None
    return [outline for message in conversation.messages for outline in _outlines(message)]


def _outlines(message: Mapping[str, Any]) -> Iterator[Outline]:
    (texts, num_images), calls = _parts_of(message["content"]), message.get("tool_calls", ())
    if texts != [""] or not calls:
        yield message["role"], "".join(texts), num_images, message.get("tool_call_id", "")
    for call in calls:
        yield message["role"], call["function"]["arguments"], 0, call["id"]


def _parts_of(content: Any) -> tuple[list[str], int]:
    if isinstance(content, str):
        return [content], 0
    texts = [part["text"] for part in content if part["type"] == "text"]
    return texts, len(content) - len(texts)


def is_closed(session: object) -> bool:
    """Whether the session has no connection, or its connection is closed."""
    over = _proxy(session).connection._over
    return over is None or over.is_set()


def has_id(generation: object) -> bool:
    """Whether the request has an id, by which it can be aborted."""
    return isinstance(generation, Generation) and generation._state.id is not None


def has_unread(generation: object) -> bool:
    """Whether there is text that was not read."""
    return isinstance(generation, Generation) and generation._state.has_unread


def response_id(generation: object) -> str:
    """The server's id of a response, which is greater than the ids of all before it; empty if it has none."""
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
