"""Processes of which only one runs at a time, so that each is measured alone."""

import os
import signal
import subprocess
import sys
from contextlib import suppress

END_TIMEOUT = 30.0  # seconds


def end_on_sigterm():
    """Let a SIGTERM unwind this process, so that no stopped process outlives it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


class StoppedProcess:
    """A process group that is stopped until `resume`. Children in groups of their own are not: they should be idle."""

    def __init__(self, command, **options):
        self.process = subprocess.Popen(command, start_new_session=True, **options)
        self._signal(signal.SIGSTOP)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        try:
            self.process.wait(END_TIMEOUT)
        finally:
            self._signal(signal.SIGKILL)
            self.process.wait()

    def resume(self):
        self._signal(signal.SIGCONT)

    def stop(self):
        self._signal(signal.SIGSTOP)

    def _signal(self, number):
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)
