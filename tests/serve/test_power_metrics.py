"""GET /metrics of an engine that sleeps, wakes, gets other weights and loses its worker."""

from helpers.scrapes import LONG, PROMPT, now, scrape


async def test_asleep_and_awake(autojump_clock, clients):
    engine = clients.engine
    async with engine.open_session() as session, session.generate(PROMPT, LONG) as generation:
        await anext(generation)
        for level, name in ((1, "weights_offloaded"), (2, "discard_all")):
            await engine.sleep(level, mode="keep")
            said = await scrape(clients)
            assert said.by_label("engine_sleep_state") == {name: 1}
            assert said.values("num_requests_running", "num_requests_suspended") == [0, 1]
        await engine.wake(["weights"])
        assert now(clients).by_label("engine_sleep_state") == {"discard_all": 1}  # it refuses requests as before
        await engine.wake()
        assert now(clients).by_label("engine_sleep_state") == {"awake": 1}
        await generation.result()
        said = now(clients)
        assert said.values("num_requests_suspended", "requests_resumed_total", "weight_version") == [0, 0, 1]
    await engine.update_weights("elsewhere")
    assert now(clients).value("weight_version") == 2


async def test_requests_that_outlive_their_worker(autojump_clock, clients):
    engine = clients.engine
    async with engine.open_session() as session, session.generate(PROMPT, LONG) as generation:
        for deaths in (1, 2):
            await anext(generation)
            clients.simulation.worker.kill()
            await engine.runtime.gate.changed()
            assert now(clients).values("num_requests_suspended", "requests_resumed_total") == [1, deaths - 1]
            await engine.ready()
            assert now(clients).values("num_requests_suspended", "requests_resumed_total") == [0, deaths]
        await generation.result()
    said = now(clients)
    assert said.by_label("request_success_total") == {"length": 1}
    assert said.value("worker_restarts_total") == 2
