"""Mutants of the worker's engine core and scheduler, which the simulation shares with the real worker."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mutant import Mutant, replaced

from trioengine.core.messages import AddSession, EndSession, RequestFailed, StopSession, TokensRow
from trioengine.core.types import FinishReason
from trioengine.testing import toy_runner
from trioengine.testing.simulated_worker import SimulatedWorker
from trioengine.worker.scheduling import block_manager
from trioengine.worker.scheduling.block_manager import BlockManager
from trioengine.worker.scheduling.engine_core import EngineCore
from trioengine.worker.scheduling.scheduler import Scheduler
from trioengine.worker.scheduling.sequence import Sampled, SchedulerOutput, Sequence


def _lose_aborts_of_the_waiting(stop_session: Any) -> Any:
    def mutant(self: EngineCore, message: StopSession) -> Any:
        sequence = self._sessions[message.session].sequence if message.session in self._sessions else None
        if sequence is not None and sequence.started_at is None:
            return []
        return stop_session(self, message)

    return mutant


def _fail_on_late_aborts(stop_session: Any) -> Any:
    def mutant(self: EngineCore, message: StopSession) -> Any:
        sequence = self._session(message.session, "STOP_SESSION").sequence
        if sequence is None:
            raise KeyError(message.request)
        return stop_session(self, message)

    return mutant


def _lose_aborts_in_prefill(stop_session: Any) -> Any:
    def mutant(self: EngineCore, message: StopSession) -> Any:
        sequence = self._sessions[message.session].sequence if message.session in self._sessions else None
        if sequence is not None and 0 < sequence.num_computed_tokens < sequence.num_prompt_tokens:
            return []
        return stop_session(self, message)

    return mutant


def _poison_the_next_turn(stop_session: Any) -> Any:
    def mutant(self: EngineCore, message: StopSession) -> Any:
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


def _fail_for_all(update: Any) -> Any:
    def mutant(self: Scheduler, output: SchedulerOutput, sampled: list[Sampled]) -> Any:
        for row in sampled:
            if isinstance(row, RequestFailed):
                raise RuntimeError(row.message)
        return update(self, output, sampled)

    return mutant


def _overlook_the_context(finish_reason: Any) -> Any:
    def mutant(self: Sequence, max_sequence_len: int) -> FinishReason | None:
        reason: FinishReason | None = finish_reason(self, max_sequence_len)
        at_the_end = self.num_tokens == max_sequence_len
        return None if at_the_end and reason is FinishReason.LENGTH else reason

    return mutant


def _by_type(turn: Any) -> Any:
    def mutant(self: SimulatedWorker) -> None:
        moved = [message for message in self._queue if isinstance(message, AddSession | EndSession)]
        ends_first = iter(sorted(moved, key=lambda message: isinstance(message, AddSession)))
        messages = [next(ends_first) if message in moved else message for message in self._queue]
        self._queue.clear()
        self._queue.extend(messages)
        turn(self)

    return mutant


def _forget_the_salt(root_digest: Any) -> Any:
    return lambda cache_salt, adapter: root_digest("", adapter)


def _put_the_newest_first(add: Any) -> Any:
    def mutant(self: Scheduler, sequence: Sequence) -> None:
        add(self, sequence)
        if self._waiting and self._waiting[-1] is sequence:
            self._waiting.rotate()

    return mutant


def _keep_a_draft(verify: Any) -> Any:
    def mutant(draft: Iterable[int], rows: Iterable[Sampled]) -> Sampled:
        drafted = tuple(draft)
        row = verify(drafted, rows)
        if isinstance(row, TokensRow) and len(row.token_ids) == 1 and drafted:
            row.token_ids[0] = drafted[0]
        return row

    return mutant


def _count_drafts_as_computed(append: Any) -> Any:
    def mutant(self: Scheduler, sequence: Sequence, row: TokensRow, draft: tuple[int, ...]) -> int:
        num_kept: int = append(self, sequence, row, draft)
        return min(len(draft), num_kept + 1)

    return mutant


def _go_on_behind_the_end(append: Any) -> Any:
    def mutant(self: Sequence, row: TokensRow, max_sequence_len: int) -> FinishReason | None:
        whole = row.token_ids[:]
        reason: FinishReason | None = append(self, row, max_sequence_len)
        row.token_ids = whole
        return reason

    return mutant


WORKER_MUTANTS = (
    Mutant(
        "F3",
        "an abort of a request that waits is lost: it goes on to its end",
        replaced(EngineCore, "_stop_session", _lose_aborts_of_the_waiting),
        shows="a stopped request goes on|it was stopped, and compiles",
    ),
    Mutant(
        "F4",
        "an abort that crosses the finish hits something that is gone",
        replaced(EngineCore, "_stop_session", _fail_on_late_aborts),
        shows="a worker failed: .*KeyError",
    ),
    Mutant(
        "F6",
        "an abort in a chunked prefill is lost",
        replaced(EngineCore, "_stop_session", _lose_aborts_in_prefill),
        shows="a stopped request goes on",
    ),
    Mutant(
        "F25",
        "an idle session pins its KV blocks",
        replaced(BlockManager, "release", _pin_the_blocks),
        shows="blocks are counted|KV blocks have no holder|none of them can be scheduled",
    ),
    Mutant(
        "F29",
        "one bad request ends the step for all",
        replaced(Scheduler, "update", _fail_for_all),
        shows="a worker failed: .*failed on request",
    ),
    Mutant(
        "F30",
        "a long session passes max_model_len",
        replaced(Sequence, "finish_reason", _overlook_the_context),
        shows="the answer is .*the model's is|the whole answer|a step continues request",
    ),
    Mutant(
        "F40",
        "a stop in one round poisons the next",
        replaced(EngineCore, "_stop_session", _poison_the_next_turn),
        shows="the model's",
    ),
    Mutant(
        "F42",
        "an end is handled before an add that came earlier: by type, not by arrival",
        replaced(SimulatedWorker, "turn", _by_type),
        shows="the engine broke the protocol: .* (is not there|does not exist)",
    ),
    Mutant(
        "F48",
        "requests with different cache salts share blocks of the prefix cache",
        replaced(block_manager, "root_digest", _forget_the_salt),
        shows="computed under another cache salt or adapter",
    ),
    Mutant(
        "F61",
        "the worker computes the newest request first",
        replaced(Scheduler, "add", _put_the_newest_first),
        shows=r"request \d+ begins before",
    ),
    Mutant(
        "F95",
        "a drafted token replaces the sampled one",
        replaced(toy_runner, "verified", _keep_a_draft),
        shows="the model's|of none of the weights",
    ),
    Mutant(
        "F96",
        "a drafted token that was not kept counts as computed",
        replaced(Scheduler, "_append", _count_drafts_as_computed),
        shows=r"a step computes \d+ tokens of request",
    ),
    Mutant(
        "F97",
        "the tokens of a draft behind the end of the answer are sent",
        replaced(Sequence, "append_sampled", _go_on_behind_the_end),
        shows="the model's|of none of the weights|the whole answer|session \\d+ holds \\d+ tokens",
    ),
)
