"""Sessions of a model with states: a turn computes only its own tokens, and the answers are those of a fresh start."""

import random

import pytest
from helpers import tiny_decoders
from helpers.torch_driver import generate, load

from trioengine.core.messages import AddMessage, AddSession, EndSession, Tokens
from trioengine.core.power import ALL_TAGS
from trioengine.core.sampling_params import ResolvedParams
from trioengine.core.types import token_ids
from trioengine.worker.scheduling.engine_core import EngineCore
from trioengine.worker.scheduling.sequence import Limits

pytestmark = pytest.mark.usefixtures("one_thread")
PARAMS = ResolvedParams(temperature=0.0, seed=0, max_tokens=7, ignore_eos=True)


@pytest.fixture(params=["lfm2", "qwen3-next"])
def path(tmp_path, request):
    return tiny_decoders.write(tmp_path, request.param)


@pytest.fixture
def runner(path, options):
    return load(path, kv_cache_memory=8 << 20, **options)


@pytest.fixture
def fresh(path, options):
    """The answer to a whole history, of a runner of its own and without a prefix cache."""
    runner = load(path, kv_cache_memory=8 << 20, **options)

    def answer(prompt):
        (found,), _ = generate(runner, [prompt], PARAMS.max_tokens, enable_prefix_caching=False)
        return found

    return answer


class Core:
    """An engine core, and the tokens of its sessions."""

    def __init__(self, runner):
        info = runner.info
        sizes = info.vocab_size, info.max_model_len, info.kv_blocks_total, info.block_size
        self.core = EngineCore(runner, Limits(*sizes, state_slots=info.state_slots, windows=info.windows), lambda: 0.0)
        self.histories = {}

    def turn(self, session, new, base=None):
        """Ask with new tokens behind the history, or behind its first `base` tokens: the answer and the usage."""
        if session not in self.histories:
            self.core.handle(AddSession(session))
            self.histories[session] = []
        history = self.histories[session]
        del history[len(history) if base is None else base :]
        self.core.handle(AddMessage(session, session, len(history), token_ids(new), PARAMS, ()))
        history += new
        answer, usage = [], None
        while self.core.has_work:
            for reply in self.core.step():
                for row in reply.rows if isinstance(reply, Tokens) else ():
                    answer += row.token_ids
                    usage = row.usage or usage
        history += answer
        return answer, usage


def turns(seed, count):
    rng = random.Random(seed)
    return [[rng.randrange(200) for _ in range(rng.randrange(1, 14))] for _ in range(count)]


def test_ten_turns_compute_only_their_own_tokens(runner, fresh):
    core, computed = Core(runner), 0
    for number, new in enumerate(turns(0, 10)):
        before = list(core.histories.get(1, []))
        answer, usage = core.turn(1, new)
        assert answer == fresh(before + new)
        assert usage.cached_tokens == max(0, len(before) - 1)  # the latest token of an answer is not computed before
        num_tokens = core.core.statistics().num_tokens
        assert num_tokens - computed == len(new) + (number > 0) + len(answer) - 1
        computed = num_tokens


def test_a_fork_shares_the_turns_before_it(runner, fresh):
    """A session that begins with these turns finds them, and those after it find the place of the fork."""
    core, common = Core(runner), turns(1, 4)
    for new in common:
        core.turn(1, new)
    shared = list(core.histories[1])
    forks = [[60 + number, *range(20)] for number in range(3)]
    cached = []
    for number, fork in enumerate(forks, start=2):
        answer, usage = core.turn(number, shared + fork)
        assert answer == fresh(shared + fork)
        cached.append(usage.cached_tokens)
    assert cached[0] == len(shared) - 1
    assert min(cached) >= len(shared) // 16 * 16 - 16


def test_a_history_that_is_cut_begins_where_a_state_is(runner, fresh):
    core = Core(runner)
    for new in turns(2, 6):
        core.turn(1, new)
    history = list(core.histories[1])
    answer, usage = core.turn(1, [5, 6, 7], base=len(history) - 9)
    assert answer == fresh([*history[:-9], 5, 6, 7])
    assert usage.cached_tokens > 0


def test_states_do_not_survive_a_sleep(runner):
    core = Core(runner)
    first, _ = core.turn(1, list(range(40)))
    core.core.handle(EndSession(1))
    del core.histories[1]
    core.core._scheduler.forget_all()
    runner.sleep()
    assert runner.states is None
    runner.wake(ALL_TAGS)
    again, usage = core.turn(1, list(range(40)))
    assert (again, usage.cached_tokens) == (first, 0)


def test_caches_share_the_memory(tmp_path, options):
    """Slots for twice the sequences of a step, and for padding, in at most half of the memory; the rest is blocks."""
    path = tiny_decoders.write(tmp_path, "lfm2")
    per_slot, per_block = 4 * 2 * 48 * 4, 2 * 2 * 2 * 8 * 4 * 16
    many = load(path, kv_cache_memory=4 << 20, **options).info
    assert (many.state_slots, many.kv_blocks_total) == (257, ((4 << 20) - 257 * per_slot) // per_block)
    few = load(path, kv_cache_memory=60 * per_slot, **options).info
    assert (few.state_slots, few.kv_blocks_total) == (30, 30 * per_slot // per_block)
    as_before = load(path, kv_blocks=9, state_slots=5, **options).info
    assert (as_before.state_slots, as_before.kv_blocks_total) == (5, 9)
