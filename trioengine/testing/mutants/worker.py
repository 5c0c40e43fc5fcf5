"""Mutants of the worker's step loop and scheduler, which the simulation shares with the real worker."""

from __future__ import annotations

from typing import Any

from trioengine.core.errors import InvariantError
from trioengine.core.messages import AddMessage, EndSession, FinishReason, StopSession
from trioengine.testing.mutants.mutant import Mutant, replaced
from trioengine.testing.simulated_worker import SimulatedWorker
from trioengine.worker.scheduling.block_manager import BlockManager
from trioengine.worker.scheduling.scheduler import Scheduler
from trioengine.worker.scheduling.sequence import Sequence
from trioengine.worker.scheduling.step_loop import StepLoop


def _lose_aborts_of_the_waiting(stop_session: Any) -> Any:
    def mutant(self: StepLoop, message: StopSession) -> Any:
        sequence = self._sessions[message.session].sequence if message.session in self._sessions else None
        if sequence is not None and sequence.started_at is None:
            return []
        return stop_session(self, message)

    return mutant


def _fail_on_late_aborts(stop_session: Any) -> Any:
    def mutant(self: StepLoop, message: StopSession) -> Any:
        if self._session(message.session, "STOP_SESSION").sequence is None:
            raise InvariantError("the request to stop is gone")
        return stop_session(self, message)

    return mutant


def _lose_aborts_in_prefill(stop_session: Any) -> Any:
    def mutant(self: StepLoop, message: StopSession) -> Any:
        sequence = self._sessions[message.session].sequence if message.session in self._sessions else None
        if sequence is not None and 0 < sequence.num_computed_tokens < sequence.num_prompt_tokens:
            return []
        return stop_session(self, message)

    return mutant


def _poison_the_next_turn(stop_session: Any) -> Any:
    def mutant(self: StepLoop, message: StopSession) -> Any:
        answer = stop_session(self, message)
        if answer:
            self._sessions[message.session].held[0] ^= 1
        return answer

    return mutant


def _pin_the_blocks(release: Any) -> Any:
    def mutant(self: BlockManager, sequence: Sequence) -> None:
        if sequence.num_output_tokens == 0:
            release(self, sequence)

    return mutant


def _fail_for_all(failed: Any) -> Any:
    def mutant(self: StepLoop, row: Any) -> Any:
        raise InvariantError("one bad request")

    return mutant


def _overlook_the_context(finish_reason: Any) -> Any:
    def mutant(self: Scheduler, sequence: Sequence, token_id: int) -> FinishReason | None:
        reason: FinishReason | None = finish_reason(self, sequence, token_id)
        at_the_end = len(sequence.token_ids) == self.limits.max_sequence_len
        return None if at_the_end and reason is FinishReason.LENGTH else reason

    return mutant


def _by_type(turn: Any) -> Any:
    def mutant(self: SimulatedWorker) -> None:
        order = {EndSession: 0, AddMessage: 2}
        messages = sorted(self._queue, key=lambda message: order.get(type(message), 1))
        self._queue.clear()
        self._queue.extend(messages)
        turn(self)

    return mutant


WORKER_MUTANTS = (
    Mutant(
        "F3",
        "an abort of a request that waits is lost: it goes on to its end",
        replaced(StepLoop, "_stop_session", _lose_aborts_of_the_waiting),
    ),
    Mutant(
        "F4",
        "an abort that crosses the finish hits something that is gone",
        replaced(StepLoop, "_stop_session", _fail_on_late_aborts),
    ),
    Mutant(
        "F6",
        "an abort in a chunked prefill is lost",
        replaced(StepLoop, "_stop_session", _lose_aborts_in_prefill),
    ),
    Mutant("F25", "an idle session pins its KV blocks", replaced(BlockManager, "release", _pin_the_blocks)),
    Mutant("F29", "one bad request ends the step for all", replaced(StepLoop, "_failed", _fail_for_all)),
    Mutant("F30", "a long session passes max_model_len", replaced(Scheduler, "_finish_reason", _overlook_the_context)),
    Mutant(
        "F40",
        "a stop in one round poisons the next",
        replaced(StepLoop, "_stop_session", _poison_the_next_turn),
    ),
    Mutant("F42", "messages are handled by type, not in order of arrival", replaced(SimulatedWorker, "turn", _by_type)),
)
