"""engine.state events over WebSocket, and the refusal of responses while the engine sleeps."""

import trio
from helpers.clients import where_a_loss_fails
from helpers.realtime_texts import GREEDY, LONG, assistant, reference, text_of, user
from trio.testing import memory_stream_pair, wait_all_tasks_blocked

from trioengine.serve.realtime.outbox import ROOM


def states(client):
    return [event["state"] for event in client.events if event["type"] == "engine.state"]


async def next_state(client):
    event = await client.until("engine.state")
    assert event.keys() == {"type", "event_id", "sequence_number", "state", "weight_version", "input_modalities"}
    return event["state"], event["weight_version"]


async def begin_response(client):
    """A long answer to hello, of which there is some text."""
    await client.say("hello")
    await client.send("response.create", response=LONG)
    await client.until("response.output_text.delta")


async def test_a_connection_is_told(autojump_clock, clients):
    async with clients.realtime() as client, clients.realtime() as other:
        for _ in range(2):
            await clients.engine.sleep()
            assert await next_state(client) == await next_state(other) == ("sleeping", 1)
            await clients.engine.wake(["weights"])  # it still sleeps
            await clients.engine.wake()
            assert await next_state(client) == await next_state(other) == ("awake", 1)
        await clients.engine.update_weights("elsewhere")
        assert await next_state(client) == ("updating", 1)
        assert await next_state(client) == ("awake", 2)
        clients.simulation.worker.exit(-9)
        assert await next_state(client) == ("restarting", 2)
        assert await next_state(client) == ("awake", 2)
    assert len(clients.engine.runtime.power._listeners) == 0


async def test_new_weights_of_an_engine_that_sleeps(autojump_clock, clients):
    async with clients.realtime() as client:
        await clients.engine.sleep()
        await clients.engine.update_weights("elsewhere")
        await clients.engine.wake()
        assert [await next_state(client) for _ in range(3)] == [("sleeping", 1), ("sleeping", 2), ("awake", 2)]


async def test_a_connection_that_comes_later(autojump_clock, clients):
    """It is told what is so, unless that is awake."""
    await clients.engine.sleep()
    async with clients.realtime() as client:
        assert await next_state(client) == ("sleeping", 1)
        await clients.engine.wake()
        assert await next_state(client) == ("awake", 1)
    async with clients.realtime() as client:
        await client.ask("hello", **GREEDY)
        assert states(client) == []


async def test_asleep_a_response_is_refused_and_the_conversation_goes_on(autojump_clock, clients):
    async with clients.realtime() as client:
        first = await client.ask("hello", **GREEDY)
        await clients.engine.sleep(2)
        await client.say("and then?")
        for options in ({}, {"conversation": "none"}):
            refused = await client.respond(**GREEDY, **options)
            assert (refused["status"], refused["status_details"]["error"]["code"]) == ("failed", "asleep")
            error = next(event["error"] for event in reversed(client.events) if event["type"] == "error")
            assert (error["type"], error["code"], error["retry_after"]) == ("server_error", "asleep", 1.0)
        await clients.engine.wake()
        messages = [user("hello"), assistant(text_of(first)), user("and then?")]
        assert text_of(await client.respond(**GREEDY)) == reference(clients, messages)


async def test_a_response_that_the_sleep_aborts(autojump_clock, clients):
    async with clients.realtime() as client:
        await begin_response(client)
        await clients.engine.sleep()
        response = (await client.until("response.done"))["response"]
        assert (response["status"], response["status_details"]["error"]["code"]) == ("failed", "sleep")
        partial = text_of(response)
        assert reference(clients, [user("hello")], 200, ignore_eos=True).startswith(partial)
        await clients.engine.wake()
        messages = [user("hello"), assistant(partial), user("again")]
        assert text_of(await client.ask("again", **GREEDY)) == reference(clients, messages)


async def test_a_response_that_is_kept(autojump_clock, clients):
    async with clients.realtime() as client:
        await begin_response(client)
        await clients.engine.sleep(mode="keep")
        await clients.engine.wake()
        response = (await client.until("response.done"))["response"]
        assert text_of(response) == reference(clients, [user("hello")], 200, ignore_eos=True)
        assert states(client) == ["sleeping", "awake"]


async def test_a_response_that_outlives_its_worker(autojump_clock, clients):
    async with clients.realtime() as client:
        await begin_response(client)
        clients.simulation.worker.exit(-9)
        response = (await client.until("response.done"))["response"]
        assert text_of(response) == reference(clients, [user("hello")], 200, ignore_eos=True)
        assert states(client) == ["restarting", "awake"]


@where_a_loss_fails
async def test_a_response_that_does_not(autojump_clock, clients):
    async with clients.realtime() as client:
        await begin_response(client)
        clients.simulation.worker.exit(-9)
        assert (await client.until("response.done"))["response"]["status"] == "failed"
        while states(client)[-1:] != ["awake"]:
            await client.next()


async def test_a_client_that_does_not_read_costs_no_more(autojump_clock, clients):
    """What it cannot be told is dropped, the oldest first; it learns how it stands in the end."""
    ours, theirs = memory_stream_pair()
    may_send, pump = trio.Event(), theirs.send_stream.send_all_hook

    async def send_later():
        await may_send.wait()
        await pump()

    async with clients.realtime(clients.stream(ours, theirs)) as client:
        theirs.send_stream.send_all_hook = send_later
        await client.say("x" * ROOM)
        await wait_all_tasks_blocked()
        (listener,) = clients.engine.runtime.power._listeners
        for _ in range(100):
            await clients.engine.sleep()
            await clients.engine.wake()
        assert len(listener._unread) <= 64
        may_send.set()
        await client.until("conversation.item.done")
        response = await client.respond(**GREEDY | {"max_output_tokens": 1})
        assert response["status_details"]["error"]["code"] == "context_length_exceeded"
        assert 2 < len(states(client)) <= 65
        assert states(client)[-1] == "awake"


async def test_a_drain_is_told_before_the_goodbye(autojump_clock, clients):
    async with clients.realtime() as client, trio.open_nursery() as nursery:
        await begin_response(client)
        nursery.start_soon(clients.server.drain)
        assert await next_state(client) == ("draining", 1)
        assert (await client.until("response.done"))["response"]["status"] == "incomplete"
