"""Keys of clients: held and compared as digests, so that neither a dump nor the time of an answer tells them."""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Iterable

from trioengine.serve.config import ServeConfig
from trioengine.serve.http import Request

logger = logging.getLogger("trioengine")
MIN_KEY_LENGTH = 16  # characters; shorter ones are warned about
BEARER = b"bearer "
SUBPROTOCOL_PREFIX = b"openai-insecure-api-key."  # a browser's WebSocket has no other place for a key


class Keys:
    """Any of these keys will do."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(_digest(key.encode()) for key in keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def __contains__(self, digest: bytes) -> bool:
        """Whether it is the digest of one of them; it takes as long for each, and for none."""
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(known, digest)
        return found


def warn_of_short_keys(config: ServeConfig) -> None:
    """Log a warning for each option that has a key which can be guessed; keys are not shown."""
    for flag, keys in (("--api-key", config.api_key), ("--admin-key", config.admin_key)):
        if any(len(key) < MIN_KEY_LENGTH for key in keys):
            logger.warning("a key of %s has fewer than %d characters, and may be guessed", flag, MIN_KEY_LENGTH)


def presented(request: Request) -> bytes | None:
    """The digest of the key that a request brings; None if it brings none, or more than one."""
    keys = [_after(BEARER, value) for name, value in request.headers if name == b"authorization"]
    if not keys and request.wants_websocket:
        keys = [_after(SUBPROTOCOL_PREFIX, name) for name in _subprotocols(request)]
        keys = [key for key in keys if key]
    return _digest(keys[0]) if len(keys) == 1 and keys[0] else None


def _subprotocols(request: Request) -> list[bytes]:
    offers = [value.split(b",") for name, value in request.headers if name == b"sec-websocket-protocol"]
    return [name.strip() for offer in offers for name in offer]


def _after(prefix: bytes, value: bytes) -> bytes:
    """What follows the prefix, in whatever case that is; nothing if it is not there."""
    return value[len(prefix) :].strip() if value[: len(prefix)].lower() == prefix else b""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
