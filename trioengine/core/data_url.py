"""Data URLs (RFC 2397) in base64: the one way in which clients send images. No URL is ever fetched."""

from __future__ import annotations

import binascii

from trioengine.core.errors import RequestRejected

_MAX_HEAD = 256  # characters before the data
_CHUNK = 1 << 18  # characters decoded at once, a multiple of 4; other threads run in between
_PREFIX = "data:"


def parse_data_url(url: str, max_bytes: int, *, where: str = "image_url") -> tuple[str, bytes]:
    """The media type, in lower case and without its parameters, and the decoded data.

    Raises RequestRejected, whose message begins with `where`, for other URLs, for data that is not exactly base64, and,
    before any of it is decoded, for more than `max_bytes`. Takes at most twice the memory of the decoded data.
    """
    if url[: len(_PREFIX)].lower() != _PREFIX:
        raise RequestRejected.at(where, "invalid_image_url", "only data: URLs are accepted; the server fetches nothing")
    comma = url.find(",", 0, _MAX_HEAD)
    media_type, *parameters = url[len(_PREFIX) : max(comma, 0)].split(";")
    if not parameters or parameters[-1].lower() != "base64":
        raise RequestRejected.at(where, "invalid_image_url", "a data: URL must begin with data:<media type>;base64,")
    start = comma + 1
    num_bytes = (len(url) - start) // 4 * 3 - url.count("=", max(len(url) - 2, start))
    if num_bytes > max_bytes:
        problem = f"the data has {num_bytes} bytes; at most {max_bytes} are accepted"
        raise RequestRejected.at(where, "image_file_too_large", problem)
    return media_type.lower(), _decoded(url, start, where)


def _decoded(url: str, start: int, where: str) -> bytes:
    end = url.find("=", start, len(url) - 2)  # only the last two characters may be padding
    if (len(url) - start) % 4 or end >= 0 or not url.isascii():
        raise _bad_base64(where)
    chunks = (url[at : at + _CHUNK] for at in range(start, len(url), _CHUNK))
    try:
        return b"".join([binascii.a2b_base64(chunk, strict_mode=True) for chunk in chunks])
    except binascii.Error:
        raise _bad_base64(where) from None


def _bad_base64(where: str) -> RequestRejected:
    return RequestRejected.at(where, "invalid_base64_image", "the data is not base64")
