"""The query of a Realtime handshake: it asks for a new session, or resumes one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import unquote_plus

from msgspec import Meta

from trioengine.serve.errors import ClientError
from trioengine.serve.http import HttpRequest
from trioengine.serve.parsing import Parameters, count_in, number_in, read_query, text_in
from trioengine.serve.realtime.window import MAX_SECONDS

_WINDOW = "Seconds for which the new session outlives a lost connection; default: it ends with it."
PARAMETERS: Mapping[str, Any] = {
    "model": str,
    "resume": Annotated[float, Meta(ge=1, le=MAX_SECONDS, description=_WINDOW)],
    "session": Annotated[str, Meta(description="The token of a session to resume.")],
    "last_seq": Annotated[int, Meta(ge=0, description="The sequence_number of the last event that came.")],
}


@dataclass(frozen=True, slots=True)
class Handshake:
    """The parameters of a handshake: `seconds` for a new session, or `token` and `last` for one to resume."""

    models: tuple[str, ...]
    seconds: float | None = None  # of its window; None: none
    token: str | None = None
    last: int = -1  # number of the last event that the client has

    @classmethod
    def of(cls, request: HttpRequest) -> Handshake:
        """Raise ClientError for parameters that cannot be used, or do not go together."""
        parameters = read_query(request.query, PARAMETERS)
        models = tuple(parameters["model"])
        seconds = number_in(parameters, "resume", 1, MAX_SECONDS)
        token, last = text_in(parameters, "session"), count_in(parameters, "last_seq")
        if token is None:
            _refuse_beside(parameters, "last_seq", "needs the session to resume")
            return cls(models, seconds)
        _refuse_beside(parameters, "resume", "is for a new session, and session resumes one")
        if last is None:
            message = "last_seq is missing: the sequence_number of the last event that came"
            raise ClientError("missing_parameter", message, param="last_seq")
        return cls(models, None, token, last)


def _refuse_beside(parameters: Parameters, name: str, rule: str) -> None:
    if parameters[name]:
        raise ClientError("invalid_value", f"{name} {rule}", param=name)


def resumes(request: HttpRequest) -> bool:
    """Whether a handshake names a session: then this one counts for its key, and the connection does not."""
    return any(unquote_plus(part.partition("=")[0]) == "session" for part in request.query.split("&"))
