"""Why a model could not be fetched, in a few words: no addresses, which are the user's own affair."""

from __future__ import annotations

import re
from collections.abc import Iterator

_NO_SUCH_MODEL, _NO_ACCESS = (401, 404), 403  # the hub says 401 of what it does not show to everybody


def pip_failure(complaint: str, returncode: int) -> str:
    """One line of pip's stderr."""
    lines = [line.strip() for line in complaint.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    crashed = "Exception:" in errors  # a traceback follows, and its last line says what happened
    last = ((not crashed and errors) or lines or [f"nothing, its exit status is {returncode}"])[-1]
    unreachable = any(line.startswith("WARNING: Retrying") for line in lines)
    return _redact(last) + ("; the package index cannot be reached: check the network" if unreachable else "")


def hub_failure(exc: Exception) -> str:
    """What the hub's client has raised, or what is behind that: an answer of the hub, or of the network."""
    behind = list(_chain(exc))
    status = next(filter(None, (getattr(getattr(one, "response", None), "status_code", None) for one in behind)), None)
    if status in _NO_SUCH_MODEL:
        return f"there is no such model, or it needs a login (HTTP {status})"
    if status is not None:
        return f"it needs a login that may have it (HTTP {status})" if status == _NO_ACCESS else f"HTTP {status}"
    refused = next((one.strerror for one in behind if isinstance(one, OSError) and one.errno and one.strerror), None)
    if refused is not None:
        return f"it cannot be reached: {refused}; is there a network?"
    first = _redact((str(exc).strip().splitlines() or [""])[0])
    if isinstance(exc, FileNotFoundError):  # neither in its cache, nor to be had
        got = f"{first.removeprefix('Got: ')}; " if first.startswith("Got: ") else ""
        return f"{got}is there a network, and HF_HUB_OFFLINE not set?"
    return first or "no reason was given"


def _chain(exc: BaseException | None) -> Iterator[BaseException]:
    while exc is not None:
        yield exc
        exc = exc.__cause__ or exc.__context__


def _redact(text: str) -> str:
    text = re.sub(r"\b[a-z+]+://[^\s'\"<>]+", "<address>", text)
    return re.sub(r"host='[^']*'", "host=<address>", text)
