"""The scheduler: which tokens of which sequences the next step computes.

There are no phases. A step gives each sequence the tokens that it has and that are not computed yet
(`num_tokens - num_computed_tokens`), as far as `max_num_batched_tokens` goes; prefill, chunked prefill, a prefix found
in the cache, decode and recomputation after a preemption are this one rule.

Of prompts a step takes no more than `chunked_prefill_size` tokens, so that first tokens leave early. While these fill
steps, decodes, which cost as much for a few sequences as for many, are left out of some: of no more than MAX_SKIPS in a
row, and so that between two tokens of a sequence that is not preempted no more than `max_num_batched_tokens` tokens of
prompts are computed. A prompt is begun when the one before it is scheduled to its end, so that only the latest running
sequence can be in the middle of its prefill.

A sampled token is followed at once by the tokens that its grammar forces, up to MAX_FORCED, which are not sampled. Such
a sequence gets one token of a step, as every decode, and the others in the room that prompts have left. In that room a
small step also verifies drafts of the next tokens (speculation.py): of these it keeps those that are sampled.

Order, and why nothing starves: the waiting are sorted by arrival, always, the running by admission. Only the first of
the waiting is admitted, and it gets blocks for all the tokens it has. Later only decodes need more blocks, and prompts
blocks of windows (block_manager.py), of which they get those for one step. When there are none, the running sequence
that was admitted last is preempted and takes its place among the waiting. So, while it is in the line, nothing is
admitted before the oldest sequence, and it is only preempted for those that already ran; these end, and alone it fits,
because `add` refuses longer ones. Without images running and waiting sequences together are sorted by arrival, and the
oldest is never preempted for another.

A sequence with images is out of the line, and can be overtaken, until their payloads have come, and whenever it would
be admitted and has to compute a tile of which there are neither features nor pixels; then it comes back to its place.
It leaves at most once for each of its tiles: while it lives no features are dropped, and pixels not before it has
computed the tokens that it came back for. A tile that it did not encode then was in the prefix cache, and is computed
there again only by a sequence that encodes it.

A prompt whose tokens get logprobs computes them from its second token on, once each: the prefix cache gives it only
tokens before that. A step has so many of them (MAX_SCORES) that its rows fit a frame.

A step encodes `max_tiles_per_step` tiles at most: a prompt is cut before the first one beyond them. While the prompts
have tiles to encode, decodes are left out of no step.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Sequence as Items
from operator import attrgetter, eq

from trioengine.core.errors import InvariantError
from trioengine.core.messages import ImageInput, RequestFailed, TokensRow, WorkerStatistics
from trioengine.worker.scheduling.block_manager import BlockManager
from trioengine.worker.scheduling.image_queue import Decoder, NoDecoder, PictureDecoded, Waiters
from trioengine.worker.scheduling.images import PayloadArrived, PictureStatus
from trioengine.worker.scheduling.integrity import check_kept, check_known, check_order, check_prefills
from trioengine.worker.scheduling.prompt_lookup import PromptLookup
from trioengine.worker.scheduling.runner_interface import Drafter
from trioengine.worker.scheduling.sequence import (
    MAX_FORCED,
    Constraint,
    Limits,
    Sampled,
    ScheduledSequence,
    SchedulerOutput,
    Sequence,
    SequenceStatus,
)
from trioengine.worker.scheduling.speculation import Pace
from trioengine.worker.scheduling.step_plan import StepPlan

MAX_SKIPS = 3  # steps in a row without decodes


class Scheduler:
    """Owns the sequences in flight, their blocks and images; synchronous, and changed between two steps only.

    Without a `drafter` drafts come from prompt lookup.
    """

    def __init__(self, limits: Limits, decoder: Decoder | None = None, drafter: Drafter | None = None) -> None:
        self.limits = limits
        self._drafter = PromptLookup() if drafter is None else drafter
        self._waiters = Waiters(limits, NoDecoder() if decoder is None else decoder)
        self.pictures = self._waiters.pictures
        self.payloads = self._waiters.payloads
        self.blocks = BlockManager(
            limits.kv_blocks_total,
            limits.block_size,
            enable_prefix_caching=limits.enable_prefix_caching,
            num_state_slots=limits.state_slots,
            windows=limits.windows,
        )
        self._waiting: deque[Sequence] = deque()  # by arrival
        self._running: list[Sequence] = []  # by admission
        self._sequences: dict[int, Sequence] = {}  # by request: all of them
        self._last_place = 0
        self._in_step: SchedulerOutput | None = None
        self._skips_left = 0  # steps in which decodes may be left out
        self._num_steps = 0
        self._num_tokens = 0
        self._num_preemptions = 0
        self._prompt_tokens = 0  # of the requests that got their first token
        self._generation_tokens = 0
        self._draft_tokens = 0
        self._accepted_tokens = 0
        self._prefix_cache_queries = 0
        self._prefix_cache_hits = 0

    @property
    def has_work(self) -> bool:
        """Whether `schedule` has something to do: not for sequences that are out of the line."""
        return bool(self._running or self._waiting)

    @property
    def requests(self) -> tuple[int, ...]:
        """The requests in flight, in any order."""
        return tuple(self._sequences)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence, or park it until its images are here.

        Raises RequestRejected, and nothing changes: `empty_prompt`, `context_length_exceeded` or `invalid_value`
        (a token outside the vocabulary).
        """
        self.limits.check_prompt(sequence.token_ids, sequence.params.max_tokens)
        if sequence.request in self._sequences:
            raise InvariantError(f"request {sequence.request} is added twice")
        self._sequences[sequence.request] = sequence
        self._last_place += 1
        sequence.place = self._last_place
        # A state cannot go back behind drafts.
        is_free = sequence.params.grammar is None and not self.limits.state_slots
        if sequence.params.num_speculative_tokens and is_free:
            sequence.pace = Pace()
        if sequence.images is None and not sequence.is_compiling:
            self._waiting.append(sequence)
        else:
            self._join(self._waiters.add(sequence))

    def announce(self, images: tuple[ImageInput, ...]) -> None:
        """Expect the payloads of these; after `add`, whether that has taken or refused the request."""
        self._join(self._waiters.announce(images))

    def take_payload(self, arrived: PayloadArrived) -> None:
        """RemoteProtocolError: it is not the one that was announced."""
        self._join(self._waiters.take_payload(arrived))

    def take_decoded(self, decoded: PictureDecoded) -> Sequence | None:
        """The sequence, dropped already, whose image could not be decoded."""
        failed = self._waiters.take_decoded(decoded)
        if failed is not None:
            self._drop(failed)
        self._join(self._waiters.advance())
        return failed

    def take_compiled(self, sequence: Sequence, constraint: Constraint) -> None:
        """The grammar of a sequence in flight is there."""
        sequence.constraint = constraint
        self._join(self._waiters.unpark())

    def abort(self, request: int) -> Sequence | None:
        """Drop a sequence, its blocks and images; None when it is not in flight. Not between schedule and update."""
        if self._in_step is not None:
            raise InvariantError(f"request {request} is aborted under a running step")
        sequence = self._sequences.get(request)
        if sequence is not None:
            self._drop(sequence)
            self._join(self._waiters.advance())
        return sequence

    def schedule(self) -> SchedulerOutput | None:
        """The next step, to be given to `update` when it is computed; None when there is nothing to do."""
        if self._in_step is not None:
            raise InvariantError("the step before has not been updated")
        if not self._running and not self._waiting:
            return None
        limits = self.limits
        plan = StepPlan(limits.chunked_prefill_size, tiles=0)
        if self._skips_left > 0 and self._has_full_chunk():
            self._skips_left -= 1
            self._schedule_prompts(plan)
        if not plan.scheduled:
            self._skips_left = min(MAX_SKIPS, limits.max_num_batched_tokens // limits.chunked_prefill_size - 1)
            plan = StepPlan(limits.chunked_prefill_size, limits.max_tiles_per_step)
            self._schedule_decodes(plan.scheduled)
            num_decodes = len(plan.scheduled)
            plan.prompt_tokens = min(plan.prompt_tokens, limits.max_num_batched_tokens - num_decodes)
            self._schedule_prompts(plan)
            plan.add_forced(num_decodes)
            plan.add_drafts(num_decodes, limits, self._drafter)
        if not plan.scheduled:
            if self._running or self._waiting:
                raise InvariantError(f"{len(self._sequences)} sequences, and none of them can be scheduled")
            return None  # they have left the line for their images
        self._in_step = SchedulerOutput(
            tuple(plan.scheduled),
            self.blocks.take_copies(),
            tuple(plan.encode),
            self.blocks.take_state_copies(),
            self.blocks.take_window_copies(),
        )
        return self._in_step

    def update(self, output: SchedulerOutput, sampled: list[Sampled]) -> list[Sequence]:
        """Apply the results of a step, and return the sequence of each.

        Appends the tokens, sets the rows' finish reasons, and drops the sequences that end.
        """
        if output is not self._in_step:
            raise InvariantError("this is not the step that was scheduled")
        self._in_step = None
        self._num_steps += 1
        if output.encode:
            self.pictures.take_in(output.encode)
        results, sequences = iter(sampled), []
        block_size = self.limits.block_size
        for entry in output.scheduled:
            sequence, before = entry.sequence, entry.sequence.num_computed_tokens
            computed = before + entry.num_new_tokens
            self._num_tokens += entry.num_new_tokens
            row: Sampled | None = None
            is_last = entry.samples
            num_scores = len(entry.scores) if sequence.params.prompt_logprobs is not None else 0
            if is_last or num_scores:
                row = next(results, None)
                if row is None or row.request != sequence.request:
                    raise InvariantError(f"the runner sampled {row} for request {sequence.request}")
                sequences.append(sequence)
            if isinstance(row, RequestFailed):
                self.blocks.finish_saves(sequence, entry.saves, discard=True)
                self._drop(sequence, discard=True)
                continue
            if num_scores:
                sequence.count_scores(row, num_scores)
            if row is not None and is_last:
                if len(row.token_ids) > 1:
                    check_kept(row, entry.draft)
                computed -= len(entry.draft) - self._append(sequence, row, entry.draft)
            sequence.num_computed_tokens = computed
            if before // block_size != computed // block_size:
                self.blocks.register(sequence, before)
                self.blocks.finish_saves(sequence, entry.saves)
            self.blocks.drop_behind(sequence)
            if row is not None and row.finish_reason is not None:
                self._drop(sequence)
        if next(results, None) is not None:
            raise InvariantError("the runner sampled more tokens than were asked for")
        if len(self._sequences) > len(self._running) + len(self._waiting):  # some are out of the line for their images
            self._join(self._waiters.advance())
        return sequences

    def forget_all(self) -> None:
        """Drop all computed blocks and features. Raises InvariantError while there is a sequence."""
        if self._sequences:
            raise InvariantError(f"{len(self._sequences)} sequences are there, and all is to be forgotten")
        self.blocks.forget_all()
        self.pictures.forget_all()

    def statistics(self, num_sessions: int) -> WorkerStatistics:
        """The current counts."""
        return WorkerStatistics(
            num_sessions=num_sessions,
            num_waiting=len(self._sequences) - len(self._running),
            num_running=len(self._running),
            num_steps=self._num_steps,
            num_tokens=self._num_tokens,
            num_preemptions=self._num_preemptions,
            kv_blocks_total=self.blocks.full.num_blocks,
            kv_blocks_free=self.blocks.full.num_free,
            kv_blocks_cached=self.blocks.full.num_cached,
            prefix_cache_queries=self._prefix_cache_queries,
            prefix_cache_hits=self._prefix_cache_hits,
            encoder_cache_queries=self.pictures.num_queries,
            encoder_cache_hits=self.pictures.num_hits,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            draft_tokens=self._draft_tokens,
            accepted_tokens=self._accepted_tokens,
            state_slots_free=self.blocks.states.num_free,
            state_slots_kept=self.blocks.states.num_kept,
            window_blocks_free=self.blocks.windowed.num_free,
            window_blocks_cached=self.blocks.windowed.num_cached,
        )

    def check_integrity(self) -> None:
        """Raise InvariantError unless lists, states, block tables and reference counts agree."""
        out = self._waiters.sequences
        listed = [*self._running, *self._waiting, *out]
        check_known(listed, self._sequences)
        if self._in_step is None:
            check_prefills(self._running)
        check_order(self._running, self._waiting, out)
        self._waiters.check_integrity(listed)
        self.blocks.check_integrity(listed)

    # ---- a step -----------------------------------------------------------------------------------------------------

    @property
    def _prefilling(self) -> Sequence | None:
        """The running sequence that is in the middle of its prefill: only the latest can be."""
        return self._running[-1] if self._running and not self._running[-1].is_decoding else None

    def _has_full_chunk(self) -> bool:
        """Whether the rest of the prompts that run, or can be admitted now, fills a step without decodes.

        Not if they have tiles to encode, which takes long.
        """
        limits, blocks = self.limits, self.blocks
        left = limits.chunked_prefill_size
        prefilling = self._prefilling
        if prefilling is not None:
            if prefilling.to_encode(prefilling.num_computed_tokens):
                return False
            left -= prefilling.num_tokens - prefilling.num_computed_tokens
        num_blocks = blocks.num_left
        for num_running, sequence in enumerate(self._waiting, len(self._running)):
            num_blocks -= -(-sequence.num_tokens // limits.block_size)
            if left <= 0 or num_running == limits.max_num_seqs or num_blocks < num_running:
                break
            num_cached_tokens = blocks.find_prefix(sequence).num_tokens
            if sequence.to_encode(num_cached_tokens):
                break
            left -= sequence.num_tokens - num_cached_tokens
        return left <= 0

    def _schedule_decodes(self, scheduled: list[ScheduledSequence]) -> None:
        """In order of arrival, a token of each; blocks for its forced tokens are there as well."""
        for sequence in list(self._running):
            if sequence.status is not SequenceStatus.RUNNING:  # preempted for one before it
                break
            if len(scheduled) == self.limits.max_num_batched_tokens or not sequence.is_decoding:
                break
            if not self.blocks.hold_all(sequence) and not self._make_room(sequence):
                break
            scheduled.append(ScheduledSequence(sequence, 1))

    def _schedule_prompts(self, plan: StepPlan) -> None:
        """Schedule the rest of the prompt that runs, then the waiting ones, in order of arrival."""
        prefilling = self._prefilling
        if prefilling is not None:
            num_new_tokens = plan.fit(prefilling, prefilling.num_computed_tokens)
            num_tokens = prefilling.num_computed_tokens + num_new_tokens
            if num_new_tokens > 0:
                if not self._make_room(prefilling, num_tokens):
                    return
                plan.add_prompt(prefilling, num_new_tokens, self.blocks.begin_saves(prefilling, num_new_tokens))
            if num_tokens < prefilling.num_tokens:
                return
        self._admit(plan)

    def _make_room(self, sequence: Sequence, num_tokens: int | None = None) -> bool:
        """Grow the sequence's block tables, preempting the latest ones for it; False when that came to itself.

        Its window table is for `num_tokens`, or for all of them.
        """
        while not self.blocks.grow(sequence, num_tokens):
            latest = self._running.pop()
            self.blocks.release(latest)
            latest.status = SequenceStatus.PREEMPTED
            self._join([latest])
            self._num_preemptions += 1
            if latest is sequence:
                return False
        return True

    def _admit(self, plan: StepPlan) -> None:
        """Admit waiting sequences in order of arrival; a block is kept back for each that runs, to grow into.

        Those that have images to be decoded leave the line. A prompt that is not scheduled to its end is the last one.
        """
        while self._waiting and plan.prompt_tokens > 0 and len(self._running) < self.limits.max_num_seqs:
            sequence = self._waiting[0]
            prefix = self.blocks.find_prefix(sequence)
            num_cached_tokens = prefix.num_tokens
            to_encode = sequence.to_encode(num_cached_tokens)
            if any(picture.status is not PictureStatus.DECODED for picture in to_encode):
                self._waiting.popleft()
                self._join(self._waiters.decode(sequence, to_encode))
                continue
            num_new_tokens = plan.fit(sequence, num_cached_tokens)
            reserve = len(self._running)
            if num_new_tokens == 0 or not self.blocks.allocate(sequence, prefix, num_new_tokens, reserve=reserve):
                break
            if sequence.status is SequenceStatus.WAITING:
                sequence.num_cached_tokens = num_cached_tokens
                self._prefix_cache_queries += sequence.num_tokens
                self._prefix_cache_hits += num_cached_tokens
            if to_encode or sequence.reading:
                self.pictures.read(sequence, to_encode)
            self._waiting.popleft()
            sequence.status = SequenceStatus.RUNNING
            self._running.append(sequence)
            plan.add_prompt(sequence, num_new_tokens, self.blocks.begin_saves(sequence, num_new_tokens))
            if num_cached_tokens + num_new_tokens < sequence.num_tokens:
                break

    def _append(self, sequence: Sequence, row: TokensRow, draft: tuple[int, ...]) -> int:
        """Append the row's tokens, unless none was asked for, and to both the tokens that its grammar forces behind it.

        The first token with which the answer ends is the last one. Returns how many tokens of the draft were kept and
        have been computed.
        """
        if sequence.reading:
            self.pictures.stop_reading(sequence)
        row.finish_reason = sequence.append_sampled(row, self.limits.max_sequence_len)
        if sequence.num_output_tokens <= 1:
            self._prompt_tokens += sequence.num_prompt_tokens
        num_kept = max(0, len(row.token_ids) - 1)
        if draft and sequence.pace is not None:
            num_accepted = sum(map(eq, draft, row.token_ids))
            sequence.pace.learn(len(draft), num_accepted)
            self._draft_tokens += len(draft)
            self._accepted_tokens += num_accepted
        sequence.num_forced = 0
        while row.finish_reason is None and sequence.num_forced < MAX_FORCED:
            token_id = sequence.forced_token()
            if token_id is None or token_id >= self.limits.vocab_size:
                break
            row.token_ids.append(token_id)
            sequence.token_ids.append(token_id)
            sequence.num_forced += 1
            row.finish_reason = sequence.finish_reason(self.limits.max_sequence_len)
        self._generation_tokens += len(row.token_ids)
        return num_kept

    # ---- coming and going -------------------------------------------------------------------------------------------

    def _join(self, sequences: Items[Sequence]) -> None:
        """Insert them into the line, by arrival."""
        for sequence in sequences:
            insort(self._waiting, sequence, key=attrgetter("place"))

    def _drop(self, sequence: Sequence, *, discard: bool = False) -> None:
        del self._sequences[sequence.request]
        match sequence.status:
            case SequenceStatus.RUNNING:
                self._running.remove(sequence)
            case SequenceStatus.PARKED | SequenceStatus.DECODING:
                self._waiters.remove(sequence)
            case _:
                self._waiting.remove(sequence)
        if discard:
            self.blocks.discard(sequence)
        else:
            self.blocks.release(sequence)
        if sequence.images is not None:
            self.pictures.release(sequence, sequence.images.pictures, discard=discard)
        sequence.status = SequenceStatus.FINISHED
