"""A draft model: found and read before a worker starts, and named to each worker."""

from dataclasses import replace
from pathlib import Path

import pytest

from trioengine import EngineConfig, ModelError, open_engine
from trioengine.aio.concurrency import open_unwrapped_nursery
from trioengine.core.messages import Configure
from trioengine.hub.model_info import check_same_tokens
from trioengine.testing import Simulation
from trioengine.testing.toy_model import toy_model
from trioengine.testing.toy_tokenizer import tokenizer_json
from trioengine.text.tokenizer import Tokenizer

CONFIG = EngineConfig(model="toy", draft_model="small", num_speculative_tokens=5)


def with_exchanged_tokens():
    """The toy model, but that two tokens have each other's ids."""
    exchanged = tokenizer_json().replace('"a": 97, "b": 98', '"a": 98, "b": 97')
    return replace(toy_model(), path=Path("small"), tokenizer=Tokenizer.from_json(exchanged))


def configurations(simulation):
    received = [message for worker in simulation.workers for message in worker.received]
    return [message.config for message in received if isinstance(message, Configure)]


async def test_each_worker_gets_its_path(autojump_clock, caplog):
    caplog.set_level("INFO")
    async with open_unwrapped_nursery() as nursery:
        simulation = Simulation(nursery)
        async with open_engine(CONFIG, ports=simulation.ports) as engine:
            await engine.generate("hello", max_tokens=3)
            simulation.worker.kill()
            await engine.generate("hello", max_tokens=3, wait=True)
    paths = [(config.model_path, config.draft_model_path) for config in configurations(simulation)]
    assert paths == [("toy", "small")] * 2
    assert "ready: toy with drafts by small on cpu" in caplog.text
    assert "drafts nothing" not in caplog.text


async def test_a_draft_model_without_drafts_is_logged(autojump_clock, caplog):
    async with open_unwrapped_nursery() as nursery:
        simulation = Simulation(nursery)
        async with open_engine(replace(CONFIG, num_speculative_tokens=0), ports=simulation.ports):
            pass
    assert "drafts nothing unless requests set num_speculative_tokens" in caplog.text


async def test_other_tokens_are_refused(autojump_clock):
    models = {Path("toy"): toy_model(), Path("small"): with_exchanged_tokens()}
    async with open_unwrapped_nursery() as nursery:
        simulation = Simulation(nursery)
        ports = replace(simulation.ports, read_model=models.__getitem__)
        with pytest.raises(ModelError, match=r"^small cannot draft for toy: token 97 is 'b', not 'a'$"):
            async with open_engine(CONFIG, ports=ports):
                pass
    assert simulation.workers == []


def test_tokens_that_one_of_both_lacks_are_no_difference():
    check_same_tokens(toy_model(images=True), toy_model())
    check_same_tokens(toy_model(), toy_model(images=True))
