"""Mutants of the client library: each breaks one promise of `connect`."""

from __future__ import annotations

from typing import Any

import trio
from mutant import Mutant, replaced

from trioengine.client import connection as connections
from trioengine.client import generation as generations
from trioengine.client import session as sessions
from trioengine.client.connection import Connection, Connections, Posts
from trioengine.client.conversation import Conversation
from trioengine.client.generation import RequestProxy, Stage
from trioengine.core.errors import EngineAsleep, EngineOverloaded
from trioengine.core.types import Usage


def _forget_after_success(run: Any) -> Any:
    async def mutant(self: Connections, connection: Connection, *, task_status: trio.TaskStatus[str]) -> None:
        self._open.add(connection)
        await connection.run(task_status=task_status)
        self._open.discard(connection)

    return mutant


def _mistake_asleep_for_full(error_of: Any) -> Any:
    def mutant(problem: Any) -> Any:
        error = error_of(problem)
        return EngineOverloaded(str(error), code="asleep") if isinstance(error, EngineAsleep) else error

    return mutant


def _read_twice(read: Any) -> Any:
    def mutant(self: RequestProxy) -> str:
        text: str = read(self)
        return text + text

    return mutant


def _swap_usage(usage_of: Any) -> Any:
    def mutant(response: Any) -> Usage:
        usage = usage_of(response)
        return Usage(usage.completion_tokens, usage.prompt_tokens, usage.cached_tokens)

    return mutant


def _never_expire(expire: Any) -> Any:
    async def mutant(self: RequestProxy) -> None:
        await trio.lowlevel.checkpoint()

    return mutant


def _send_no_cancel(post: Any) -> Any:
    def mutant(self: RequestProxy) -> None:
        if self.stage is Stage.NONE:
            post(self)

    return mutant


def _ignore_answers(on_answer: Any) -> Any:
    return lambda self, event_id: None


def _report_no_state(report: Any) -> Any:
    return lambda self, state: None


def _mutant(id: str, failure: str, active: Any, shows: str) -> Mutant:
    return Mutant(id, failure, active, shows, machine="ClientMachine")


CLIENT_MUTANTS = (
    _mutant(
        "F52",
        "a connection whose session is cancelled while it is opened stays registered",
        replaced(Connections, "_run", _forget_after_success),
        shows="all have gone, and left are",
    ),
    _mutant(
        "F53",
        "the refusal of a sleeping engine is raised as that of a full one",
        replaced(sessions, "error_of", _mistake_asleep_for_full),
        shows="refused for asleep|it was to wait|the worker was well",
    ),
    _mutant(
        "F54",
        "a chunk is read twice",
        replaced(RequestProxy, "read_text_nowait", _read_twice),
        shows="the chunks give",
    ),
    _mutant(
        "F55",
        "the usage of an answer is mapped wrongly",
        replaced(generations, "usage_of", _swap_usage),
        shows="are counted|are cached",
    ),
    _mutant(
        "F56",
        "the timeout of a request is not kept",
        replaced(RequestProxy, "expire", _never_expire),
        shows="its time is over, and its reader waits|its time is over, and it goes on",
    ),
    _mutant(
        "F57",
        "an abort is not sent to the server",
        replaced(RequestProxy, "_post_cancel", _send_no_cancel),
        shows="has no request, and the server",
    ),
    _mutant(
        "F58",
        "answered events are counted as unanswered, so that nothing more is sent",
        replaced(Posts, "on_answer", _ignore_answers),
        shows="waits? forever|are never answered|it waits: <Generation",
    ),
    _mutant(
        "F59",
        "a session that is left waits for a server that does not answer its close",
        replaced(connections, "CLOSE_TIMEOUT", lambda _: 900.0),
        shows="is left, and goes on|its time is over, and it goes on",
    ),
    _mutant(
        "F60",
        "a change of the engine's state is not reported",
        replaced(Connections, "report_state", _report_no_state),
        shows="hears",
    ),
    _mutant(
        "F63",
        "the part of an answer that its reader did not get stays at the server",
        replaced(Conversation, "truncate", lambda _: lambda self, item_id, text_end: None),
        shows="the client's history is|is not part of the model's answer|the model's is|are counted|are cached",
    ),
)
