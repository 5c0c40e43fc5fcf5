"""The settings of sessions and responses: instructions, tools, sampling, and how prompts beyond the context are cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from trioengine.core.grammar import Grammar
from trioengine.core.sampling_params import Overflow, SamplingParams
from trioengine.core.tools import FLAT_PATHS, ChoicePaths
from trioengine.serve.chat_tools import Choice, asked_for, tools_for
from trioengine.serve.limits import size_of, size_of_json
from trioengine.serve.reading import sampling_params
from trioengine.serve.realtime.requests import FlatTool, RetentionRatio
from trioengine.serve.requests import ChosenFunction, Sampling
from trioengine.text.tool_calls import ToolForm
from trioengine.text.tools import Tools

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


class GivenTools(NamedTuple):
    """The setting `tools`: the functions in it, and their bytes of memory."""

    functions: tuple[FlatTool, ...] = ()
    size: int = 0

    @classmethod
    def of(cls, functions: Sequence[FlatTool]) -> GivenTools:
        tools = cls(tuple(functions))
        return tools._replace(size=sum(map(size_of_json, tools.to_json())))

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {name: value for name, value in msgspec.to_builtins(function).items() if value is not None}
            for function in self.functions
        ]


NO_TOOLS = GivenTools()


@dataclass(frozen=True, slots=True)
class Settings:
    """Validated settings, by the protocol's names."""

    instructions: str = ""
    sampling: Sampling = field(default_factory=Sampling)
    max_output_tokens: int | str = _UNLIMITED
    truncation: Truncation = AUTO
    tools: GivenTools = NO_TOOLS
    tool_choice: Choice = "auto"
    parallel_tool_calls: bool | None = None

    @property
    def size(self) -> int:
        """The bytes of memory of its texts and tools."""
        return size_of(self.instructions) + self.tools.size

    def changed(self, changes: Mapping[str, Any], where: str) -> Settings:
        """Return the settings with these changes, of which None removes a setting; other names have no effect.

        Raises ClientError or RequestRejected for values that do not go together.
        """
        sampling = {name: value for name, value in changes.items() if name in Sampling.__struct_fields__}
        changed = dataclasses.replace(self, sampling=msgspec.structs.replace(self.sampling, **sampling))
        if "instructions" in changes:
            changed = dataclasses.replace(changed, instructions=changes["instructions"] or "")
        if "max_output_tokens" in changes:
            changed = dataclasses.replace(changed, max_output_tokens=changes["max_output_tokens"] or _UNLIMITED)
        if "truncation" in changes:
            changed = dataclasses.replace(changed, truncation=Truncation.of(changes["truncation"]))
        if "tools" in changes:
            changed = dataclasses.replace(changed, tools=changes["tools"] or NO_TOOLS)
        if "tool_choice" in changes:
            changed = dataclasses.replace(changed, tool_choice=changes["tool_choice"] or "auto")
        if "parallel_tool_calls" in changes:
            changed = dataclasses.replace(changed, parallel_tool_calls=changes["parallel_tool_calls"])
        paths = ChoicePaths(f"{where}.tool_choice", f"{where}.tool_choice.name")
        asked_for(changed.tools.functions, changed.tool_choice, is_single=False, paths=paths)
        changed.params(where)
        return changed

    def chosen_tools(self, form: ToolForm) -> Tools | None:
        """Return the tools for a model; None if there are none, or the choice hides them. Raises RequestRejected."""
        is_single = self.parallel_tool_calls is False
        return tools_for(self.tools.functions, self.tool_choice, form, is_single=is_single, paths=FLAT_PATHS)

    def params(self, where: str, grammar: Grammar | None = None) -> SamplingParams:
        """Return the engine's parameters. Raises ClientError."""
        limit = self.max_output_tokens
        max_tokens = limit if isinstance(limit, int) else None
        return sampling_params(self.sampling, max_tokens=max_tokens, grammar=grammar, where=f"{where}.")

    def to_json(self, id: str, model: str, *, takes_images: bool) -> dict[str, Any]:
        """Return the session as clients see it."""
        optional = {**msgspec.structs.asdict(self.sampling), "parallel_tool_calls": self.parallel_tool_calls}
        return {
            "type": "realtime",
            "object": "realtime.session",
            "id": id,
            "model": model,
            "input_modalities": input_modalities(takes_images=takes_images),
            "output_modalities": ["text"],
            "instructions": self.instructions,
            "tools": self.tools.to_json(),
            "tool_choice": _shown_choice(self.tool_choice),
            "truncation": self.truncation.shown,
            "tracing": None,
            "prompt": None,
            "include": None,
            **{name: value for name, value in optional.items() if value is not None},
            "max_output_tokens": self.max_output_tokens,
        }


def _shown_choice(choice: Choice) -> str | dict[str, Any]:
    return {"type": "function", "name": choice.name} if isinstance(choice, ChosenFunction) else choice or "auto"


def input_modalities(*, takes_images: bool) -> list[str]:
    """Return the modalities for session and engine events; text alone until the model is known."""
    return ["text", "image"] if takes_images else ["text"]
