"""trioengine: an actor-model engine that runs large language models on trio structured concurrency.

The public names are loaded when first used, because this module also runs in the worker, which has no trio.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trioengine.actors.engine import Engine as Engine
    from trioengine.actors.generation import Generation as Generation
    from trioengine.actors.opening import open_engine as open_engine
    from trioengine.actors.power_change import PowerState as PowerState
    from trioengine.actors.session import Session as Session
    from trioengine.actors.statistics import Statistics as Statistics
    from trioengine.client.client import Client as Client
    from trioengine.client.client import connect as connect
    from trioengine.core.config import EngineConfig as EngineConfig
    from trioengine.core.embedding import Embeddings as Embeddings
    from trioengine.core.errors import ConnectionLost as ConnectionLost
    from trioengine.core.errors import EngineAsleep as EngineAsleep
    from trioengine.core.errors import EngineClosed as EngineClosed
    from trioengine.core.errors import EngineError as EngineError
    from trioengine.core.errors import EngineOverloaded as EngineOverloaded
    from trioengine.core.errors import InvalidConfig as InvalidConfig
    from trioengine.core.errors import InvariantError as InvariantError
    from trioengine.core.errors import ModelError as ModelError
    from trioengine.core.errors import RequestRejected as RequestRejected
    from trioengine.core.errors import SamplingFailed as SamplingFailed
    from trioengine.core.errors import SessionBusy as SessionBusy
    from trioengine.core.errors import SessionEnded as SessionEnded
    from trioengine.core.errors import TimedOut as TimedOut
    from trioengine.core.errors import TransitionFailed as TransitionFailed
    from trioengine.core.errors import UnknownArgument as UnknownArgument
    from trioengine.core.errors import WorkerLost as WorkerLost
    from trioengine.core.grammar import Grammar as Grammar
    from trioengine.core.lifecycle import Power as Power
    from trioengine.core.sampling_params import SamplingParams as SamplingParams
    from trioengine.text.conversation import Prompt as Prompt
    from trioengine.text.messages import ChatMessage as ChatMessage

__version__ = "0.1.0"

_HOMES = {
    "Engine": "trioengine.actors.engine",
    "open_engine": "trioengine.actors.opening",
    "Generation": "trioengine.actors.generation",
    "Session": "trioengine.actors.session",
    "PowerState": "trioengine.actors.power_change",
    "Statistics": "trioengine.actors.statistics",
    "Client": "trioengine.client.client",
    "connect": "trioengine.client.client",
    "Chunk": "trioengine.core.types",
    "ToolCall": "trioengine.core.types",
    "ToolCallDelta": "trioengine.core.types",
    "Completion": "trioengine.core.types",
    "EngineConfig": "trioengine.core.config",
    "Embeddings": "trioengine.core.embedding",
    "ConnectionLost": "trioengine.core.errors",
    "EngineAsleep": "trioengine.core.errors",
    "EngineClosed": "trioengine.core.errors",
    "EngineError": "trioengine.core.errors",
    "EngineOverloaded": "trioengine.core.errors",
    "InvalidConfig": "trioengine.core.errors",
    "InvariantError": "trioengine.core.errors",
    "ModelError": "trioengine.core.errors",
    "RequestRejected": "trioengine.core.errors",
    "SamplingFailed": "trioengine.core.errors",
    "SessionBusy": "trioengine.core.errors",
    "SessionEnded": "trioengine.core.errors",
    "TimedOut": "trioengine.core.errors",
    "TransitionFailed": "trioengine.core.errors",
    "UnknownArgument": "trioengine.core.errors",
    "WorkerLost": "trioengine.core.errors",
    "Grammar": "trioengine.core.grammar",
    "Power": "trioengine.core.lifecycle",
    "FinishReason": "trioengine.core.types",
    "Usage": "trioengine.core.types",
    "Cause": "trioengine.core.types",
    "SamplingParams": "trioengine.core.sampling_params",
    "ChatMessage": "trioengine.text.messages",
    "Prompt": "trioengine.text.conversation",
}

__all__ = [*_HOMES, "__version__"]

logging.getLogger("trioengine").addHandler(logging.NullHandler())  # silent, unless the program wants a log


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
