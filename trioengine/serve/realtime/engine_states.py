"""What a connection is told of its engine: that it sleeps, restarts, is awake again."""

from __future__ import annotations

from collections.abc import Mapping

from trioengine.actors.engine import Engine
from trioengine.core.lifecycle import Power
from trioengine.serve.realtime.outbox import Outbox
from trioengine.serve.realtime.settings import input_modalities

AWAKE = "awake"
SHOWN: Mapping[Power, str] = {
    Power.LOADING: "loading",
    Power.AWAKE: AWAKE,
    Power.RESTARTING: "restarting",
    Power.FALLING_ASLEEP: "sleeping",
    Power.ASLEEP: "sleeping",
    Power.WAKING: "sleeping",  # until all of it is awake
    Power.UPDATING: "updating",
    Power.DRAINING: "draining",
    Power.CLOSED: "draining",
}


async def tell_states(engine: Engine, outbox: Outbox) -> None:
    """An event for each change, until the engine is closed; one for the state at the beginning unless that is awake.

    A client that reads slowly holds nobody up: of what it could not be told the oldest is dropped.
    """
    told = (AWAKE, engine.power.weight_version)
    with engine.states() as states:
        async for state in states:
            shown = (SHOWN[state.power], state.weight_version)
            if shown == told:
                continue
            await outbox.room()
            modalities = input_modalities(takes_images=engine.takes_images)
            outbox.put("engine.state", state=shown[0], weight_version=shown[1], input_modalities=modalities)
            told = shown
