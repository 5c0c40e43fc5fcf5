"""The real process of a worker, from the outside: started, killed and reaped, it leaves nothing behind."""

import os
import select
import signal
from pathlib import Path

import pytest
import trio
import trio.testing

from trioengine import WorkerLost
from trioengine.actors import ports


def descriptors():
    return sorted(path.name for path in Path("/proc/self/fd").iterdir())


def environment_of(pid):
    """Of a live process; it is empty in the middle of exec."""
    while not (environment := Path(f"/proc/{pid}/environ").read_bytes()):
        os.sched_yield()
    return environment


async def test_a_spawn_that_fails_half_way_leaves_nothing(monkeypatch):
    """Out of descriptors at the pidfd: the process that was started is gone, and both pipes are closed."""
    started = []

    def no_pidfd(pid):
        started.append(pid)
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(ports.os, "pidfd_open", no_pidfd)
    before = descriptors()
    with pytest.raises(WorkerLost, match="Too many open files"):
        await ports.Ports().spawn_worker()
    assert descriptors() == before
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)


async def test_terminating_a_dead_leader_does_not_reap_it():
    process = await ports.Ports().spawn_worker()
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()
    process.terminate()
    os.kill(process.pid, 0)  # not reaped: the group can still be killed
    assert process.reap() == -signal.SIGKILL


async def test_reaping_twice_is_reaping_once():
    before = descriptors()
    process = await ports.Ports().spawn_worker()
    process.kill()
    await process.wait()
    assert process.reap() == -signal.SIGKILL
    assert descriptors() == before
    others = os.pipe()  # they have numbers that were the process's
    process.terminate()
    process.kill()
    assert process.reap() == -signal.SIGKILL
    for descriptor in others:
        os.close(descriptor)
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


async def test_reaping_does_not_wait(monkeypatch):
    """A process that the kernel does not let die yet: its descriptors are given back, its status comes later."""
    process = await ports.Ports().spawn_worker()
    with monkeypatch.context() as patch:
        patch.setattr(ports.os, "killpg", lambda group, number: None)
        assert process.reap() is None
    process.kill()
    await trio.to_thread.run_sync(os.waitid, os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert process.reap() == -signal.SIGKILL


async def test_the_worker_gets_no_keys(monkeypatch):
    """Neither the users' nor the operators'; the other variables it gets."""
    monkeypatch.setenv("TRIOENGINE_API_KEY", "secret-1")
    monkeypatch.setenv("TRIOENGINE_ADMIN_KEY", "secret-2")
    monkeypatch.setenv("TRIOENGINE_TEST_MARK", "seen")
    process = await ports.Ports().spawn_worker()
    try:
        environment = environment_of(process.pid)
    finally:
        process.kill()
        await process.wait()
        process.reap()
    assert b"TRIOENGINE_TEST_MARK=seen" in environment
    assert b"secret" not in environment


async def test_a_death_can_be_known_at_once():
    """A SIGKILL that is on its way counts: no process outlives one."""
    process = await ports.Ports().spawn_worker()
    assert process.is_alive
    os.kill(process.pid, signal.SIGKILL)
    assert not process.is_alive
    await process.wait()
    assert not process.is_alive
    process.reap()
    assert not process.is_alive


async def test_an_exit_can_be_known_where_nothing_but_the_pidfd_says_so(monkeypatch):
    process = await ports.Ports().spawn_worker()
    monkeypatch.setattr(ports, "_STATUS", "/nowhere/{pid}")
    assert process.is_alive
    process.kill()
    await process.wait()
    assert not process.is_alive
    process.reap()


async def test_a_process_that_is_stopped_is_alive():
    process = await ports.Ports().spawn_worker()
    os.kill(process.pid, signal.SIGSTOP)
    os.kill(process.pid, signal.SIGTERM)  # pending, and it may yet be ignored
    assert process.is_alive
    process.kill()
    await process.wait()
    process.reap()


class FirstArrival(trio.abc.Instrument):
    """Whether a payload had been sent, by its sender's account, at the end of the step in which it could be read."""

    def __init__(self, reader, is_sent):
        self.is_sent = None
        self._poll = select.poll()
        self._poll.register(reader, select.POLLIN)
        self._is_sent = is_sent

    def after_task_step(self, task):
        if self.is_sent is None and self._poll.poll(0):
            self.is_sent = self._is_sent()


@pytest.fixture
def readers(monkeypatch):
    """Descriptors of the workers' ends of the payload sockets that are made from here on."""
    descriptors, make_sockets = [], ports._payload_sockets

    def payload_sockets(ours, children):
        our_end, child_end = make_sockets(ours, children)
        descriptors.append(os.dup(child_end))
        return our_end, child_end

    monkeypatch.setattr(ports, "_payload_sockets", payload_sockets)
    yield descriptors
    for descriptor in descriptors:
        os.close(descriptor)


@pytest.fixture
async def deaf_process(monkeypatch):
    """A worker that reads nothing."""
    monkeypatch.setattr(ports, "WORKER", ("-c", "import signal; signal.pause()"))
    process = await ports.Ports().spawn_worker()
    try:
        yield process
    finally:
        with trio.CancelScope(shield=True):
            process.kill()
            await process.wait()
            process.reap()


@pytest.fixture
def sealed():
    memfd = ports.SealedMemfd([b"cat"])
    yield memfd
    memfd.close()


async def test_a_payload_is_sent_in_the_step_in_which_the_worker_can_read_it(readers, deaf_process, sealed):
    """Else another task could read the worker's PAYLOAD_CONSUMED before the sender has counted the payload as sent."""
    sent = []
    arrival = FirstArrival(readers[0], lambda: bool(sent))
    trio.lowlevel.add_instrument(arrival)
    try:
        await deaf_process.send_payload(1, sealed)
        sent.append(1)
        await trio.lowlevel.checkpoint()
    finally:
        trio.lowlevel.remove_instrument(arrival)
    assert arrival.is_sent


async def test_payloads_wait_for_room_in_the_socket_and_end_with_the_worker(deaf_process, sealed):
    sent = []

    async def send_until_it_breaks():
        with pytest.raises(trio.BrokenResourceError):
            while True:
                await deaf_process.send_payload(len(sent), sealed)
                sent.append(len(sent))

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_until_it_breaks)
            await trio.testing.wait_all_tasks_blocked()
            assert sent
            deaf_process.kill()


async def test_no_payload_is_sent_after_the_reaping(sealed):
    process = await ports.Ports().spawn_worker()
    process.kill()
    await process.wait()
    process.reap()
    with pytest.raises(trio.ClosedResourceError):
        await process.send_payload(1, sealed)
