"""Mutants of the slots for states."""

from __future__ import annotations

from typing import Any

from mutant import Mutant, replaced

from trioengine.worker.scheduling.block_manager import BlockManager, Prefix
from trioengine.worker.scheduling.scheduler import Scheduler
from trioengine.worker.scheduling.sequence import Sequence
from trioengine.worker.scheduling.state_slots import PADDING_SLOT, StateCopy, StateSlots


def _clear_no_slot(take_state_copies: Any) -> Any:
    def mutant(self: BlockManager) -> tuple[StateCopy, ...]:
        return tuple(copy for copy in take_state_copies(self) if copy.source != PADDING_SLOT)

    return mutant


def _hand_out_the_padding(init: Any) -> Any:
    def mutant(self: StateSlots, num_slots: int) -> None:
        init(self, num_slots)
        if num_slots:
            self._free.append(PADDING_SLOT)

    return mutant


def _keep_states_of_evicted_blocks(forget: Any) -> Any:
    return lambda self, block: None


def _lose_slots_of_aborts(abort: Any) -> Any:
    def mutant(self: Scheduler, request: int) -> Sequence | None:
        if (sequence := self._sequences.get(request)) is not None:
            sequence.state_slot = PADDING_SLOT
        result: Sequence | None = abort(self, request)
        return result

    return mutant


def _go_on_behind_the_state(with_state: Any) -> Any:
    def mutant(self: BlockManager, found: list[int], *rest: Any) -> Prefix:
        prefix: Prefix = with_state(self, found, *rest)
        if prefix.num_tokens < prefix.num_found:
            return prefix._replace(blocks=tuple(found), num_tokens=prefix.num_found)
        return prefix

    return mutant


STATE_MUTANTS = (
    Mutant(
        "F98",
        "a sequence gets a slot with the state of the one before it",
        replaced(BlockManager, "take_state_copies", _clear_no_slot),
        shows="with a state of something else",
    ),
    Mutant(
        "F99",
        "a sequence gets the slot that is for padding",
        replaced(StateSlots, "__init__", _hand_out_the_padding),
        shows="the state slot of the padding|state slots .* are free|state slots have no holder|state slots are acc",
    ),
    Mutant(
        "F100",
        "the state behind an evicted block is found for the block's next content",
        replaced(StateSlots, "forget", _keep_states_of_evicted_blocks),
        shows="with a state of something else|the block holds no prefix",
    ),
    Mutant(
        "F101",
        "an abort loses the slot of its sequence",
        replaced(Scheduler, "abort", _lose_slots_of_aborts),
        shows="state slots|none of them can be scheduled",
    ),
    Mutant(
        "F102",
        "a prefix goes on behind the tokens of its state",
        replaced(BlockManager, "_with_state", _go_on_behind_the_state),
        shows="with a state of something else",
    ),
)
