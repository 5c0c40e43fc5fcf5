"""The model that a request names: the served one, or `SERVED:ADAPTER` for one of its LoRA adapters."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from trioengine.serve.errors import ClientError


class AskedModel(NamedTuple):
    """The name that the response shows, and the adapter; None: the model as it is."""

    name: str
    adapter: str | None = None


def asked_model(name: str | None, model: str, adapters: Collection[str] = ()) -> AskedModel:
    """Return the model that a request names; None stands for the served one. Raises ClientError for any other."""
    if name in (None, model):
        return AskedModel(model)
    adapter = name.removeprefix(adapted_name(model, ""))
    if adapter == name or adapter not in adapters:
        message = f"model {name!r:.120} not found; this server serves {model!r}"
        if adapters:
            message += f", and its adapters as {model}:NAME"
        raise ClientError("model_not_found", message, param="model")
    return AskedModel(name, adapter)


def adapted_name(model: str, adapter: str) -> str:
    """Return the name of the served model with an adapter."""
    return f"{model}:{adapter}"
