"""The settings of sessions and responses: instructions, sampling, and how prompts beyond the context are cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from trioengine.core.sampling_params import Overflow, SamplingParams
from trioengine.serve.reading import sampling_params
from trioengine.serve.realtime.requests import RetentionRatio
from trioengine.serve.requests import Sampling

_NAMES: Mapping[str, Overflow] = {"auto": "drop_oldest_turns", "disabled": "refuse"}
_UNLIMITED = "inf"


class Truncation(NamedTuple):
    """The setting `truncation`: how the prompt of a conversation beyond the context is cut."""

    shown: str | Mapping[str, Any] = "auto"
    overflow: Overflow = "drop_oldest_turns"
    retention_ratio: float = 1.0

    @property
    def is_lasting(self) -> bool:
        """Whether the turns that one response leaves out are left out by later responses as well."""
        return not isinstance(self.shown, str)

    @classmethod
    def of(cls, given: str | RetentionRatio | None) -> Truncation:
        """Return the setting; null is `auto`."""
        if isinstance(given, RetentionRatio):
            return cls(msgspec.to_builtins(given), "drop_oldest_turns", given.retention_ratio)
        return AUTO if given is None else cls(given, _NAMES[given])


AUTO = Truncation()


@dataclass(frozen=True, slots=True)
class Settings:
    """Validated settings, by the protocol's names."""

    instructions: str = ""
    sampling: Sampling = field(default_factory=Sampling)
    max_output_tokens: int | str = _UNLIMITED
    truncation: Truncation = AUTO

    def changed(self, changes: Mapping[str, Any], where: str) -> Settings:
        """Return the settings with these changes, of which None removes a setting; other names have no effect.

        Raises ClientError for values that do not go together.
        """
        sampling = {name: value for name, value in changes.items() if name in Sampling.__struct_fields__}
        changed = dataclasses.replace(self, sampling=msgspec.structs.replace(self.sampling, **sampling))
        if "instructions" in changes:
            changed = dataclasses.replace(changed, instructions=changes["instructions"] or "")
        if "max_output_tokens" in changes:
            changed = dataclasses.replace(changed, max_output_tokens=changes["max_output_tokens"] or _UNLIMITED)
        if "truncation" in changes:
            changed = dataclasses.replace(changed, truncation=Truncation.of(changes["truncation"]))
        changed.params(where)
        return changed

    def params(self, where: str) -> SamplingParams:
        """Return the engine's parameters. Raises ClientError."""
        limit = self.max_output_tokens
        return sampling_params(self.sampling, max_tokens=limit if isinstance(limit, int) else None, where=f"{where}.")

    def to_json(self, id: str, model: str, *, takes_images: bool) -> dict[str, Any]:
        """Return the session as clients see it."""
        sampling = msgspec.structs.asdict(self.sampling)
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
            **{name: value for name, value in sampling.items() if value is not None},
            "max_output_tokens": self.max_output_tokens,
        }


def input_modalities(*, takes_images: bool) -> list[str]:
    """Return the modalities for session and engine events; text alone until the model is known."""
    return ["text", "image"] if takes_images else ["text"]
