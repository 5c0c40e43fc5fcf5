"""Expectations of the tests of the engine: the reference answer, and that everything is given back."""

import itertools

from trioengine import EngineConfig, SamplingParams
from trioengine.actors.observer import Observer
from trioengine.aio.concurrency import Notifier
from trioengine.core.messages import AddMessage, AddSession, EndSession, StopSession
from trioengine.testing import toy_answer

GREEDY = SamplingParams(max_tokens=40)
LONG = SamplingParams(max_tokens=200, ignore_eos=True)
FAILING = EngineConfig(model="toy", max_num_seqs=8, on_worker_loss="fail")


async def everything_is_given_back(engine, simulation):
    """No session, request or block is left, on either side."""
    while engine.statistics().sessions:
        await engine.runtime.gate.changed()
    await engine.check_invariants()
    statistics = engine.statistics()
    assert (statistics.preparing, statistics.waiting, statistics.running, statistics.worker_sessions) == (0, 0, 0, 0)
    assert statistics.received == statistics.finished + statistics.aborted + statistics.failed
    orders_are_kept(simulation)


def orders_are_kept(simulation):
    """Per attachment: ADD_SESSION (ADD_MESSAGE STOP_SESSION?)* END_SESSION, on every incarnation."""
    for worker in simulation.workers:
        lives: dict[int, list[list[type]]] = {}
        for message in worker.received:
            if isinstance(message, AddSession):
                lives.setdefault(message.session, []).append([])
            if isinstance(message, (AddSession, AddMessage, StopSession, EndSession)):
                lives[message.session][-1].append(type(message))
        for attachments in lives.values():
            assert all(life[-1] is EndSession for life in attachments[:-1])
            for life in attachments:
                assert EndSession not in life[:-1]
                for previous, following in itertools.pairwise(life):
                    assert following is not StopSession or previous is AddMessage


def said(simulation, kind):
    """The messages of this type that the workers got, of all incarnations."""
    return [message for worker in simulation.workers for message in worker.received if isinstance(message, kind)]


def reference(engine, prompt, params=GREEDY):
    ids = prompt if isinstance(prompt, list) else engine.tokenizer.apply_chat_template(chat(prompt))
    return toy_answer(ids, params.max_tokens, ignore_eos=params.ignore_eos)


def chat(prompt):
    return [{"role": "user", "content": prompt}]


class Steps(Observer):
    """Tells of every step of the worker."""

    def __init__(self):
        self.changes = Notifier()

    def step(self, num_tokens):
        self.changes.notify()


async def until(engine, is_so):
    """The worker steps until this is true."""
    steps = Steps()
    engine.observers.append(steps)
    while not is_so():
        await steps.changes.wait()
    engine.observers.remove(steps)


async def generated(engine, count):
    """So many tokens, of all requests together."""
    await until(engine, lambda: engine.statistics().generation_tokens >= count)
