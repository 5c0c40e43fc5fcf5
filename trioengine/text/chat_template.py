"""Chat templates: jinja2 in its sandbox, with the settings that Hugging Face's templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trioengine.core.bounds import printable
from trioengine.core.errors import ModelError, RequestRejected


class _Raised(Exception):
    """The template called raise_exception(message)."""


class ChatTemplate:
    """Renders a conversation as the text that the model was trained on. Raises ModelError if it does not compile."""

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, autoescape=False, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = environment.from_string(source)
        except Exception as exc:  # jinja2's own, and Python's where the template is nested too deeply
            raise ModelError(f"the chat template does not compile: {printable(str(exc))}") from exc

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        """The text of a conversation. Raises RequestRejected where the template does not take it."""
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, tools=None, **self._tokens
            )
        except _Raised as exc:
            raise RequestRejected(
                "template_error", f"messages: the chat template says: {exc}", param="messages"
            ) from None
        except Exception as exc:  # whatever the template's author wrote; its details are not the client's
            raise RequestRejected(
                "template_error", "messages: the model's chat template cannot render them", param="messages"
            ) from exc


def _raise(message: str) -> NoReturn:
    raise _Raised(message)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)
