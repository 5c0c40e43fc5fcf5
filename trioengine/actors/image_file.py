"""Files that callers give as images: their sizes, and the refusals of those that cannot be read."""

from __future__ import annotations

from pathlib import Path
from stat import S_ISREG

from trioengine.core.bounds import brief
from trioengine.core.errors import RequestRejected


def file_size(path: Path, where: str) -> int:
    """Bytes. Raises RequestRejected if it is not a regular file: to open a pipe blocks until it has a writer."""
    try:
        status = path.stat()
        if not S_ISREG(status.st_mode):
            raise ValueError("Not a regular file")
    except (OSError, ValueError) as exc:
        raise unreadable(path, where, exc) from exc
    return status.st_size


def unreadable(path: Path, where: str, error: Exception) -> RequestRejected:
    """The refusal of a file, with the reason."""
    reason = getattr(error, "strerror", None) or str(error)
    return RequestRejected.at(where, "invalid_value", f"cannot read {brief(str(path))}: {reason}")
