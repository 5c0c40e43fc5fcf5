"""The simulated worker's payloads: on their way, held, closed once, and none left behind by a death."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import trio
import trio.testing

from trioengine.core.config import WorkerConfig
from trioengine.core.connection import Connection, Role
from trioengine.core.image import ImageFormat, ImageInfo
from trioengine.core.messages import (
    AddMessage,
    AddSession,
    Configure,
    EndSession,
    ImageInput,
    Message,
    PayloadConsumed,
    Ready,
    Tokens,
)
from trioengine.core.sampling_params import ResolvedParams
from trioengine.core.types import token_ids
from trioengine.testing.simulated_process import SMALL_PAYLOAD_QUEUE, Behaviour, SimulatedMemfd
from trioengine.testing.simulated_worker import SimulatedWorker
from trioengine.testing.simulation import DEFAULT_LIMITS, SealFailure, Simulation
from trioengine.testing.toy_model import TOY_TILE, toy_answer

LIMITS = replace(DEFAULT_LIMITS, tile=TOY_TILE)
PROMPT = [1, 7, 7, 7, 2]


class Bench:
    """The engine's end of a simulated worker, whose bytes arrive at once."""

    def __init__(self, *, by_hand: bool) -> None:
        self.worker = SimulatedWorker(1, LIMITS, Behaviour(load_time=0.0), by_hand=by_hand)
        self.connection = Connection(Role.ENGINE)

    def send(self, *messages: Message) -> None:
        for message in messages:
            self.worker.to_worker.put(self.connection.send(message))
        self.worker.receive()

    async def receive(self) -> list[Message]:
        """At least one message."""
        found: list[Message] = []
        while not found:
            self.worker.deliver()
            self.connection.receive_data(await self.worker.receive_stream.receive_some())
            while (message := self.connection.next_message()) is not None:
                found.append(message)
        return found


def add_message(payload: int = 1) -> AddMessage:
    info = ImageInfo(ImageFormat.PNG, 8, 8)
    image = ImageInput(payload, "image", b"digest", info, 3, token_ids([1]))
    params = ResolvedParams(max_tokens=2, seed=1, ignore_eos=True)
    return AddMessage(1, 1, 0, token_ids(PROMPT), params, (), images=(image,))


def settle(worker: SimulatedWorker) -> None:
    worker.receive()
    worker.receive_payloads()
    while worker.has_work:
        worker.turn()


async def configured() -> Bench:
    bench = Bench(by_hand=True)
    bench.send(Configure(WorkerConfig("toy")))
    settle(bench.worker)
    assert isinstance((await bench.receive())[0], Ready)
    return bench


async def test_an_image_is_seen_and_its_payload_closed() -> None:
    bench = await configured()
    sealed = SimulatedMemfd([b"c", b"at"])
    bench.send(AddSession(1), add_message())
    await bench.worker.send_payload(1, sealed)
    sealed.close()  # the engine's own; the worker has another one
    settle(bench.worker)
    messages = await bench.receive()
    rows = [row for message in messages if isinstance(message, Tokens) for row in message.rows]
    tokens = [token for row in rows for token in row.token_ids]
    assert tokens == toy_answer(PROMPT, 2, ignore_eos=True, images=[([1], b"cat")])
    assert tokens != toy_answer(PROMPT, 2, ignore_eos=True, images=[([1], b"dog")])
    assert PayloadConsumed(1) in messages
    assert not any(payload.is_open for payload in sealed.passed)


async def test_a_decoding_that_has_begun_goes_on_when_its_request_ends() -> None:
    bench = await configured()
    sealed = SimulatedMemfd([b"cat"])
    bench.send(AddSession(1), add_message())
    await bench.worker.send_payload(1, sealed)
    bench.worker.receive_payloads()
    while not bench.worker.only_decodes:
        bench.worker.turn()
    bench.worker.begin_decoding()
    bench.send(EndSession(1))
    while not bench.worker.only_decodes:
        bench.worker.turn()
    assert sealed.passed[0].is_open
    settle(bench.worker)
    assert not sealed.passed[0].is_open
    assert PayloadConsumed(1) in await bench.receive()


async def test_in_time_images_are_decoded_beside_the_steps(autojump_clock: trio.testing.MockClock) -> None:
    bench = Bench(by_hand=False)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.worker.run)
        bench.send(Configure(WorkerConfig("toy")))
        assert isinstance((await bench.receive())[0], Ready)
        bench.send(AddSession(1), add_message())
        await bench.worker.send_payload(1, SimulatedMemfd([b"cat"]))
        while PayloadConsumed(1) not in await bench.receive():
            pass
        nursery.cancel_scope.cancel()


async def test_a_send_blocks_while_the_socket_is_full() -> None:
    bench = await configured()
    sealed = SimulatedMemfd([b"cat"])
    async with trio.open_nursery() as nursery:
        for payload in range(1, SMALL_PAYLOAD_QUEUE + 2):
            nursery.start_soon(bench.worker.send_payload, payload, sealed)
        await trio.testing.wait_all_tasks_blocked()
        assert len(bench.worker.payloads) == SMALL_PAYLOAD_QUEUE
        bench.worker.receive_payloads(1)
        await trio.testing.wait_all_tasks_blocked()
        assert len(bench.worker.payloads) == SMALL_PAYLOAD_QUEUE
    assert len(sealed.passed) == SMALL_PAYLOAD_QUEUE + 1


@pytest.mark.parametrize("end", ["break_payloads", "kill"])
async def test_a_broken_socket_ends_the_sends_and_loses_what_is_on_its_way(end: str) -> None:
    bench = await configured()
    sealed = SimulatedMemfd([b"cat"])
    async with trio.open_nursery() as nursery:
        for payload in range(1, SMALL_PAYLOAD_QUEUE + 1):
            await bench.worker.send_payload(payload, sealed)

        async def fail() -> None:
            with pytest.raises(trio.BrokenResourceError):
                await bench.worker.send_payload(9, sealed)

        nursery.start_soon(fail)
        await trio.testing.wait_all_tasks_blocked()
        getattr(bench.worker, end)()
    assert not any(payload.is_open for payload in sealed.passed)


async def test_a_send_that_fails_loses_nothing_that_is_on_its_way() -> None:
    bench = await configured()
    sealed = SimulatedMemfd([b"cat"])
    await bench.worker.send_payload(1, sealed)
    bench.worker.fail_send()
    for payload in (2, 3):
        with pytest.raises(trio.BrokenResourceError):
            await bench.worker.send_payload(payload, sealed)
    bench.worker.receive_payloads()
    assert len(bench.worker.open_payloads) == len(sealed.passed) == 1


@pytest.mark.parametrize("failure", SealFailure)
async def test_bytes_that_cannot_be_sealed_are_nowhere(failure: SealFailure) -> None:
    simulation = Simulation()
    simulation.failing_seals = [failure]
    chunks = iter([b"c", b"at"])
    with pytest.raises(OSError, match=os.strerror(failure.value)):
        simulation.ports.seal(chunks)
    assert len(list(chunks)) == (2 if failure is SealFailure.CREATE else 1)
    assert not simulation.memfds
    assert simulation.ports.seal([b"dog"]).num_bytes == 3


async def test_a_death_closes_what_the_worker_holds() -> None:
    bench = await configured()
    sealed = SimulatedMemfd([b"cat"])
    bench.send(AddSession(1), add_message())
    await bench.worker.send_payload(1, sealed)
    bench.worker.receive_payloads()
    bench.worker.turn()
    bench.worker.turn()
    bench.worker.turn()
    assert bench.worker.core.num_payloads == 1
    assert [payload.is_open for payload in sealed.passed] == [True]
    bench.worker.kill()
    assert [payload.is_open for payload in sealed.passed] == [False]


async def test_a_hung_worker_receives_nothing() -> None:
    bench = await configured()
    bench.worker.hang()
    await bench.worker.send_payload(1, SimulatedMemfd([b"cat"]))
    bench.worker.receive_payloads()
    assert len(bench.worker.payloads) == 1


async def test_a_payload_that_leaks_is_noticed() -> None:
    bench = await configured()
    await bench.worker.send_payload(1, SimulatedMemfd([b"cat"]))
    bench.worker.receive_payloads()
    bench.worker.turn()
    bench.worker.core._scheduler.payloads._early.clear()
    bench.send(AddSession(1), EndSession(1))
    with pytest.raises(AssertionError, match="payloads open that it does not know"):
        settle(bench.worker)


def test_payloads_are_closed_once_and_not_read_after_that() -> None:
    sealed = SimulatedMemfd([b"cat"])
    payload = sealed.pass_on()
    payload.close()
    with pytest.raises(AssertionError, match="closed twice"):
        payload.close()
    with pytest.raises(AssertionError, match="read that is closed"), payload.open():
        pass
    sealed.close()
    with pytest.raises(AssertionError, match="given back twice"):
        sealed.close()
    with pytest.raises(AssertionError, match="that were given back"):
        sealed.pass_on()
