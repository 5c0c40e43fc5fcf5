"""Clients that all abort, while the worker is killed, stopped and put to sleep: the server lives and loses nothing."""

import os
import random
import re
import signal
from pathlib import Path

import httpx
import pytest
import trio
from helpers.served import PATIENCE, Served
from leaving import Soak

CONNECTIONS = 32
SESSIONS = 4000  # with so many: KILLS, STOPS and SLEEPS; with fewer, proportionally fewer, and one at least
KILLS, STOPS, SLEEPS = 50, 10, 20
MOST_GROWTH = 1.10  # of the RSS of either process
QUESTION = {
    "model": "m",
    "messages": [{"role": "user", "content": "Name the capital of France."}],
    "max_tokens": 16,
    "temperature": 0,
}


@pytest.fixture
def served(smollm2, tmp_path):
    served = Served(smollm2, tmp_path / "log", "--unresponsive-timeout", "3", "--ping-interval", "0.5")
    yield served
    served.process.kill()
    served.process.wait()


def rss(pid):
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Storm:
    """Kills and stops the worker, and puts the engine to sleep and wakes it, in the middle of the load."""

    def __init__(self, http, sessions, seed):
        self.done = dict.fromkeys(("kill", "stop", "sleep"), 0)
        self._over, self._sessions = 0, sessions
        self._next, self._due = 0.0, trio.Event()
        self.goes_on = True
        self._choose = random.Random(seed)
        self._http = http

    def after(self, over):
        self._over = over
        if over >= self._next:
            self._due.set()

    async def run(self):
        share = min(1.0, self._sessions / SESSIONS)
        acts = [self._kill] * max(1, round(KILLS * share)) + [self._stop] * max(1, round(STOPS * share))
        acts += [self._sleep] * max(1, round(SLEEPS * share))
        self._choose.shuffle(acts)
        for number, act in enumerate(acts):
            self._next, self._due = number * self._sessions / (len(acts) + 1), trio.Event()
            self.after(self._over)
            await self._due.wait()
            await trio.sleep(self._choose.uniform(0, 0.2))
            await act()
            await self.ready()
        self.goes_on = False

    async def ready(self):
        """Wait until the server is ready, and return the worker's pid."""
        with trio.fail_after(PATIENCE):
            while True:
                response = await self._http.get("/debug/invariants")
                if response.status_code == 200:
                    assert response.json()["ok"]
                    if (await self._http.get("/ready")).status_code == 200:
                        return response.json()["statistics"]["worker_pid"]
                await trio.sleep(0.05)

    async def _kill(self):
        await self._end_worker("kill", signal.SIGKILL)

    async def _stop(self):
        await self._end_worker("stop", signal.SIGSTOP)

    async def _end_worker(self, name, signal_number):
        pid = await self.ready()
        pidfd = os.pidfd_open(pid)
        try:
            os.kill(pid, signal_number)
            with trio.fail_after(PATIENCE):
                await trio.lowlevel.wait_readable(pidfd)
        finally:
            os.close(pidfd)
        self.done[name] += 1

    async def _sleep(self):
        level, mode = self._choose.choice((1, 2)), self._choose.choice(("abort", "keep"))
        assert (await self._http.post("/sleep", params={"level": level, "mode": mode})).status_code == 200
        await trio.sleep(self._choose.uniform(0, 0.3))
        assert (await self._http.post("/wake_up")).status_code == 200
        self.done["sleep"] += 1

    async def answer(self):
        response = await self._http.post("/v1/chat/completions", json=QUESTION)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["message"]["content"]

    async def gauges(self):
        """The gauges of requests, sessions and memory, by name."""
        text = (await self._http.get("/metrics")).text
        pattern = r"^trioengine_((?:num_(?:requests|sessions)|kv_cache_usage)\w*) (\S+)$"
        return {name: float(value) for name, value in re.findall(pattern, text, re.MULTILINE)}


async def pass_over(served, sessions):
    """A storm of so many clients. Returns its figures."""
    warming, storming = (Soak(served.port, "m", seed=seed, aborting=True) for seed in (0, 1))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{served.port}", timeout=PATIENCE) as http:
        storm = Storm(http, sessions, seed=0)
        await warming.run(min(200, sessions), CONNECTIONS, lambda over: None)  # the first ones make both grow
        expected = await storm.answer()
        before = served.rss, rss(await storm.ready())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(storm.run)
            await storming.run(sessions, CONNECTIONS, storm.after, lambda: storm.goes_on)
        assert await storm.answer() == expected
        after = served.rss, rss(await storm.ready())
        gauges = await storm.gauges()
    assert len(gauges) == 5 and not any(gauges.values()), gauges
    assert after[0] < before[0] * MOST_GROWTH and after[1] < before[1] * MOST_GROWTH, (before, after)
    return f"{sum(storming.seen.values())} clients, {storming.refused} refused; {storm.done}; RSS {before} to {after}"


def test_clients_that_abort_while_the_worker_dies_and_sleeps_leave_nothing_behind(served, request):
    before = served.get("/debug/invariants")["tasks"], served.descriptors
    try:
        figures = trio.run(pass_over, served, request.config.getoption("--sessions"))
    except BaseException:
        print(served.log.read_text()[-4000:])
        raise
    statistics = served.rest(*before)
    assert statistics["finished"] == 2  # the two answers that were read to their ends
    assert statistics["received"] == statistics["finished"] + statistics["aborted"] + statistics["failed"]
    print(figures, statistics)
    assert served.stop() == 0
    assert "Traceback" not in served.log.read_text()
