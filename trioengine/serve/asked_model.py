"""The model that a request names: the served one, or `SERVED:ADAPTER` for one of its LoRA adapters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from trioengine.actors.engine import Engine
from trioengine.core.errors import EngineOverloaded
from trioengine.core.messages import Adapter
from trioengine.serve.errors import ClientError


class AskedModel(NamedTuple):
    """The name that the response shows, and the adapter; None: the model as it is."""

    name: str
    adapter: Adapter | None = None


class ServedNames(NamedTuple):
    """The names that requests may give, at one moment."""

    model: str
    adapters: Mapping[str, Adapter] | None  # None: they are not known while the model loads

    @classmethod
    def of(cls, engine: Engine, model: str) -> ServedNames:
        """The names of an engine whose model clients know by this name."""
        runtime = engine.runtime
        return cls(model, runtime.adapters.by_name if runtime.has_model else None)

    def asked(self, name: str | None) -> AskedModel:
        """Return the model of this name; None stands for the served one.

        Raises ClientError for any other, and EngineOverloaded for an adapter while these are not known.
        """
        model, adapters = self
        if name in (None, model):
            return AskedModel(model)
        adapter = name.removeprefix(adapted_name(model, ""))
        if adapter != name and adapters is None:
            raise EngineOverloaded("the model is loading", code="loading")
        if adapter == name or adapters is None or adapter not in adapters:
            message = f"model {name!r:.120} not found; this server serves {model!r}"
            if adapters:
                message += f", and its adapters as {model}:NAME"
            raise ClientError("model_not_found", message, param="model")
        return AskedModel(name, adapters[adapter])


def adapted_name(model: str, adapter: str) -> str:
    """Return the name of the served model with an adapter."""
    return f"{model}:{adapter}"
