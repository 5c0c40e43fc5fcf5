"""Requests as bytes, in forms that no HTTP library sends, with the status and the code that docs/http.md promises."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from trioengine import __version__
from trioengine.testing.fuzz import shapes
from trioengine.testing.fuzz.faults import Life
from trioengine.testing.fuzz.http_books import KEYS
from trioengine.testing.fuzz.shapes import Head, has_fields

_KEY = f"Authorization: Bearer {KEYS[0]}"


@dataclass(frozen=True)
class RawRequest:
    """The bytes of a request, and its response: 200, or the status and the code of an error."""

    data: bytes
    status: int = 400
    code: str = "bad_request"
    closes: bool = True  # the connection

    def judge(self, head: Head, body: bytes, life: Life) -> bool:
        """Whether it is the expected response; False if it may be another error."""
        if head.status != self.status:
            return False
        shapes.check_head(head, "application/json", None)
        found = json.loads(body)
        if self.status == 200:
            assert found == {"version": __version__}, f"{self.data!r} is answered by {found}"
        else:
            error = shapes.check_problem(has_fields(found, ("error",), "the body")["error"], head)
            assert error["code"] == self.code, f"{self.data!r} is refused by {error}"
        assert head.is_last == self.closes, f"{self.data!r} is answered with the headers {head.headers}"
        return True


def _head(
    *headers: str, target: str = "/version", version: str = "1.1", host: str = "Host: localhost", end: str = "\r\n"
) -> bytes:
    lines = (f"GET {target} HTTP/{version}", *filter(None, [host]), _KEY, *headers, "", "")
    return end.join(lines).encode()


RAW: Mapping[str, RawRequest] = {
    "line feeds": RawRequest(_head(end="\n")),
    "folded": RawRequest(_head("X-A: a\r\n b")),
    "other version": RawRequest(_head(version="1.2")),
    "fragment": RawRequest(_head(target="/version#a")),
    "two slashes": RawRequest(_head(target="//version"), 404, "not_found", closes=False),
    "no slash": RawRequest(_head(target="version")),
    "other authority": RawRequest(_head(target="http://other/version")),
    "no host": RawRequest(_head(host="")),
    "two hosts": RawRequest(_head("Host: localhost")),
    "odd host": RawRequest(_head(host="Host: a@localhost")),
    "two origins": RawRequest(_head("Origin: http://localhost", "Origin: http://localhost")),
    "two lengths": RawRequest(_head("Content-Length: 1", "Content-Length: 2")),
    "two ways": RawRequest(_head("Content-Length: 5", "Transfer-Encoding: chunked")),
    "no number": RawRequest(_head("Content-Length: -1")),
    "gzip": RawRequest(_head("Transfer-Encoding: gzip"), 501),
    "compressed": RawRequest(_head("Content-Encoding: gzip", "Content-Length: 5"), 415, "unsupported_encoding"),
    "url": RawRequest(_head(target="http://localhost/version"), 200, closes=False),
    "last": RawRequest(_head("Connection: close"), 200),
    "old": RawRequest(_head(version="1.0"), 200),
}
