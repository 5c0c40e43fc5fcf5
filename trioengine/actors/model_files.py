"""The files of models: read and checked in threads, before a worker loads them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trioengine.actors.adapters import Adapters
from trioengine.actors.ports import Ports
from trioengine.core.config import EngineConfig
from trioengine.core.errors import ModelError, RequestRejected
from trioengine.hub.generation_config import sampling_defaults
from trioengine.hub.model_info import ModelInfo, check_same_tokens, with_chat_template
from trioengine.text.chat_tokenizer import ChatTokenizer

logger = logging.getLogger("trioengine")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The content of the model's files, as far as the engine needs it."""

    model: ModelInfo
    tokenizer: ChatTokenizer
    sampling_defaults: Mapping[str, float]  # of requests, by parameter


async def read_model_files(path: Path, config: EngineConfig, ports: Ports, adapters: Adapters) -> ModelFiles:
    """Read the model's files and its sampling defaults, and add the adapters of the configuration.

    Raises ModelError, and InvalidConfig for a `max_model_len` beyond its context.
    """
    model = await ports.run_in_thread(ports.read_model, path)
    if config.chat_template is not None:
        model = await ports.run_in_thread(with_chat_template, model, Path(config.chat_template))
    await _add_adapters(adapters, config, model)
    config.check_context(model.context_length)
    defaults = await ports.run_in_thread(sampling_defaults, model.generation, config.generation_config)
    if defaults:
        shown = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
        logger.info("sampling defaults of requests: %s; generation_config=none ignores them", shown)
    tokenizer = ChatTokenizer(model.tokenizer, model.chat_template, model.images, f"model {config.model!r}")
    return ModelFiles(model, tokenizer, defaults)


async def _add_adapters(adapters: Adapters, config: EngineConfig, model: ModelInfo) -> None:
    for given in config.adapters:
        name, _, path = given.partition("=")
        try:
            await adapters.add(name, path, model)
        except RequestRejected as exc:
            raise ModelError(f"adapter {given}: {exc.message}") from exc


async def check_draft_model(path: Path, model: ModelInfo, config: EngineConfig, ports: Ports) -> None:
    """Read the draft model's files. Raises ModelError where its tokens are not the model's."""
    draft = await ports.run_in_thread(ports.read_model, path)
    await ports.run_in_thread(check_same_tokens, draft, model)
    if config.num_speculative_tokens == 0:
        logger.warning(
            "the draft model computes every step and drafts nothing unless requests set num_speculative_tokens; "
            "num_speculative_tokens=4 (--num-speculative-tokens 4) sets it for all"
        )


async def check_other_weights(path: Path, model: ModelInfo, ports: Ports) -> None:
    """Raise ModelError where the files at a path cannot be the same model with other weights."""
    found = await ports.run_in_thread(ports.read_model, path)
    for name in ("model_type", "vocab_size"):
        has, wants = getattr(found, name), getattr(model, name)
        if has != wants:
            raise ModelError(f"{path}: {name} is {has}, the model's is {wants}")
