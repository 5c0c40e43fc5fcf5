"""The fields of SamplingParams and EngineConfig as keywords of the calls that take either."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypedDict, TypeVar

from trioengine.core.arguments import check_names, checked_call, parameters_of, rejected
from trioengine.core.config import DType, EngineConfig, Kernels, OnWorkerLoss
from trioengine.core.sampling_params import SamplingParams

P = ParamSpec("P")
R = TypeVar("R")


class SamplingOptions(TypedDict, total=False):
    """The fields of SamplingParams."""

    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    stop: str | tuple[str, ...] | list[str]
    stop_token_ids: tuple[int, ...] | list[int]
    min_tokens: int
    ignore_eos: bool
    logit_bias: Mapping[int, float]
    logprobs: int | None
    skip_special_tokens: bool
    cache_salt: str


class EngineOptions(TypedDict, total=False):
    """The fields of EngineConfig."""

    model: str
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
    batch_invariant: bool
    startup_timeout: float
    step_timeout: float
    unresponsive_timeout: float
    ping_interval: float
    worker_shutdown_timeout: float
    restart_delays: tuple[float, ...] | list[float]
    max_restarts: int
    on_worker_loss: OnWorkerLoss


_REQUEST_KEYWORDS = ("keep_partial", "timeout", "wait", "label")  # of `generate`, beside the sampling parameters
_ENGINE_KEYWORDS = ("ports", "on_progress", "on_load")  # of `open_engine`, beside the configuration


def merged_params(params: SamplingParams | None, options: Mapping[str, Any]) -> SamplingParams:
    """`params`, or the defaults, with these fields in place of its own. Raises RequestRejected for a bad value."""
    if not (params is None or isinstance(params, SamplingParams)):
        raise rejected("params", f"must be SamplingParams, got {type(params).__name__}")
    return dataclasses.replace(SamplingParams() if params is None else params, **options)


def sampling_checked(function: Callable[P, R], name: str | None = None) -> Callable[P, R]:
    """The function under this name. It raises UnknownArgument unless a keyword is a parameter of it or of sampling."""
    known = [*parameters_of(function), *_names(SamplingParams)]
    function = inspect.unwrap(function)  # another name of one that is checked already is checked once
    return checked_call(function, name or function.__name__, known, _REQUEST_KEYWORDS)


def merged_config(config: EngineConfig | str | None, options: Mapping[str, Any]) -> EngineConfig:
    """`config`, which may be a model's name or path; or the defaults with these fields in place of their own.

    Raises UnknownArgument for an unknown field, TypeError for fields beside a whole configuration, and InvalidConfig
    for a bad value.
    """
    check_names("open_engine", options, _names(EngineConfig), _ENGINE_KEYWORDS)
    if isinstance(config, EngineConfig):
        if options:
            raise TypeError(f"give either an EngineConfig or its fields ({', '.join(options)}), not both")
        return config
    if config is None:
        return EngineConfig(**options)
    if "model" in options:
        raise TypeError("the model is given twice: as the first argument and as model=…")
    return EngineConfig(model=config, **options)


def _names(cls: type[SamplingParams] | type[EngineConfig]) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]
