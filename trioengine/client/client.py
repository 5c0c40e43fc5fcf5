"""A client of a server: `connect`, and sessions over WebSockets with the surface of an engine's."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Unpack

import trio

from trioengine.aio.calls import opens, whole_answer
from trioengine.aio.concurrency import deadline_after, open_unwrapped_nursery
from trioengine.client.address import Address, Endpoint
from trioengine.client.connection import Connections
from trioengine.client.generation import Generation, RequestProxy, Requests
from trioengine.client.prompt import Media
from trioengine.client.session import Session, SessionProxy
from trioengine.core.checks import PromptPlaces, check_callback, check_request, is_key, names_checked
from trioengine.core.errors import (
    InvalidConfig,
    RequestRejected,
    SessionEnded,
    TimedOut,
)
from trioengine.core.sampling_params import Overflow, SamplingOptions, SamplingParams, merged_params, sampling_checked
from trioengine.core.tools import ToolChoice, asked_tools
from trioengine.core.types import Cause, Completion
from trioengine.core.wording import brief, counted


class Client:
    """The result of `connect`: sessions like an engine's, each over a WebSocket of its own."""

    def __init__(self, endpoint: Endpoint, nursery: trio.Nursery, on_state: Callable[[str], object]) -> None:
        self._connections = Connections(endpoint, nursery, on_state)
        self._requests = Requests()

    def __repr__(self) -> str:
        connections = self._connections
        return f"<Client of {connections.endpoint.authority}, {counted(len(connections), 'session')}>"

    @names_checked
    def open_session(
        self,
        *,
        label: str | None = None,
        history: Sequence[Mapping[str, Any]] | None = None,
        wait: bool | None = None,
        timeout: float | None = None,
        overflow: Overflow = "refuse",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        adapter: str | None = None,
    ) -> Session:
        """A session, to be entered. `label` is the caller's name for it, `history` chat messages to begin with.

        `overflow` is for a chat that outgrows the context, as in Engine.open_session. An unknown one raises
        RequestRejected here, as `chat_template_kwargs` do, which cannot be sent over a connection, and `adapter`, which
        is a part of the model's name, for `connect`.

        Entering raises ConnectionLost when the server cannot be reached, RequestRejected when it refuses the key, the
        model or the history. A full server is asked again, with `wait=True` also one that cannot serve at the moment,
        until TimedOut, `timeout` seconds from this call; with `wait=False` EngineOverloaded is raised.
        """
        if chat_template_kwargs is not None:
            name = "chat_template_kwargs"
            raise RequestRejected("unsupported_parameter", f"{name} cannot be sent over a connection", param=name)
        _check_adapter(adapter)
        deadline = deadline_after(timeout)
        state = SessionProxy(
            self._connections,
            self._requests,
            label=label,
            history=history,
            wait=wait,
            overflow=overflow,
            deadline=deadline,
        )
        return Session(state)

    @whole_answer
    @sampling_checked
    async def generate(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        media: Sequence[Media] = (),
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: ToolChoice = "auto",
        parallel_tool_calls: bool = True,
        timeout: float | None = None,
        wait: bool | None = None,
        label: str | None = None,
        adapter: str | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Completion:
        """One answer, in a session of its own. Errors, keywords, timeout, wait and label as in Session.generate.

        An `adapter` is refused, as in `open_session`.
        """
        _check_adapter(adapter)
        deadline, params = deadline_after(timeout), merged_params(params, options)
        state = SessionProxy(self._connections, self._requests, label=label, wait=wait, deadline=deadline)
        request = RequestProxy(
            params,
            places=PromptPlaces.of(prompt, media),
            deadline=deadline,
            wait=wait,
            label=label,
            conversation=state.conversation,
            requests=self._requests,
            opening=state.opening,
            tools=asked_tools(tools, tool_choice, parallel_tool_calls, params),
        )
        generation = Generation(request, partial(state.enter, request, prompt, media))
        self._requests.add(request)
        try:
            async with Session(state), generation:
                return await generation.result()
        except TimedOut as exc:
            if exc.completion is None:  # while the session was opened
                request.abort(Cause.TIMEOUT)
                exc.completion = generation.completion
            raise
        except SessionEnded:
            if request.outcome is None:
                raise
            return generation.completion  # aborted while the session was opened
        finally:
            self._requests.discard(request)

    ask = whole_answer(sampling_checked(generate, "ask"))

    @names_checked
    def abort(self, request: int | str) -> int:
        """Abort this client's request with this id, or all its requests with this label, entered or being entered.

        Returns how many this call aborts, as Engine.abort does.
        """
        return self._requests.abort(check_request(request))

    def close(self) -> None:
        """End every session; opening another one raises EngineClosed."""
        self._connections.close()


def _check_adapter(adapter: str | None) -> None:
    """Raise RequestRejected for an adapter, which only the model's name chooses."""
    if adapter is not None:
        problem = "adapter is a part of the model's name over a connection: connect(url, model='MODEL:ADAPTER')"
        raise RequestRejected("unsupported_parameter", problem, param="adapter")


@names_checked
@opens("client")
async def connect(
    url: str,
    *,
    api_key: str | None = None,
    model: str | None = None,
    dial: Callable[[], Awaitable[trio.abc.Stream]] | None = None,
    on_state: Callable[[str], object] = lambda state: None,
    ssl_context: ssl.SSLContext | None = None,
) -> AsyncIterator[Client]:
    """A client of the server at `url`, such as ws://localhost:8000 or https://example.org.

    Nothing is connected before a session is opened. Leaving ends every session and closes its WebSocket; cancelled, or
    with an exception, at once. `model` is the name that the server must serve; `dial` opens the streams to connect by,
    in place of TCP and TLS. `ssl_context` has the certificates to trust, in place of the system's.
    `on_state(state)` is called by each session when the state of the server's engine changes (`awake`, `sleeping`,
    `updating`, `restarting`, …); it must not block, and an exception in it ends the client and is raised here. Raises
    InvalidConfig.
    """
    if api_key is not None and not is_key(api_key):
        raise InvalidConfig.of("api_key", "must be one key of visible ASCII characters")
    if not (model is None or isinstance(model, str)):
        raise InvalidConfig.of("model", f"must be a name, got {brief(model)}")
    if not (ssl_context is None or isinstance(ssl_context, ssl.SSLContext)):
        raise InvalidConfig.of("ssl_context", f"must be an ssl.SSLContext, got {brief(ssl_context)}")
    check_callback("dial", dial)
    check_callback("on_state", on_state)
    address = Address.parse(url, model)
    headers = [] if api_key is None else [(b"authorization", b"Bearer " + api_key.encode())]
    endpoint = Endpoint(address.authority, address.target, headers, dial or partial(address.dial, ssl_context))
    async with open_unwrapped_nursery() as nursery:
        client = Client(endpoint, nursery, on_state)
        try:
            yield client
        finally:
            client.close()
