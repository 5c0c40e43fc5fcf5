"""Cache salts of keys: two keys share nothing in the prefix cache, and within a key two `cache_salt`s do not.

Otherwise `cached_tokens`, or the time to the first token, would show a client which prompts others have sent.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import secrets

from trioengine.core.sampling_params import SamplingParams

NO_SALT = b""  # of a server without keys, whose clients share the prefix cache


class CacheSalts:
    """Derives each key's salt with a secret of this server's own, so that a salt discloses no key."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def of(self, key: bytes) -> bytes:
        """The salt of the key with this digest."""
        return hmac.digest(self._secret, key, hashlib.sha256)


def salted(params: SamplingParams, salt: bytes) -> SamplingParams:
    """The parameters as the engine gets them from a client whose key has this salt."""
    if salt == NO_SALT:
        return params
    cache_salt = hmac.digest(salt, params.cache_salt.encode(), hashlib.sha256).hex()
    return dataclasses.replace(params, cache_salt=cache_salt)
