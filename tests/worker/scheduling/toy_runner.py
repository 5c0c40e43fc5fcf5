"""A runner without a model: the next token is a hash of the whole history, read through the block table.

Its KV store holds a value a slot that depends on the token there and on the value before it, as keys and values do in
a model, and like real KV memory it is never cleared: a wrong block table, a block that is shared and written to, or a
prefix that is stale or another one's shows as a wrong token.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable
from itertools import accumulate

from trioengine.core.sampling_params import SamplingParams
from trioengine.worker.scheduling.limits import Limits
from trioengine.worker.scheduling.output import SampledToken, SchedulerOutput
from trioengine.worker.scheduling.scheduler import SampledRow, Scheduler
from trioengine.worker.scheduling.sequence import Sequence

VOCAB_SIZE = 40
EOS = 0
NOT_A_TOKEN = -1
FIRST_VALUE = 1


def value_of(before: int, token_id: int) -> int:
    """The value in the slot of `token_id` after a slot with `before`."""
    return zlib.crc32(token_id.to_bytes(4, "little"), before)


def sample(values: Iterable[int]) -> int:
    """The token that follows all these slots."""
    return zlib.crc32(array("I", values).tobytes()) % VOCAB_SIZE


def next_token(history: Iterable[int]) -> int:
    """What the toy model says after `history`: the reference."""
    return sample(list(accumulate(history, value_of, initial=FIRST_VALUE))[1:])


def answer(prompt: list[int], params: SamplingParams, max_sequence_len: int) -> list[int]:
    """The reference: what a request must give, computed without blocks, batches or caches."""
    tokens = list(prompt)
    output: list[int] = []
    while True:
        output.append(next_token(tokens))
        tokens.append(output[-1])
        stops = output[-1] in params.stop_token_ids or (output[-1] == EOS and not params.ignore_eos)
        if (stops and len(output) >= params.min_tokens) or len(output) == params.max_tokens:
            return output
        if len(tokens) == max_sequence_len:
            return output


class ToyRunner:
    """Sequences whose request is in `failing` get an error instead of a token."""

    def __init__(self, limits: Limits) -> None:
        self.block_size = limits.block_size
        self.store = [0] * (limits.kv_blocks_total * limits.block_size)
        self.failing: set[int] = set()
        self.num_computed = 0

    def execute(self, output: SchedulerOutput) -> list[SampledToken]:
        for entry in output.scheduled:
            sequence, start = entry.sequence, entry.sequence.num_computed_tokens
            value = self.store[self._slot(sequence, start - 1)] if start else FIRST_VALUE
            for position in range(start, start + entry.num_new_tokens):
                value = value_of(value, sequence.token_ids[position])
                self.store[self._slot(sequence, position)] = value
            self.num_computed += entry.num_new_tokens
        return [self._sample(entry.sequence) for entry in output.scheduled if entry.samples]

    def _sample(self, sequence: Sequence) -> SampledToken:
        if sequence.request in self.failing:
            return SampledToken(sequence.request, NOT_A_TOKEN, error="the logits are not finite")
        values = [self.store[self._slot(sequence, position)] for position in range(sequence.num_tokens)]
        return SampledToken(sequence.request, sample(values))

    def _slot(self, sequence: Sequence, position: int) -> int:
        return sequence.block_table[position // self.block_size] * self.block_size + position % self.block_size


def sequence_of(request: int, prompt: list[int], params: SamplingParams | None = None) -> Sequence:
    """A new sequence, its session numbered as the request."""
    params = params or SamplingParams(max_tokens=4, seed=1, ignore_eos=True)
    return Sequence(request, request, list(prompt), len(prompt), params, frozenset({EOS}))


def run_step(scheduler: Scheduler, runner: ToyRunner) -> list[SampledRow]:
    """One step and a check of the books before and after its update."""
    output = scheduler.schedule()
    assert output is not None
    assert output.num_tokens <= scheduler.limits.max_num_batched_tokens
    assert len(output.scheduled) <= scheduler.limits.max_num_seqs
    scheduler.check_integrity()
    rows = scheduler.update(output, runner.execute(output))
    scheduler.check_integrity()
    return rows


def run_all(scheduler: Scheduler, runner: ToyRunner) -> list[SampledRow]:
    """Steps until nothing is left; the rows of the sequences' ends."""
    ends: list[SampledRow] = []
    while scheduler.has_work:
        ends += [row for row in run_step(scheduler, runner) if row.finish_reason is not None]
    return ends
