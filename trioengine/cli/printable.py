"""Text from a model or a server, made safe for a terminal."""

from __future__ import annotations

import json
import re

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_C0 = {code: 0x2400 + code for code in range(0x20)} | {0x7F: 0x2421}  # the control pictures of Unicode
_C1 = dict.fromkeys(range(0x80, 0xA0), _REPLACEMENT)
_SURROGATES = dict.fromkeys(range(0xD800, 0xE000), _REPLACEMENT)  # JSON can hold lone ones; UTF-8 cannot
_KEPT = {ord("\n"): "\n", ord("\t"): "\t", ord("\r"): ""}
_TABLE: dict[int, int | str] = {**_C0, **_C1, **_SURROGATES, **_KEPT}
_UNESCAPED = re.compile("[\x7f-\x9f\ud800-\udfff]")  # by JSON, which escapes C0 alone


def printable(text: str) -> str:
    """Replace control characters, but for newline and tab, so that a terminal shows escape sequences as text.

    Carriage returns are left out.
    """
    return text.translate(_TABLE)


def json_line(content: object) -> str:
    """The content as JSON on one line, whose control characters are escaped."""
    dumped = json.dumps(content, ensure_ascii=False)
    return _UNESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", dumped) + "\n"
