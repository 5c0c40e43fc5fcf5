"""Rows as columns: packed, unpacked, and refused where they do not fit."""

import dataclasses

import msgpack
import pytest
from helpers.pair import STATISTICS

from trioengine.core.codec import decode, encode
from trioengine.core.errors import LocalProtocolError, RemoteProtocolError
from trioengine.core.messages import Tokens, TokensRow
from trioengine.core.types import FinishReason, Usage, token_ids

NAMES = [field.name for field in dataclasses.fields(TokensRow)]
ROWS = (
    TokensRow(1, 10, token_ids([5])),
    TokensRow(2, 11, token_ids([6, 7]), ({6: -1.0, 9: -2.0}, {7: -0.5})),
    TokensRow(3, 12, token_ids(), None, FinishReason.ABORT, Usage(1, 0, 0)),
)


@pytest.mark.parametrize("rows", [(), ROWS[:1], ROWS[1:2], ROWS], ids=len)
def test_rows_are_packed_by_columns(rows):
    message = Tokens(rows, STATISTICS)
    packed = msgpack.unpackb(encode(message), strict_map_key=False)
    columns = dict(zip(NAMES, packed["rows"], strict=True))
    assert columns["session"] == [row.session for row in rows]
    assert columns["embedding"] is None
    assert (columns["usage"] is None) == (len(rows) < 3)
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    ("field", "column", "error"),
    [
        ("session", None, "expected an array of 8 columns of TokensRow"),
        ("session", [1, 2], "request: expected a column of 2"),
        ("session", [1, 2, "3"], "session: expected int, got str"),
        ("request", None, "request: expected a column of 3"),
        ("token_ids", [b"", b"", None], "token_ids: expected token ids"),
        ("finish_reason", [None, None], "finish_reason: expected a column of 3"),
        ("usage", [None, None, [1]], "usage: expected Usage as an array of 5"),
        ("usage", [None, None, [1, 2, "3", 0.0, 0.0]], "usage: cached_tokens: expected int, got str"),
        ("logprobs", [None, [[1.0]], None], "logprobs: expected a map, got list"),
    ],
)
def test_columns_that_do_not_fit(field, column, error):
    packed = msgpack.unpackb(encode(Tokens(ROWS, STATISTICS)), strict_map_key=False)
    packed["rows"][NAMES.index(field)] = column
    with pytest.raises(RemoteProtocolError, match=f"^TOKENS: rows: {error}"):
        decode(msgpack.packb(packed))


def test_columns_of_another_number():
    packed = msgpack.unpackb(encode(Tokens(ROWS, STATISTICS)), strict_map_key=False)
    del packed["rows"][-1]
    with pytest.raises(RemoteProtocolError, match="rows: expected an array of 8 columns of TokensRow"):
        decode(msgpack.packb(packed))


@pytest.mark.parametrize("rows", [3, (3,)])
def test_rows_of_another_class_cannot_be_packed(rows):
    with pytest.raises(LocalProtocolError, match="TOKENS cannot be packed"):
        encode(Tokens(rows, STATISTICS))
