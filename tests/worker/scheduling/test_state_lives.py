"""Random lives of sessions over eight state slots, each checked at every step: no state is another session's.

The runner pads each step with a row that writes to the padding's slot, and refuses a step that reads the state of other
tokens than the sequence's. The environment variable STATE_LIVES sets the number of lives.
"""

import os
import random
from dataclasses import replace

import pytest

from trioengine.core.messages import AddMessage, AddSession, EndSession, StopSession, Tokens
from trioengine.core.sampling_params import ResolvedParams
from trioengine.core.types import token_ids
from trioengine.testing.toy_model import IM_END, VOCAB_SIZE, toy_answer
from trioengine.testing.toy_runner import ToyRunner
from trioengine.worker.scheduling.engine_core import EngineCore
from trioengine.worker.scheduling.sequence import Limits

LIVES = int(os.environ.get("STATE_LIVES", "400"))
LIMITS = Limits(
    VOCAB_SIZE, 64, 20, 4, max_num_seqs=12, max_num_batched_tokens=24, chunked_prefill_size=12, state_slots=8
)


class Lives:
    """Sessions that come and go; each has turns, and keeps, cuts or ends its history."""

    def __init__(self, seed, limits):
        self.rng, self.limits = random.Random(seed), limits
        self.core = EngineCore(ToyRunner(limits), limits, lambda: 0.0)
        self.histories = {}  # of live sessions
        self.asked = {}  # of those with a request: its number, prompt and answer
        self.openings = [[self.rng.randrange(97, 123) for _ in range(18)] for _ in range(4)]
        self.num_sessions = self.num_requests = self.num_whole = 0

    def begin(self):
        self.num_sessions += 1
        self.core.handle(AddSession(self.num_sessions))
        self.histories[self.num_sessions] = []

    def ask(self, session):
        rng, history = self.rng, self.histories[session]
        base = len(history) if rng.random() < 0.7 else rng.randrange(len(history) + 1)
        new = rng.choice(self.openings)[: rng.randrange(1, 19)] if base == 0 else [rng.randrange(97, 123)]
        prompt = [*history[:base], *new]
        params = ResolvedParams(max_tokens=rng.randrange(1, 12), seed=1)
        self.num_requests += 1
        message = AddMessage(session, self.num_requests, base, token_ids(new), params, (IM_END,))
        if self.core.handle(message):
            self.histories[session] = prompt  # too long, and refused
        else:
            room = self.limits.max_sequence_len - len(prompt)
            self.asked[session] = self.num_requests, prompt, toy_answer(prompt, min(params.max_tokens, room)), []

    def take(self, replies):
        for reply in replies:
            for row in reply.rows if isinstance(reply, Tokens) else ():
                number, prompt, expected, found = self.asked[row.session]
                assert row.request == number
                found += row.token_ids
                assert found == expected[: len(found)]
                if row.finish_reason is not None:
                    self.num_whole += found == expected
                    self.histories[row.session] = [*prompt, *found]
                    del self.asked[row.session]

    def act(self):
        """One event of a life, or a step."""
        rng, idle = self.rng, [session for session in self.histories if session not in self.asked]
        chance = rng.random()
        if chance < 0.12 and len(self.histories) < 16:
            self.begin()
        elif chance < 0.3 and idle:
            self.ask(rng.choice(idle))
        elif chance < 0.34 and self.asked:
            session = rng.choice([*self.asked])
            self.take(self.core.handle(StopSession(session, self.asked[session][0])))
        elif chance < 0.4 and self.histories:
            session = rng.choice([*self.histories])
            self.core.handle(EndSession(session))
            del self.histories[session]
            self.asked.pop(session, None)
        else:
            self.take(self.core.step())
        self.core.check_integrity()


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_no_state_is_of_another_session(enable_prefix_caching):
    lives = Lives(0, replace(LIMITS, enable_prefix_caching=enable_prefix_caching))
    while lives.num_sessions < LIVES:
        lives.act()
    while lives.asked:
        lives.take(lives.core.step())
    for session in lives.histories:
        lives.core.handle(EndSession(session))
    lives.core.check_integrity()
    statistics = lives.core.statistics()
    assert lives.num_whole > LIVES / 2
    assert statistics.num_preemptions > 0
    assert (statistics.prefix_cache_hits > 0) is enable_prefix_caching
    assert statistics.state_slots_free + statistics.state_slots_kept == 7
