"""What a session is told by session.update, and a response by response.create: instructions and sampling."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trioengine.core.sampling_params import SamplingParams
from trioengine.serve.fields import check_fixed, known_fields, metadata_of, text_of
from trioengine.serve.realtime.truncation import AUTO, Truncation, parse_truncation
from trioengine.serve.sampling import SAMPLING, sampling_params

_SAMPLING = {"max_output_tokens": "max_tokens", **SAMPLING}  # the protocol's name, and ours
_FIXED: Mapping[str, tuple[Any, ...]] = {  # what these may say: nothing else is built
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
    """Instructions and sampling, by the protocol's names and validated."""

    instructions: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    truncation: Truncation = AUTO
    metadata: Mapping[str, str] | None = None  # of a response; given back as it is

    def for_session(self, fields: object, model: str) -> Settings:
        """These with the fields of a session.update. Raises ClientError."""
        allowed = {**_SESSION_FIXED, "model": (model,)}
        return self._with(fields, allowed, (), "session")

    def for_response(self, fields: Mapping[str, Any]) -> Settings:
        """These with the fields of a response.create. Raises ClientError."""
        more = ("metadata", "conversation", "input")  # the latter two are read already
        return self._with(fields, _FIXED, more, "response")

    def params(self, where: str) -> SamplingParams:
        """The engine's parameters. Raises ClientError."""
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
        """The session as a client sees it."""
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
    """As a session and the engine's state show it; text alone as long as the model is not known."""
    return ["text", "image"] if takes_images else ["text"]
