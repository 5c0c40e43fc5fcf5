"""Random ids and the wall clock of answers: their one source, which the fuzzer replaces by a count."""

from __future__ import annotations

import secrets
import time

_clock = time.time


def new_id(prefix: str) -> str:
    """Return a new random id with this prefix."""
    return f"{prefix}{random_hex()}"


def random_hex() -> str:
    """Return 24 random hexadecimal digits."""
    return secrets.token_hex(12)


def unix_time() -> int:
    """Return the time in seconds since 1970, as answers show it."""
    return int(_clock())
