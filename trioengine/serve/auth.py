"""Keys of clients: held and compared as digests, so that neither a dump nor the time of an answer tells them."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import ipaddress
import logging
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple, NoReturn, TypeAlias

from trioengine.core.sampling_params import SamplingParams
from trioengine.serve.config import ServeConfig
from trioengine.serve.errors import INVALID_REQUEST, RATE_LIMIT, Problem
from trioengine.serve.http import (
    BadRequest,
    Request,
    Response,
    is_plain_origin,
    name_of_host,
    name_of_origin,
    problem_response,
)
from trioengine.serve.routes import Role

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


Headers: TypeAlias = Iterable[tuple[bytes, bytes]]
logger = logging.getLogger("trioengine")
OPAQUE = b"null"  # the origin of a page that has none, as a file or a sandboxed frame
_SHOWN = 100  # bytes
PREFLIGHT_AGE = b"600"  # seconds that a browser need not ask again


def is_loopback(host: str) -> bool:
    """Whether a name or an address without a port stands for this machine alone."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Refusal(NamedTuple):
    """The status and the error of a request that is refused."""

    status: int
    code: str
    message: str


class Origins:
    """The rules of one server."""

    def __init__(self, config: ServeConfig) -> None:
        self._has_keys = config.has_keys
        self._loopback_only = not config.has_keys and not config.insecure
        self._allowed = {origin.encode() for origin in config.allowed_origin}

    def refusal(self, headers: Headers) -> Refusal | None:
        """Why a request with these headers is refused; None: it is not. A refused Host or Origin is logged."""
        hosts = [value for name, value in headers if name == b"host"]
        if self._loopback_only and not any(is_loopback(name_of_host(host)) for host in hosts):
            return _refused_host(hosts)
        origins = [value for name, value in headers if name == b"origin" and value not in self._allowed]
        for origin in origins:
            refusal = self._refusal_of(origin, hosts)
            if refusal is not None:
                _log_refused(origin)
                return refusal
        return None

    def _refusal_of(self, origin: bytes, hosts: list[bytes]) -> Refusal | None:
        """Why a page of an origin that is not an allowed one may not ask, if so."""
        name = name_of_origin(origin)
        if not name and origin != OPAQUE:
            rule = "the Origin must be http:// or https:// and a host, or an --allowed-origin"
            return Refusal(400, "bad_request", rule)
        if self._loopback_only and not is_loopback(name):
            rule = "the Origin must be localhost or an --allowed-origin: there is no key"
            return Refusal(403, "forbidden", rule)
        if self._has_keys and origin.partition(b"://")[2] not in hosts:
            return Refusal(403, "forbidden", "the Origin must be this server's or an --allowed-origin")
        return None

    def headers(self, request: Request) -> tuple[tuple[bytes, bytes], ...]:
        """What every response to this request says to browsers."""
        vary = (b"vary", b"origin")
        origin = self._allowed_origin(request)
        if origin is None:
            return (vary,) if self._allowed else ()
        exposed = (b"access-control-expose-headers", b"x-request-id, retry-after")
        return ((b"access-control-allow-origin", origin), exposed, vary)

    def preflight(self, request: Request, methods: Iterable[str]) -> Response | None:
        """The answer to a browser that asks whether its page may ask; None: it is no such request."""
        asked = request.header(b"access-control-request-method")
        if request.method != "OPTIONS" or asked is None or self._allowed_origin(request) is None:
            return None
        headers = [
            (b"access-control-allow-methods", ", ".join(methods).encode()),
            (b"access-control-max-age", PREFLIGHT_AGE),
        ]
        wanted = request.header(b"access-control-request-headers")
        if wanted is not None:
            headers.append((b"access-control-allow-headers", wanted))
        return Response(200, b"", b"text/plain", tuple(headers))

    def _allowed_origin(self, request: Request) -> bytes | None:
        origin = request.header(b"origin")
        if origin is None or origin in self._allowed:
            return origin
        return origin if self._loopback_only and is_loopback(name_of_origin(origin)) else None


def _refused_host(hosts: list[bytes]) -> Refusal:
    """Of a server without a key; the flags that would allow the Host are named, in the log as well."""
    host = (hosts[0] if hosts else b"")[:_SHOWN].decode("ascii", "backslashreplace")
    logger.warning("a request was refused for its Host %r; --api-key KEY (or --insecure) would allow any Host", host)
    rule = "is not a loopback name such as localhost; a server with --api-key (or --insecure) serves any Host"
    return Refusal(403, "forbidden", f"the Host {host!r} {rule}")


def _log_refused(origin: bytes) -> None:
    """Warn, with the flag that would allow the origin if there is one; it is safe to be pasted into a shell."""
    if len(origin) <= _SHOWN and is_plain_origin(origin):
        flag = origin.decode().lower()
        logger.warning("a page was refused for its Origin; --allowed-origin %s would allow it", flag)
    else:
        logger.warning("a page was refused for its Origin %r; no --allowed-origin can name it", origin[:_SHOWN])


class Caller(NamedTuple):
    """The digest of the key that a request counts for, if any, and the salt of that key in the prefix cache."""

    key: bytes | None
    cache_salt: bytes


class Access:
    """The rules of one server. Without any key, whoever may connect may do everything."""

    def __init__(self, config: ServeConfig) -> None:
        self.origins = Origins(config)
        self._operators = Keys(config.admin_key)
        self._users = Keys((*config.api_key, *config.admin_key))
        self._most = config.max_sessions_per_key
        self._salts = CacheSalts()
        self._sessions: dict[bytes, int] = {}  # by the key's digest; none of them is 0

    @contextmanager
    def admit(self, request: Request, role: Role) -> Iterator[Caller]:
        """Within, the request is served. Raises BadRequest when it may not be."""
        refusal = self.origins.refusal(request.headers)
        if refusal is not None:
            _refuse(*refusal)
        key = self._check_key(request, role) if self._users else None
        with nullcontext() if key is None else self._session(key):
            yield Caller(key, NO_SALT if key is None else self._salts.of(key))

    def _check_key(self, request: Request, role: Role) -> bytes | None:
        """The key that the request counts for. An operator is never told that there are too many."""
        if role is Role.ANYONE:
            return None
        if role is Role.OPERATOR and not self._operators:
            _refuse(403, "admin_key_required", "this is for operators: start the server with --admin-key")
        key = presented(request)
        if key is None:
            _refuse(401, "invalid_api_key", "this needs a key, in the header Authorization: Bearer KEY")
        if key not in self._users:
            _refuse(401, "invalid_api_key", "this key is not accepted")
        if role is Role.USER:
            return key
        if key not in self._operators:
            _refuse(403, "admin_key_required", "this is for operators, and needs their key")
        return None

    @contextmanager
    def _session(self, key: bytes) -> Iterator[None]:
        count = self._sessions.get(key, 0)
        if count >= self._most:
            message = f"this key has {count} requests and connections, which is the limit; try again when one has ended"
            problem = Problem(RATE_LIMIT, "too_many_sessions", message, retry_after=1.0)
            raise BadRequest(problem_response(429, problem))
        self._sessions[key] = count + 1
        try:
            yield
        finally:
            self._sessions[key] -= 1
            if not self._sessions[key]:
                del self._sessions[key]


def _refuse(status: int, code: str, message: str) -> NoReturn:
    response = problem_response(status, Problem(INVALID_REQUEST, code, message))
    if status == 401:
        response = dataclasses.replace(response, headers=((b"www-authenticate", b"Bearer"),))
    raise BadRequest(response)
