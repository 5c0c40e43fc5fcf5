"""LoRA adapters of an engine: each session's own, until it ends."""

import pytest
import trio

from trioengine import EngineConfig
from trioengine.actors.engine import Engine
from trioengine.core.errors import EngineOverloaded, RequestRejected
from trioengine.testing import Simulation
from trioengine.testing.toy_model import toy_answer
from trioengine.testing.toy_weights import toy_adapted, toy_weights

PROMPT = [7, 8, 9, 10, 11, 12, 13, 14]


@pytest.fixture
def engine(simulated):
    return simulated[0]


@pytest.fixture
def simulation(simulated):
    return simulated[1]


def answer(adapter=None, prompt=PROMPT, weights="toy"):
    """The toy model's answer of six tokens with the adapter at a path."""
    return tuple(toy_answer(prompt, 6, ignore_eos=True, weights=toy_adapted(toy_weights(weights), adapter)))


async def generate(engine, adapter):
    completion = await engine.generate(PROMPT, max_tokens=6, ignore_eos=True, adapter=adapter)
    return completion.token_ids


class Talk:
    """A session whose prompts are PROMPT, again and again, with the adapter at a path."""

    def __init__(self, session, path=None):
        self.session, self.path, self._history = session, path, ()

    async def ask(self, weights="toy"):
        """One more answer, which must be the model's with these weights."""
        async with self.session.generate(PROMPT, max_tokens=6, ignore_eos=True) as generation:
            await self.check(generation, weights)

    async def check(self, generation, weights="toy"):
        completion = await generation.result()
        self._history += tuple(PROMPT)
        assert completion.token_ids == answer(self.path, self._history, weights)
        self._history += completion.token_ids


async def test_each_session_has_its_own(engine, autojump_clock):
    await engine.load_adapter("one", "adapters/one")
    await engine.load_adapter("two", "adapters/two")
    assert dict(engine.adapters) == {"one": "adapters/one", "two": "adapters/two"}
    async with (
        engine.open_session() as plain,
        engine.open_session(adapter="one") as first,
        engine.open_session(adapter="two") as second,
    ):
        talks = Talk(plain), Talk(first, "adapters/one"), Talk(second, "adapters/two")
        for talk in (*talks, *reversed(talks)):  # nothing of another adapter's prefix is used
            await talk.ask()
    completion = await engine.generate(PROMPT, max_tokens=6, ignore_eos=True, adapter="two")
    assert completion.token_ids == answer("adapters/two")
    assert completion.usage.cached_tokens > 0, "of the session with the same adapter"


async def test_an_unloaded_one_stays_with_its_sessions(engine, autojump_clock):
    await engine.load_adapter("one", "adapters/one")
    async with engine.open_session(adapter="one") as session:
        engine.unload_adapter("one")
        with pytest.raises(RequestRejected, match="adapter 'one' is not loaded; loaded: none"):
            engine.open_session(adapter="one")
        await engine.load_adapter("one", "adapters/another")
        await Talk(session, "adapters/one").ask()
        assert await generate(engine, "one") == answer("adapters/another")


async def test_it_comes_back_with_the_next_worker(engine, simulation, autojump_clock):
    await engine.load_adapter("one", "adapters/one")
    async with engine.open_session(adapter="one") as session:
        talk = Talk(session, "adapters/one")
        await talk.ask()
        async with session.generate(PROMPT, max_tokens=6, ignore_eos=True) as generation:
            await anext(generation)
            simulation.worker.kill()
            await talk.check(generation)
        await talk.ask()
    assert len(simulation.workers) == 2


async def test_after_a_sleep_and_other_weights(engine, autojump_clock):
    await engine.load_adapter("one", "adapters/one")
    async with engine.open_session(adapter="one") as session:
        talk = Talk(session, "adapters/one")
        await talk.ask()
        await engine.sleep()
        await engine.wake()
        await talk.ask()
        await engine.update_weights("toy-2")
        await talk.ask("toy-2")


async def test_one_that_cannot_be_loaded_fails_its_requests_alone(engine, autojump_clock):
    await engine.load_adapter("bad", "adapters/misshapen")
    for _ in range(2):
        with pytest.raises(RequestRejected, match="adapters/misshapen: other shapes") as caught:
            await generate(engine, "bad")
        assert caught.value.code == "adapter_failed"
        assert await generate(engine, None) == answer()


async def test_refusals(engine, autojump_clock):
    with pytest.raises(RequestRejected, match="path: adapters/other: an adapter of another model") as caught:
        await engine.load_adapter("one", "adapters/other")
    assert (caught.value.code, caught.value.param) == ("invalid_adapter", "path")
    await engine.load_adapter("one", "adapters/one")
    with pytest.raises(RequestRejected, match="name 'one' belongs to an adapter already") as caught:
        await engine.load_adapter("one", "adapters/one")
    assert caught.value.code == "adapter_exists"
    for name in ("", "a\nb", "x" * 257, 7):
        with pytest.raises(RequestRejected, match="name must be a string of 1 to 256 printable characters"):
            await engine.load_adapter(name, "adapters/one")
    with pytest.raises(RequestRejected, match="path must be a file or directory, got ''"):
        await engine.load_adapter("two", "")
    for call in (engine.unload_adapter, lambda name: engine.open_session(adapter=name)):
        with pytest.raises(RequestRejected, match="adapter 'two' is not loaded; loaded: 'one'") as caught:
            call("two")
        assert caught.value.code == "adapter_not_found"
    with pytest.raises(RequestRejected, match="adapter 'two' is not loaded"):
        await generate(engine, "two")


async def test_a_name_is_taken_while_the_files_are_checked(engine, simulation, autojump_clock):
    simulation.thread_passes = 3
    refused = []

    async def load(path):
        try:
            await engine.load_adapter("one", path)
        except RequestRejected as exc:
            refused.append(exc.code)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(load, "adapters/one")
        nursery.start_soon(load, "adapters/two")
    assert refused == ["adapter_exists"]
    with trio.CancelScope() as scope:
        scope.cancel()
        await engine.load_adapter("two", "adapters/two")
    assert scope.cancelled_caught
    assert list(engine.adapters) == ["one"]
    await engine.load_adapter("two", "adapters/two")


async def test_before_the_model_is_read(autojump_clock):
    with pytest.raises(EngineOverloaded):
        await Engine().load_adapter("one", "adapters/one")


async def test_a_worker_keeps_few_that_are_idle(engine, simulation, autojump_clock):
    for number in range(12):
        await engine.load_adapter(f"{number}", f"adapters/{number}")
    async with engine.open_session(adapter="0") as session:
        await Talk(session, "adapters/0").ask()
        for number in range(1, 12):
            assert await generate(engine, f"{number}") == answer(f"adapters/{number}")
        await engine.check_invariants()  # a round trip: the worker has ended the sessions
        held = simulation.worker.runner.adapters
        assert {*held.values()} == {"adapters/0", *(f"adapters/{number}" for number in range(4, 12))}
        await engine.sleep()
        assert not held
        await engine.wake()


async def test_those_of_the_configuration_come_first(autojump_clock):
    """Until they are read, no other can take their names."""
    refused = []
    async with trio.open_nursery() as nursery:
        simulation = Simulation(nursery, thread_passes=5)
        engine = Engine(EngineConfig(model="toy", adapters=("one=adapters/one",)), ports=simulation.ports)
        nursery.start_soon(engine.run)
        while not engine.adapters:
            try:
                await engine.load_adapter("one", "adapters/two")
            except EngineOverloaded as exc:
                refused.append(exc.code)
            await trio.lowlevel.checkpoint()
        await engine.ready()
        assert dict(engine.adapters) == {"one": "adapters/one"}
        engine.close()
    assert {*refused} == {"loading"}
