"""JSON on one line of standard output."""

from __future__ import annotations

import json

from trioengine.core.bounds import UNPRINTABLE

_ESCAPES = {code: f"\\u{code:04x}" for code in UNPRINTABLE}


def json_line(content: object) -> str:
    """The content as JSON on one line; characters that a terminal must not get are escaped, others are not."""
    return json.dumps(content, ensure_ascii=False).translate(_ESCAPES) + "\n"
