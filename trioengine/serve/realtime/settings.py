"""The settings of sessions and responses: instructions, sampling, and how prompts beyond the context are cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trioengine.core.checks import number
from trioengine.core.sampling_params import Overflow, SamplingParams
from trioengine.serve.errors import ClientError
from trioengine.serve.parsing import (
    SAMPLING,
    check_fixed,
    in_json,
    known_fields,
    metadata_of,
    sampling_params,
    shown,
    text_of,
)

_NAMES: Mapping[str, Overflow] = {"auto": "drop_oldest_turns", "disabled": "refuse"}
_RATIO = "retention_ratio"
_TRUNCATION_FIXED: Mapping[str, tuple[Any, ...]] = {"type": (_RATIO,), "token_limits": ()}


class Truncation(NamedTuple):
    """The setting `truncation`, validated: how the prompt of a conversation beyond the context is cut."""

    shown: str | Mapping[str, Any] = "auto"
    overflow: Overflow = "drop_oldest_turns"
    retention_ratio: float = 1.0

    @property
    def is_lasting(self) -> bool:
        """Whether the turns that one response leaves out are left out by later responses as well."""
        return not isinstance(self.shown, str)


AUTO = Truncation()


def parse_truncation(value: object, where: str) -> Truncation:
    """Parse the setting; null is `auto`. Raises ClientError."""
    if value is None:
        return AUTO
    if isinstance(value, str) and value in _NAMES:
        return Truncation(value, _NAMES[value])
    if not isinstance(value, Mapping):
        rule = f'must be "auto", "disabled" or an object of the type "{_RATIO}"'
        raise ClientError("unsupported_parameter", f"{where} {rule}, got {shown(value)}", param=where)
    return _retention(value, where)


def _retention(value: Mapping[str, Any], where: str) -> Truncation:
    fields = known_fields(value, {_RATIO, *_TRUNCATION_FIXED}, where)
    for name in ("type", _RATIO):
        if fields.get(name) is None:
            raise ClientError("missing_parameter", f"{where}.{name} is missing", param=f"{where}.{name}")
    check_fixed(fields, _TRUNCATION_FIXED, where)
    try:
        ratio = number(fields[_RATIO], 0, 1)
    except ValueError as exc:
        raise ClientError(
            "invalid_value", f"{where}.{_RATIO} {in_json(str(exc), fields[_RATIO])}", param=f"{where}.{_RATIO}"
        ) from None
    return Truncation({"type": _RATIO, _RATIO: ratio}, "drop_oldest_turns", ratio)


_SAMPLING = {"max_output_tokens": "max_tokens", **SAMPLING}  # the protocol's names of the fields of SamplingParams
_FIXED: Mapping[str, tuple[Any, ...]] = {  # the only values that are supported
    "output_modalities": (["text"],),
    "tools": ([],),
    "tool_choice": ("auto", "none"),
}
_SESSION_FIXED: Mapping[str, tuple[Any, ...]] = {
    **_FIXED,
    "type": ("realtime",),
    "tracing": (),
    "prompt": (),
    "include": (),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Validated settings, by the protocol's names."""

    instructions: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    truncation: Truncation = AUTO
    metadata: Mapping[str, str] | None = None  # of a response, which repeats it

    def for_session(self, fields: object, model: str) -> Settings:
        """Return the settings changed by a session.update. Raises ClientError."""
        allowed = {**_SESSION_FIXED, "model": (model,)}
        return self._with(fields, allowed, (), "session")

    def for_response(self, fields: Mapping[str, Any]) -> Settings:
        """Return the settings changed by a response.create. Raises ClientError."""
        more = ("metadata", "conversation", "input")  # the latter two are parsed already
        return self._with(fields, _FIXED, more, "response")

    def params(self, where: str) -> SamplingParams:
        """Return the engine's parameters. Raises ClientError."""
        given = {name: value for name, value in self.sampling.items() if (name, value) != ("max_output_tokens", "inf")}
        return sampling_params(given, _SAMPLING, where)

    def _with(
        self, fields: object, fixed: Mapping[str, tuple[Any, ...]], more: tuple[str, ...], where: str
    ) -> Settings:
        given = known_fields(fields, {"instructions", "truncation", *_SAMPLING, *fixed, *more}, where)
        check_fixed(given, fixed, where)
        sampling = dict(self.sampling)
        for name in _SAMPLING.keys() & given.keys():
            sampling.pop(name, None)
            if given[name] is not None:
                sampling[name] = given[name]
        instructions = given.get("instructions", self.instructions)
        changed = dataclasses.replace(
            self,
            instructions="" if instructions is None else text_of(instructions, f"{where}.instructions"),
            sampling=sampling,
            truncation=self._truncation(given, f"{where}.truncation"),
            metadata=metadata_of(given.get("metadata"), f"{where}.metadata"),
        )
        changed.params(where)
        return changed

    def _truncation(self, given: Mapping[str, Any], where: str) -> Truncation:
        return parse_truncation(given["truncation"], where) if "truncation" in given else self.truncation

    @property
    def max_output_tokens(self) -> int | str:
        limit: int | str = self.sampling.get("max_output_tokens", "inf")
        return limit

    def to_json(self, id: str, model: str, *, takes_images: bool) -> dict[str, Any]:
        """Return the session as clients see it."""
        return {
            "type": "realtime",
            "object": "realtime.session",
            "id": id,
            "model": model,
            "input_modalities": input_modalities(takes_images=takes_images),
            "output_modalities": ["text"],
            "instructions": self.instructions,
            "tools": [],
            "tool_choice": "auto",
            "truncation": self.truncation.shown,
            "tracing": None,
            "prompt": None,
            "include": None,
            **self.sampling,
            "max_output_tokens": self.max_output_tokens,
        }


def input_modalities(*, takes_images: bool) -> list[str]:
    """Return the modalities for session and engine events; text alone until the model is known."""
    return ["text", "image"] if takes_images else ["text"]
