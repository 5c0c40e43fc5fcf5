"""The worker as a process: its descriptors, signals and end; its main thread, which steps and replies until SHUTDOWN.

The supervisor spawns it in a session, hence a process group, of its own: `python -m trioengine.worker --in FD --out FD
--payloads FD --parent PID`. It never outlives its parent, whose death it learns from a pidfd: a forked child of
the parent keeps the pipe open, so EOF does not suffice, and PR_SET_PDEATHSIG is tied to the thread that spawned.

Nothing heavy is imported here: `load` imports the model runner, and torch with it.
"""

from __future__ import annotations

import argparse
import errno
import faulthandler
import gc
import logging
import os
import select
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeAlias

from trioengine.core.config import WorkerConfig
from trioengine.core.errors import ModelError, RemoteProtocolError
from trioengine.core.grammar import Grammar
from trioengine.core.messages import (
    WIRE_NAMES,
    Activity,
    AddMessage,
    Configure,
    Fatal,
    FatalCode,
    Loading,
    Ready,
    Shutdown,
    Sleep,
    UpdateWeights,
    Wake,
)
from trioengine.worker.scheduling.engine_core import EngineCore, Event
from trioengine.worker.scheduling.grammars import GrammarCompiled, compile_for
from trioengine.worker.scheduling.image_queue import PictureDecoded, decode_picture
from trioengine.worker.scheduling.images import Decode, Picture
from trioengine.worker.scheduling.runner_interface import ModelInfo, ModelRunner, OnProgress
from trioengine.worker.scheduling.sequence import Constraint, Limits, Sequence, SequenceStatus
from trioengine.worker.transport import Progress, Transport, start_receiving

if TYPE_CHECKING:
    from trioengine.text.grammar import Compiler

CPU_PREFILL_SIZE = 512  # tokens, some 0.3 s on two cores
CPU_TILES, CUDA_TILES = 1, 16  # encoded in one step
QUIET_SECONDS = 0.2  # of idleness before the accounts are checked, which may take some 10 ms
_NICE = 10  # so that a step that runs meanwhile keeps its cores

Load: TypeAlias = Callable[[WorkerConfig, OnProgress], tuple[ModelInfo, ModelRunner]]


def run(arguments: Items[str], load: Load) -> int:
    """Serve the parent over the descriptors that it names; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m trioengine.worker")
    parser.add_argument("--in", dest="fd_in", type=int, required=True, metavar="FD")
    parser.add_argument("--out", dest="fd_out", type=int, required=True, metavar="FD")
    parser.add_argument("--payloads", type=int, metavar="FD", help="an end of a SOCK_SEQPACKET pair")
    parser.add_argument("--parent", type=int, required=True, metavar="PID")
    parser.add_argument("--log-level", type=int, default=logging.WARNING, metavar="LEVEL")
    options = parser.parse_args(arguments)
    _print_to_the_log()
    logging.basicConfig(format="%(levelname)s: %(message)s")
    logging.getLogger("trioengine").setLevel(options.log_level)
    faulthandler.enable(file=2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    _watch_parent(options.parent)
    for fd in filter(None, (options.fd_in, options.fd_out, options.payloads)):
        os.set_inheritable(fd, False)  # a grandchild that holds them hides our end from the parent
        os.set_blocking(fd, True)
    transport = Transport(options.fd_in, options.fd_out, Progress(time.monotonic), kill_own_group)
    transport.start()
    if options.payloads is not None:
        start_receiving(options.payloads, transport.report)
    return serve(transport, load, time.monotonic)


def _print_to_the_log() -> None:
    """Send the prints of libraries to stderr, the log; to nowhere if the parent has no log."""
    try:
        os.fstat(2)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.dup2(2, 1)


def kill_own_group() -> None:
    """End this process and its children at once, in the middle of whatever they do."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)  # not the leader: the group belongs to another process


def _watch_parent(parent: int) -> None:
    try:
        pidfd = os.pidfd_open(parent)
    except ProcessLookupError:
        kill_own_group()
        return
    if os.getppid() != parent:  # it died before the pidfd was open, which may be another process's now
        kill_own_group()
    threading.Thread(target=_await_death, args=(pidfd,), name="parent watch", daemon=True).start()


def _await_death(pidfd: int) -> None:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll()
    kill_own_group()


def serve(transport: Transport, load: Load, clock: Callable[[], float]) -> int:
    """Run one incarnation and return the exit status: 0 after SHUTDOWN, 1 after an exception, sent as FATAL."""
    try:
        config = _receive_configuration(transport)
        if config is not None:
            _step_until_shutdown(transport, _load(transport, load, config, clock))
    except Exception as exc:
        transport.send(_fatal(exc))
        return 1
    return 0


def _receive_configuration(transport: Transport) -> WorkerConfig | None:
    """Wait for CONFIGURE; None after SHUTDOWN."""
    while True:
        for message in transport.receive(timeout=None):
            match message:
                case Configure(config=config):
                    return config
                case Shutdown():
                    return None
            name = WIRE_NAMES.get(type(message), "a payload")
            raise RemoteProtocolError(f"{name} before CONFIGURE")


def _load(transport: Transport, load: Load, config: WorkerConfig, clock: Callable[[], float]) -> EngineCore:
    transport.progress.enter(Activity.LOADING)

    core: EngineCore | None = None

    def on_progress(done: int, total: int) -> None:
        transport.progress.advance()
        if core is None:  # a wake or an update of the weights shows in PONG only
            transport.send(Loading(done, total))

    info, runner = load(config, on_progress)
    limits = limits_of(config, info)
    decoder = None if info.vision is None else DecoderThread(info.vision.decode, transport.report)
    compiler = CompilerThread(config.model_path, transport.report)
    core = EngineCore(runner, limits, clock, frozenset(config.asleep), decoder, compiler)
    _freeze_gc()
    transport.send(
        Ready(
            model_type=info.model_type,
            device=info.device,
            dtype=info.dtype,
            vocab_size=info.vocab_size,
            max_model_len=limits.max_sequence_len,
            kv_blocks_total=info.kv_blocks_total,
            block_size=info.block_size,
            weight_version=config.weight_version,
            kernels=info.kernels,
            quantization=info.quantization,
            kv_cache_dtype=info.kv_cache_dtype,
            state_slots=info.state_slots,
            window_blocks_total=info.windows.num_blocks,
        )
    )
    return core


def limits_of(config: WorkerConfig, info: ModelInfo) -> Limits:
    """Return the limits of scheduling for a model that is loaded."""
    chunked_prefill_size = config.chunked_prefill_size
    if chunked_prefill_size is None:
        chunked_prefill_size = CPU_PREFILL_SIZE if info.device == "cpu" else config.max_num_batched_tokens
    return Limits(
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        kv_blocks_total=info.kv_blocks_total,
        block_size=info.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        chunked_prefill_size=chunked_prefill_size,
        enable_prefix_caching=config.enable_prefix_caching,
        embeds=info.embeds,
        tile=None if info.vision is None else info.vision.tile,
        max_tiles_per_step=CPU_TILES if info.device == "cpu" else CUDA_TILES,
        encoder_cache_memory=config.encoder_cache_memory,
        state_slots=info.state_slots,
        windows=info.windows,
    )


def _freeze_gc() -> None:
    """Exclude all objects of the loading from collections: a full one would walk them for 0.1 s with torch."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def _step_until_shutdown(transport: Transport, core: EngineCore) -> None:
    progress = transport.progress
    while True:
        for message in _take(transport, core):
            if isinstance(message, Shutdown):
                return
            if isinstance(message, Sleep | Wake | UpdateWeights):
                progress.enter(Activity.LOADING)
            elif isinstance(message, AddMessage):  # which may load an adapter
                progress.enter(Activity.STEPPING)
            for reply in core.handle(message):
                transport.send(reply)
            progress.advance()
        if core.has_work:
            progress.enter(Activity.STEPPING)
            for reply in core.step():
                transport.send(reply)


def _take(transport: Transport, core: EngineCore) -> list[Event]:
    """Return the messages and events that have come. Without work, check the accounts, prepare, and wait for them."""
    if core.has_work:
        return transport.receive(timeout=0)
    transport.progress.enter(Activity.IDLE)
    messages = transport.receive(timeout=QUIET_SECONDS)
    if messages:
        return messages
    core.check_integrity()
    transport.progress.enter(Activity.STEPPING)
    while core.prepare():
        transport.progress.advance()
        if messages := transport.receive(timeout=0):
            return messages
    transport.progress.enter(Activity.IDLE)
    return transport.receive(timeout=None)


def _fatal(exc: Exception) -> Fatal:
    message = f"{type(exc).__name__}: {exc}"
    if _is_out_of_memory(exc):
        code = FatalCode.MEMORY
    elif isinstance(exc, ModelError):
        code, message = FatalCode.MODEL, str(exc)  # the engine raises it as a ModelError again
    else:
        code = FatalCode.INTERNAL
    return Fatal(code, _encodable(message), _encodable("".join(traceback.format_exception(exc))))


def _is_out_of_memory(exc: BaseException | None) -> bool:
    """Whether memory was short here, or for the cause of the error, as where a model's file cannot be mapped.

    Errors are recognized by name and text: torch is not imported here, and its CPU allocator raises RuntimeError.
    """
    if exc is None:
        return False
    is_short = isinstance(exc, OSError) and exc.errno == errno.ENOMEM
    is_torch = type(exc).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(exc)
    return is_short or is_torch or isinstance(exc, MemoryError) or _is_out_of_memory(exc.__cause__)


def _encodable(text: str) -> str:
    """Escape lone surrogates, which file names with odd bytes bring into messages."""
    return text.encode("utf-8", "backslashreplace").decode()


class DecoderThread:
    """A Decoder in a thread of low priority; `submit` and `cancel` are called by one other thread."""

    def __init__(self, decode: Decode, report: Callable[[PictureDecoded], None]) -> None:
        self._decode = decode
        self._report = report
        self._pictures: deque[Picture] = deque()  # each operation on it is atomic
        self._submitted = threading.Semaphore(0)  # at least as often as there are pictures
        threading.Thread(target=self._run, name="decoder", daemon=True).start()

    def submit(self, picture: Picture) -> None:
        self._pictures.append(picture)
        self._submitted.release()

    def cancel(self, picture: Picture) -> bool:
        try:
            self._pictures.remove(picture)
        except ValueError:
            return False
        return True

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while self._submitted.acquire():
            try:
                picture = self._pictures.popleft()
            except IndexError:  # it was cancelled
                continue
            self._report(decode_picture(picture, self._decode))


class CompilerThread:
    """A Compiler in a thread of low priority, which reads the model's tokenizer when the first grammar comes."""

    def __init__(self, model_path: str, report: Callable[[GrammarCompiled], None]) -> None:
        self._model_path = model_path
        self._report = report
        self._sequences: SimpleQueue[Sequence] = SimpleQueue()
        self._compiler: Compiler | None = None
        threading.Thread(target=self._run, name="compiler", daemon=True).start()

    def submit(self, sequence: Sequence) -> None:
        self._sequences.put(sequence)

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while True:
            sequence = self._sequences.get()
            if sequence.status is not SequenceStatus.FINISHED:
                self._report(compile_for(sequence, self._compile))

    def _compile(self, grammar: Grammar) -> Constraint:
        if self._compiler is None:
            from trioengine.hub.model_info import read_model
            from trioengine.text.grammar import Compiler

            model = read_model(Path(self._model_path))
            self._compiler = Compiler(model.tokenizer, model.eos_token_ids)
        return self._compiler.compile(grammar)
