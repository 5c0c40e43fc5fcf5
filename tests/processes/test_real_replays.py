"""Streams of the real model outlive its worker: killed in their middle, killed again, killed by one of them."""

import itertools
import os
import signal
import sys
from pathlib import Path

import poisoned_worker
import pytest
import trio

from trioengine import EngineConfig, SamplingParams, WorkerLost, open_engine
from trioengine.actors import ports
from trioengine.actors.observer import Observer
from trioengine.core.types import FinishReason

PATIENCE = 300  # seconds; a guard against hanging, far beyond what is needed
STREAMS = 32
PROMPTS = [f"Write {number} short words about the sea." for number in range(STREAMS)]
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
SEEDED = [SamplingParams(max_tokens=24, temperature=0.8, ignore_eos=True, seed=number) for number in range(STREAMS)]
PARAMS = {prompt: SEEDED[number] if number % 4 == 3 else GREEDY for number, prompt in enumerate(PROMPTS)}
POISON = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, seed=poisoned_worker.POISON)


@pytest.fixture
def config(smollm2):
    return EngineConfig(model=str(smollm2), dtype="float32", kv_cache_memory=256 << 20, max_model_len=256)


class KillsAt(Observer):
    """Kills the worker in the middle of it all."""

    def __init__(self, engine, tokens):
        self.engine, self.tokens = engine, tokens

    def step(self, num_tokens):
        if self.tokens is not None and self.engine.statistics().generation_tokens >= self.tokens:
            self.tokens = None
            os.kill(self.engine.statistics().worker_pid, signal.SIGKILL)


def killing_the_second():
    """The real ports, but that the second worker is killed as soon as it is started."""
    numbers = itertools.count(1)

    async def spawn_worker():
        process = await ports.Ports().spawn_worker()
        if next(numbers) == 2:
            process.kill()
        return process

    return ports.Ports(spawn_worker=spawn_worker)


async def ask_all(engine, poisoned=None):
    """Every prompt at once, in their order: the completions, or why there is none."""
    completions = {}

    async def ask(prompt, task_status=trio.TASK_STATUS_IGNORED):
        params = POISON if prompt == poisoned else PARAMS[prompt]
        async with engine.open_session() as session, session.generate(prompt, params) as generation:
            task_status.started()
            try:
                completions[prompt] = await generation.result()
            except WorkerLost as exc:
                completions[prompt] = exc

    async with trio.open_nursery() as nursery:
        for prompt in PROMPTS:
            await nursery.start(ask, prompt)
    return completions


async def test_streams_of_a_killed_worker_end_as_if_nothing_had_happened(config):
    with trio.fail_after(PATIENCE):
        async with open_engine(config, ports=killing_the_second()) as engine:
            undisturbed = await ask_all(engine)
            total = engine.statistics().generation_tokens
            engine.observers.append(KillsAt(engine, total + STREAMS * 10))
            completions = await ask_all(engine)
            assert engine.statistics().incarnation == 3
            await engine.check_invariants()
    for prompt, completion in completions.items():
        assert completion.token_ids == undisturbed[prompt].token_ids
        assert (completion.text, completion.finish_reason) == (undisturbed[prompt].text, FinishReason.LENGTH)
        assert completion.resumed == 1  # at the second one, which never was ready, no request ran


@pytest.mark.parametrize("victim", [PROMPTS[5]])
async def test_a_request_that_kills_the_worker_goes_alone(config, monkeypatch, victim):
    """Also where a worker is killed before it is ready."""
    module = str(Path(poisoned_worker.__file__))
    command = ports._command
    monkeypatch.setattr(ports, "_command", lambda *fds: [sys.executable, module, *command(*fds)[4:]])
    with trio.fail_after(PATIENCE):
        async with open_engine(config, ports=killing_the_second()) as engine:
            completions = await ask_all(engine, poisoned=victim)
            assert isinstance(completions.pop(victim), WorkerLost)
            assert len(completions) == STREAMS - 1
            undisturbed = {prompt: await engine.generate(prompt, PARAMS[prompt]) for prompt in list(completions)[::6]}
            assert engine.statistics().incarnation == 6
    assert all(completion.finish_reason is FinishReason.LENGTH for completion in completions.values())
    for prompt, alone in undisturbed.items():
        assert completions[prompt].token_ids == alone.token_ids
