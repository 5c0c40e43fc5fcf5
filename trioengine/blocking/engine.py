"""Engine, client, session and generation with calls that block."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self, Unpack

import trioengine.actors.engine
import trioengine.client.client
from trioengine.actors.power_change import Level, ModeName
from trioengine.actors.statistics import Statistics
from trioengine.blocking.loop import Loop
from trioengine.core.completion import Chunk, Completion
from trioengine.core.config import EngineConfig
from trioengine.core.lifecycle import Power
from trioengine.core.options import EngineOptions, SamplingOptions
from trioengine.core.overflow import Overflow
from trioengine.core.sampling_params import SamplingParams
from trioengine.core.tag import TagName
from trioengine.text.conversation import Prompt


class Generation:
    """One request, asked when it is iterated over: `for chunk in session.generate(...)`.

    Leaving the loop early, by `break` or an exception, aborts the request.
    """

    def __init__(self, session: Session, inner: Any) -> None:
        self._session = session  # which lives as long as this
        self._inner = inner

    def __repr__(self) -> str:
        return repr(self._inner)

    def __iter__(self) -> Iterator[Chunk]:
        """Ask, and give the answer in chunks. Raises as the asynchronous Generation does."""
        chunks: SimpleQueue[Chunk | None] = SimpleQueue()
        loop = self._session.loop
        with loop.running(self._read, chunks.put) as task:
            task.future.add_done_callback(lambda _: chunks.put(None))
            while (chunk := chunks.get()) is not None:
                yield chunk
            loop.result(task)

    async def _read(self, put: Callable[[Chunk], None]) -> None:
        async with self._inner as generation:
            async for chunk in generation:
                put(chunk)

    def result(self) -> Completion:
        """Ask, read to the end and return the whole answer."""
        for _ in self:
            pass
        return self.completion

    @property
    def completion(self) -> Completion:
        """The answer, once there is an outcome; raises the typed error of a failed request."""
        completion: Completion = self._session.loop.call_sync(lambda: self._inner.completion)
        return completion

    def abort(self) -> None:
        """Ask for the end of this request, from any thread; harmless when it has one."""
        self._session.loop.call_sync(self._inner.abort)


class Session:
    """A conversation: `engine.open_session()`."""

    def __init__(self, host: _Host, options: Mapping[str, Any]) -> None:
        self.loop = host.loop
        self._host = host  # which lives as long as this
        self._inner: Any = self.loop.call_sync(partial(host.loop.resource.open_session, **options))
        weakref.finalize(self, self.loop.end_soon, self._inner.end).atexit = False
        self.loop.call(self._inner.__aenter__)

    def __repr__(self) -> str:
        return repr(self._inner)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def history(self) -> list[dict[str, Any]]:
        """The committed conversation, as chat messages."""
        return self.loop.call_sync(lambda: self._inner.history)

    def replace_history(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Make these messages the conversation."""
        self.loop.call_sync(partial(self._inner.replace_history, messages))

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        keep_partial: bool = False,
        timeout: float | None = None,
        wait: bool | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Generation:
        """A request, to be iterated over. The arguments are those of the asynchronous Session.generate."""
        options_of_call = {"keep_partial": keep_partial, "timeout": timeout, "wait": wait, **options}
        return Generation(self, self.loop.call_sync(partial(self._inner.generate, prompt, params, **options_of_call)))

    def ask(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        keep_partial: bool = False,
        timeout: float | None = None,
        wait: bool | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Completion:
        """One whole answer."""
        generation = self.generate(prompt, params, keep_partial=keep_partial, timeout=timeout, wait=wait, **options)
        return generation.result()

    def close(self) -> None:
        """End the session: a request in flight is aborted. Harmless when ended, also with the engine."""
        self.loop.end_soon(self._inner.end)


class _Host:
    """Base class of Engine and Client: opens sessions."""

    def __init__(self, opening: Callable[[], AbstractAsyncContextManager[Any]]) -> None:
        self.loop = Loop(opening)
        weakref.finalize(self, self.loop.close)  # also when Python exits

    def __repr__(self) -> str:
        return repr(self.loop.resource)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def open_session(
        self,
        *,
        label: str | None = None,
        history: Sequence[Mapping[str, Any]] | None = None,
        wait: bool | None = None,
        timeout: float | None = None,
        overflow: Overflow = "refuse",
    ) -> Session:
        """An open session. The arguments are those of the asynchronous `open_session`."""
        options = {"label": label, "history": history, "wait": wait, "timeout": timeout, "overflow": overflow}
        return Session(self, options)

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        wait: bool | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Completion:
        """One answer, in a session of its own."""
        generate = partial(self.loop.resource.generate, prompt, params, timeout=timeout, wait=wait, **options)
        completion: Completion = self.loop.call(generate)
        return completion

    def close(self) -> None:
        """End every session, and wait until all is closed, the worker too. Harmless when closed."""
        self.loop.close()


class Client(_Host):
    """A server elsewhere: `connect(url)`."""


class Engine(_Host):
    """An engine of this process: `open_engine(model)`."""

    @property
    def state(self) -> Power:
        """The engine's state."""
        state: Power = self.loop.resource.state
        return state

    def statistics(self) -> Statistics:
        """The counts at this moment."""
        statistics: Statistics = self.loop.call_sync(self.loop.resource.statistics)
        return statistics

    def sleep(
        self, level: Level = 1, *, mode: ModeName = "abort", timeout: float | None = None, keep_waiting: bool = False
    ) -> None:
        """Give the worker's memory back."""
        sleep = self.loop.resource.sleep
        self.loop.call(partial(sleep, level, mode=mode, timeout=timeout, keep_waiting=keep_waiting))

    def wake(self, tags: TagName | Collection[TagName] | None = None, *, reload: bool = True) -> None:
        """Take memory back."""
        self.loop.call(partial(self.loop.resource.wake, tags, reload=reload))

    def update_weights(self, path: str | Path, *, mode: ModeName = "abort", timeout: float | None = None) -> None:
        """Go over to the weights at `path`."""
        self.loop.call(partial(self.loop.resource.update_weights, path, mode=mode, timeout=timeout))


def open_engine(
    config: EngineConfig | str | None = None,
    *,
    on_progress: Callable[[int, int], None] | None = None,
    on_load: Callable[[int, int], None] | None = None,
    **options: Unpack[EngineOptions],
) -> Engine:
    """An engine that is ready. Arguments and errors are those of the asynchronous `open_engine`.

    Interrupted, it is closed again. The callbacks are called in other threads.
    """
    given: Any = options
    opening = trioengine.actors.engine.open_engine
    return Engine(partial(opening, config, on_progress=on_progress, on_load=on_load, **given))


def connect(url: str, *, api_key: str | None = None, model: str | None = None) -> Client:
    """A client of the server at `url`. Arguments and errors are those of the asynchronous `connect`."""
    return Client(partial(trioengine.client.client.connect, url, api_key=api_key, model=model))
