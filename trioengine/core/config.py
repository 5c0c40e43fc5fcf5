"""Configuration of the engine (EngineConfig, set by users) and of its worker (WorkerConfig, sent in CONFIGURE)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias, TypedDict

from trioengine.core.checks import (
    MAX_COUNT,
    MAX_INT64,
    check_names,
    field_names,
    fields_checked,
    integer,
    number,
    path,
)
from trioengine.core.errors import InvalidConfig
from trioengine.core.power import Tag
from trioengine.core.sampling_params import MAX_SPECULATIVE_TOKENS
from trioengine.core.wording import brief, changed_fields, counted

DEFAULT_MODEL = "smollm2-135m-instruct"
MAX_SESSIONS = 50_000  # so that AUDITED, with 18 bytes a session and its request, always fits a frame
MAX_SECONDS = 10**9
_THREADS_PER_CORE = 4
DType: TypeAlias = Literal["auto", "float32", "bfloat16"]
Kernels: TypeAlias = Literal["auto", "native", "triton", "torch"]
CudaGraphs: TypeAlias = Literal["auto", "none", "pad"]
Quantization: TypeAlias = Literal["auto", "none", "int8", "gguf"]
KVCacheDType: TypeAlias = Literal["auto", "int8"]
OnWorkerLoss: TypeAlias = Literal["resume", "fail"]
_DEVICES = ("auto", "cpu", "cuda", *(f"cuda:{index}" for index in range(128)))
_INTEGERS = {
    "max_num_seqs": (1, MAX_COUNT),
    "max_num_queued_reqs": (0, MAX_COUNT),
    "max_sessions": (1, MAX_SESSIONS),
    "max_num_batched_tokens": (1, MAX_COUNT),
    "block_size": (1, MAX_COUNT),
    "encoder_cache_memory": (0, MAX_INT64),
    "max_restarts": (1, MAX_COUNT),
    "payload_memory": (1, MAX_INT64),
    "num_speculative_tokens": (0, MAX_SPECULATIVE_TOKENS),
}
_OPTIONAL_INTEGERS = {
    "max_model_len": (2, MAX_COUNT),  # a prompt and a token
    "kv_cache_memory": (1, MAX_INT64),
    "chunked_prefill_size": (1, MAX_COUNT),
    "num_threads": (1, 1024),
}
_SECONDS = ("startup_timeout", "step_timeout", "unresponsive_timeout", "ping_interval", "worker_shutdown_timeout")


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """The worker's configuration, sent to it in CONFIGURE."""

    model_path: str  # a .gguf file, or a directory with config.json and safetensors
    device: str = "auto"  # auto, cpu, cuda, cuda:N
    dtype: str = "auto"  # auto, float32, bfloat16
    max_model_len: int | None = None  # tokens of prompt and answer together; None: the model's own limit
    max_num_seqs: int = 128  # sequences in one step
    max_num_batched_tokens: int = 2048  # tokens in one step
    chunked_prefill_size: int | None = None  # tokens of prompts in one step; None: suited to the device
    block_size: int = 16  # tokens in a KV block
    kv_cache_memory: int | None = None  # bytes
    kv_blocks: int | None = None  # instead of kv_cache_memory, after the first incarnation: as many as that one had
    state_slots: int | None = None  # with kv_blocks, the same
    window_blocks: int | None = None  # with kv_blocks, the same
    gpu_memory_utilization: float = 0.9  # of weights and KV cache, on CUDA, when kv_cache_memory is None
    enable_prefix_caching: bool = True
    encoder_cache_memory: int = 256 << 20  # bytes of image features, kept for later requests
    num_threads: int | None = None  # None: torch's own choice
    weight_version: int = 1  # the engine's number of the weights at model_path
    kernels: str = "auto"  # auto, native, triton, torch
    cuda_graphs: str = "auto"  # auto, none, pad
    quantization: str = "auto"  # auto, none, int8, gguf
    kv_cache_dtype: str = "auto"  # auto: dtype; int8
    batch_invariant: bool = False  # an error unless logits have the same bits whatever shares a step
    draft_model_path: str | None = None  # of a smaller model, which drafts for the other
    asleep: tuple[Tag, ...] = ()  # not to be loaded before WAKE


@fields_checked
@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The engine's configuration; InvalidConfig names the field that cannot be used.

    `model` is a name that `trioengine pull` takes, a .gguf file, a Hugging Face directory or a hub id. Times are in
    seconds, memory in bytes.
    """

    model: str = DEFAULT_MODEL
    generation_config: str = "auto"  # sampling defaults: auto (the model's own), none, or a path
    chat_template: str | None = None  # a file, in place of the model's template
    adapters: tuple[str, ...] = ()  # LoRA adapters that are loaded at the start, each as NAME=DIRECTORY
    device: str = "auto"
    dtype: DType = "auto"  # bfloat16 on CUDA and where the CPU has AVX512-BF16 or AMX, else float32
    max_model_len: int | None = None
    max_num_seqs: int = 128
    max_num_queued_reqs: int = 256
    max_sessions: int = 4096
    max_num_batched_tokens: int = 2048
    chunked_prefill_size: int | None = None
    block_size: int = 16
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    encoder_cache_memory: int = 256 << 20  # image features, kept for later requests
    payload_memory: int = 512 << 20  # images on their way to the worker, or kept for later turns
    num_threads: int | None = None  # of the worker, up to 4 for each core; None: torch's own choice
    kernels: Kernels = "auto"  # native, in C++, on a CPU with a compiler; triton on a GPU that has it; else torch
    cuda_graphs: CudaGraphs = "auto"  # with triton, of steps padded to a few sizes; pad: only pad, on any device
    quantization: Quantization = "auto"  # gguf, int8: products of integers; auto: gguf where it is fast
    kv_cache_dtype: KVCacheDType = "auto"  # auto: dtype; int8: 8-bit integers, with a scale for each token and head
    batch_invariant: bool = False  # an error unless answers have the same bits whatever shares a step: native kernels
    num_speculative_tokens: int = 0  # tokens drafted a step, at most, for requests that do not choose; 0: none
    draft_model: str | None = None  # as model: a smaller one of the same vocabulary, which drafts; None: prompt lookup
    startup_timeout: float = 120.0  # without progress while the worker loads
    step_timeout: float = 300.0  # one step longer than that is death
    unresponsive_timeout: float = 10.0  # no answer to a PING for that long is death
    ping_interval: float = 0.5  # from an answer to the next PING: silence is noticed after both together
    worker_shutdown_timeout: float = 5.0  # bounds the whole shutdown, the worker's end included
    restart_delays: tuple[float, ...] = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0)  # the last one repeats
    max_restarts: int = 10  # deaths in a row, of workers that delivered no token, until the engine gives up
    on_worker_loss: OnWorkerLoss = "resume"  # the requests in flight go on with the next worker; or "fail"

    def __repr__(self) -> str:
        return changed_fields(self)

    def __post_init__(self) -> None:
        for name in ("adapters", "restart_delays"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        self._validate("model", path, "a name or a path")
        self._validate("generation_config", path, "auto, none or a path")
        if self.chat_template is not None:
            self._validate("chat_template", path, "a file")
        self._validate("adapters", _adapters)
        if self.draft_model is not None:
            self._validate("draft_model", path, "a name or a path")
        if self.device not in _DEVICES:
            raise InvalidConfig.of("device", f"must be auto, cpu, cuda or cuda:N, got {brief(self.device)}")
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise InvalidConfig.of("dtype", f"must be auto, float32 or bfloat16, got {brief(self.dtype)}")
        if self.kernels not in ("auto", "native", "triton", "torch"):
            raise InvalidConfig.of("kernels", f"must be auto, native, triton or torch, got {brief(self.kernels)}")
        if self.cuda_graphs not in ("auto", "none", "pad"):
            raise InvalidConfig.of("cuda_graphs", f"must be auto, none or pad, got {brief(self.cuda_graphs)}")
        if self.quantization not in ("auto", "none", "int8", "gguf"):
            raise InvalidConfig.of("quantization", f"must be auto, none, int8 or gguf, got {brief(self.quantization)}")
        if self.kv_cache_dtype not in ("auto", "int8"):
            raise InvalidConfig.of("kv_cache_dtype", f"must be auto or int8, got {brief(self.kv_cache_dtype)}")
        if self.on_worker_loss not in ("resume", "fail"):
            raise InvalidConfig.of("on_worker_loss", f"must be resume or fail, got {brief(self.on_worker_loss)}")
        for name in ("enable_prefix_caching", "batch_invariant"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidConfig.of(name, f"must be True or False, got {brief(getattr(self, name))}")
        self._validate_numbers()
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidConfig(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): every running sequence needs a token a step",
                fields=("max_num_batched_tokens", "max_num_seqs"),
            )

    def _validate_numbers(self) -> None:
        for name, bounds in (_INTEGERS | _OPTIONAL_INTEGERS).items():
            if name in _INTEGERS or getattr(self, name) is not None:
                self._validate(name, integer, *bounds)
        self._validate("gpu_memory_utilization", partial(number, above=True), 0, 1)
        for name in _SECONDS:
            self._validate(name, partial(number, above=True), 0, MAX_SECONDS)
        if not isinstance(self.restart_delays, tuple) or not self.restart_delays:
            raise InvalidConfig.of("restart_delays", f"must be seconds, at least one, got {brief(self.restart_delays)}")
        self._validate("restart_delays", _numbers, 0, MAX_SECONDS)

    def _validate(self, name: str, check: Callable[..., object], *bounds: int | str) -> None:
        try:
            object.__setattr__(self, name, check(getattr(self, name), *bounds))
        except ValueError as exc:
            raise InvalidConfig.of(name, str(exc)) from None

    def check_cores(self, num_cores: int) -> None:
        """Raise InvalidConfig for more threads than libraries can run on so many cores without crashing."""
        most = _THREADS_PER_CORE * num_cores
        if self.num_threads is not None and self.num_threads > most:
            rule = f"must be at most {most} ({_THREADS_PER_CORE} for each of {counted(num_cores, 'core')})"
            raise InvalidConfig.of("num_threads", f"{rule}, got {self.num_threads}")

    def check_context(self, context_length: int) -> None:
        """Raise InvalidConfig if `max_model_len` is longer than the model's context."""
        if self.max_model_len is not None and self.max_model_len > context_length:
            rule = f"must be at most {context_length}, the context of model {self.model!r}"
            raise InvalidConfig.of("max_model_len", f"{rule}, got {self.max_model_len}")

    def for_worker(self, model_path: str, draft_model_path: str | None = None) -> WorkerConfig:
        """Return the worker's part: all fields that both have.

        The paths are those that `model` and `draft_model` were found at.
        """
        shared = [name for name in field_names(WorkerConfig) if name in field_names(EngineConfig)]
        fields = {name: getattr(self, name) for name in shared}
        return WorkerConfig(model_path, draft_model_path=draft_model_path, **fields)


def _adapters(values: object) -> tuple[str, ...]:
    if not isinstance(values, tuple) or not all(isinstance(each, str) and all(each.partition("=")) for each in values):
        raise ValueError(f"must be a list of NAME=DIRECTORY, got {brief(values)}")
    names = [each.partition("=")[0] for each in values]
    if len(set(names)) < len(names) or not all(map(str.isprintable, values)):
        raise ValueError(f"must be a list of printable NAME=DIRECTORY, each name once, got {brief(values)}")
    return values


def _numbers(values: tuple[float, ...], low: int, high: int) -> tuple[float, ...]:
    return tuple(number(value, low, high) for value in values)


class EngineOptions(TypedDict, total=False):
    """The fields of EngineConfig as keywords of the calls that open an engine."""

    model: str
    generation_config: str
    chat_template: str | None
    adapters: tuple[str, ...] | list[str]
    device: str
    dtype: DType
    max_model_len: int | None
    max_num_seqs: int
    max_num_queued_reqs: int
    max_sessions: int
    max_num_batched_tokens: int
    chunked_prefill_size: int | None
    block_size: int
    kv_cache_memory: int | None
    gpu_memory_utilization: float
    enable_prefix_caching: bool
    encoder_cache_memory: int
    payload_memory: int
    num_threads: int | None
    kernels: Kernels
    cuda_graphs: CudaGraphs
    quantization: Quantization
    kv_cache_dtype: KVCacheDType
    batch_invariant: bool
    num_speculative_tokens: int
    draft_model: str | None
    startup_timeout: float
    step_timeout: float
    unresponsive_timeout: float
    ping_interval: float
    worker_shutdown_timeout: float
    restart_delays: tuple[float, ...] | list[float]
    max_restarts: int
    on_worker_loss: OnWorkerLoss


_ENGINE_KEYWORDS = ("ports", "on_progress", "on_load")  # of `open_engine`, beside the configuration


def merged_config(config: EngineConfig | str | None, options: Mapping[str, Any]) -> EngineConfig:
    """Return `config`, which may be a model's name or path, or the defaults; `options` are fields to set.

    Raises UnknownArgument for an unknown field, TypeError for fields beside a whole configuration, and InvalidConfig
    for a bad value.
    """
    check_names("open_engine", options, field_names(EngineConfig), _ENGINE_KEYWORDS)
    if isinstance(config, EngineConfig):
        if options:
            raise TypeError(f"give either an EngineConfig or its fields ({', '.join(options)}), not both")
        return config
    if config is None:
        return EngineConfig(**options)
    if "model" in options:
        raise TypeError("the model is given twice: as the first argument and as model=…")
    return EngineConfig(model=config, **options)


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a copy without the variables of options that hold keys: TRIOENGINE_API_KEY, TRIOENGINE_ADMIN_KEY.

    /proc/PID/environ shows a process's initial environment for its whole life, and no child needs a key.
    """
    return {name: value for name, value in environment.items() if not _holds_keys(name)}


def _holds_keys(name: str) -> bool:
    """Match every option that is named after a key, so that a new one is left out as well."""
    return name.startswith("TRIOENGINE_") and name.endswith("_KEY")
