"""`trioengine serve` as a process, with the default model."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

PATIENCE = 60  # seconds for what takes milliseconds


class Served:
    """`trioengine serve` as a process, on a free port."""

    def __init__(self, model: Path, log: Path, *more: str) -> None:
        self.log = log
        options = "--port 0 --max-model-len 512 --kv-cache-memory 33554432 --max-num-seqs 8 --served-model-name m"
        options += " --num-threads 1"  # two that wait for each other are many times slower on a busy machine
        command = [sys.executable, "-m", "trioengine", "serve", str(model), *options.split(), *more]
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(command, stderr=stderr)
        self.port = int(self._wait_for(r"listening on http://127\.0\.0\.1:(\d+)"))
        self._wait_for("(ready): ")

    def _wait_for(self, pattern: str) -> str:
        give_up = time.monotonic() + PATIENCE
        while not (found := re.search(pattern, self.log.read_text())):
            assert self.process.poll() is None and time.monotonic() < give_up, self.log.read_text()
            time.sleep(0.02)
        return found.group(1)

    def get(self, path: str) -> dict:
        connection = http.client.HTTPConnection("localhost", self.port, timeout=PATIENCE)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            assert response.status == 200, response.read()
            return json.loads(response.read())
        finally:
            connection.close()

    def rest(self, tasks: int, descriptors: int) -> dict:
        """What the server says of itself when it has, within PATIENCE, no session and as much as it had before."""
        give_up = time.monotonic() + PATIENCE
        while True:
            state = self.get("/debug/invariants")
            statistics, found = state["statistics"], (state["tasks"], self.descriptors)
            if statistics["sessions"] == statistics["worker_sessions"] == 0 and found == (tasks, descriptors):
                return statistics
            assert time.monotonic() < give_up, (state, found, tasks, descriptors)
            time.sleep(0.05)

    @property
    def rss(self) -> int:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    @property
    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE)
