"""The wording of messages: short and printable values, counts of things, the nearest known name."""

from __future__ import annotations

import dataclasses
import difflib
import reprlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

_SHOWN = 80  # characters

_REPR = reprlib.Repr()
_REPR.maxlevel = 3
_REPR.maxdict = _REPR.maxlist = _REPR.maxtuple = _REPR.maxset = _REPR.maxfrozenset = 20
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = _SHOWN


def changed_fields(value: Any) -> str:
    """Return the repr of a dataclass with only the fields that are not at their defaults."""
    names = [field.name for field in dataclasses.fields(value) if _is_shown(value, field)]
    return f"{type(value).__name__}({', '.join(f'{name}={getattr(value, name)!r}' for name in names)})"


def _is_shown(value: Any, field: dataclasses.Field[Any]) -> bool:
    make_default = field.default_factory
    default = field.default if make_default is dataclasses.MISSING else make_default()
    return field.repr and bool(getattr(value, field.name) != default)


def brief(value: object) -> str:
    """Return the value's repr for a message: at most 80 printable characters, made in little memory."""
    try:
        text = repr(value[:_SHOWN]) if isinstance(value, str | bytes) else _REPR.repr(value)
    except (ValueError, RecursionError):  # more digits or levels than Python prints
        return "a value too long to show"
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def counted(count: int, noun: str) -> str:
    """Return the count and its noun, in the plural unless the count is 1."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def excerpt(text: str, length: int = 200) -> str:
    """Return another library's message about a file, printable on one line of at most `length` characters."""
    shown = printable(text[:length])
    return shown if len(shown) <= length else shown[: length - 1] + "…"


# ---- text from outside, for terminals and logs: nothing in it is obeyed, all of it is shown --------------------------

_CONTROLS = (*range(0x20), *range(0x7F, 0xA0))
_LINE_SEPARATORS = (0x2028, 0x2029)
_BIDI_OVERRIDES = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))  # also embeddings and isolates
_SURROGATES = range(0xD800, 0xE000)  # JSON can hold lone ones; UTF-8 cannot

UNPRINTABLE = frozenset((*_CONTROLS, *_LINE_SEPARATORS, *_BIDI_OVERRIDES, *_SURROGATES))  # code points
_ESCAPES = {code: repr(chr(code))[1:-1] for code in UNPRINTABLE}
_ESCAPES_IN_LINES = _ESCAPES | {ord("\n"): "\n", ord("\t"): "\t", ord("\r"): ""}


def printable(text: str) -> str:
    """Return the text on one line: control characters, line ends and bidi overrides are escaped as in Python's repr."""
    return text.translate(_ESCAPES)


def printable_lines(text: str) -> str:
    """Like `printable`, for text of several lines: keep newlines and tabs, drop carriage returns."""
    return text.translate(_ESCAPES_IN_LINES)


# ---- suggestions -----------------------------------------------------------------------------------------------------

_COMPARED = 80  # characters: the comparison takes quadratic time
_MIN_SIMILARITY = 0.68  # minimum similarity, from 0 to 1: "levle" and "level" have 0.8, "system" and "stream" 0.67
_MIN_PREFIX = 3  # minimum length of a name that is taken for the beginning of a longer one
_ALIASES: Mapping[str, tuple[str, ...]] = {  # names in other interfaces: our names for the same thing
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
    """Return `; did you mean 'x'?` with the prefix and the most likely known name; empty if none is similar."""
    nearest = _nearest(name[:_COMPARED], set(known))
    return f"; did you mean {prefix + nearest!r}?" if nearest else ""


def _nearest(name: str, known: Collection[str]) -> str | None:
    """Return the meaning of another interface's name, the only known name that begins with `name`, or the nearest."""
    aliases = _aliases_of(known)
    longer = [other for other in known if other.startswith(name)] if len(name) >= _MIN_PREFIX else []
    if len(longer) == 1 and name not in aliases:
        return longer[0]
    names = aliases | {other: other for other in known}
    matches = difflib.get_close_matches(name, sorted(names), n=1, cutoff=_MIN_SIMILARITY)
    return names[matches[0]] if matches else None


def _aliases_of(known: Collection[str]) -> dict[str, str]:
    meanings = {alias: [name for name in ours if name in known] for alias, ours in _ALIASES.items()}
    return {alias: names[0] for alias, names in meanings.items() if names}
