"""Random ids and the wall clock of answers: their one source, which the fuzzer replaces by a count."""

from __future__ import annotations

import secrets
import time
from email.utils import formatdate
from functools import lru_cache

_clock = time.time


def new_id(prefix: str) -> str:
    """Return a new random id with this prefix."""
    return f"{prefix}{random_hex()}"


def new_token() -> str:
    """Return a new secret of 192 random bits, in hexadecimal digits."""
    return random_hex() + random_hex()


def random_hex() -> str:
    """Return 24 random hexadecimal digits."""
    return secrets.token_hex(12)


def unix_time() -> int:
    """Return the time in seconds since 1970, as answers show it."""
    return int(_clock())


def http_date() -> bytes:
    """Return the time for the header Date (RFC 9110, section 5.6.7)."""
    return _http_date(unix_time())


@lru_cache(maxsize=1)
def _http_date(seconds: int) -> bytes:
    return formatdate(seconds, usegmt=True).encode()
