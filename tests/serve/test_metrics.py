"""GET /metrics: after a known story, exact values; whatever happens, an answer at once."""

import json
from contextlib import AsyncExitStack
from functools import partial
from time import process_time

import pytest
import trio
from helpers.clients import Clients, where_a_loss_fails
from helpers.scrapes import LONG, PROMPT, SCRAPE, Scrape, now, scrape
from trio.testing import lockstep_stream_pair, memory_stream_pair, wait_all_tasks_blocked
from trio_websocket import ConnectionClosed

from trioengine import EngineConfig, SamplingParams, TimedOut, WorkerLost
from trioengine.actors.engine import Engine
from trioengine.core.types import Cause, FinishReason
from trioengine.serve.metrics import HISTOGRAMS, Histogram
from trioengine.serve.server import Server
from trioengine.testing import simulated_engine
from trioengine.testing.simulated_worker import Behaviour
from trioengine.worker.scheduling.sequence import Limits

STEP = 0.03
TEN = SamplingParams(max_tokens=10, ignore_eos=True)


@pytest.fixture
async def clients(autojump_clock, engine_config):
    behaviours = [Behaviour(step_time=STEP)]
    async with (
        simulated_engine(engine_config, behaviours=behaviours) as (engine, simulation),
        trio.open_nursery() as nursery,
    ):
        clients = Clients(engine, simulation, nursery)
        yield clients
        clients.server.connections.close_idle()
        with trio.fail_after(60):
            await clients.all_closed()
            await clients.everything_is_given_back()


async def ask(engine, prompt=PROMPT, params=TEN, **options):
    return await engine.generate(prompt, params, **options)


NAMES = {
    "gauge": [
        *("num_requests_running", "num_requests_waiting", "num_requests_suspended"),
        *("num_sessions", "num_waiting_for_slot"),
        *(
            "kv_cache_usage_perc",
            "window_cache_usage_perc",
            "state_slot_usage_perc",
            "engine_sleep_state",
            "weight_version",
            "buffered_bytes",
        ),
        *("payload_bytes_inflight", "payload_bytes_kept"),
    ],
    "counter": [
        *("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "num_preemptions"),
        *("encoder_cache_queries", "encoder_cache_hits"),
        *("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
        *("request_success", "requests_aborted", "client_disconnected", "worker_restarts", "requests_resumed"),
    ],
    "histogram": [
        *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
        *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
        *("iteration_tokens", "request_prompt_tokens", "request_generation_tokens", "stop_to_ended_seconds"),
    ],
}


async def test_every_name_is_there_from_the_beginning(autojump_clock, clients):
    said = await scrape(clients)
    types = {kind: {"trioengine_" + name for name in names} for kind, names in NAMES.items()}
    assert {family.name: family.type for family in said.families} == {
        name: kind for kind, names in types.items() for name in names
    }
    assert said.by_label("engine_sleep_state") == {"awake": 1}
    assert said.value("weight_version") == 1
    states = ("trioengine_engine_sleep_state", "trioengine_weight_version")
    assert not any(sample.value for sample in said.samples if sample.name not in states)
    labels = {sample.labels["finished_reason"] for sample in said.samples if "finished_reason" in sample.labels}
    assert labels == {reason.value for reason in FinishReason}
    labels = {sample.labels["cause"] for sample in said.samples if "cause" in sample.labels}
    assert labels == {cause.value for cause in Cause}


async def test_cpu_time_and_memory_of_the_process(autojump_clock, clients):
    clients.server.metrics.add_process()
    before = process_time()
    said = await scrape(clients)
    values = {sample.name: sample.value for sample in said.samples if sample.name.startswith("process_")}
    assert before - 0.1 <= values["process_cpu_seconds_total"] <= process_time() + 0.1  # it counts in ticks
    assert values["process_resident_memory_bytes"] > 1 << 20
    assert {"process_open_fds", "process_start_time_seconds"} <= values.keys()


async def test_head_and_other_methods(autojump_clock, clients):
    data = await clients.http(SCRAPE.replace(b"GET", b"HEAD"))
    assert data.startswith(b"HTTP/1.1 200 ")
    assert data.endswith(b"\r\n\r\n")
    assert b"content-type: text/plain; version=0.0.4" in data
    assert (await clients.http(SCRAPE.replace(b"GET", b"POST"))).startswith(b"HTTP/1.1 405 ")


async def test_a_request_that_finishes(autojump_clock, clients):
    await ask(clients.engine)
    await ask(clients.engine, [5], SamplingParams(max_tokens=400))
    await clients.everything_is_given_back()
    said = now(clients)
    counts = clients.engine.statistics()
    generated = counts.generation_tokens
    assert said.by_label("request_success_total") == {"length": 1, "stop": 1}
    assert said.values("prompt_tokens_total", "generation_tokens_total") == [21, generated]
    assert said.values("prefix_cache_queries_total", "prefix_cache_hits_total") == [21, 0]
    assert said.values("num_sessions", "num_requests_running", "num_requests_waiting") == [0, 0, 0]
    assert said.histogram("time_to_first_token_seconds") == (2, pytest.approx(2 * STEP))
    assert said.histogram("inter_token_latency_seconds") == (generated - 2, pytest.approx((generated - 2) * STEP))
    assert said.histogram("e2e_request_latency_seconds") == (2, pytest.approx(generated * STEP))
    assert said.histogram("request_decode_time_seconds") == (2, pytest.approx((generated - 2) * STEP))
    assert said.histogram("request_queue_time_seconds") == (2, pytest.approx(2 * STEP))
    assert said.histogram("request_prefill_time_seconds") == (2, 0)
    assert said.histogram("iteration_tokens") == (generated, 21 + generated - 2)
    assert said.histogram("request_prompt_tokens") == (2, 21)
    assert said.histogram("request_generation_tokens") == (2, generated)
    assert said.histogram("stop_to_ended_seconds") == (2, 0)
    assert said.value("time_to_first_token_seconds_bucket", "0.02") == 0
    assert said.value("time_to_first_token_seconds_bucket", "0.04") == 2
    assert said.value("time_to_first_token_seconds_bucket", "+Inf") == 2
    assert said.value("iteration_tokens_bucket", "16.0") == generated - 1


async def test_callers_that_wait_for_a_slot(autojump_clock, clients):
    engine = clients.engine
    async with trio.open_nursery() as nursery:
        async with AsyncExitStack() as sessions:
            for _ in range(engine.config.max_sessions):
                await sessions.enter_async_context(engine.open_session())
            for _ in range(3):
                nursery.start_soon(partial(ask, engine, wait=True))
            await wait_all_tasks_blocked()
            assert now(clients).value("num_waiting_for_slot") == 3
            assert engine.statistics().waiting_for_slot == 3
    assert now(clients).value("num_waiting_for_slot") == 0


async def test_what_is_in_flight(autojump_clock, clients):
    engine = clients.engine
    async with engine.open_session() as session, session.generate(PROMPT, LONG) as generation:
        assert now(clients).values("num_requests_running", "num_requests_waiting", "num_sessions") == [0, 1, 1]
        await anext(generation)
        said = now(clients)
        assert said.values("num_requests_running", "num_requests_waiting", "num_sessions") == [1, 0, 1]
        counts = engine.statistics()
        held = counts.kv_blocks_total - counts.kv_blocks_free - counts.kv_blocks_cached
        assert said.value("kv_cache_usage_perc") == held / 256 > 0
    await session.ended()
    assert now(clients).value("kv_cache_usage_perc") == 0


async def test_aborts_by_every_cause(autojump_clock, clients):
    engine = clients.engine
    with pytest.raises(TimedOut):
        await ask(engine, params=LONG, timeout=1)
    for cause in set(Cause) - {Cause.TIMEOUT, Cause.ERROR}:
        async with engine.open_session() as session, session.generate(PROMPT, LONG) as generation:
            await anext(generation)
            engine.abort_all(cause)
    await clients.everything_is_given_back()
    said = now(clients)
    assert said.by_label("requests_aborted_total") == {cause.value: 1 for cause in set(Cause) - {Cause.ERROR}}
    assert said.by_label("request_success_total") == {"abort": 7} == {"abort": engine.statistics().aborted}
    assert said.histogram("e2e_request_latency_seconds") == (0, 0)
    assert said.histogram("time_to_first_token_seconds")[0] == 7
    # A STOP and an END each; after the timeout, which does not wait for the worker, the END follows the STOP at once.
    assert said.histogram("stop_to_ended_seconds")[0] == 2 * 6 + 1


@where_a_loss_fails
async def test_the_worker_dies(autojump_clock, clients):
    """What it counted stays, and goes on."""
    engine = clients.engine
    for _ in range(2):
        await ask(engine)
    async with engine.open_session() as session, session.generate(PROMPT, LONG) as generation:
        await anext(generation)
        before = now(clients)
        clients.simulation.worker.kill()
        with pytest.raises(WorkerLost):
            await generation.result()
        said = await scrape(clients)
    names = ("prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total")
    assert said.values(*names) == before.values(*names) == [60, 21, 60, 2 * 19]
    assert said.by_label("request_success_total") == {"length": 2, "error": 1}
    await engine.ready()
    await ask(engine)
    said = now(clients)
    assert said.values(*names) == [80, 31, 80, 2 * 19]
    assert said.value("worker_restarts_total") == 1


async def test_preemptions(autojump_clock):
    limits = Limits(
        vocab_size=259, max_model_len=64, kv_blocks_total=12, block_size=4, max_num_seqs=4, max_num_batched_tokens=64
    )
    async with simulated_engine(limits=limits) as (engine, simulation):
        server = Server(engine)
        async with trio.open_nursery() as nursery:
            for start in (1, 2):
                nursery.start_soon(engine.generate, [start] * 8, SamplingParams(max_tokens=30, ignore_eos=True))
        preemptions = simulation.worker.core.statistics().num_preemptions
        assert Scrape(server.metrics.render().decode()).value("num_preemptions_total") == preemptions > 0


async def test_two_servers_of_an_engine_say_the_same(autojump_clock, clients):
    other = Server(clients.engine)
    await ask(clients.engine)
    assert other.metrics.render() == clients.server.metrics.render()


# ---- it never waits -------------------------------------------------------------------------------------------------


async def immediate(clients):
    """A scrape in no time."""
    stream = clients.stream()
    before = trio.current_time()
    await stream.send_all(SCRAPE)
    data = b""
    while b"stop_to_ended_seconds_sum" not in data:
        data += await stream.receive_some()
    assert trio.current_time() == before
    await stream.aclose()


@where_a_loss_fails
async def test_a_worker_that_hangs_is_not_waited_for(autojump_clock, clients):
    engine = clients.engine
    async with engine.open_session() as session, session.generate(PROMPT, LONG) as generation:
        await anext(generation)
        clients.simulation.worker.hang()
        await immediate(clients)
        clients.simulation.worker.kill()
        with pytest.raises(WorkerLost):
            await generation.result()
        await immediate(clients)
    await engine.ready()


async def test_before_the_engine_is_ready_and_after_its_end(autojump_clock):
    engine = Engine(EngineConfig(model="toy"))
    said = Scrape(Server(engine).metrics.render().decode())
    assert said.values("kv_cache_usage_perc", "worker_restarts_total") == [0, 0]
    async with simulated_engine() as (engine, _):
        server = Server(engine)
        await ask(engine)
    assert Scrape(server.metrics.render().decode()).by_label("request_success_total") == {"length": 1}


# ---- clients that go ------------------------------------------------------------------------------------------------


def disconnects(clients):
    return now(clients).value("client_disconnected_total")


async def test_a_client_that_leaves_a_response_behind_is_counted(autojump_clock, clients):
    async with clients.realtime() as client:
        await client.say("hello")
        await client.send("response.create", response={"max_output_tokens": 400})
        await client.until("response.created")
    await clients.all_closed()
    assert disconnects(clients) == 1
    await clients.everything_is_given_back()
    assert now(clients).by_label("requests_aborted_total") == {"disconnect": 1}


@pytest.mark.parametrize("count", [0, 1])
async def test_a_client_that_is_sent_away_is_counted_if_it_has_a_response(autojump_clock, clients, count):
    """It asks for more than may be unhandled, and reads none of it."""
    event = json.dumps({"type": "conversation.item.retrieve", "item_id": "x" * 80})
    async with clients.realtime(clients.stream(*lockstep_stream_pair())) as client:
        await client.say("hello")
        for _ in range(count):
            await client.send("response.create", response={"max_output_tokens": 400, "ignore_eos": True})
            await client.until("response.created")
        await client.say("x" * 100_000)
        for _ in range(70):
            await client.websocket.send_message(event)
        with pytest.raises(ConnectionClosed):
            while True:
                await client.websocket.get_message()
    await clients.all_closed()
    assert disconnects(clients) == count


async def test_a_client_that_has_its_response_is_not_counted(autojump_clock, clients):
    async with clients.realtime() as client:
        await client.ask("hello")
    await clients.all_closed()
    assert disconnects(clients) == 0


@pytest.mark.parametrize("way", ["hangs up", "is silent"])
async def test_a_client_that_goes_is_counted_once(autojump_clock, clients, way):
    """One that is silent neither answers a ping nor reads, while the worker is in a long step."""
    ours, theirs = memory_stream_pair()
    async with clients.realtime(clients.stream(ours, theirs)) as client:
        await client.say("hello")
        await client.send("response.create")
        await client.until("response.created")
        if way == "hangs up":
            await ours.aclose()
        else:
            clients.simulation.worker.stall(60)
            theirs.send_stream.send_all_hook = trio.sleep_forever
        await clients.all_closed()
    assert disconnects(clients) == 1
    if way == "is silent":
        clients.simulation.worker.kill()
        await clients.engine.runtime.gate.changed()
        await clients.engine.ready()


async def test_a_server_that_aborts_counts_no_departure(autojump_clock, clients):
    ours, theirs = memory_stream_pair()
    async with trio.open_nursery() as connections:
        connections.start_soon(clients.server.connections.handle, theirs)
        async with clients.realtime(ours) as client:
            await client.say("hello")
            await client.send("response.create")
            await client.until("response.created")
            connections.cancel_scope.cancel()
    assert disconnects(clients) == 0
    await clients.everything_is_given_back()


# ---- a histogram ----------------------------------------------------------------------------------------------------


def test_a_bound_is_in_its_bucket():
    histogram = Histogram((1, 2.5))
    for value in (0.5, 1, 1.5, 2.5, 3):
        histogram.observe(value)
    assert histogram.buckets == [("1.0", 2), ("2.5", 4), ("+Inf", 5)]
    assert histogram.sum == 8.5


@pytest.mark.parametrize("name", HISTOGRAMS)
def test_bounds_rise(name):
    bounds = HISTOGRAMS[name].bounds
    assert list(bounds) == sorted(set(bounds))
