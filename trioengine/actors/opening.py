"""`open_engine`: an engine for the time of a block."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from copy import copy
from typing import Unpack

from trioengine.actors.engine import Engine
from trioengine.actors.ports import Ports
from trioengine.aio.calls import opens
from trioengine.aio.concurrency import open_unwrapped_nursery
from trioengine.core.config import EngineConfig, EngineOptions, merged_config
from trioengine.core.errors import EngineError, ModelError


@opens("engine")
async def open_engine(
    config: EngineConfig | str | None = None,
    *,
    ports: Ports | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    on_load: Callable[[int, int], None] | None = None,
    **options: Unpack[EngineOptions],
) -> AsyncIterator[Engine]:
    """An engine that is ready; leaving ends its sessions and its worker, whatever happens in the body.

    Give a whole EngineConfig; or the model's name or path, and fields of EngineConfig as keywords.

    Raises ModelError or WorkerLost when it cannot start, or dies for good later (the body is cancelled then, and
    errors that it raises for requests that died with the engine are not kept apart). A single exception of the body
    comes out as it is, not in a group.
    """
    engine = Engine(merged_config(config, options), ports=ports, on_progress=on_progress, on_load=on_load)
    try:
        async with open_unwrapped_nursery() as nursery:
            nursery.start_soon(engine.run)
            await engine.ready()
            yield engine
            engine.close()
    except BaseExceptionGroup as group:
        if engine.runtime.gate.failure is not None and group.split(EngineError)[1] is None:
            failure = engine.runtime.gate.failure
            raise copy(failure) if isinstance(failure, ModelError) else failure from failure.__cause__
        raise
