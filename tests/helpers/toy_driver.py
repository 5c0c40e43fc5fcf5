"""Run sequences through the scheduler and the toy model, and the answers that they must give."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from trioengine.core.messages import RequestFailed, TokensRow
from trioengine.core.sampling_params import ResolvedParams
from trioengine.core.types import FinishReason
from trioengine.testing.toy_model import IM_END as EOS
from trioengine.testing.toy_model import VOCAB_SIZE, toy_answer
from trioengine.testing.toy_runner import ToyRunner
from trioengine.worker.scheduling.scheduler import Scheduler
from trioengine.worker.scheduling.sequence import Limits, Sampled, Sequence, SequenceStatus


def make(**changes: int) -> tuple[Scheduler, ToyRunner]:
    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "max_model_len": 64,
        "kv_blocks_total": 64,
        "block_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
    }
    limits = Limits(**(values | changes))
    return Scheduler(limits), ToyRunner(limits)


def params(max_tokens: int, **changes: Any) -> ResolvedParams:
    return replace(ResolvedParams(max_tokens=max_tokens, seed=1, ignore_eos=True), **changes)


def next_token(history: Iterable[int]) -> int:
    """What the toy model says after `history`: the reference."""
    return toy_answer(history, 1)[0]


def answer(prompt: list[int], params: ResolvedParams, max_sequence_len: int) -> list[int]:
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


def sequence_of(request: int, prompt: list[int], params: ResolvedParams | None = None) -> Sequence:
    """A new sequence, its session numbered as the request."""
    params = params or ResolvedParams(max_tokens=4, seed=1, ignore_eos=True)
    return Sequence(request, request, list(prompt), len(prompt), params, frozenset({EOS}))


def run_step(scheduler: Scheduler, runner: ToyRunner) -> list[Sampled]:
    """One step; its rows."""
    return _step(scheduler, runner)[1]


def shape(scheduler: Scheduler, runner: ToyRunner) -> list[tuple[int, int]]:
    """One step; (request, tokens) of what it computed."""
    return _step(scheduler, runner)[0]


def _step(scheduler: Scheduler, runner: ToyRunner) -> tuple[list[tuple[int, int]], list[Sampled]]:
    """With a check of its limits, and of the books before and after its update."""
    output = scheduler.schedule()
    assert output is not None
    assert output.num_tokens <= scheduler.limits.max_num_batched_tokens
    assert len(output.scheduled) <= scheduler.limits.max_num_seqs
    prompts = sum(entry.num_new_tokens for entry in output.scheduled if not entry.sequence.is_decoding)
    assert prompts <= scheduler.limits.chunked_prefill_size
    computed = [(entry.sequence.request, entry.num_new_tokens) for entry in output.scheduled]
    scheduler.check_integrity()
    rows = runner.execute(output)
    sequences = scheduler.update(output, rows)
    assert [sequence.request for sequence in sequences] == [row.request for row in rows]
    scheduler.check_integrity()
    return computed, rows


def run_all(scheduler: Scheduler, runner: ToyRunner) -> list[Sampled]:
    """Steps until nothing is left; the rows of the sequences' ends."""
    ends: list[Sampled] = []
    while scheduler.has_work:
        rows = run_step(scheduler, runner)
        ends += [row for row in rows if isinstance(row, RequestFailed) or row.finish_reason is not None]
    return ends


def finish(prompt: list[int], sampling: ResolvedParams, **limits: int) -> tuple[FinishReason | None, list[int]]:
    """Run one request; how and with which tokens it finished, which are checked against the reference."""
    scheduler, runner = make(**limits)
    sequence = sequence_of(1, prompt, sampling)
    scheduler.add(sequence)
    (end,) = run_all(scheduler, runner)
    assert sequence.status is SequenceStatus.FINISHED
    assert scheduler.blocks.full.num_held == 0
    assert sequence.token_ids[len(prompt) :] == answer(prompt, sampling, scheduler.limits.max_sequence_len)
    assert isinstance(end, TokensRow)
    return end.finish_reason, sequence.token_ids[len(prompt) :]
