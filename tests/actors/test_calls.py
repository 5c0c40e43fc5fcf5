"""The shorter calls: an engine by its model's name, one whole answer, sampling parameters as keywords."""

import pytest
import trio
from expectations import GREEDY, chat, reference

from trioengine import EngineConfig, RequestRejected, SamplingParams, open_engine
from trioengine.core.types import FinishReason
from trioengine.testing import Simulation


async def test_an_engine_by_its_models_name(autojump_clock):
    async with trio.open_nursery() as nursery:
        ports = Simulation(nursery).ports
        async with open_engine("toy", ports=ports, max_num_seqs=4, max_sessions=7) as engine:
            assert engine.config == EngineConfig(model="toy", max_num_seqs=4, max_sessions=7)
            assert list((await engine.generate("hello", GREEDY)).token_ids) == reference(engine, "hello")
        for wrong in ({"config": EngineConfig(), "max_sessions": 7}, {"max_session": 7}):
            with pytest.raises(TypeError):
                async with open_engine(ports=ports, **wrong):
                    pass


async def test_one_whole_answer_of_a_session(autojump_clock, simulated):
    engine, _ = simulated
    async with engine.open_session() as session:
        completion = await session.ask("hello", GREEDY, max_tokens=7, ignore_eos=True)
        expected = reference(engine, "hello", SamplingParams(max_tokens=7, ignore_eos=True))
        assert list(completion.token_ids) == expected
        assert completion.finish_reason is FinishReason.LENGTH
        assert session.history == [*chat("hello"), {"role": "assistant", "content": completion.text}]


async def test_sampling_parameters_as_keywords(autojump_clock, simulated):
    engine, _ = simulated
    async with engine.open_session() as session:
        async with session.generate("hello", GREEDY, max_tokens=3, ignore_eos=True) as generation:
            assert generation.params == SamplingParams(max_tokens=3, ignore_eos=True)
            assert (await generation.result()).usage.completion_tokens == 3
        assert (await engine.generate("hello", max_tokens=2, ignore_eos=True)).usage.completion_tokens == 2


async def test_what_is_no_sampling_parameter(autojump_clock, simulated):
    engine, _ = simulated
    async with engine.open_session() as session:
        with pytest.raises(TypeError, match="did you mean 'max_tokens'"):
            session.generate("hello", max_token=3)
        with pytest.raises(TypeError, match="did you mean 'max_tokens'"):
            await session.ask("hello", max_token=3)
        with pytest.raises(TypeError, match="did you mean 'max_tokens'"):
            await engine.generate("hello", max_token=3)
        with pytest.raises(RequestRejected, match="max_tokens must be"):
            session.generate("hello", max_tokens=0)
        assert engine.statistics().received == 0


async def test_a_generation_that_is_awaited_says_how_it_is_read(autojump_clock, simulated):
    engine, _ = simulated
    async with engine.open_session() as session:
        with pytest.raises(TypeError, match=r"async with session.generate\(...\).*await session.ask\(...\)"):
            await session.generate("hello")
