"""JSON of responses. Lists of log-probabilities are encoded in slices: one call for all would hold the GIL for long.

Texts are encoded in ASCII: some clients split the lines of a stream at further separators of Unicode.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import islice

import msgspec

SLICE = 64  # items of a long list: with 20 alternatives of each token, half a millisecond
encode = msgspec.json.Encoder().encode  # for values whose texts are ASCII, or made by `encoded`


def encoded(value: object) -> msgspec.Raw:
    """Return the JSON of a value, as a part of another value. Lone surrogates in it become escapes."""
    try:
        data = encode(value)
    except UnicodeEncodeError:
        data = b""
    return msgspec.Raw(data if data.isascii() and data else json.dumps(value).encode())


def encoded_list(items: Iterable[object]) -> msgspec.Raw:
    """Return the JSON of a list as a part of another value; other threads may run after each slice."""
    rest = iter(items)
    slices = [bytes(encoded(piece))[1:-1] for piece in iter(lambda: list(islice(rest, SLICE)), [])]
    return msgspec.Raw(b"[" + b",".join(slices) + b"]")
