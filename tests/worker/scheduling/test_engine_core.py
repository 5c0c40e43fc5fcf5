"""The engine core: what each message does, what the rows say, and what the engine must not send."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.toy_driver import answer, params

from trioengine.core.codec import encode
from trioengine.core.connection import MIN_FRAME_LIMIT
from trioengine.core.errors import RemoteProtocolError
from trioengine.core.messages import (
    NO_TOKEN_LEFT,
    AddMessage,
    AddSession,
    Audit,
    Audited,
    EndSession,
    FromWorker,
    Ping,
    RequestFailed,
    SessionEnded,
    StopSession,
    Tokens,
    TokensRow,
    ToWorker,
)
from trioengine.core.sampling_params import EMBEDDING, ResolvedParams, resolved_params
from trioengine.core.types import FinishReason, token_ids
from trioengine.testing.toy_model import IM_END as EOS
from trioengine.testing.toy_model import VOCAB_SIZE, toy_embedding
from trioengine.testing.toy_runner import ToyRunner
from trioengine.worker.scheduling.engine_core import EngineCore
from trioengine.worker.scheduling.sequence import Limits, Sampled, SchedulerOutput

LIMITS = Limits(
    vocab_size=VOCAB_SIZE, max_model_len=64, kv_blocks_total=32, block_size=4, max_num_seqs=4, max_num_batched_tokens=16
)
EMBEDDED = resolved_params(EMBEDDING, {}, seed=0)
PARAMS = ResolvedParams(max_tokens=3, seed=1, ignore_eos=True)


class Clock:
    """Seconds that only pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """An engine core over the toy runner, and what it said."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.clock = Clock()
        self.runner = ToyRunner(limits)
        self.core = EngineCore(self.runner, limits, self.clock)

    def handle(self, *messages: ToWorker) -> list[FromWorker]:
        return [reply for message in messages for reply in self.core.handle(message)]

    def run(self) -> list[FromWorker]:
        replies: list[FromWorker] = []
        while self.core.has_work:
            replies += self.core.step()
            self.core.check_integrity()
        return replies

    def rows(self) -> list[TokensRow]:
        return [row for reply in self.run() if isinstance(reply, Tokens) for row in reply.rows]


def message(session: int, request: int, base: int, ids: list[int], params: ResolvedParams = PARAMS) -> AddMessage:
    return AddMessage(session, request, base, token_ids(ids), params, (EOS,))


def test_an_answer_is_rows_and_its_last_row_has_the_end() -> None:
    bench = Bench()
    assert bench.handle(AddSession(1), message(1, 7, 0, [1, 2])) == []
    rows = bench.rows()
    assert [row.token_ids.tolist() for row in rows] == [[token] for token in answer([1, 2], PARAMS, 64)]
    assert [row.finish_reason for row in rows] == [None, None, FinishReason.LENGTH]
    assert [row.usage is None for row in rows] == [False, True, False]
    assert bench.core.held_tokens(1).tolist() == [1, 2, *answer([1, 2], PARAMS, 64)]
    assert bench.core.step() == []


def test_a_step_is_one_message_with_a_row_for_each_that_sampled() -> None:
    bench = Bench()
    for session in (1, 2):
        bench.handle(AddSession(session), message(session, session, 0, [session] * 10))
    first, second = bench.core.step(), bench.core.step()
    assert [[row.session for row in reply.rows] for reply in first if isinstance(reply, Tokens)] == [[1]]
    assert [[row.session for row in reply.rows] for reply in second if isinstance(reply, Tokens)] == [[1, 2]]


def test_a_step_that_only_computes_a_chunk_has_no_rows() -> None:
    bench = Bench()
    bench.handle(AddSession(1), message(1, 1, 0, [1] * 20))
    assert bench.core.step() == [Tokens((), bench.core.statistics())]
    (reply,) = bench.core.step()
    assert isinstance(reply, Tokens)
    assert len(reply.rows) == 1


def test_embeddings_of_a_step_are_divided_among_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each message fits a frame also if vectors have 8,192 numbers; rows keep their order."""
    limits = replace(LIMITS, embeds=True, max_num_seqs=100, max_num_batched_tokens=200, kv_blocks_total=400)
    bench = Bench(limits)
    vectors = [bytes([session]) * (4 * 8192) for session in range(100)]

    def embed(output: SchedulerOutput) -> list[Sampled]:
        return [each.sequence.embedded_row(vectors[each.sequence.session]) for each in output.scheduled]

    monkeypatch.setattr(bench.runner, "execute", embed)
    for session in range(100):
        bench.handle(AddSession(session), message(session, 1 + session, 0, [session], EMBEDDED))
    replies = bench.core.step()
    assert [len(reply.rows) for reply in replies if isinstance(reply, Tokens)] == [16] * 6 + [4]
    assert max(len(encode(reply)) for reply in replies) < MIN_FRAME_LIMIT
    rows = [row for reply in replies if isinstance(reply, Tokens) for row in reply.rows]
    assert [row.embedding for row in rows] == vectors
    assert {row.finish_reason for row in rows} == {FinishReason.LENGTH} and all(row.usage for row in rows)
    assert bench.core.requests == () and bench.core.step() == []


def test_an_embedding_model_runs_no_other_requests() -> None:
    bench = Bench(replace(LIMITS, embeds=True))
    bench.handle(AddSession(1))
    with pytest.raises(RemoteProtocolError, match="request 5 is not for a model of this kind"):
        bench.handle(message(1, 5, 0, [1, 2]))
    bench.handle(message(1, 5, 0, [1, 2], EMBEDDED))
    (row,) = bench.rows()
    assert row.embedding == toy_embedding([1, 2])


def test_another_model_embeds_nothing() -> None:
    bench = Bench()
    bench.handle(AddSession(1))
    with pytest.raises(RemoteProtocolError, match="request 5 is not for a model of this kind"):
        bench.handle(message(1, 5, 0, [1, 2], EMBEDDED))


def test_every_step_says_how_many_tokens_were_computed() -> None:
    """With that of a prompt that is too long for one step, of a cached one, and of a request that is dropped."""
    bench = Bench()
    bench.handle(AddSession(1), AddSession(2), message(1, 1, 0, [1] * 20))
    assert _num_tokens(bench.run()) == [16, 20, 21, 22]
    bench.handle(message(1, 2, 0, [1] * 20), message(2, 3, 0, [2] * 9))
    (reply,) = bench.core.step()
    assert _num_tokens([reply]) == [22 + 1 + 9]
    bench.handle(EndSession(1))
    assert _num_tokens(bench.run()) == [33, 34]
    assert bench.core.statistics().num_steps == 7


def _num_tokens(replies: list[FromWorker]) -> list[int]:
    return [reply.statistics.num_tokens for reply in replies if isinstance(reply, Tokens)]


def test_the_end_of_a_session_says_which_blocks_are_free_now() -> None:
    bench = Bench()
    bench.handle(AddSession(1), message(1, 1, 0, [1] * 6))
    bench.core.step()
    assert bench.core.statistics().kv_blocks_free == 30
    (ended,) = bench.handle(EndSession(1))
    assert isinstance(ended, SessionEnded)
    assert (ended.statistics.kv_blocks_free, ended.statistics.kv_blocks_cached) == (31, 1)
    assert (ended.statistics.num_sessions, ended.statistics.num_running) == (0, 0)


def test_usage_counts_tokens_and_seconds() -> None:
    bench = Bench()
    bench.handle(AddSession(1), message(1, 1, 0, [1] * 20))
    bench.clock.now += 2
    bench.core.step()
    bench.clock.now += 3
    usage = bench.rows()[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (20, 3, 0)
    assert (usage.queue_time, usage.prefill_time) == (2.0, 3.0)
    bench.handle(message(1, 2, 23, [5]))
    usage = bench.rows()[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (24, 3, 20)


def test_another_salt_finds_nothing_of_the_turns_before() -> None:
    """The session still holds their tokens, and `base` still counts them; only what was computed is not used."""
    bench = Bench()
    bench.handle(AddSession(1))
    cached = []
    for request, salt in enumerate(("a", "a", "b", "", "b", "a"), 1):
        held = len(bench.core.held_tokens(1))
        salted = params(3, cache_salt=salt)
        bench.handle(message(1, request, held, [5] * (20 if request == 1 else 1), salted))
        prompt = bench.core.held_tokens(1).tolist()
        rows = bench.rows()
        assert [row.token_ids.tolist() for row in rows] == [[token] for token in answer(prompt, salted, 64)]
        usage = rows[-1].usage
        assert usage is not None
        cached.append(usage.cached_tokens)
    # of 20, 24, 28, 32, 36, 40 tokens: what was computed of them under the same salt, in blocks of 4
    assert cached == [0, 20, 0, 0, 28, 24]


def test_base_truncates() -> None:
    bench = Bench()
    bench.handle(AddSession(1), message(1, 1, 0, [1, 2, 3]))
    bench.rows()
    bench.handle(message(1, 2, 2, [9]))
    assert bench.core.held_tokens(1).tolist() == [1, 2, 9]
    assert [row.token_ids[0] for row in bench.rows()] == answer([1, 2, 9], PARAMS, 64)


def test_stop_ends_with_an_empty_row_and_keeps_the_tokens() -> None:
    bench = Bench()
    bench.handle(AddSession(1), message(1, 1, 0, [1, 2]))
    bench.core.step()
    (reply,) = bench.handle(StopSession(1, 1))
    assert isinstance(reply, Tokens)
    (row,) = reply.rows
    assert (row.request, row.token_ids.tolist(), row.finish_reason) == (1, [], FinishReason.ABORT)
    assert row.usage is not None
    assert (row.usage.prompt_tokens, row.usage.completion_tokens) == (2, 1)
    assert bench.core.held_tokens(1).tolist() == [1, 2, answer([1, 2], PARAMS, 64)[0]]
    assert not bench.core.has_work
    assert bench.handle(StopSession(1, 1)) == []


def test_stop_before_the_first_step() -> None:
    bench = Bench()
    (reply,) = bench.handle(AddSession(1), message(1, 1, 0, [1, 2]), StopSession(1, 1))
    assert isinstance(reply, Tokens)
    usage = reply.rows[0].usage
    assert usage is not None
    assert (usage.completion_tokens, usage.queue_time, usage.prefill_time) == (0, 0.0, 0.0)


def test_stop_of_a_finished_request_does_not_touch_the_next() -> None:
    bench = Bench()
    bench.handle(AddSession(1), message(1, 1, 0, [1, 2]))
    bench.rows()
    bench.handle(message(1, 2, 0, [3]))
    assert bench.handle(StopSession(1, 1)) == []
    assert [row.request for row in bench.rows()] == [2, 2, 2]


def test_end_drops_the_request_and_gives_everything_back() -> None:
    bench = Bench()
    bench.handle(AddSession(1), AddSession(2), message(1, 1, 0, [1] * 20), message(2, 2, 0, [2]))
    bench.core.step()
    assert bench.handle(EndSession(1)) == [SessionEnded(1, bench.core.statistics())]
    assert {row.session for row in bench.rows()} == {2}
    assert bench.handle(EndSession(2)) == [SessionEnded(2, bench.core.statistics())]
    with pytest.raises(KeyError):
        bench.core.held_tokens(1)
    (audited,) = bench.handle(Audit(5))
    assert isinstance(audited, Audited)
    assert (audited.audit, audited.sessions, audited.requests, audited.kv_blocks_held) == (5, (), (), 0)


def test_audit_under_load() -> None:
    bench = Bench()
    bench.handle(AddSession(4), AddSession(2), message(2, 3, 0, [1] * 9))
    bench.core.step()
    (audited,) = bench.handle(Audit(1))
    assert isinstance(audited, Audited)
    assert (audited.sessions, audited.requests) == ((2, 4), (3,))
    assert (audited.kv_blocks_held, audited.kv_blocks_cached, audited.kv_blocks_free) == (3, 0, 29)
    assert audited.kv_blocks_total == 32


def test_a_refused_request_fails_alone_and_the_session_goes_on() -> None:
    bench = Bench()
    (failed,) = bench.handle(AddSession(1), message(1, 1, 0, [1] * 64))
    assert isinstance(failed, RequestFailed)
    assert (failed.session, failed.request, failed.code) == (1, 1, "context_length_exceeded")
    assert len(bench.core.held_tokens(1)) == 64
    bench.handle(message(1, 2, 3, [2]))
    assert len(bench.rows()) == 3


def test_a_request_that_cannot_be_sampled_fails_alone() -> None:
    bench = Bench()
    bench.handle(AddSession(1), AddSession(2), message(1, 1, 0, [1]), message(2, 2, 0, [2]))
    bench.core.step()
    bench.runner.fail_requests = {1}
    tokens, failed = bench.core.step()
    assert isinstance(tokens, Tokens)
    assert [row.session for row in tokens.rows] == [2]
    assert failed == RequestFailed(1, 1, "sampling_failed", "failed on request")
    assert bench.core.held_tokens(1).tolist() == [1, answer([1], PARAMS, 64)[0]]
    bench.runner.fail_requests = {2}
    replies = bench.core.step()
    failed = RequestFailed(2, 2, "sampling_failed", "failed on request")
    assert replies == [Tokens((), bench.core.statistics()), failed]


def test_a_failure_says_whose_fault_it_is() -> None:
    class Runner:
        def execute(self, output: SchedulerOutput) -> list[Sampled]:
            return [output.scheduled[0].sequence.failure(NO_TOKEN_LEFT, "none left")]

    core = EngineCore(Runner(), LIMITS, Clock())
    core.handle(AddSession(1))
    core.handle(message(1, 1, 0, [1]))
    assert core.step()[1:] == [RequestFailed(1, 1, "no_token_left", "none left")]


def test_logprobs_travel_with_their_token() -> None:
    class Runner:
        def execute(self, output: SchedulerOutput) -> list[Sampled]:
            return [output.scheduled[0].sequence.row(5, {5: -0.5, 6: -1.0})]

    core = EngineCore(Runner(), LIMITS, Clock())
    core.handle(AddSession(1))
    core.handle(message(1, 1, 0, [1]))
    (reply,) = core.step()
    assert isinstance(reply, Tokens)
    assert reply.rows[0].logprobs == ({5: -0.5, 6: -1.0},)


def test_statistics_travel_with_every_step() -> None:
    bench = Bench()
    bench.handle(AddSession(1), AddSession(2), message(1, 1, 0, [1]))
    (reply,) = bench.core.step()
    assert isinstance(reply, Tokens)
    statistics = reply.statistics
    assert (statistics.num_sessions, statistics.num_running, statistics.num_waiting) == (2, 1, 0)
    assert (statistics.num_steps, statistics.kv_blocks_free) == (1, 31)
    assert statistics == bench.core.statistics()


@pytest.mark.parametrize(
    "wrong",
    [
        AddSession(1),
        message(2, 2, 0, [1]),
        message(1, 2, 0, [1]),
        StopSession(2, 1),
        EndSession(2),
        Ping(1),
    ],
)
def test_what_the_engine_must_not_send_changes_nothing(wrong: ToWorker) -> None:
    bench = Bench()
    bench.handle(AddSession(1), message(1, 1, 0, [1, 2]))
    with pytest.raises(RemoteProtocolError):
        bench.handle(wrong)
    assert [row.token_ids[0] for row in bench.rows()] == answer([1, 2], PARAMS, 64)


@pytest.mark.parametrize("base", [-1, 3])
def test_a_base_outside_of_what_is_held_is_refused(base: int) -> None:
    bench = Bench()
    bench.handle(AddSession(1), message(1, 1, 0, [1]), StopSession(1, 1))
    with pytest.raises(RemoteProtocolError, match="base"):
        bench.handle(message(1, 2, base, [1]))
    assert bench.core.held_tokens(1).tolist() == [1]
