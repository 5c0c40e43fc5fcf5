"""The worker's main thread: load the model, then take messages, step and reply until SHUTDOWN.

Nothing heavy is imported here; `load` brings the model runner, and torch with it.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from typing import Protocol, TypeAlias

from trioengine.core.config import WorkerConfig
from trioengine.core.errors import ModelError, RemoteProtocolError
from trioengine.core.messages import (
    WIRE_NAMES,
    Activity,
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
from trioengine.worker.decoder import DecoderThread, Vision
from trioengine.worker.scheduling.engine_core import EngineCore, Event
from trioengine.worker.scheduling.step import Limits, ModelRunner
from trioengine.worker.transport import Transport

CPU_PREFILL_SIZE = 512  # tokens, some 0.3 s on two cores
CPU_TILES, CUDA_TILES = 1, 16  # encoded in one step
QUIET_SECONDS = 0.2  # idle for that long: the books are checked, which may take some 10 ms


class LoadedRunner(ModelRunner, Protocol):
    """A model runner, and what READY says of it."""

    @property
    def model_type(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def kernels(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def kv_blocks_total(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def vision(self) -> Vision | None:
        """None: the model takes no images."""
        ...


OnProgress: TypeAlias = Callable[[int, int], None]  # (done, total), in bytes of weights
Load: TypeAlias = Callable[[WorkerConfig, OnProgress], LoadedRunner]


def serve(transport: Transport, load: Load, clock: Callable[[], float]) -> int:
    """Run one incarnation; returns the exit status, 0 after SHUTDOWN. Any exception is said as FATAL, and is 1."""
    try:
        config = _receive_configuration(transport)
        if config is not None:
            _step_until_shutdown(transport, _load(transport, load, config, clock))
    except Exception as exc:
        transport.send(_fatal(exc))
        return 1
    return 0


def _receive_configuration(transport: Transport) -> WorkerConfig | None:
    """None: SHUTDOWN came instead."""
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
        if core is None:  # of a wake, or an update of the weights, only the PONG tells
            transport.send(Loading(done, total))

    runner = load(config, on_progress)
    chunked_prefill_size = config.chunked_prefill_size
    if chunked_prefill_size is None:
        chunked_prefill_size = CPU_PREFILL_SIZE if runner.device == "cpu" else config.max_num_batched_tokens
    limits = Limits(
        vocab_size=runner.vocab_size,
        max_model_len=runner.max_model_len,
        kv_blocks_total=runner.kv_blocks_total,
        block_size=runner.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        chunked_prefill_size=chunked_prefill_size,
        enable_prefix_caching=config.enable_prefix_caching,
        tile=None if runner.vision is None else runner.vision.tile,
        max_tiles_per_step=CPU_TILES if runner.device == "cpu" else CUDA_TILES,
        encoder_cache_memory=config.encoder_cache_memory,
    )
    decoder = None if runner.vision is None else DecoderThread(runner.vision.decode, transport.report)
    core = EngineCore(runner, limits, clock, frozenset(config.asleep), decoder)
    _calm_garbage_collector()
    transport.send(
        Ready(
            model_type=runner.model_type,
            device=runner.device,
            dtype=runner.dtype,
            vocab_size=runner.vocab_size,
            max_model_len=limits.max_sequence_len,
            kv_blocks_total=runner.kv_blocks_total,
            block_size=runner.block_size,
            weight_version=config.weight_version,
            kernels=runner.kernels,
        )
    )
    return core


def _calm_garbage_collector() -> None:
    """What loading made stays for good: without this each full collection walks it, a pause of 0.1 s with torch."""
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
            for reply in core.handle(message):
                transport.send(reply)
            progress.advance()
        if core.has_work:
            progress.enter(Activity.STEPPING)
            for reply in core.step():
                transport.send(reply)


def _take(transport: Transport, core: EngineCore) -> list[Event]:
    """The messages and events that have come; waits when there is nothing else to do, and checks the books then."""
    if core.has_work:
        return transport.receive(timeout=0)
    transport.progress.enter(Activity.IDLE)
    messages = transport.receive(timeout=QUIET_SECONDS)
    if messages:
        return messages
    core.check_integrity()
    return transport.receive(timeout=None)


def _fatal(exc: Exception) -> Fatal:
    message = f"{type(exc).__name__}: {exc}"
    if isinstance(exc, ModelError):
        code, message = FatalCode.MODEL, str(exc)  # the engine raises it as a ModelError again
    elif _is_out_of_memory(exc):
        code = FatalCode.MEMORY
    else:
        code = FatalCode.INTERNAL
    return Fatal(code, _encodable(message), _encodable("".join(traceback.format_exception(exc))))


def _is_out_of_memory(exc: Exception) -> bool:
    """By name and words, because torch is not imported here: its CPU allocator raises a plain RuntimeError."""
    return (
        isinstance(exc, MemoryError) or type(exc).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(exc)
    )


def _encodable(text: str) -> str:
    """Without lone surrogates, which file names with odd bytes bring into messages."""
    return text.encode("utf-8", "backslashreplace").decode()
