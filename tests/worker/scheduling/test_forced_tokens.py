"""Tokens that a grammar forces: the same answer as with one token a step, in fewer steps, however it is cut or moved.

A request that asks for logprobs gets every token from the sampler, and so is the reference.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
from helpers.json_schemas import make_schema

from trioengine import Grammar, RequestRejected
from trioengine.core.messages import AddMessage, AddSession, RequestFailed, Tokens, TokensRow, WorkerStatistics
from trioengine.core.sampling_params import ResolvedParams
from trioengine.core.types import FinishReason, Usage, token_ids
from trioengine.testing.toy_grammar import toy_compile
from trioengine.testing.toy_model import IM_END, VOCAB_SIZE, toy_answer
from trioengine.testing.toy_runner import ToyRunner
from trioengine.worker.scheduling.engine_core import EngineCore
from trioengine.worker.scheduling.grammars import compile_for
from trioengine.worker.scheduling.sequence import MAX_FORCED, Limits, Sequence

NUM_SCHEMAS = 50
PERSON = Grammar.json_schema(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "is_old": {"type": "boolean"}, "n": {"const": 12}},
        "required": ["name", "is_old", "n"],
        "additionalProperties": False,
    }
)
PROMPT = [1, 2, 3]


@dataclass
class Answer:
    """The rows of a request."""

    rows: list[list[int]] = field(default_factory=list)
    usages: list[Usage | None] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str = ""

    @property
    def tokens(self) -> list[int]:
        return [token for row in self.rows for token in row]

    @property
    def outcome(self) -> tuple[list[int], FinishReason | None, str]:
        return self.tokens, self.finish_reason, self.error


class Queue:
    """A compiler whose sequences are compiled before the first step."""

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []

    def submit(self, sequence: Sequence) -> None:
        self.sequences.append(sequence)


def limits_of(**changes: int) -> Limits:
    values: dict[str, Any] = {
        "max_model_len": 128,
        "kv_blocks_total": 256,
        "block_size": 4,
        "max_num_batched_tokens": 64,
    }
    return Limits(vocab_size=VOCAB_SIZE, **(values | changes))


def params_of(grammar: Grammar, **changes: Any) -> ResolvedParams:
    return replace(ResolvedParams(max_tokens=80, seed=1, ignore_eos=True, grammar=grammar), **changes)


def run(
    requests: list[ResolvedParams], *, delivered: list[int] | None = None, **changes: int
) -> tuple[list[Answer], WorkerStatistics]:
    """Run the requests at once, each behind the same prompt, of whose answers these tokens were delivered before."""
    limits, compiler = limits_of(**changes), Queue()
    core = EngineCore(ToyRunner(limits), limits, lambda: 0.0, compiler=compiler)
    answers = [Answer() for _ in requests]
    output = delivered or []
    for number, params in enumerate(requests):
        core.handle(AddSession(number))
        ids = token_ids([*PROMPT, *output])
        core.handle(AddMessage(number, number, 0, ids, params, (IM_END,), num_output=len(output)))
    for sequence in compiler.sequences:
        for reply in core.handle(compile_for(sequence, toy_compile)):
            assert isinstance(reply, RequestFailed)
            answers[reply.request].error = reply.code
    while core.has_work:
        for reply in core.step():
            match reply:
                case Tokens(rows=rows):
                    for row in rows:
                        take(answers[row.request], row)
                case RequestFailed():
                    answers[reply.request].error = reply.code
        core.check_integrity()
    return answers, core.statistics()


def take(answer: Answer, row: TokensRow) -> None:
    assert answer.finish_reason is None
    answer.rows.append(row.token_ids.tolist())
    answer.usages.append(row.usage)
    answer.finish_reason = row.finish_reason


def one(params: ResolvedParams, **changes: Any) -> Answer:
    (answer,), _ = run([params], **changes)
    return answer


def sampled(params: ResolvedParams, **changes: Any) -> Answer:
    """The reference: every token comes from the sampler."""
    answer = one(replace(params, logprobs=0), **changes)
    assert all(len(row) == 1 for row in answer.rows)
    return answer


def schemas() -> list[Grammar]:
    found: list[Grammar] = []
    seed = 0
    while len(found) < NUM_SCHEMAS:
        try:
            grammar = Grammar.json_schema(make_schema(seed))
            toy_compile(grammar)
            found.append(grammar)
        except RequestRejected:
            pass
        seed += 1
    return found


def test_fifty_schemas() -> None:
    requests = [params_of(grammar) for grammar in schemas()]
    forced, statistics = run(requests, enable_prefix_caching=False)
    expected, others = run([replace(params, logprobs=0) for params in requests], enable_prefix_caching=False)
    assert [answer.outcome for answer in forced] == [answer.outcome for answer in expected]
    assert [answer.usages[-1] for answer in forced] == [answer.usages[-1] for answer in expected]
    assert statistics.generation_tokens == others.generation_tokens
    assert statistics.prompt_tokens == others.prompt_tokens
    assert statistics.num_steps < others.num_steps


def test_an_answer_takes_fewer_steps_and_is_the_references() -> None:
    answer = one(params_of(PERSON))
    assert answer.tokens == toy_answer(PROMPT, 80, ignore_eos=True, grammar=PERSON)
    assert answer.outcome == sampled(params_of(PERSON)).outcome
    text = bytes(answer.tokens).decode()
    assert bytes(answer.rows[0]).decode() == '{"name": "'
    assert text.endswith(', "n": 12}') and len(answer.rows) < len(text) / 2


def test_the_first_row_has_the_usage() -> None:
    answer = one(params_of(PERSON))
    assert [usage is not None for usage in answer.usages] == [True, *[False] * (len(answer.rows) - 2), True]
    assert answer.usages[0] is not None and answer.usages[0].completion_tokens == len(answer.rows[0])


@pytest.mark.parametrize(
    ("chunk", "batch", "block_size"), [(1, 1, 4), (1, 8, 1), (2, 2, 3), (3, 16, 4), (5, 6, 16), (64, 64, 1)]
)
def test_steps_of_any_size(chunk: int, batch: int, block_size: int) -> None:
    requests = [params_of(grammar, cache_salt=str(number)) for number, grammar in enumerate([PERSON, *schemas()[:5]])]
    expected = [sampled(params).outcome for params in requests]
    answers, _ = run(requests, chunked_prefill_size=chunk, max_num_batched_tokens=batch, block_size=block_size)
    assert [answer.outcome for answer in answers] == expected


@pytest.mark.parametrize("max_tokens", range(1, 60))
def test_max_tokens_may_cut_in_the_middle_of_forced_tokens(max_tokens: int) -> None:
    whole = one(params_of(PERSON)).tokens
    answer = one(params_of(PERSON, max_tokens=max_tokens))
    assert answer.tokens == whole[:max_tokens]
    assert answer.outcome == sampled(params_of(PERSON, max_tokens=max_tokens)).outcome
    assert answer.usages[-1] is not None and answer.usages[-1].completion_tokens == len(answer.tokens)


def test_no_token_is_forced_where_none_is_asked_for() -> None:
    assert one(params_of(PERSON, max_tokens=0, prompt_logprobs=0)).outcome == ([], FinishReason.LENGTH, "")


@pytest.mark.parametrize("max_model_len", range(5, 40, 3))
def test_the_context_may_cut_as_well(max_model_len: int) -> None:
    params, whole = params_of(PERSON, max_tokens=None), one(params_of(PERSON)).tokens
    answer = one(params, max_model_len=max_model_len)
    assert answer.tokens == whole[: max_model_len - len(PROMPT)]
    assert answer.outcome == sampled(params, max_model_len=max_model_len).outcome


@pytest.mark.parametrize("stop", sorted(set(b'{"nameisold:12}')))
def test_a_stop_token_may_be_forced(stop: int) -> None:
    for min_tokens in (0, 1, 4, 20):
        params = params_of(PERSON, stop_token_ids=(stop,), min_tokens=min_tokens)
        assert one(params).outcome == sampled(params).outcome


def test_an_answer_goes_on_behind_any_number_of_its_tokens() -> None:
    whole = one(params_of(PERSON))
    for num_delivered in range(1, len(whole.tokens)):
        rest = one(params_of(PERSON), delivered=whole.tokens[:num_delivered])
        assert (whole.tokens[:num_delivered] + rest.tokens, rest.finish_reason) == (whole.tokens, FinishReason.STOP)
        assert rest.usages[0] is None or len(rest.rows) == 1


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
@pytest.mark.parametrize("kv_blocks_total", [13, 17, 23, 31])
def test_preempted_answers_are_the_same(kv_blocks_total: int, enable_prefix_caching: bool) -> None:
    requests = [params_of(PERSON, max_tokens=40, cache_salt=str(number)) for number in range(4)]
    answers, statistics = run(
        requests, kv_blocks_total=kv_blocks_total, max_model_len=48, enable_prefix_caching=enable_prefix_caching
    )
    assert statistics.num_preemptions > 0
    assert [answer.outcome for answer in answers] == [sampled(params).outcome for params in requests]


def test_forced_texts_of_any_length() -> None:
    text = "abcdefghij" * 10
    answer = one(params_of(Grammar.choice([text]), max_tokens=200))
    assert (bytes(answer.tokens).decode(), answer.finish_reason) == (text, FinishReason.STOP)
    assert max(map(len, answer.rows)) == 1 + MAX_FORCED
    assert answer.usages[-1] is not None and answer.usages[-1].completion_tokens == 100


def test_prompts_come_before_forced_tokens() -> None:
    """Of a step that a prompt fills, an answer with forced tokens to compute gets one token, as any other."""
    limits, compiler = limits_of(chunked_prefill_size=8, max_num_batched_tokens=16), Queue()
    core = EngineCore(ToyRunner(limits), limits, lambda: 0.0, compiler=compiler)
    core.handle(AddSession(1))
    core.handle(AddMessage(1, 1, 0, token_ids(PROMPT), params_of(PERSON), (IM_END,)))
    core.handle(compile_for(compiler.sequences[0], toy_compile))
    core.step()
    core.handle(AddSession(2))
    prompt = token_ids(range(100, 124))
    core.handle(AddMessage(2, 2, 0, prompt, ResolvedParams(max_tokens=1, seed=1), (IM_END,)))
    computed = [core.statistics().num_tokens]
    while 2 in core.requests:
        core.step()
        core.check_integrity()
        computed.append(core.statistics().num_tokens)
    steps = [after - before for before, after in pairwise(computed)]
    assert sum(steps) - 24 <= len(steps) and len(steps) == 3
