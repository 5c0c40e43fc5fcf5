"""Performs programs on a server that the fuzzer has started: the rules that harm its processes, without I/O.

A request survives the death of its worker, so no client is excused for one. MOST_DEATHS bounds the deaths that the
rules of a program cause, below the number after which the engine gives a request up.
"""

from __future__ import annotations

from trioengine.testing.target.exchange import Target
from trioengine.testing.target.machine import Run
from trioengine.testing.target.oracles import Finding, Snapshot
from trioengine.testing.target.program import Step
from trioengine.testing.target.wire import (
    Action,
    Close,
    End,
    Ended,
    Figures,
    Leave,
    Limit,
    Pipes,
    ReadLog,
    Restart,
    Signal,
    Wait,
    answer_of,
)

MOST_DEATHS = 2
SURVIVED = 3  # deaths of a worker that a request survives
RESTARTS = "trioengine_worker_restarts_total"
SHORT_FREEZE = 100  # milliseconds: no worker dies of it
LIMITED = 1.0  # seconds of a limit
CLOSING = 0.05  # seconds in which the server closes the connections of earlier requests
FILES = "descriptors of the server"


class FaultyRun(Run):
    """One program with faults."""

    def __init__(self, target: Target, steps: list[Step], tag: str, ignored: frozenset[str] = frozenset()) -> None:
        super().__init__(target, steps, tag, ignored)
        self._deaths = 0
        self._restarted = False
        self._may_log_errors = False

    def snapshot(self) -> Action[Snapshot]:
        """Count the descriptors before a connection is opened: the server closes each some time after its client."""
        yield Wait(CLOSING)
        figures = yield Figures()
        found = yield from super().snapshot()
        if figures is not None:
            found.gauges[FILES] = float(figures[1])
        return found

    def _fault(self, text: str) -> Action[None]:
        yield from self.note("fault", text, to_server=True)

    def _count_death(self) -> None:
        """A text that was computed by two workers may differ in a crowd: it is not compared."""
        self._deaths += 1
        for client in self.clients.values():
            client.golden = False

    # ---- faults -----------------------------------------------------------------------------------------------------

    def do_kill(self, process: str) -> Action[None]:
        if process == "server":
            yield from self._end_server("KILL")
        elif self._deaths < MOST_DEATHS and (yield Signal("KILL", process)):
            self._count_death()
            yield from self._fault("SIGKILL of the worker")

    def do_freeze(self, process: str, milliseconds: int) -> Action[None]:
        """Stop a process; a worker that is silent for too long is killed by the engine."""
        if milliseconds > SHORT_FREEZE and self._deaths == MOST_DEATHS:
            return
        if not (yield Signal("STOP", process)):
            return
        if milliseconds > SHORT_FREEZE:
            self._count_death()
        yield from self._fault(f"SIGSTOP of the {process}")
        yield Wait(milliseconds / 1000)
        yield Signal("CONT", process)
        yield from self._fault(f"SIGCONT of the {process}")

    def do_pipes(self, way: str) -> Action[None]:
        """Pass bytes between the engine and its worker in this way until the end of the program."""
        yield Pipes(way)
        yield from self._fault(f"pipes: {way}")

    def do_starve(self, process: str, megabytes: int) -> Action[None]:
        """Let a process take no more memory while requests come. Each may fail, but must end."""
        if self._deaths == MOST_DEATHS or not (yield Limit(process, "memory", megabytes)):
            return
        self._count_death()
        self._may_log_errors = True
        yield from self._fault(f"the {process} may have {megabytes} MiB more memory")
        yield from self._open_many("starve", 200, 4, words=200)
        self._excuse_all()
        yield Wait(LIMITED)
        yield Limit(process, "memory", None)
        yield from self._fault("no limit")
        if process == "server" and (yield Ended("server", 0.0)) is not None:  # Python cannot promise more
            yield from self._end_server("KILL")

    def do_crowd(self, spare: int, count: int, kill: bool) -> Action[None]:
        """Let the server have few descriptors while connections come, and its worker may have to be replaced."""
        if not (yield Limit("server", "files", spare)):
            return
        self._may_log_errors = True
        yield from self._fault(f"the server may have {spare} descriptors more")
        if kill:
            yield from self.do_kill("worker")
        yield from self._open_many("crowd", 300, count, words=0)
        yield Wait(LIMITED)
        yield Limit("server", "files", None)
        yield from self._fault("no limit")

    def _open_many(self, name: str, first: int, count: int, words: int) -> Action[None]:
        for number in range(first, first + count):
            yield from self._leave(number, Close.FIN)
            yield from self._open(number, f"fz{self.tag}-{name}-{number}", True, 8, words, False)

    def do_terminate(self) -> Action[None]:
        yield from self._end_server("TERM")

    # ---- the end of a server ----------------------------------------------------------------------------------------

    def _end_server(self, name: str) -> Action[None]:
        """End the server, judge its end, and start it again, at most once in a program."""
        if self._restarted or not (yield Signal(name, "server")):
            return
        self._restarted = True
        yield from self._fault(f"SIG{name} of the server")
        yield Signal("CONT", "server")
        deadline = self.target.deadline
        status = yield Ended("server", deadline)
        if status is None:
            self.findings.append(Finding("ends", f"the server runs {deadline:g} s after SIG{name}"))
        elif name == "TERM" and status != 0:
            self.findings.append(Finding("ends", f"the server ended with {status} after SIGTERM"))
        if status is not None and (yield Ended("worker", deadline)) is None:
            self.findings.append(Finding("ends", f"the worker runs {deadline:g} s after its server's end"))
        for number, client in self.clients.items():
            if name == "TERM" and not client.stalled:
                yield from self._judge_last(number)
            yield Leave(number, Close.RST)
        yield from self._start_again()

    def _judge_last(self, number: int) -> Action[None]:
        """Judge the answer to a client of a server that has ended: whole, or with an error."""
        client = self.clients[number]
        response = client.response
        yield from self.read(number, response, self.target.deadline)
        yield from self._received(number)
        broken = response.status == 200 and not response.ended
        if broken and not client.excused and response.end is not End.RESET:
            message = f"the request of client {number} broke off after {answer_of(response).pieces} pieces at SIGTERM"
            self.findings.append(Finding("whole", message))

    def _start_again(self) -> Action[None]:
        yield from self._read_log()
        self.target.host = yield Restart()
        yield from self._fault(f"a new server at {self.target.host}")
        self.clients.clear()
        self.power = type(self.power).AWAKE
        self.answers = self._deaths = 0
        yield from self.golden(1)
        self.before = yield from self.snapshot()

    # ---- the judgement ----------------------------------------------------------------------------------------------

    def perform(self) -> Action[Finding | None]:
        yield ReadLog()
        return (yield from super().perform())

    def _restore(self) -> Action[None]:
        """A call may fail with the worker: try again, once for each death."""
        yield Pipes("fast")
        for _ in range(self._deaths):
            yield from self._wake_up()
        yield from super()._restore()

    def _wake_up(self) -> Action[None]:
        if self.power.value == "asleep":
            yield from self._move("wake")

    def _read_all(self) -> Action[None]:
        now = yield from self.snapshot()
        deaths = now.counters.get(RESTARTS, 0.0) - self.before.counters.get(RESTARTS, 0.0)
        if deaths > SURVIVED:  # on a busy machine a worker may be silent for too long
            self._excuse_all()
        yield from super()._read_all()

    def judge(self) -> Action[None]:
        status = yield Ended("server", 0.0)
        if status is not None:
            self.findings.append(Finding("alive", f"the server ended with {status}"))
        else:
            yield from super().judge()
        yield from self._read_log()

    def _read_log(self) -> Action[None]:
        text = yield ReadLog()
        self.evidence["log"] = text[-4000:]
        errors = [line for line in text.splitlines() if " ERROR " in line or " CRITICAL " in line]
        if errors and not self._may_log_errors:
            self.findings.append(Finding("log", errors[0]))
