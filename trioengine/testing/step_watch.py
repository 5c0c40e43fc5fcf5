"""Refuses steps that no scheduler may plan, so that a nonsense step is found where it is made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from trioengine.worker.scheduling.sequence import (
    Limits,
    ScheduledSequence,
    SchedulerOutput,
    Sequence,
    SequenceStatus,
)

MAX_STEPS_LEFT_OUT = 8  # of a sequence that runs, in a row: more than any scheduler needs for the prompts of others


class StepWatch:
    """Checks the steps of one KV cache. Raises AssertionError, which names the request and the numbers."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._live: dict[Sequence, tuple[int, range]] = {}  # the latest step of each, and its computed tokens after it
        self._num_steps = 0

    def reset(self) -> None:
        """All sequences are gone: the cache is lost, or is another one."""
        self._live.clear()

    def take(self, output: SchedulerOutput, arrivals: Mapping[int, bool]) -> list[ScheduledSequence]:
        """Check a step before it is computed, and return the entries that begin, or begin again after a preemption.

        `arrivals` are all requests that the worker has, in their order, and whether they have images or a grammar.
        """
        self._num_steps += 1
        self._live = {each: seen for each, seen in self._live.items() if each.status is SequenceStatus.RUNNING}
        self._check_size(output)
        began = []
        for entry in output.scheduled:
            self._check_entry(entry)
            _, computed = self._live.get(entry.sequence, (0, range(0)))
            if entry.sequence.num_computed_tokens not in computed:
                began.append(entry)
            end = entry.sequence.num_computed_tokens + entry.num_new_tokens
            self._live[entry.sequence] = self._num_steps, range(end - len(entry.draft), end + 1)
        for entry in output.scheduled:
            self._check_written(entry)
        self._check_starved()
        self._check_order(began, arrivals)
        return began

    def _check_size(self, output: SchedulerOutput) -> None:
        limits, entries = self._limits, output.scheduled
        running = {entry.sequence for entry in entries}
        assert len(running) == len(entries), f"a step has {len(entries)} entries of {len(running)} sequences"
        assert len(entries) <= limits.max_num_seqs, f"a step has {len(entries)} of {limits.max_num_seqs} sequences"
        tokens, most = output.num_tokens, limits.max_num_batched_tokens
        assert tokens <= most, f"a step computes {tokens} tokens, the most are {most}"
        prompts = sum(entry.num_new_tokens for entry in entries if entry.num_new_tokens > 1)
        most = limits.chunked_prefill_size
        assert prompts <= most, f"a step computes {prompts} tokens of prompts, the most are {most}"
        assert len(output.encode) <= limits.max_tiles_per_step, f"a step encodes {len(output.encode)} tiles"

    def _check_entry(self, entry: ScheduledSequence) -> None:
        sequence, limits = entry.sequence, self._limits
        name, end = f"request {sequence.request}", sequence.num_computed_tokens + entry.num_new_tokens
        assert entry.num_new_tokens > 0, f"a step computes nothing of {name}"
        num_tokens = sequence.num_tokens + len(entry.draft)
        assert end <= num_tokens, f"a step computes {end} tokens of {name}, which has {num_tokens}"
        assert end == num_tokens or not entry.draft, f"a step computes half of a draft of {name}"
        most = min(sequence.params.num_speculative_tokens, sequence.num_tokens_left(limits.max_sequence_len) - 1)
        assert not entry.draft or len(entry.draft) <= most, (
            f"a step drafts {len(entry.draft)} of {most} tokens of {name}"
        )
        assert sequence.status is SequenceStatus.RUNNING, f"a step computes {name}, which is {sequence.status.value}"
        room = len(sequence.block_table) * limits.block_size
        assert end <= room, f"a step computes {end} tokens of {name}, whose blocks have room for {room}"
        assert len(set(sequence.block_table)) == len(sequence.block_table), f"{name} has a block twice"
        if limits.windows:
            self._check_window(entry)
        assert not _has_ended(sequence, limits), f"a step continues {name}, which has ended: {sequence.params}"

    def _check_window(self, entry: ScheduledSequence) -> None:
        """The window table has the blocks that its tokens see and are written to, and no others before these."""
        sequence, size = entry.sequence, self._limits.block_size
        computed, table, behind = sequence.num_computed_tokens, sequence.window_table, sequence.num_behind
        name, end = f"request {sequence.request}", computed + entry.num_new_tokens
        room = (behind + len(table)) * size
        assert end <= room, f"a step computes {end} tokens of {name}, whose blocks of windows end at {room}"
        first = max(0, computed // size * size + 1 - self._limits.windows.size)
        assert behind == first // size, f"{name} sees tokens from {first} on, and gave back {behind} blocks of windows"
        assert len(set(table)) == len(table), f"{name} has a block of windows twice"

    def _check_written(self, entry: ScheduledSequence) -> None:
        """The blocks that a sequence writes to belong to no other one that runs."""
        sequence, size = entry.sequence, self._limits.block_size
        first = sequence.num_computed_tokens // size
        last = (sequence.num_computed_tokens + entry.num_new_tokens - 1) // size
        written = sequence.block_table[first : last + 1]
        in_windows = sequence.window_table[max(0, first - sequence.num_behind) : last + 1 - sequence.num_behind]
        saves = [slot for slot, _ in entry.saves]
        for other in self._live:
            taken = [slot for slot in (sequence.state_slot, *saves) if slot and slot == other.state_slot]
            assert other is sequence or not taken, f"request {sequence.request} writes a state of {other.request}"
            if other is sequence:
                continue
            shared = [block for block in written if block in other.block_table]
            shared += [block for block in in_windows if block in other.window_table]
            assert not shared, f"request {sequence.request} writes blocks {shared}, which {other.request} also has"

    def _check_order(self, began: Iterable[ScheduledSequence], arrivals: Mapping[int, bool]) -> None:
        """No sequence begins before one that came earlier, and that waits for nothing but its turn."""
        running = {sequence.request for sequence in self._live}
        beginning = {entry.sequence.request for entry in began}
        overtaken: list[int] = []
        for request, may_wait in arrivals.items():
            assert request not in beginning or not overtaken, f"request {request} begins before {overtaken}"
            if not may_wait and request not in running:
                overtaken.append(request)

    def _check_starved(self) -> None:
        for sequence, (latest, _) in self._live.items():
            steps = self._num_steps - latest
            assert steps <= MAX_STEPS_LEFT_OUT, f"request {sequence.request} runs, and got nothing in {steps} steps"


def _has_ended(sequence: Sequence, limits: Limits) -> bool:
    """Whether its answer is over, by the parameters of the request."""
    params, num_output = sequence.params, sequence.num_output_tokens
    if num_output < 1:
        return False
    if sequence.constraint is not None and sequence.constraint.is_complete:
        return True
    latest, is_whole = sequence.token_ids[-1], num_output >= params.min_tokens
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else sequence.eos_token_ids)
    is_full = sequence.num_tokens >= limits.max_sequence_len or num_output >= (params.max_tokens or num_output + 1)
    return is_full or (is_whole and latest in ends)
