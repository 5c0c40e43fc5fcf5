"""Where OpenAI's clients find what they look for."""

from __future__ import annotations

from trioengine.actors.engine import Engine
from trioengine.serve.limits import InFlight
from trioengine.serve.openai.chat import ChatCompletions
from trioengine.serve.openai.models import MODELS, Models
from trioengine.serve.routes import BELOW, Routes, get, post


def openai_routes(engine: Engine, model: str, in_flight: InFlight) -> Routes:
    """The routes of an engine whose clients call it `model`."""
    models = Models(engine, model)
    return {
        "/v1/chat/completions": post(ChatCompletions(engine, model, in_flight)),
        MODELS: get(models.list),
        f"{MODELS}/{BELOW}": get(models.retrieve),
    }
