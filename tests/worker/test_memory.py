"""Memory really returns to the system when a worker sleeps: the resident memory of its process, with a real model."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from toy_worker import EngineEnd

from trioengine.core.config import WorkerConfig
from trioengine.core.messages import (
    AddMessage,
    AddSession,
    Configure,
    EndSession,
    Loading,
    Ready,
    SessionEnded,
    Sleep,
    Slept,
    Tokens,
    Wake,
    Woken,
)
from trioengine.core.power import ALL_TAGS, Tag
from trioengine.core.sampling_params import ResolvedParams
from trioengine.core.types import token_ids

SCRIPT = Path(__file__).with_name("memory_worker.py")
MIB = 1 << 20
KV_BYTES = 72 * MIB  # some more than three sessions fill
MAX_MODEL_LEN = 1024
CYCLES = 10
GREEDY = ResolvedParams(temperature=0.0, max_tokens=4, seed=0, ignore_eos=True)


class Worker:
    """The engine's end of a worker process, a message at a time."""

    def __init__(self, end, pid):
        self._end, self._pid = end, pid
        self._minted = 0

    @property
    def rss(self):
        """Bytes."""
        status = Path(f"/proc/{self._pid}/status").read_text()
        (line,) = (line for line in status.splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) << 10

    def expect(self, kind, *messages):
        """Send these; the answer of that kind, after those of the worker's own accord."""
        self._end.send(*messages)
        while not isinstance(answer := self._end.receive(), kind):
            assert isinstance(answer, Loading | Tokens), answer
        return answer

    def sleep(self):
        self.expect(Slept, Sleep())

    def wake(self, *tags):
        assert self.expect(Woken, Wake(tags or tuple(ALL_TAGS))) == Woken(None)

    def fill_the_kv_cache(self, ready):
        """With sessions as long as the model takes."""
        for _ in range(ready.kv_blocks_total * ready.block_size // ready.max_model_len):
            self.run(ready.max_model_len - GREEDY.max_tokens)

    def run(self, num_tokens):
        """A session with one request, whose prompt nobody else had."""
        self._minted += 1
        self._end.send(AddSession(self._minted), self._message([self._minted] * num_tokens))
        while not (isinstance(answer := self._end.receive(), Tokens) and _is_over(answer)):
            pass
        self.expect(SessionEnded, EndSession(self._minted))

    def _message(self, ids):
        return AddMessage(self._minted, self._minted, 0, token_ids(ids), GREEDY, ())


def _is_over(tokens):
    return any(row.finish_reason is not None for row in tokens.rows)


@contextlib.contextmanager
def started(path, *asleep):
    """A worker, and what its READY said."""
    to_worker, from_worker = os.pipe(), os.pipe()
    fds = (to_worker[0], from_worker[1])
    command = [sys.executable, str(SCRIPT), "--in", str(fds[0]), "--out", str(fds[1]), "--parent", str(os.getpid())]
    end = EngineEnd(from_worker[0], to_worker[1])
    with subprocess.Popen(command, pass_fds=fds, start_new_session=True) as process:
        for fd in fds:
            os.close(fd)
        try:
            worker = Worker(end, process.pid)
            config = WorkerConfig(
                str(path), dtype="bfloat16", kv_cache_memory=KV_BYTES, max_model_len=MAX_MODEL_LEN, asleep=tuple(asleep)
            )
            yield worker, worker.expect(Ready, Configure(config))
        finally:
            end.close()  # the worker ends with its pipes


def test_memory_of_a_worker_that_sleeps(smollm2):
    with started(smollm2) as (worker, ready):
        worker.sleep()  # what loading left is given back
        worker.wake()
        empty = worker.rss
        worker.fill_the_kv_cache(ready)
        full = worker.rss
        assert full > empty + 0.8 * KV_BYTES
        worker.sleep()
        assert worker.rss < full - 0.8 * KV_BYTES


def test_cycles_do_not_grow(smollm2):
    """After the first one, which finds the allocators as loading left them."""
    with started(smollm2) as (worker, _):

        def cycle():
            worker.run(100)
            worker.sleep()
            asleep = worker.rss
            worker.wake(Tag.WEIGHTS)
            worker.wake(Tag.KV_CACHE)
            return asleep

        cycle()
        sizes = [cycle() for _ in range(CYCLES + 1)]
        assert sizes[-1] < sizes[0] + 5 * MIB, [size // MIB for size in sizes]
