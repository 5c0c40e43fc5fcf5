"""The main loop and the transport over real pipes, with a toy runner, in a thread of this process."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from toy_worker import CountingRunner, EngineEnd, request

from trioengine.core.config import WorkerConfig
from trioengine.core.errors import ModelError
from trioengine.core.messages import (
    SAMPLING_FAILED,
    Activity,
    AddSession,
    Audit,
    Audited,
    Configure,
    EndSession,
    Fatal,
    FatalCode,
    Loading,
    Ping,
    Pong,
    Ready,
    RequestFailed,
    SessionEnded,
    Shutdown,
    StopSession,
    Tokens,
)
from trioengine.core.types import FinishReason
from trioengine.worker.process import serve
from trioengine.worker.scheduling.runner_interface import ModelInfo, OnProgress
from trioengine.worker.scheduling.sequence import SchedulerOutput
from trioengine.worker.transport import Progress, Transport


class Worker:
    """A worker in a thread: `engine` talks to it, `join` gives its exit status."""

    def __init__(self) -> None:
        to_worker, from_worker = os.pipe(), os.pipe()
        self.engine = EngineEnd(from_worker[0], to_worker[1])
        self.fds = (to_worker[0], from_worker[1])
        self.lost = threading.Event()
        self.runner = CountingRunner()
        self.error: Exception | None = None
        self.status: int | None = None
        self.transport = Transport(*self.fds, Progress(time.monotonic), self.lost.set)
        self.reader = self.transport.start()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        self.status = serve(self.transport, self._load, time.monotonic)

    def _load(self, config: WorkerConfig, on_progress: OnProgress) -> tuple[ModelInfo, CountingRunner]:
        on_progress(1, 2)
        if self.error is not None:
            raise self.error
        on_progress(2, 2)
        return self.runner.info, self.runner

    def join(self) -> int | None:
        self.thread.join()
        return self.status


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    if worker.thread.is_alive():
        worker.engine.send(Shutdown())
    worker.join()
    worker.engine.close()
    worker.reader.join()
    for fd in worker.fds:
        os.close(fd)


def fatal(worker: Worker) -> Fatal:
    """What it says last, all else skipped."""
    while not isinstance(message := worker.engine.receive(), Fatal):
        assert message is not None
    assert worker.join() == 1
    return message


def test_a_whole_life(worker: Worker) -> None:
    engine = worker.engine
    engine.send(Configure(WorkerConfig("toy")))
    assert [engine.receive(), engine.receive()] == [Loading(1, 2), Loading(2, 2)]
    assert engine.receive() == Ready("toy", "cpu", "float32", 1000, 512, 128, 16, "torch")
    engine.send(AddSession(1), request(1, 7, [4, 5]))
    rows = []
    for _ in range(3):
        message = engine.receive()
        assert isinstance(message, Tokens)
        rows += message.rows
    assert [row.token_ids.tolist() for row in rows] == [[6], [7], [8]]
    assert [row.finish_reason for row in rows] == [None, None, FinishReason.LENGTH]
    engine.send(EndSession(1), Audit(1))
    ended = engine.receive()
    assert isinstance(ended, SessionEnded)
    assert ended.session == 1
    audited = engine.receive()
    assert isinstance(audited, Audited)
    assert (audited.sessions, audited.requests, audited.kv_blocks_held) == ((), (), 0)
    engine.send(Shutdown())
    assert worker.join() == 0


@pytest.mark.parametrize(
    ("device", "chunked_prefill_size", "steps"),
    [("cpu", None, [512, 512, 276]), ("cuda:0", None, [1300]), ("cpu", 700, [700, 600])],
)
def test_prompts_are_cut_into_what_suits_the_device(
    worker: Worker, device: str, chunked_prefill_size: int | None, steps: list[int]
) -> None:
    runner = worker.runner
    runner.info = replace(runner.info, device=device, max_model_len=2048)
    seen: list[int] = []
    runner.before_step = lambda output: seen.append(output.num_tokens)
    worker.engine.configure(chunked_prefill_size=chunked_prefill_size)
    worker.engine.send(AddSession(1), request(1, 1, [1] * 1300, max_tokens=1))
    while not (isinstance(message := worker.engine.receive(), Tokens) and message.rows):
        assert message is not None  # each chunk is answered, too: by statistics without a row
    assert seen == steps


def test_shutdown_before_configure(worker: Worker) -> None:
    worker.engine.send(Shutdown())
    assert worker.join() == 0


def test_ping_is_answered_in_the_middle_of_a_step(worker: Worker) -> None:
    entered, release = threading.Event(), threading.Event()

    def block(output: SchedulerOutput) -> None:
        entered.set()
        release.wait()

    worker.runner.before_step = block
    engine = worker.engine
    engine.send(Ping(1))
    pong = engine.receive()
    assert isinstance(pong, Pong)
    assert (pong.ping, pong.activity) == (1, Activity.STARTING)
    engine.configure()
    engine.send(AddSession(1), request(1, 1, [1], max_tokens=1))
    entered.wait()
    engine.send(Ping(2))
    later = engine.receive()
    assert isinstance(later, Pong)
    assert (later.ping, later.activity) == (2, Activity.STEPPING)
    assert later.progress > pong.progress
    assert later.seconds >= 0
    release.set()
    assert isinstance(engine.receive(), Tokens)


def test_messages_that_came_during_a_step_are_applied_in_order_after_it(worker: Worker) -> None:
    entered, release = threading.Event(), threading.Event()

    def block(output: SchedulerOutput) -> None:
        entered.set()
        release.wait()

    worker.runner.before_step = block
    engine = worker.engine
    engine.configure()
    engine.send(AddSession(1), request(1, 1, [1]))
    entered.wait()
    engine.send(StopSession(1, 1), EndSession(1), AddSession(2), Audit(1), Ping(1))
    assert isinstance(engine.receive(), Pong)  # the reader has queued what came before the PING
    release.set()
    first, second = engine.receive(), engine.receive()
    assert isinstance(first, Tokens)
    assert isinstance(second, Tokens)
    assert [row.finish_reason for row in (*first.rows, *second.rows)] == [None, FinishReason.ABORT]
    ended = engine.receive()
    assert isinstance(ended, SessionEnded)
    assert ended.session == 1
    audited = engine.receive()
    assert isinstance(audited, Audited)
    assert audited.sessions == (2,)


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


def unmapped() -> ModelError:
    """The error of a model's file that could not be mapped."""
    error = ModelError("model.gguf: Cannot allocate memory")
    error.__cause__ = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    return error


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ModelError("rope is missing"), FatalCode.MODEL, "rope is missing"),
        (MemoryError("no memory"), FatalCode.MEMORY, "MemoryError: no memory"),
        (OutOfMemoryError("CUDA: all gone"), FatalCode.MEMORY, "OutOfMemoryError: CUDA: all gone"),
        (RuntimeError("CPU: can't allocate memory"), FatalCode.MEMORY, "RuntimeError: CPU: can't allocate memory"),
        (unmapped(), FatalCode.MEMORY, "ModelError: model.gguf: Cannot allocate memory"),
        (KeyError("weight"), FatalCode.INTERNAL, "KeyError: 'weight'"),
        (ValueError("a file named \udcff"), FatalCode.INTERNAL, "ValueError: a file named \\udcff"),
    ],
)
def test_an_error_while_loading_is_fatal(worker: Worker, error: Exception, code: FatalCode, said: str) -> None:
    worker.error = error
    worker.engine.send(Configure(WorkerConfig("toy")))
    message = fatal(worker)
    assert (message.code, message.message) == (code, said)
    assert "raise self.error" in message.traceback


def test_a_step_that_raises_is_fatal(worker: Worker) -> None:
    def fail(output: SchedulerOutput) -> None:
        raise ZeroDivisionError("in the kernel")

    worker.runner.before_step = fail
    worker.engine.configure()
    worker.engine.send(AddSession(1), request(1, 1, [1]))
    message = fatal(worker)
    assert (message.code, message.message) == (FatalCode.INTERNAL, "ZeroDivisionError: in the kernel")
    assert "in fail" in message.traceback


@pytest.mark.parametrize(
    "garbage",
    [b"\xff\xff\xff\xff", b"\x01\x00\x00\x00\xc1", b"\x03\x00\x00\x00abc"],
    ids=["too long", "not msgpack", "not a map"],
)
def test_a_broken_frame_is_fatal_after_what_came_before_it(worker: Worker, garbage: bytes) -> None:
    engine = worker.engine
    engine.configure()
    engine.write(engine.connection.send(Audit(1)) + garbage)
    assert isinstance(engine.receive(), Audited)
    message = fatal(worker)
    assert message.code is FatalCode.INTERNAL
    assert message.message.startswith("RemoteProtocolError")


def test_a_message_before_configure_is_fatal(worker: Worker) -> None:
    stranger = EngineEnd(-1, worker.engine.fd_out)
    stranger.connection.stage = type(stranger.connection.stage).READY
    stranger.send(Audit(1))
    assert fatal(worker).message.startswith("RemoteProtocolError")


def test_a_base_beyond_the_session_is_fatal(worker: Worker) -> None:
    worker.engine.configure()
    message = request(1, 1, [1])
    worker.engine.send(AddSession(1), type(message)(1, 1, 5, message.token_ids, message.params, ()))
    assert "base 5" in fatal(worker).message


def test_an_idle_worker_prepares_until_work_comes(worker: Worker) -> None:
    """A part at a time; messages go before the next part, and what is left is done when it is idle again."""
    begun, release, ready, parts = threading.Event(), threading.Event(), threading.Event(), list(range(4))

    def prepare() -> bool:
        if not parts:
            ready.set()
            return False
        parts.pop()
        if len(parts) == 2:
            begun.set()
            release.wait()
        return True

    worker.runner.prepare = prepare
    left: list[int] = []
    worker.runner.before_step = lambda output: left.append(len(parts))
    worker.engine.configure()
    begun.wait()
    worker.engine.send(AddSession(1), request(1, 1, [4, 5]), Ping(1))
    assert isinstance(worker.engine.receive(), Pong)  # so the reader has the messages before it
    release.set()
    for _ in range(3):
        assert isinstance(worker.engine.receive(), Tokens)
    assert left == [2, 2, 2]
    ready.wait()
    worker.engine.send(Shutdown())
    assert worker.join() == 0


def test_books_that_do_not_balance_are_fatal_when_idle(worker: Worker) -> None:
    def leak(output: SchedulerOutput) -> None:
        output.scheduled[0].sequence.block_table.pop()

    worker.runner.before_step = leak
    worker.engine.configure()
    worker.engine.send(AddSession(1), request(1, 1, [1], max_tokens=1))
    assert fatal(worker).message.startswith("InvariantError")


def test_rows_that_do_not_fit_a_frame_are_split(worker: Worker) -> None:
    logprobs = dict.fromkeys(range(100000, 104000), -1.0)
    worker.runner.describe = lambda sequence, token: sequence.row(token, logprobs)
    engine = worker.engine
    engine.configure()
    for number in range(1, 33):
        engine.send(AddSession(number))
    for number in range(1, 33):
        engine.send(request(number, number, [number], max_tokens=1))
    rows = []
    while len(rows) < 32:
        message = engine.receive()
        assert isinstance(message, Tokens)
        rows += message.rows
    assert sorted(row.session for row in rows) == list(range(1, 33))
    assert all(row.logprobs == (logprobs,) for row in rows)


def test_texts_that_do_not_fit_a_frame_are_truncated(worker: Worker) -> None:
    worker.runner.describe = lambda sequence, token: sequence.failure(SAMPLING_FAILED, "x" * (3 << 20))
    engine = worker.engine
    engine.configure()
    engine.send(AddSession(1), request(1, 1, [1]))
    assert isinstance(engine.receive(), Tokens)  # the step's, without a row
    failed = engine.receive()
    assert isinstance(failed, RequestFailed)
    assert failed.code == "sampling_failed"
    assert 1 << 18 < len(failed.message) < 1 << 20

    def fail(output: SchedulerOutput) -> None:
        raise RuntimeError("y" * (3 << 20) + "the end")

    worker.runner.before_step = fail
    engine.send(EndSession(1), AddSession(2), request(2, 2, [1]))
    message = fatal(worker)
    assert message.message.startswith("RuntimeError: yyy")
    assert message.traceback.endswith("the end\n")


def test_the_end_of_the_stream_is_noticed(worker: Worker) -> None:
    worker.engine.configure()
    os.close(worker.engine.fd_out)
    worker.lost.wait()
    worker.engine.fd_out = os.open(os.devnull, os.O_WRONLY)
    worker.transport._inbox.put(Shutdown())  # in a process nothing runs after the loss
    assert worker.join() == 0


def test_an_engine_that_does_not_read_any_more_is_noticed(worker: Worker) -> None:
    worker.engine.configure()
    os.close(worker.engine.fd_in)
    worker.engine.send(Audit(1))
    worker.lost.wait()
    worker.engine.fd_in = os.open(os.devnull, os.O_RDONLY)


def test_an_error_of_the_pipe_is_raised_and_stays() -> None:
    """Without messages the worker would wait for the next one for ever."""
    folder = os.open("/", os.O_RDONLY)
    transport = Transport(folder, folder, Progress(time.monotonic), lambda: None)
    transport.start().join()
    for _ in range(2):
        with pytest.raises(IsADirectoryError):
            transport.receive(timeout=0)
    os.close(folder)
