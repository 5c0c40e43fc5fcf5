"""Checks on a request's head beyond h11's: forms that another HTTP parser may read differently are refused.

The rules are those of RFC 9112, of which h11 is lenient about line ends, folded headers, versions and targets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

SINGLE = (b"host", b"origin", b"sec-websocket-key", b"sec-websocket-version")
_VERSIONS = (b"1.0", b"1.1")
_AUTHORITY = rb"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~%-]*)(?::[0-9]{0,5})?"  # no user info
_HOST = re.compile(_AUTHORITY)
_ORIGIN = re.compile(rb"https?://(?=[^:])" + _AUTHORITY)
_PLAIN_ORIGIN = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*://(?=[^:])" + _AUTHORITY)
_ABSOLUTE = re.compile(rb"https?://([^/?]*)(.*)", re.IGNORECASE)
_TLS = b"\x16\x03"  # the first record of a handshake (RFC 8446, section 5.1)
_FAULTS = {  # of h11's messages, those that quote nothing of the client's, and in our words
    "Found multiple Host: headers": "the request has more than one Host header",
    "Missing mandatory Host: header": "the request has no Host header",
    "conflicting Content-Length headers": "the request has different values of Content-Length",
    "bad Content-Length": "the Content-Length is not a number",
}


class BadHead(Exception):
    """A head that is refused; its text is for the client."""


def fault_of(error: Exception, data: bytes) -> str:
    """Why h11 has refused a request, which begins with these bytes, in words for the client and the log."""
    if data.startswith(_TLS):
        return "the bytes are TLS, and this server speaks plain HTTP; TLS is for a proxy in front of it"
    return _FAULTS.get(str(error), "the bytes are not an HTTP/1.1 request")


def check_lines(head: bytes, version: bytes) -> None:
    """Raises BadHead for a bare line feed, a folded header, or a version other than 1.0 and 1.1."""
    if head.count(b"\n") != head.count(b"\r\n"):
        raise BadHead("a line of the head ends with a bare line feed")
    if b"\r\n " in head or b"\r\n\t" in head:
        raise BadHead("a header is folded over several lines")
    if version not in _VERSIONS:
        raise BadHead("the version must be HTTP/1.0 or HTTP/1.1")


def check_headers(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The Host, if there is one. Raises BadHead if it is malformed, or a header is repeated that must not be."""
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in SINGLE:
            if name in found:
                shown = name.decode().title().replace("Websocket", "WebSocket")
                raise BadHead(f"the request has more than one {shown} header")
            found[name] = value
    host = found.get(b"host")
    if host is not None and not _HOST.fullmatch(host):
        raise BadHead("the Host header must be a name or an address, and a port")
    return host


def split_target(target: bytes, host: bytes | None) -> tuple[str, str]:
    """Path and query of a request's target: a path, or a URL whose authority is the Host. Raises BadHead."""
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute is not None:
        authority, target = absolute.groups()
        if host is None or authority.lower() != host.lower():
            raise BadHead("the request's target is a URL whose host is not that of the Host header")
        target = target if target.startswith(b"/") else b"/" + target
    if not target.startswith(b"/"):
        raise BadHead("the request's target must be a path")
    if target.startswith(b"//"):
        raise BadHead("the path must begin with one slash")
    if b"#" in target:
        raise BadHead("the request's target has a fragment")
    path, _, query = target.decode("ascii").partition("?")
    return path, query


def name_of_host(host: bytes) -> str:
    """The name or address in a Host header, without its port and brackets; empty if it is malformed."""
    return _name(_HOST.fullmatch(host))


def name_of_origin(origin: bytes) -> str:
    """The same of an http or https Origin; empty if it is another one."""
    return _name(_ORIGIN.fullmatch(origin))


def is_plain_origin(origin: bytes) -> bool:
    """Whether it is a scheme, a name or address, and maybe a port."""
    return _PLAIN_ORIGIN.fullmatch(origin) is not None


def _name(match: re.Match[bytes] | None) -> str:
    return "" if match is None else match.group(1).decode().strip("[]")
