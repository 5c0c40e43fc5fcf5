"""Random sessions on a tiny KV cache: every token is the reference's, every block comes back.

The machine keeps the engine's mirror of each session, checks each row against the toy model's answer for that mirror,
and compares all books after every event; its runner checks each step, and that none reads what a request with another
cache salt has computed. Few blocks and few distinct prompts make preemption, eviction and shared prefixes common.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from helpers.session_machine import SessionMachine
from helpers.toy_driver import next_token
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from trioengine.core.messages import (
    AddMessage,
    Audit,
    Audited,
    EndSession,
    FromWorker,
    RequestFailed,
    SessionEnded,
    StopSession,
    Tokens,
    TokensRow,
)
from trioengine.core.sampling_params import ResolvedParams
from trioengine.core.types import FinishReason, token_ids
from trioengine.testing.toy_model import IM_END as EOS
from trioengine.testing.toy_model import VOCAB_SIZE
from trioengine.testing.toy_runner import ToyRunner
from trioengine.worker.scheduling.engine_core import EngineCore
from trioengine.worker.scheduling.sequence import (
    MAX_FORCED,
    NO_WINDOWS,
    Limits,
    Sampled,
    SchedulerOutput,
    Sequence,
    SequenceStatus,
    Windows,
)


@dataclass
class Request:
    number: int
    params: ResolvedParams
    num_output: int = 0


@dataclass
class Mirror:
    tokens: list[int] = field(default_factory=list)
    request: Request | None = None


class CheckingRunner(ToyRunner):
    """Checks how many tokens of prompts a step computes, and how many lie between two tokens of a sequence."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self._limits = limits
        self._prompt_tokens: dict[Sequence, int] = {}  # since the latest token of each that decodes

    def execute(self, output: SchedulerOutput) -> list[Sampled]:
        limits = self._limits
        decoding = {entry.sequence for entry in output.scheduled if entry.sequence.is_decoding}
        prompt_tokens = sum(entry.num_new_tokens for entry in output.scheduled if entry.sequence not in decoding)
        assert prompt_tokens <= limits.chunked_prefill_size
        assert output.num_tokens <= limits.max_num_batched_tokens
        for sequence in list(self._prompt_tokens):
            self._prompt_tokens[sequence] += prompt_tokens
            if sequence.status is not SequenceStatus.RUNNING:
                del self._prompt_tokens[sequence]
            elif limits.max_num_seqs < limits.max_num_batched_tokens:  # there is room for all that decode
                assert self._prompt_tokens[sequence] <= limits.max_num_batched_tokens
        self._prompt_tokens |= {entry.sequence: 0 for entry in output.scheduled if entry.samples}
        return super().execute(output)


class EngineCoreMachine(SessionMachine):
    mirrors: dict[int, Mirror]

    @initialize(
        kv_blocks_total=st.integers(2, 16),
        block_size=st.integers(1, 4),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.integers(1, 16),
        chunked_prefill_size=st.integers(1, 8),
        max_model_len=st.integers(2, 40),
        enable_prefix_caching=st.booleans(),
        state_slots=st.sampled_from([0, 0, 2, 3, 6]),
        window=st.integers(0, 9),
        window_blocks=st.integers(0, 8),
    )
    def start(self, window: int, window_blocks: int, **limits: Any) -> None:
        if window and not limits["state_slots"]:
            held = window + limits["max_num_batched_tokens"] + MAX_FORCED
            least = min(limits["kv_blocks_total"], 2 + -(-held // limits["block_size"]))
            windows = Windows(window, min(limits["kv_blocks_total"], least + window_blocks))
        else:
            windows = NO_WINDOWS
        self.limits = Limits(vocab_size=VOCAB_SIZE, windows=windows, **limits)
        self.runner = CheckingRunner(self.limits)
        self.core = EngineCore(self.runner, self.limits, lambda: 0.0)
        self.mirrors = {}
        self.last_session = 0
        self.last_request = 0

    @precondition(lambda self: self.idle or self.has_room)
    @rule(
        data=st.data(),
        fresh=st.booleans(),
        length=st.integers(0, 20),
        token=st.integers(1, 2),
        max_tokens=st.integers(1, 20),
        min_tokens=st.integers(0, 3),
        ignore_eos=st.booleans(),
        stop_token_ids=st.sampled_from([(), tuple(b"a"), tuple(b"abcde")]),
        cache_salt=st.sampled_from(["", "", "a", "b"]),
    )
    def add_message(
        self,
        data: st.DataObject,
        fresh: bool,
        length: int,
        token: int,
        max_tokens: int,
        min_tokens: int,
        ignore_eos: bool,
        stop_token_ids: tuple[int, ...],
        cache_salt: str,
    ) -> None:
        session = self.draw_session(data, Mirror(), fresh=fresh)
        mirror = self.mirrors[session]
        base = data.draw(st.sampled_from([0, len(mirror.tokens)]) | st.integers(0, len(mirror.tokens)))
        params = ResolvedParams(
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            ignore_eos=ignore_eos,
            stop_token_ids=stop_token_ids,
            cache_salt=cache_salt,
            seed=1,
        )
        self.last_request += 1
        mirror.tokens = [*mirror.tokens[:base], *[token] * length]
        mirror.request = Request(self.last_request, params)
        message = AddMessage(session, self.last_request, base, token_ids([token] * length), params, (EOS,))
        replies = self.core.handle(message)
        fits = 0 < len(mirror.tokens) < self.limits.max_sequence_len
        assert bool(replies) is not fits
        self.take(replies)

    @precondition(lambda self: self.mirrors)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(sorted(self.mirrors)))
        request = self.mirrors[session].request
        replies = self.core.handle(StopSession(session, request.number if request else self.last_request + 1))
        assert len(replies) == (request is not None)
        self.take(replies)

    @precondition(lambda self: self.mirrors)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(sorted(self.mirrors)))
        (ended,) = self.core.handle(EndSession(session))
        assert ended == SessionEnded(session, self.core.statistics())
        del self.mirrors[session]

    @precondition(lambda self: self.busy)
    @rule(data=st.data())
    def break_sampling(self, data: st.DataObject) -> None:
        request = self.mirrors[data.draw(st.sampled_from(self.busy))].request
        assert request is not None
        self.runner.fail_requests.add(request.number)

    @rule(num_steps=st.integers(1, 8))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.take(self.core.step())
            self.core.check_integrity()

    @invariant()
    def audit_agrees(self) -> None:
        (audited,) = self.core.handle(Audit(1))
        assert isinstance(audited, Audited)
        assert audited.sessions == tuple(sorted(self.mirrors))
        requests = [mirror.request.number for mirror in self.mirrors.values() if mirror.request is not None]
        assert audited.requests == tuple(sorted(requests))
        counts = (audited.kv_blocks_free, audited.kv_blocks_cached, audited.kv_blocks_held)
        assert min(counts) >= 0
        assert sum(counts) == audited.kv_blocks_total
        slots = (audited.state_slots_free, audited.state_slots_kept, audited.state_slots_held)
        assert min(slots) >= 0
        assert sum(slots) == max(0, self.limits.state_slots - 1)
        in_windows = (audited.window_blocks_free, audited.window_blocks_cached, audited.window_blocks_held)
        assert min(in_windows) >= 0
        assert sum(in_windows) == audited.window_blocks_total == self.limits.windows.num_blocks

    @invariant()
    def books_agree(self) -> None:
        self.core.check_integrity()
        assert self.core.has_work is bool(self.busy)
        for session, mirror in self.mirrors.items():
            assert self.core.held_tokens(session).tolist() == mirror.tokens
        listed = [*self.core._scheduler._running, *self.core._scheduler._waiting]
        assert [sequence.request for sequence in listed] == sorted(sequence.request for sequence in listed)

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        steps_left = 100 * len(self.busy) * self.limits.max_sequence_len
        while self.busy:
            self.take(self.core.step())
            steps_left -= 1
            assert steps_left > 0, "no progress"
        for session in list(self.mirrors):
            self.core.handle(EndSession(session))
        self.core.check_integrity()
        statistics = self.core.statistics()
        assert statistics.num_sessions == statistics.num_running == statistics.num_waiting == 0
        assert statistics.kv_blocks_free + statistics.kv_blocks_cached == statistics.kv_blocks_total
        assert statistics.state_slots_free + statistics.state_slots_kept == max(0, self.limits.state_slots - 1)
        assert statistics.window_blocks_free + statistics.window_blocks_cached == self.limits.windows.num_blocks

    def take(self, replies: list[FromWorker]) -> None:
        for reply in replies:
            match reply:
                case Tokens(rows=rows):
                    for row in rows:
                        self.take_row(row)
                case RequestFailed(session=session, request=number):
                    request = self.mirrors[session].request
                    assert request is not None
                    assert request.number == number
                    self.mirrors[session].request = None
                case _:
                    raise AssertionError(f"{reply} was not asked for")

    def take_row(self, row: TokensRow) -> None:
        mirror = self.mirrors[row.session]
        request = mirror.request
        assert request is not None
        assert request.number == row.request
        if row.finish_reason is not FinishReason.ABORT:
            assert row.token_ids.tolist() == [next_token(mirror.tokens)]
            mirror.tokens += row.token_ids
            request.num_output += 1
            assert row.finish_reason is self.expected_end(mirror.tokens, request)
        if row.finish_reason is not None:
            assert row.usage is not None
            assert row.usage.completion_tokens == request.num_output
            assert row.usage.prompt_tokens == len(mirror.tokens) - request.num_output
            assert row.usage.cached_tokens < row.usage.prompt_tokens
            mirror.request = None

    def expected_end(self, tokens: list[int], request: Request) -> FinishReason | None:
        params = request.params
        stops = tokens[-1] in params.stop_token_ids or (tokens[-1] == EOS and not params.ignore_eos)
        if stops and request.num_output >= params.min_tokens:
            return FinishReason.STOP
        if request.num_output == params.max_tokens or len(tokens) == self.limits.max_sequence_len:
            return FinishReason.LENGTH
        return None


TestEngineCoreMachine = EngineCoreMachine.TestCase
TestEngineCoreMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
