"""Access to a server: keys, roles, limits for each key, and the hosts and origins of requests.

Keys are held and compared as digests, so that neither a memory dump nor the time of a response discloses one.

Without a key only loopback names and allowed hosts are served, so that no web page can reach the engine by DNS
rebinding. With a key every host is served unless some are allowed, and a page may send requests if it comes from this
server. Pages of an allowed site, and without a key pages of this machine, also get the headers of CORS.

Two keys share nothing in the prefix cache, and within a key two `cache_salt`s do not: otherwise `cached_tokens`, or the
time to the first token, would show a client which prompts others have sent.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import hmac
import ipaddress
import logging
import secrets
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import NamedTuple, NoReturn, TypeAlias

from trioengine.core.sampling_params import SamplingParams, replace_valid
from trioengine.serve.config import ServeConfig
from trioengine.serve.errors import INVALID_REQUEST, OverBudget, Problem
from trioengine.serve.http import (
    BadRequest,
    HttpRequest,
    HttpResponse,
    error_response,
    is_plain_origin,
    name_of_host,
    name_of_origin,
    problem_response,
)
from trioengine.serve.key_sessions import KeySessions, SessionShare
from trioengine.serve.listening import is_loopback

Headers: TypeAlias = Iterable[tuple[bytes, bytes]]
logger = logging.getLogger("trioengine")
BEARER = b"bearer "
API_KEY = b"x-api-key"  # a header that some clients send instead
SUBPROTOCOL_PREFIX = b"openai-insecure-api-key."  # a browser's WebSocket has no other place for a key
NO_SALT = b""  # of requests without a key, which share the prefix cache
OPAQUE = b"null"  # the origin of a page without one, such as a file or a sandboxed frame
PREFLIGHT_AGE = b"600"  # seconds for which a browser may reuse the answer to a preflight
_SHOWN = 100  # bytes of a Host or Origin


class Role(enum.Enum):
    """The clients that may use a route."""

    ANYONE = "anyone"
    USER = "user"
    OPERATOR = "operator"


class Caller(NamedTuple):
    """The digest of the key that a request counts for, if any, its sessions, and its salt in the prefix cache."""

    key: bytes | None
    cache_salt: bytes
    sessions: SessionShare | None = None


class Access:
    """The rules of one server. Without any key every client may use every route."""

    def __init__(self, config: ServeConfig) -> None:
        self.origins = Origins(config)
        self._operators = Keys(config.admin_key)
        self._users = Keys((*config.api_key, *config.admin_key))
        self._secret = secrets.token_bytes(32)  # makes a salt of a key that discloses nothing of it
        self._sessions = KeySessions(config.max_sessions_per_key)

    @contextmanager
    def admit(self, request: HttpRequest, role: Role, num_sessions: int = 1) -> Iterator[Caller]:
        """Admit a request, to be served within the block with so many sessions. Raises BadRequest if it is refused."""
        refusal = self.origins.refusal(request.headers)
        if refusal is not None:
            _refuse(*refusal)
        key = self._check_key(request, role) if self._users else None
        if key is None:
            yield Caller(None, NO_SALT)
            return
        with ExitStack() as stack:
            try:
                sessions = stack.enter_context(self._sessions.holding(key, num_sessions))
            except OverBudget as exc:
                raise BadRequest(error_response(exc)) from None
            yield Caller(key, hmac.digest(self._secret, key, hashlib.sha256), sessions)

    def _check_key(self, request: HttpRequest, role: Role) -> bytes | None:
        """Return the key that the request counts for. Operators have no limit: theirs is None."""
        if role is Role.ANYONE:
            return None
        if role is Role.OPERATOR and not self._operators:
            _refuse(403, "admin_key_required", "this server has no key for operators: start it with --admin-key")
        key = presented_key(request)
        if key is None:
            _refuse(401, "invalid_api_key", "this needs a key, in the header Authorization: Bearer KEY")
        if key not in self._users:
            _refuse(401, "invalid_api_key", "this key is not accepted")
        if role is Role.USER:
            return key
        if key not in self._operators:
            _refuse(403, "admin_key_required", "this is for operators, and needs their key")
        return None


def _refuse(status: int, code: str, message: str) -> NoReturn:
    response = problem_response(status, Problem(INVALID_REQUEST, code, message))
    if status == 401:
        response = dataclasses.replace(response, headers=((b"www-authenticate", b"Bearer"),))
    raise BadRequest(response)


def salted(params: SamplingParams, salt: bytes) -> SamplingParams:
    """Return the parameters with the cache salt that the engine gets for a client whose key has this salt."""
    if salt == NO_SALT:
        return params
    cache_salt = hmac.digest(salt, params.cache_salt.encode(), hashlib.sha256).hex()
    return replace_valid(params, cache_salt=cache_salt)


# ---- keys ---------------------------------------------------------------------------------------------------------


class Keys:
    """A set of keys, of which any one is accepted."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(_digest(key.encode()) for key in keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def __contains__(self, digest: bytes) -> bool:
        """Whether it is the digest of one of the keys; takes the same time for every digest."""
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(known, digest)
        return found


def presented_key(request: HttpRequest) -> bytes | None:
    """Return the digest of the request's key; None unless it has exactly one. Authorization goes before X-Api-Key."""
    keys = [_strip_prefix(BEARER, value) for name, value in request.headers if name == b"authorization"]
    keys = keys or [value for name, value in request.headers if name == API_KEY]
    if not keys and request.wants_websocket:
        keys = [_strip_prefix(SUBPROTOCOL_PREFIX, name) for name in _subprotocols(request)]
        keys = [key for key in keys if key]
    return _digest(keys[0]) if len(keys) == 1 and keys[0] else None


def _subprotocols(request: HttpRequest) -> list[bytes]:
    offers = [value.split(b",") for name, value in request.headers if name == b"sec-websocket-protocol"]
    return [name.strip() for offer in offers for name in offer]


def _strip_prefix(prefix: bytes, value: bytes) -> bytes:
    """Return the rest after a prefix, which is compared without regard to case; empty without the prefix."""
    return value[len(prefix) :].strip() if value[: len(prefix)].lower() == prefix else b""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


# ---- hosts and origins --------------------------------------------------------------------------------------------


@lru_cache(64)
def normal_host(host: str) -> str:
    """Return the one spelling of a name or an address by which hosts are compared."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host.lower()


class Refusal(NamedTuple):
    """The status and the error of a request that is refused."""

    status: int
    code: str
    message: str


class Origins:
    """The rules of one server for the headers Host and Origin."""

    def __init__(self, config: ServeConfig) -> None:
        self._has_keys = config.has_keys
        self._loopback_only = not config.has_keys and not config.insecure
        self._hosts = {normal_host(host.strip("[]")) for host in config.allowed_host}
        self._serves_loopback = self._loopback_only or is_loopback(config.host)
        self._allowed = {origin.encode() for origin in config.allowed_origin}

    def refusal(self, headers: Headers) -> Refusal | None:
        """Return the reason to refuse a request with these headers, if any. A refused Host or Origin is logged."""
        hosts = [value for name, value in headers if name == b"host"]
        if (self._loopback_only or self._hosts) and not any(self._is_own(name_of_host(host)) for host in hosts):
            return _refused_host(hosts)
        origins = [value for name, value in headers if name == b"origin" and value not in self._allowed]
        for origin in origins:
            refusal = self._refused_origin(origin, hosts)
            if refusal is not None:
                _log_refused(origin)
                return refusal
        return None

    def _is_own(self, name: str) -> bool:
        """Whether a Host may have this name: an allowed one, or a loopback name of a server that listens there."""
        return normal_host(name) in self._hosts or (self._serves_loopback and is_loopback(name))

    def _refused_origin(self, origin: bytes, hosts: list[bytes]) -> Refusal | None:
        """Check an origin that is not an allowed one."""
        name = name_of_origin(origin)
        if not name and origin != OPAQUE:
            rule = "the Origin must be http:// or https:// and a host, or an --allowed-origin"
            return Refusal(400, "bad_request", rule)
        is_same = origin.partition(b"://")[2] in hosts
        if self._loopback_only and not (is_loopback(name) or is_same):
            rule = "the Origin must be localhost or an --allowed-origin on a server without a key"
            return Refusal(403, "forbidden", rule)
        if self._has_keys and not is_same:
            return Refusal(403, "forbidden", "the Origin must be this server's or an --allowed-origin")
        return None

    def headers(self, request: HttpRequest) -> tuple[tuple[bytes, bytes], ...]:
        """Return the CORS headers of every response to this request."""
        vary = (b"vary", b"origin")
        origin = self._allowed_origin(request)
        if origin is None:
            return (vary,) if self._allowed else ()
        exposed = (b"access-control-expose-headers", b"x-request-id, retry-after, x-unknown-fields")
        return ((b"access-control-allow-origin", origin), exposed, vary)

    def preflight(self, request: HttpRequest, methods: Iterable[str]) -> HttpResponse | None:
        """Return the response to a CORS preflight of an allowed origin; None for any other request."""
        wanted = request.header(b"access-control-request-method")
        if request.method != "OPTIONS" or wanted is None or self._allowed_origin(request) is None:
            return None
        headers = [
            (b"access-control-allow-methods", ", ".join(methods).encode()),
            (b"access-control-max-age", PREFLIGHT_AGE),
        ]
        names = request.header(b"access-control-request-headers")
        if names is not None:
            headers.append((b"access-control-allow-headers", names))
        return HttpResponse(200, b"", b"text/plain", tuple(headers))

    def _allowed_origin(self, request: HttpRequest) -> bytes | None:
        origin = request.header(b"origin")
        if origin is None or origin in self._allowed:
            return origin
        return origin if self._loopback_only and is_loopback(name_of_origin(origin)) else None


def _refused_host(hosts: list[bytes]) -> Refusal:
    """Log the refusal; log and response name the flag that would allow the Host."""
    host = (hosts[0] if hosts else b"")[:_SHOWN].decode("ascii", "backslashreplace")
    logger.warning("a request was refused for its Host %r; --allowed-host NAME would allow it", host)
    rule = "is neither an --allowed-host nor, on a server of this machine, a loopback name such as localhost"
    return Refusal(403, "forbidden", f"the Host {host!r} {rule}")


def _log_refused(origin: bytes) -> None:
    """Warn, with the flag that would allow the origin if there is one; the flag is safe to paste into a shell."""
    if len(origin) <= _SHOWN and is_plain_origin(origin):
        flag = origin.decode().lower()
        logger.warning("a page was refused for its Origin; --allowed-origin %s would allow it", flag)
    else:
        logger.warning("a page was refused for its Origin %r; no --allowed-origin can name it", origin[:_SHOWN])
