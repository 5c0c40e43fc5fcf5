"""Configuration: what the user sets (EngineConfig), and the part that the worker is told (WorkerConfig)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trioengine.core.errors import InvalidConfig

DEFAULT_MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What the worker needs to run a model; sent to it in CONFIGURE."""

    model_path: str  # a .gguf file, or a directory with config.json and safetensors
    device: str = "auto"  # auto, cpu, cuda, cuda:N
    dtype: str = "auto"  # auto, float32, bfloat16
    max_model_len: int | None = None  # tokens of prompt and answer together; None: the model's own limit
    max_num_seqs: int = 128  # sequences in one step
    max_num_batched_tokens: int = 2048  # tokens in one step
    block_size: int = 16  # tokens in a KV block
    kv_cache_memory: int | None = None  # bytes
    gpu_memory_utilization: float = 0.9  # on CUDA, when kv_cache_memory is None
    enable_prefix_caching: bool = True
    num_threads: int | None = None  # None: torch's own choice


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The engine's configuration; InvalidConfig names the field that cannot be used.

    `model` is a name that `trioengine pull` knows, a .gguf file, a Hugging Face directory or a hub id. Times are in
    seconds, memory in bytes.
    """

    model: str = DEFAULT_MODEL
    device: str = "auto"
    dtype: str = "auto"  # bfloat16 on CUDA and where the CPU has AVX512-BF16 or AMX, else float32
    max_model_len: int | None = None
    max_num_seqs: int = 128
    max_num_queued_reqs: int = 256
    max_sessions: int = 4096
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    num_threads: int | None = None
    startup_timeout: float = 120.0  # without progress while the worker loads
    step_timeout: float = 300.0  # one step longer than that is death
    unresponsive_timeout: float = 10.0  # no answer to a PING for that long is death
    ping_interval: float = 2.0
    worker_shutdown_timeout: float = 5.0  # bounds the whole shutdown, the worker's end included
    restart_delays: tuple[float, ...] = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0)  # the last one repeats
    max_restarts: int = 10  # deaths without one finished request until the engine gives up

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise InvalidConfig(f"model must be a name or a path, got {self.model!r}")
        if self.device not in ("auto", "cpu", "cuda") and not _is_cuda_index(self.device):
            raise InvalidConfig(f"device must be auto, cpu, cuda or cuda:N, got {self.device!r}")
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise InvalidConfig(f"dtype must be auto, float32 or bfloat16, got {self.dtype!r}")
        for name in ("max_num_seqs", "max_sessions", "max_num_batched_tokens", "block_size", "max_restarts"):
            self._integer(name, 1)
        self._integer("max_num_queued_reqs", 0)
        for name in ("max_model_len", "kv_cache_memory", "num_threads"):
            self._integer(name, 1, optional=True)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidConfig(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): every running sequence needs a token a step"
            )
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise InvalidConfig(
                f"gpu_memory_utilization must be above 0 and at most 1, got {self.gpu_memory_utilization}"
            )
        for name in ("startup_timeout", "step_timeout", "unresponsive_timeout"):
            self._seconds(name, getattr(self, name))
        for name in ("ping_interval", "worker_shutdown_timeout"):
            self._seconds(name, getattr(self, name))
        if not self.restart_delays or any(not _is_finite(delay) or delay < 0 for delay in self.restart_delays):
            raise InvalidConfig(f"restart_delays must be seconds, at least one, got {self.restart_delays!r}")

    def _integer(self, name: str, low: int, *, optional: bool = False) -> None:
        value = getattr(self, name)
        if optional and value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise InvalidConfig(f"{name} must be an integer of at least {low}, got {value!r}")

    def _seconds(self, name: str, value: object) -> None:
        if not _is_finite(value) or value <= 0:  # type: ignore[operator]
            raise InvalidConfig(f"{name} must be a positive number of seconds, got {value!r}")

    def for_worker(self, model_path: str) -> WorkerConfig:
        """The worker's part, for the model file or directory that `model` was found at."""
        return WorkerConfig(
            model_path=model_path,
            device=self.device,
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            block_size=self.block_size,
            kv_cache_memory=self.kv_cache_memory,
            gpu_memory_utilization=self.gpu_memory_utilization,
            enable_prefix_caching=self.enable_prefix_caching,
            num_threads=self.num_threads,
        )


def _is_cuda_index(device: object) -> bool:
    return isinstance(device, str) and device.startswith("cuda:") and device[5:].isdecimal()


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
