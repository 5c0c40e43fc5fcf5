"""The real model sleeps, wakes, and gets other weights, in float32: never another token, whatever lies in between."""

import shutil

import pytest
import trio

from trioengine import EngineAsleep, EngineConfig, SamplingParams, TransitionFailed, open_engine
from trioengine.core.gguf import parse_gguf
from trioengine.core.lifecycle import Power
from trioengine.core.types import Cause

PATIENCE = 300  # seconds; a guard against hanging, far beyond what is needed
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
PROMPTS = ["What is the capital of France?", "Count from one to ten.", "My name is Ada."]


@pytest.fixture
def config(smollm2):
    return EngineConfig(model=str(smollm2), dtype="float32", kv_cache_memory=64 << 20, max_model_len=512)


@pytest.fixture
def other_weights(smollm2, tmp_path):
    """The same model with the MLPs of two layers exchanged."""
    path = tmp_path / "other.gguf"
    shutil.copyfile(smollm2, path)
    with path.open("r+b") as file:
        tensors = {tensor.name: tensor for tensor in parse_gguf(file.read()).tensors}
        one, two = (tensors[f"blk.{layer}.ffn_up.weight"] for layer in (9, 20))
        assert one.nbytes == two.nbytes
        contents = []
        for tensor in (one, two):
            file.seek(tensor.offset)
            contents.append(file.read(tensor.nbytes))
        for tensor, data in zip((two, one), contents, strict=True):
            file.seek(tensor.offset)
            file.write(data)
    yield path
    path.unlink()


async def answers(engine, session=None):
    """Of requests of their own; or the next turn of a session."""
    if session is not None:
        async with session.generate("Go on.", GREEDY) as generation:
            return [await generation.result()]
    return [await engine.generate(prompt, GREEDY) for prompt in PROMPTS]


def tokens(completions):
    return [completion.token_ids for completion in completions]


async def test_golden(config, other_weights):
    """The same prompts give the same tokens after each way to sleep and wake, and with the old weights again."""
    with trio.fail_after(PATIENCE):
        async with open_engine(config) as engine, engine.open_session() as session, engine.open_session() as control:
            expected = tokens(await answers(engine))
            first = tokens(await answers(engine, session))
            assert tokens(await answers(engine, control)) == first
            second = tokens(await answers(engine, control))
            third = tokens(await answers(engine, control))
            assert (await engine.generate(PROMPTS[0], GREEDY)).usage.cached_tokens > 0

            await engine.sleep(1)
            await engine.wake()
            after = await answers(engine)
            assert tokens(after) == expected
            assert after[0].usage.cached_tokens == 0
            assert tokens(await answers(engine, session)) == second

            await engine.sleep(2)
            await engine.wake(["kv_cache"])
            await engine.wake(["weights"])
            after = await answers(engine)
            assert (tokens(after), after[0].usage.cached_tokens) == (expected, 0)
            assert tokens(await answers(engine, session)) == third

            await engine.update_weights(str(other_weights))
            others = await answers(engine)
            assert (others[0].usage.cached_tokens, others[0].weight_versions) == (0, (2,))
            assert tokens(others) != expected
            await engine.sleep(2)
            await engine.update_weights(config.model)
            await engine.wake(reload=False)
            after = await answers(engine)
            assert (tokens(after), after[0].usage.cached_tokens) == (expected, 0)
            assert after[0].weight_versions == (3,)
            await engine.check_invariants()


async def test_the_story_of_lmdeploy_4541_twice(config):
    with trio.fail_after(PATIENCE):
        async with open_engine(config) as engine, engine.open_session() as session:
            expected = tokens(await answers(engine))
            for _ in range(2):
                async with session.generate("Tell me a story.", LONG) as stream:
                    await anext(stream)
                    await engine.sleep()
                    assert (await stream.result()).cause is Cause.SLEEP
                for _ in range(2):
                    with pytest.raises(EngineAsleep):
                        await engine.generate("new", GREEDY)
                    with pytest.raises(EngineAsleep):
                        async with session.generate("new", GREEDY):
                            pass
                    await engine.wake(["weights"])
                assert engine.state is Power.ASLEEP
                await engine.wake()
                assert tokens(await answers(engine)) == expected


async def test_a_stream_is_kept_over_the_night(config):
    with trio.fail_after(PATIENCE):
        async with open_engine(config) as engine, engine.open_session() as session:
            params = SamplingParams(max_tokens=40, temperature=0.8, seed=7, ignore_eos=True, logprobs=1)
            undisturbed = await engine.generate("Tell me a story.", params)
            async with session.generate("Tell me a story.", params) as stream:
                await anext(stream)
                await engine.sleep(2, mode="keep")
                assert engine.statistics().suspended == 1
                await engine.wake()
                completion = await stream.result()
            assert completion.token_ids == undisturbed.token_ids
            assert [list(entry) for entry in completion.logprobs] == [list(entry) for entry in undisturbed.logprobs]


async def test_weights_that_do_not_fit_change_nothing(config, tmp_path):
    with trio.fail_after(PATIENCE):
        async with open_engine(config) as engine:
            expected = tokens(await answers(engine))
            (tmp_path / "torn.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
            for path in (tmp_path / "none.gguf", tmp_path / "torn.gguf"):
                with pytest.raises(TransitionFailed, match=path.name):
                    await engine.update_weights(str(path))
            assert tokens(await answers(engine)) == expected
