"""A worker without a process: the real connection, the real scheduling and a toy model in a simulated process.

Beside the faults of its process it has faults of its work: `stall` and `give_up`. It is run in one of two ways: by its
task `run`, in trio's time, so that under MockClock nothing waits; or by hand, with wires that are moved by calls and
`turn`, as the fuzzer does.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

import trio

from trioengine.core.connection import Connection, Role
from trioengine.core.errors import RemoteProtocolError
from trioengine.core.messages import (
    Activity,
    AddMessage,
    Configure,
    Fatal,
    FatalCode,
    FromWorker,
    Loading,
    Message,
    Ping,
    Pong,
    Ready,
    Shutdown,
    StopSession,
    Tokens,
)
from trioengine.core.power import Tag
from trioengine.testing.simulated_process import (
    SIGSEGV,
    SimulatedCompiler,
    SimulatedDecoder,
    SimulatedPayload,
    SimulatedProcess,
)
from trioengine.testing.simulated_process import Behaviour as Behaviour
from trioengine.testing.simulated_process import Health as Health
from trioengine.testing.toy_model import toy_decode
from trioengine.testing.toy_runner import Crash, ToyRunner
from trioengine.testing.toy_weights import toy_quantization
from trioengine.worker.scheduling.engine_core import EngineCore, Event
from trioengine.worker.scheduling.images import PayloadArrived
from trioengine.worker.scheduling.sequence import Limits

Handled: TypeAlias = Event


class WorkerObserver:
    """Base class: simulated workers call each method when something happens; it does nothing unless overridden."""

    def handling(self, worker: SimulatedWorker, event: Handled) -> None:
        """The worker is about to handle a message of the engine, or an event of a payload."""

    def handled(self, worker: SimulatedWorker, event: Handled, replies: list[FromWorker]) -> None:
        """The worker has handled it, and sends these replies."""

    def sending(self, worker: SimulatedWorker, messages: Sequence[Message]) -> None:
        """The worker sends these messages."""

    def dying(self, worker: SimulatedWorker) -> None:
        """The worker is about to be dead."""


class SimulatedWorker(SimulatedProcess):
    """One incarnation.

    With `by_hand` nothing happens by itself: `receive`, `receive_payloads`, `turn`, `decode`, `compile` and `deliver`
    are called.
    """

    def __init__(
        self,
        pid: int,
        limits: Limits,
        behaviour: Behaviour,
        *,
        by_hand: bool = False,
        observers: Sequence[WorkerObserver] = (),
    ) -> None:
        super().__init__(pid, by_hand=by_hand)
        self._observers = observers
        self.runner = ToyRunner(limits)
        self.decoder = SimulatedDecoder(toy_decode, self._report)
        self.compiler = SimulatedCompiler(self._report)
        self._limits = limits
        self.core = self._new_core(frozenset())
        self.connection = Connection(Role.WORKER)
        self.received: list[Message] = []  # all messages of the engine, in order
        self.blamed: RemoteProtocolError | None = None  # a protocol violation by the engine
        self.fatal: Fatal | None = None  # sent for an exception of the step loop, which is the worker's own bug
        self._behaviour = behaviour
        self._queue: deque[Event] = deque()
        self._stopped: set[int] = set()  # requests
        self._arrivals: dict[int, bool] = {}  # requests in order, and whether they have images or a grammar
        self._weight_version = 0
        self._stalled_until = math.inf
        self._activity, self._since, self._progress = Activity.STARTING, trio.current_time(), 0

    # ---- faults ---------------------------------------------------------------------------------------------------

    def stall(self, seconds: float = math.inf) -> None:
        """Stay in a step, or in the start, for so long or without end; PING is answered. By hand, `recover` ends it."""
        if self.health is Health.WELL:
            self.health = Health.STALLED
            self._stalled_until = trio.current_time() + seconds
            if self._activity is not Activity.STARTING:
                self._turn_to(Activity.STEPPING)

    def recover(self) -> None:
        """A step that took long ends, if its time has passed."""
        if self.health is Health.STALLED and trio.current_time() >= self._stalled_until:
            self.health = Health.WELL
            if self._activity is not Activity.STARTING:
                self._turn_to(Activity.IDLE)

    @property
    def seconds_to_recover(self) -> float:
        """Until a slow step or start ends; 0 without one, infinite for one that never ends."""
        is_stalled = self.health is Health.STALLED
        return max(self._stalled_until - trio.current_time(), 0.0) if is_stalled else 0.0

    def give_up(self, fatal: Fatal) -> None:
        """Say why, and exit."""
        self._send_all([fatal])
        self.exit(1)

    def exit(self, exit_code: int) -> None:
        if self.health is not Health.DEAD:
            for observer in self._observers:
                observer.dying(self)
        super().exit(exit_code)

    @property
    def is_starting(self) -> bool:
        """Whether it has not handled CONFIGURE."""
        return self._activity is Activity.STARTING

    # ---- by hand --------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether `turn` would do anything."""
        is_busy = bool(self._queue) or self.core.has_work or len(self.decoder) + len(self.compiler) > 0
        return self.health is Health.WELL and is_busy

    @property
    def has_images(self) -> bool:
        """Whether `receive_payloads` or `decode` would do anything."""
        return self.reads and len(self.payloads) + len(self.decoder) > 0

    @property
    def only_decodes(self) -> bool:
        """Whether `turn` would decode an image, as there is nothing else to do."""
        return self._is_idle and len(self.decoder) > 0

    @property
    def only_compiles(self) -> bool:
        """Whether `turn` would compile a grammar, as there is nothing else to do."""
        return self._is_idle and len(self.compiler) > 0 and not self.decoder

    @property
    def _is_idle(self) -> bool:
        """Whether it is well, and only the decoder and the compiler may have work."""
        return self.health is Health.WELL and not self._queue and not self.core.has_work

    def begin_decoding(self) -> None:
        """Begin to decode the next image, if there is one; `decode` ends that."""
        if self.reads:
            self.decoder.begin()

    def decode(self) -> None:
        """Decode the next image, if there is one: beside a step, even one that takes long."""
        if self.reads and self.decoder:
            self.decoder.decode()

    def compile(self) -> None:
        """Compile the next grammar, if there is one: beside a step, even one that takes long."""
        if self.reads and self.compiler:
            self.compiler.compile()

    def turn(self) -> None:
        """Handle the next message or event; otherwise run a step; otherwise decode an image, or compile a grammar."""
        if not self.has_work:
            return
        if self._queue:
            self._handle(self._queue.popleft())
        elif self.core.has_work:
            self._step()
        elif self.decoder:
            self.decode()
        else:
            self.compile()

    # ---- the worker's work ----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Load, then step and answer until dead."""
        while self.health is Health.WELL:
            if not self.has_work:
                self._turn_to(Activity.IDLE)
                await self._arrived.wait()
                self._arrived = trio.Event()
                continue
            step = not self._queue and self.core.has_work
            if step:
                self._turn_to(Activity.STEPPING)
                await trio.sleep(self._behaviour.step_time)
            elif not self._queue:
                await trio.sleep(self._behaviour.decode_time)
            elif isinstance(self._queue[0], Configure):
                self._turn_to(Activity.LOADING)
                await self._load()
            if self.health is Health.WELL and step:
                self._step()
            elif self.health is Health.WELL and self._queue:
                self._handle(self._queue.popleft())
            self.decode()
            self.compile()

    async def _load(self) -> None:
        total = self._behaviour.load_bytes
        if not total:
            await trio.sleep(self._behaviour.load_time)
            return
        for done in (total // 2, total):
            await trio.sleep(self._behaviour.load_time / 2)
            if self.health is Health.WELL:
                self._send_all([Loading(done, total)])

    def _step(self) -> None:
        known = self.core.requests
        self._arrivals = {each: may_wait for each, may_wait in self._arrivals.items() if each in known}
        self.runner.arrivals = self._arrivals
        try:
            messages = self.core.step()
        except AssertionError:  # the kit's own
            raise
        except Crash:
            self.exit(-SIGSEGV)
            return
        except Exception as exc:
            self._fail(exc)
            return
        for message in messages:
            rows = message.rows if isinstance(message, Tokens) else ()
            assert not any(row.request in self._stopped for row in rows), "a stopped request goes on"
        self._send_all(messages)
        self._check_payloads()
        if not self.core.has_work:
            self.core.check_integrity()

    def _handle(self, message: Event) -> None:
        self._progress += 1
        if isinstance(message, Configure):
            if self._behaviour.fatal is not None:
                self.give_up(self._behaviour.fatal)
            else:
                asleep = frozenset(message.config.asleep)
                self.runner.load(message.config.model_path, asleep)
                self.core = self._new_core(asleep)
                self._weight_version = message.config.weight_version
                self._send_all([self._ready()])
                self._turn_to(Activity.IDLE)
        elif isinstance(message, Shutdown):
            self.exit(0)
        else:
            if isinstance(message, StopSession):
                self._stopped.add(message.request)
            elif isinstance(message, AddMessage):
                self._arrivals.pop(message.request, None)  # it comes again
                self._arrivals[message.request] = bool(message.images) or message.params.grammar is not None
            try:
                for observer in self._observers:
                    observer.handling(self, message)
                replies = self.core.handle(message)
                for observer in self._observers:
                    observer.handled(self, message, replies)
                self._send_all(replies)
                self._check_payloads()
            except RemoteProtocolError as exc:
                self._blame(exc)
            except AssertionError:
                raise
            except Exception as exc:
                self._fail(exc)

    def _check_payloads(self) -> None:
        """No payload leaks."""
        if self.health is not Health.DEAD and self.open_payloads:
            self.open_payloads = [payload for payload in self.open_payloads if payload.is_open]
            held = self.core.num_payloads + sum(isinstance(event, PayloadArrived) for event in self._queue)
            assert len(self.open_payloads) == held, "the worker has payloads open that it does not know"

    def _new_core(self, asleep: frozenset[Tag]) -> EngineCore:
        return EngineCore(self.runner, self._limits, trio.current_time, asleep, self.decoder, self.compiler)

    def _ready(self) -> Ready:
        limits = self._limits
        return Ready(
            model_type="toy",
            device="cpu",
            dtype="float32",
            kernels="simulated",
            vocab_size=limits.vocab_size,
            max_model_len=limits.max_sequence_len,
            kv_blocks_total=limits.kv_blocks_total,
            block_size=limits.block_size,
            weight_version=self._weight_version,
            quantization=toy_quantization(self.runner.path),
            state_slots=limits.state_slots,
            window_blocks_total=limits.windows.num_blocks,
        )

    def _send_all(self, messages: list[FromWorker]) -> None:
        if not self.reads:
            return
        for observer in self._observers:
            observer.sending(self, messages)
        for message in messages:
            self.to_engine.put(self.connection.send(message))

    def _turn_to(self, activity: Activity) -> None:
        if activity is not self._activity:
            self._activity, self._since = activity, trio.current_time()

    def _arrive(self, data: bytes) -> None:
        """The reader thread's part: decode, answer PING, queue the rest."""
        self.connection.receive_data(data)
        try:
            while (message := self.connection.next_message()) is not None:
                self.received.append(message)
                if isinstance(message, Ping):
                    self._pong(message)
                else:
                    self._queue.append(message)  # type: ignore[arg-type]
        except RemoteProtocolError as exc:
            self._blame(exc)
        self._arrived.set()

    def _arrive_payload(self, payload: int, source: SimulatedPayload) -> None:
        self.open_payloads.append(source)
        self._report(PayloadArrived(payload, source))

    def _report(self, event: Event) -> None:
        """Queue an event, as a thread of a real worker does."""
        self._queue.append(event)
        self._arrived.set()

    def _blame(self, error: RemoteProtocolError) -> None:
        self.blamed = error
        self.give_up(Fatal(FatalCode.INTERNAL, str(error), ""))

    def _fail(self, error: Exception) -> None:
        """As the real worker does; without its traceback, whose length would depend on paths."""
        self.fatal = Fatal(FatalCode.INTERNAL, f"{type(error).__name__}: {error}", "")
        self.give_up(self.fatal)

    def _pong(self, message: Ping) -> None:
        seconds = trio.current_time() - self._since
        self._send_all([Pong(message.ping, self._progress, self._activity, seconds)])
