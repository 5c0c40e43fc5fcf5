"""The checkpoints that the server may be given the weights of: by their names in one directory."""

from __future__ import annotations

from pathlib import Path

from trioengine.actors.power_change import path_of
from trioengine.core.bounds import brief
from trioengine.core.errors import RequestRejected
from trioengine.serve.problem import ClientError


class Checkpoints:
    """Those in a directory; without one there are none."""

    def __init__(self, directory: str | None) -> None:
        self._directory = None if directory is None else Path(directory)

    def find(self, name: str) -> Path:
        """The checkpoint of this name. It touches the file system: call it in a thread. Raises ClientError.

        A name is no path, and what it leads to lies in the directory, also where it is a link. The engine takes it.
        """
        if self._directory is None:
            message = "the server was started without --weights-dir: it has no other weights"
            raise ClientError("no_weights_dir", message)
        if name in ("", ".", "..") or set(name) & set("/\\") or not name.isprintable():
            message = f"name must be that of a checkpoint under --weights-dir, printable and no path, got {brief(name)}"
            raise _invalid(message)
        try:
            directory = self._directory.resolve(strict=True)
            path = (directory / name).resolve(strict=True)
        except (OSError, RuntimeError):  # there is none, or it is a link to itself
            raise _none(name) from None
        if directory not in path.parents:
            raise _none(name)
        try:
            path_of(path)
        except RequestRejected:  # whose message tells the path
            raise _invalid(f"name leads to a path that is too long or not printable, got {brief(name)}") from None
        return path


def _invalid(message: str) -> ClientError:
    return ClientError("invalid_value", message, param="name")


def _none(name: str) -> ClientError:
    """Also for what lies elsewhere: nobody is told what there is."""
    return ClientError("weights_not_found", f"there is no checkpoint {brief(name)} under --weights-dir", param="name")
