"""What a session is told by session.update, and a response by response.create: instructions and sampling."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trioengine.core.errors import RequestRejected
from trioengine.core.sampling_params import SamplingParams
from trioengine.serve.problem import ClientError
from trioengine.serve.realtime.fields import known_fields, text_of

_SAMPLING = {  # the protocol's name, and ours
    "max_output_tokens": "max_tokens",
    **{
        name: name
        for name in (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "seed",
            "stop",
            "stop_token_ids",
            "min_tokens",
            "ignore_eos",
            "logit_bias",
            "skip_special_tokens",
        )
    },
}
_FIXED: Mapping[str, tuple[Any, ...]] = {  # what these may say: nothing else is built
    "output_modalities": (["text"],),
    "tools": ([],),
    "tool_choice": ("auto", "none"),
}
_SESSION_FIXED: Mapping[str, tuple[Any, ...]] = {
    **_FIXED,
    "type": ("realtime",),
    "truncation": ("disabled",),
    "tracing": (),
    "prompt": (),
    "include": (),
}
_MAX_METADATA = 16
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")


@dataclass(frozen=True, slots=True)
class Settings:
    """Instructions and sampling, by the protocol's names and validated."""

    instructions: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, str] | None = None  # of a response; given back as it is

    def for_session(self, fields: object, model: str) -> Settings:
        """These with the fields of a session.update. Raises ClientError."""
        allowed = {**_SESSION_FIXED, "model": (model,)}
        return self._with(fields, allowed, (), "session")

    def for_response(self, fields: Mapping[str, Any]) -> Settings:
        """These with the fields of a response.create. Raises ClientError."""
        return self._with(fields, _FIXED, ("metadata",), "response")

    def params(self, where: str) -> SamplingParams:
        """The engine's parameters. Raises ClientError."""
        values = {_SAMPLING[name]: _value(name, value, where) for name, value in self.sampling.items()}
        try:
            return SamplingParams(**values)
        except RequestRejected as exc:
            name = next((name for name, ours in _SAMPLING.items() if ours == exc.param), exc.param)
            message = f"{where}.{exc.message.replace(str(exc.param), str(name), 1)}"
            raise ClientError(exc.code, message, param=f"{where}.{name}") from exc

    def _with(
        self, fields: object, fixed: Mapping[str, tuple[Any, ...]], more: tuple[str, ...], where: str
    ) -> Settings:
        given = known_fields(fields, {"instructions", *_SAMPLING, *fixed, *more}, where)
        for name, allowed in fixed.items():
            value = given.get(name)
            if value is not None and value not in allowed:
                raise _unsupported(f"{where}.{name}", value, allowed)
        sampling = dict(self.sampling)
        for name in _SAMPLING.keys() & given.keys():
            sampling.pop(name, None)
            if given[name] is not None:
                sampling[name] = given[name]
        instructions = given.get("instructions")
        changed = dataclasses.replace(
            self,
            instructions=self.instructions if instructions is None else text_of(instructions, f"{where}.instructions"),
            sampling=sampling,
            metadata=_metadata(given.get("metadata"), where),
        )
        changed.params(where)
        return changed

    @property
    def max_output_tokens(self) -> int | str:
        limit: int | str = self.sampling.get("max_output_tokens", "inf")
        return limit

    def to_json(self, id: str, model: str) -> dict[str, Any]:
        """The session as a client sees it."""
        return {
            "type": "realtime",
            "object": "realtime.session",
            "id": id,
            "model": model,
            "output_modalities": ["text"],
            "instructions": self.instructions,
            "tools": [],
            "tool_choice": "auto",
            "truncation": "disabled",
            "tracing": None,
            "prompt": None,
            "include": None,
            **self.sampling,
            "max_output_tokens": self.max_output_tokens,
        }


def _value(name: str, value: Any, where: str) -> Any:
    """A JSON value as SamplingParams takes it."""
    if name == "max_output_tokens" and value == "inf":
        return None
    if name == "logit_bias" and isinstance(value, Mapping):
        if not all(_TOKEN_ID.fullmatch(token_id) for token_id in value):
            param = f"{where}.logit_bias"
            raise ClientError("invalid_value", f"{param} must map token ids to numbers", param=param)
        return {int(token_id): bias for token_id, bias in value.items()}
    return value


def _metadata(value: object, where: str) -> Mapping[str, str] | None:
    if value is None:
        return None
    if (
        not isinstance(value, Mapping)
        or len(value) > _MAX_METADATA
        or not all(isinstance(text, str) and len(key) <= 64 and len(text) <= 512 for key, text in value.items())
    ):
        param = f"{where}.metadata"
        raise ClientError("invalid_value", f"{param} must map at most {_MAX_METADATA} keys to strings", param=param)
    return value


def _unsupported(param: str, value: object, allowed: tuple[Any, ...]) -> ClientError:
    what = " or ".join(repr(choice) for choice in allowed)
    rule = f"{param} must be {what}" if allowed else f"{param} is not supported"
    return ClientError("unsupported_parameter", f"{rule}, got {value!r:.80}", param=param)
