"""Who may come in: where a request comes from, which key it brings, and how many requests of that key there are."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple, NoReturn

from trioengine.serve.cache_salt import NO_SALT, CacheSalts
from trioengine.serve.config import ServeConfig
from trioengine.serve.http import BadRequest, Request, problem_response
from trioengine.serve.keys import Keys, presented
from trioengine.serve.origins import Origins
from trioengine.serve.problem import INVALID_REQUEST, RATE_LIMIT, Problem
from trioengine.serve.routes import Role


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
