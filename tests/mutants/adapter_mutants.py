"""Mutants of LoRA adapters."""

from __future__ import annotations

from typing import Any

from mutant import Mutant, replaced

from trioengine.actors.attachment import WorkerAttachment
from trioengine.core.lifecycle import Action
from trioengine.core.messages import Adapter
from trioengine.worker.scheduling import block_manager
from trioengine.worker.scheduling.adapters import Adapters


def _forget_the_adapter(root_digest: Any) -> Any:
    return lambda cache_salt, adapter: root_digest(cache_salt)


def _attach_without_it_later(carry_out: Any) -> Any:
    posted: set[int] = set()

    def mutant(self: WorkerAttachment, action: Action, session: int, *more: Any) -> None:
        if action is Action.POST_ADD_SESSION and session in posted:
            self._adapter = None
        carry_out(self, action, session, *more)
        posted.add(session)

    return mutant


def _drop_it_for_others(release: Any) -> Any:
    def mutant(self: Adapters, adapter: Adapter) -> None:
        release(self, adapter)
        if adapter.id in self._loaded:
            del self._loaded[adapter.id]
            self._runner.drop_adapter(adapter.id)

    return mutant


def _hold_it_forever(release: Any) -> Any:
    return lambda self, adapter: None


ADAPTER_MUTANTS = (
    Mutant(
        "F103",
        "requests with different adapters share blocks of the prefix cache",
        replaced(block_manager, "root_digest", _forget_the_adapter),
        shows="computed under another cache salt or adapter|of another history",
    ),
    Mutant(
        "F104",
        "a session that comes to a worker again has lost its adapter",
        replaced(WorkerAttachment, "carry_out", _attach_without_it_later),
        machine="PowerMachine",
        shows="the model's|of none of the weights",
    ),
    Mutant(
        "F105",
        "an adapter is dropped with its first session, and others have it",
        replaced(Adapters, "release", _drop_it_for_others),
        shows="KeyError",
    ),
    Mutant(
        "F106",
        "a session that has ended holds its adapter",
        replaced(Adapters, "release", _hold_it_forever),
        shows="are counted",
    ),
)
