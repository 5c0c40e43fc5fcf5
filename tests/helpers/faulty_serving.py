"""`trioengine serve` with a bug: `python faulty_serving.py BUG serve …`, behind the fuzzer's relay."""

import runpy
import sys

import trio

from trioengine.actors.ports import LocalWorkerProcess
from trioengine.testing.target import relay

kept: list[LocalWorkerProcess] = []


def keep_descriptors():
    """Keep the descriptors of a dead worker."""

    def reap(self):
        self.kill()
        self._is_reaped = True
        kept.append(self)
        return self._process.poll()

    setattr(LocalWorkerProcess, "reap", reap)  # noqa: B010 - mypy rejects the assignment to a method


def miss_the_death():
    """Do not notice that a worker has died."""

    async def wait(self):
        await trio.sleep_forever()

    setattr(LocalWorkerProcess, "wait", wait)  # noqa: B010


BUGS = {function.__name__: function for function in (keep_descriptors, miss_the_death)}

if __name__ == "__main__":
    BUGS[sys.argv.pop(1)]()
    runpy.run_path(relay.__file__, run_name="__main__")
