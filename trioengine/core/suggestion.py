"""The name that was probably meant, for a message about an unknown one."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping

_COMPARED = 80  # characters: the comparison takes their square
_LIKENESS = 0.68  # least likeness, from 0 to 1: "levle" and "level" have 0.8, "system" and "stream" 0.67
_BEGINNING = 3  # least characters of a name that is taken for the beginning of a longer one
_ALIASES: Mapping[str, tuple[str, ...]] = {  # names of other interfaces, and ours for the same thing
    "input": ("messages", "prompt"),
    "max_completion_tokens": ("max_output_tokens", "max_tokens"),
    "max_new_tokens": ("max_tokens", "max_output_tokens"),
    "max_output_tokens": ("max_tokens",),
    "max_tokens": ("max_output_tokens",),
    "messages": ("prompt", "history"),
    "n_predict": ("max_tokens", "max_output_tokens"),
    "prompt": ("messages",),
    "repeat_penalty": ("repetition_penalty",),
    "sampling_params": ("params",),
    "stop_sequences": ("stop",),
    "system": ("instructions", "messages", "history"),
}


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """`; did you mean 'x'?` with the name that was probably meant, after the prefix; empty if none is near."""
    meant = _meant(name[:_COMPARED], set(known))
    return f"; did you mean {prefix + meant!r}?" if meant else ""


def _meant(name: str, known: Collection[str]) -> str | None:
    """The name that another interface's stands for, the only known name that begins with it, or the nearest."""
    aliases = _aliases_of(known)
    longer = [other for other in known if other.startswith(name)] if len(name) >= _BEGINNING else []
    if len(longer) == 1 and name not in aliases:
        return longer[0]
    names = aliases | {other: other for other in known}
    nearest = difflib.get_close_matches(name, sorted(names), n=1, cutoff=_LIKENESS)
    return names[nearest[0]] if nearest else None


def _aliases_of(known: Collection[str]) -> dict[str, str]:
    meanings = {alias: [name for name in ours if name in known] for alias, ours in _ALIASES.items()}
    return {alias: names[0] for alias, names in meanings.items() if names}
