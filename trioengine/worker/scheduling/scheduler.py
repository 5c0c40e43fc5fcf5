"""The scheduler: which tokens of which sequences the next step computes.

There are no phases. A step gives each sequence the tokens that it has and that are not computed yet
(`num_tokens - num_computed_tokens`), as far as `max_num_batched_tokens` goes; prefill, chunked prefill, a prefix found
in the cache, decode and recomputation after a preemption are this one rule.

Of prompts a step takes no more than `chunked_prefill_size` tokens, so that first tokens leave early. While these fill
steps, decodes, which cost as much for a few sequences as for many, are left out of some: of no more than MAX_SKIPS in a
row, and so that between two tokens of a sequence that is not preempted no more than `max_num_batched_tokens` tokens of
prompts are computed. A prompt is begun when the one before it is scheduled to its end, so that of the running sequences
only the latest can be in the middle of its prefill.

Order, and why nothing starves: running and waiting sequences together are sorted by arrival, always. Only the first of
the waiting is admitted, and it gets blocks for all the tokens it has; only decodes need more blocks later, and when
there are none the latest running sequence is preempted and becomes the first of the waiting. So the oldest sequence
is never preempted for another, and alone it fits, because `add` refuses what does not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from typing import NamedTuple

from trioengine.core.errors import InvariantError, RequestRejected
from trioengine.core.messages import FinishReason, WorkerStatistics
from trioengine.worker.scheduling.block_manager import BlockManager
from trioengine.worker.scheduling.limits import Limits
from trioengine.worker.scheduling.output import SampledToken, ScheduledSequence, SchedulerOutput
from trioengine.worker.scheduling.sequence import Sequence, SequenceStatus

MAX_SKIPS = 3  # steps in a row without decodes


class SampledRow(NamedTuple):
    """What a step did for one sequence: a token, which is appended already, or the end without one (ERROR)."""

    sequence: Sequence
    sampled: SampledToken
    finish_reason: FinishReason | None


class Scheduler:
    """Owns the sequences in flight and their blocks; synchronous, and changed between two steps only."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.blocks = BlockManager(
            limits.kv_blocks_total, limits.block_size, enable_prefix_caching=limits.enable_prefix_caching
        )
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._sequences: dict[int, Sequence] = {}  # by request
        self._in_step: SchedulerOutput | None = None
        self._skips_left = 0  # steps in which decodes may be left out
        self._num_steps = 0
        self._num_tokens = 0
        self._num_preemptions = 0
        self._prefix_cache_queries = 0
        self._prefix_cache_hits = 0

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    @property
    def requests(self) -> tuple[int, ...]:
        """The requests in flight, in no order that means anything."""
        return tuple(self._sequences)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence.

        Raises RequestRejected, and nothing changes: `empty_prompt`, `context_length_exceeded` or `invalid_value`
        (a token outside the vocabulary).
        """
        self._check_prompt(sequence)
        if sequence.request in self._sequences:
            raise InvariantError(f"request {sequence.request} is added twice")
        self._sequences[sequence.request] = sequence
        self._waiting.append(sequence)

    def abort(self, request: int) -> Sequence | None:
        """Drop a sequence and its blocks; None when the request is not in flight. Not between schedule and update."""
        if self._in_step is not None:
            raise InvariantError(f"request {request} is aborted under a running step")
        sequence = self._sequences.get(request)
        if sequence is not None:
            self._drop(sequence)
        return sequence

    def schedule(self) -> SchedulerOutput | None:
        """The next step, to be given to `update` when it is computed; None when there is nothing to do."""
        if self._in_step is not None:
            raise InvariantError("the step before has not been updated")
        if not self._sequences:
            return None
        limits = self.limits
        scheduled: list[ScheduledSequence] = []
        if self._skips_left > 0 and self._has_full_chunk():
            self._skips_left -= 1
            self._schedule_prompts(scheduled, limits.chunked_prefill_size)
        if not scheduled:
            self._skips_left = min(MAX_SKIPS, limits.max_num_batched_tokens // limits.chunked_prefill_size - 1)
            self._schedule_decodes(scheduled)
            left = limits.max_num_batched_tokens - len(scheduled)
            self._schedule_prompts(scheduled, min(left, limits.chunked_prefill_size))
        if not scheduled:
            raise InvariantError(f"{len(self._sequences)} sequences, and none of them can be scheduled")
        self._in_step = output = SchedulerOutput(tuple(scheduled), self.blocks.take_copies())
        self._num_steps += 1
        self._num_tokens += output.num_tokens
        return output

    def update(self, output: SchedulerOutput, sampled: Items[SampledToken]) -> list[SampledRow]:
        """Take in what the step computed: a row for each sequence that sampled; finished ones are dropped."""
        if output is not self._in_step:
            raise InvariantError("this is not the step that was scheduled")
        self._in_step = None
        rows: list[SampledRow] = []
        tokens = iter(sampled)
        block_size = self.limits.block_size
        for sequence, num_new_tokens in [(entry.sequence, entry.num_new_tokens) for entry in output.scheduled]:
            before = sequence.num_computed_tokens
            computed = before + num_new_tokens
            token = next(tokens, None) if computed == len(sequence.token_ids) else None
            if token is not None and token.error is not None:
                rows.append(self._fail(sequence, token))
                continue
            sequence.num_computed_tokens = computed
            if before // block_size != computed // block_size:
                self.blocks.register(sequence, before)
            if computed == len(sequence.token_ids):
                rows.append(self._append(sequence, token))
        if next(tokens, None) is not None:
            raise InvariantError("the runner sampled more tokens than were asked for")
        return rows

    def forget_all(self) -> None:
        """Drop whatever was computed; InvariantError while there is a sequence."""
        if self._sequences:
            raise InvariantError(f"{len(self._sequences)} sequences are there, and all is to be forgotten")
        self.blocks.forget_all()

    def statistics(self, num_sessions: int) -> WorkerStatistics:
        """The counts now."""
        return WorkerStatistics(
            num_sessions=num_sessions,
            num_waiting=len(self._waiting),
            num_running=len(self._running),
            num_steps=self._num_steps,
            num_tokens=self._num_tokens,
            num_preemptions=self._num_preemptions,
            kv_blocks_total=self.blocks.num_blocks,
            kv_blocks_free=self.blocks.num_free,
            kv_blocks_cached=self.blocks.num_cached,
            prefix_cache_queries=self._prefix_cache_queries,
            prefix_cache_hits=self._prefix_cache_hits,
        )

    def check_integrity(self) -> None:
        """Raise InvariantError unless lists, states, block tables and reference counts agree."""
        listed = [*self._running, *self._waiting]
        if len(listed) != len(self._sequences) or any(
            self._sequences.get(sequence.request) is not sequence for sequence in listed
        ):
            raise InvariantError(f"{len(listed)} sequences run or wait, {len(self._sequences)} are known")
        for sequence in self._running:
            if sequence.status is not SequenceStatus.RUNNING:
                raise InvariantError(f"request {sequence.request} runs and is {sequence.status.value}")
        if self._in_step is None and not all(sequence.is_decoding for sequence in self._running[:-1]):
            raise InvariantError("a sequence is in the middle of its prefill, and a later one runs")
        for sequence in self._waiting:
            waits = sequence.status in (SequenceStatus.WAITING, SequenceStatus.PREEMPTED)
            if not waits or sequence.block_table or sequence.num_computed_tokens:
                raise InvariantError(
                    f"request {sequence.request} waits, is {sequence.status.value}, holds {len(sequence.block_table)} "
                    f"blocks and has {sequence.num_computed_tokens} tokens computed"
                )
        self.blocks.check_integrity(listed)

    # ---- a step -----------------------------------------------------------------------------------------------------

    @property
    def _prefilling(self) -> Sequence | None:
        """The running sequence that is in the middle of its prefill: only the latest can be."""
        return self._running[-1] if self._running and not self._running[-1].is_decoding else None

    def _has_full_chunk(self) -> bool:
        """Whether what is left of the prompts that run, or can be admitted now, fills a step without decodes."""
        limits, blocks = self.limits, self.blocks
        left = limits.chunked_prefill_size
        prefilling = self._prefilling
        if prefilling is not None:
            left -= prefilling.num_tokens - prefilling.num_computed_tokens
        num_blocks = blocks.num_free + blocks.num_cached
        for num_running, sequence in enumerate(self._waiting, len(self._running)):
            num_blocks -= blocks.num_blocks_for(sequence.num_tokens)
            if left <= 0 or num_running == limits.max_num_seqs or num_blocks < num_running:
                break
            left -= sequence.num_tokens - blocks.num_tokens_of(blocks.find_prefix(sequence))
        return left <= 0

    def _schedule_decodes(self, scheduled: list[ScheduledSequence]) -> None:
        """In order of arrival."""
        block_size = self.limits.block_size
        for sequence in list(self._running):
            if sequence.status is not SequenceStatus.RUNNING:  # preempted for one before it
                break
            if len(scheduled) == self.limits.max_num_batched_tokens or not sequence.is_decoding:
                break
            is_full = len(sequence.token_ids) > len(sequence.block_table) * block_size
            if is_full and not self._make_room(sequence):
                break
            scheduled.append(ScheduledSequence(sequence, 1))

    def _schedule_prompts(self, scheduled: list[ScheduledSequence], budget: int) -> None:
        """What is left of the one that runs, then of those that wait, in order of arrival."""
        prefilling = self._prefilling
        if prefilling is not None and budget > 0:
            budget -= self._schedule_prompt(scheduled, prefilling, budget)
        self._admit(scheduled, budget)

    def _schedule_prompt(self, scheduled: list[ScheduledSequence], sequence: Sequence, budget: int) -> int:
        num_new_tokens = min(sequence.num_tokens - sequence.num_computed_tokens, budget)
        scheduled.append(ScheduledSequence(sequence, num_new_tokens))
        return num_new_tokens

    def _make_room(self, sequence: Sequence) -> bool:
        """Grow the sequence's block table, preempting the latest ones for it; False when that came to itself."""
        while not self.blocks.grow(sequence):
            latest = self._running.pop()
            self.blocks.release(latest)
            latest.status = SequenceStatus.PREEMPTED
            self._waiting.appendleft(latest)
            self._num_preemptions += 1
            if latest is sequence:
                return False
        return True

    def _admit(self, scheduled: list[ScheduledSequence], budget: int) -> None:
        """Admit waiting sequences in order of arrival; a block is kept back for each that runs, to grow into."""
        while self._waiting and budget > 0 and len(self._running) < self.limits.max_num_seqs:
            sequence = self._waiting[0]
            prefix = self.blocks.find_prefix(sequence)
            if not self.blocks.allocate(sequence, prefix, reserve=len(self._running)):
                break
            if sequence.status is SequenceStatus.WAITING:
                sequence.num_cached_tokens = sequence.num_computed_tokens
                self._prefix_cache_queries += sequence.num_tokens
                self._prefix_cache_hits += sequence.num_computed_tokens
            self._waiting.popleft()
            sequence.status = SequenceStatus.RUNNING
            self._running.append(sequence)
            budget -= self._schedule_prompt(scheduled, sequence, budget)

    def _append(self, sequence: Sequence, token: SampledToken | None) -> SampledRow:
        if token is None or token.request != sequence.request:
            raise InvariantError(f"the runner sampled {token} for request {sequence.request}")
        sequence.token_ids.append(token.token_id)
        finish_reason = self._finish_reason(sequence, token.token_id)
        if finish_reason is not None:
            self._drop(sequence)
        return SampledRow(sequence, token, finish_reason)

    def _fail(self, sequence: Sequence, token: SampledToken) -> SampledRow:
        if token.request != sequence.request:
            raise InvariantError(f"the runner sampled {token} for request {sequence.request}")
        self._drop(sequence, discard=True)
        return SampledRow(sequence, token, FinishReason.ERROR)

    def _finish_reason(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        params = sequence.params
        num_output_tokens = sequence.num_output_tokens
        if num_output_tokens >= params.min_tokens and (
            token_id in params.stop_token_ids or (token_id in sequence.eos_token_ids and not params.ignore_eos)
        ):
            return FinishReason.STOP
        if params.max_tokens is not None and num_output_tokens >= params.max_tokens:
            return FinishReason.LENGTH
        if len(sequence.token_ids) >= self.limits.max_sequence_len:
            return FinishReason.LENGTH
        return None

    # ---- coming and going -------------------------------------------------------------------------------------------

    def _check_prompt(self, sequence: Sequence) -> None:
        token_ids, limit = sequence.token_ids, self.limits.max_sequence_len
        if not token_ids:
            raise RequestRejected("empty_prompt", "the prompt has no tokens")
        if len(token_ids) >= limit:
            raise RequestRejected(
                "context_length_exceeded",
                f"the prompt has {len(token_ids)} tokens, and prompt and answer together at most {limit}",
            )
        if min(token_ids) < 0 or max(token_ids) >= self.limits.vocab_size:
            raise RequestRejected("invalid_value", f"token ids must be from 0 to {self.limits.vocab_size - 1}")

    def _drop(self, sequence: Sequence, *, discard: bool = False) -> None:
        del self._sequences[sequence.request]
        if sequence.status is SequenceStatus.RUNNING:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        if discard:
            self.blocks.discard(sequence)
        else:
            self.blocks.release(sequence)
        sequence.status = SequenceStatus.FINISHED
