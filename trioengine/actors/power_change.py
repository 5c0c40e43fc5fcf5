"""What is asked of the power actor: a change, and the checks of its arguments, which name what is wrong."""

from __future__ import annotations

import enum
import logging
from collections.abc import Awaitable, Callable, Collection
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import trio

from trioengine.core.arguments import check_flag, rejected
from trioengine.core.bounds import brief, integer, number
from trioengine.core.config import MAX_SECONDS
from trioengine.core.errors import TransitionFailed
from trioengine.core.power import ALL_TAGS, Tag

logger = logging.getLogger("trioengine")
MAX_PATH = 4096  # characters


class Mode(enum.StrEnum):
    """What a sleep or an update does with the requests that run."""

    ABORT = "abort"  # they end, with cause `sleep` and what came until then
    WAIT = "wait"  # they finish; after the timeout the rest is aborted
    KEEP = "keep"  # they are suspended, and go on afterwards


Level: TypeAlias = Literal[1, 2]
ModeName: TypeAlias = Literal["abort", "wait", "keep"]


class Leniency(NamedTuple):
    """How long requests in flight may still run: `timeout` seconds at most, where the mode is WAIT."""

    mode: Mode
    timeout: float | None
    aborts_waiting: bool = False  # requests and sessions that wait for a slot


class Weights(NamedTuple):
    """What the model is made of: a file or directory, and how many there were with it."""

    path: str
    version: int


@dataclass(eq=False)
class PowerChange:
    """One that was asked for; by its name the log tells of it."""

    name: str
    make: Callable[[], Awaitable[None]]
    closes_gate: bool
    done: trio.Event = field(default_factory=trio.Event)
    failure: TransitionFailed | None = None
    num_aborted: int = 0  # requests

    def log(self, message: str, *values: object) -> None:
        """At INFO, under its name."""
        logger.info(f"%s: {message}", self.name, *values)

    async def wait(self) -> None:
        """Until it is done; raises TransitionFailed if it failed. Cancelled, the change goes on."""
        await self.done.wait()
        if self.failure is not None:
            raise copy(self.failure)


def level_of(level: object) -> int:
    try:
        return integer(level, 1, 2)
    except ValueError as exc:
        raise rejected("level", str(exc)) from None


def leniency_of(mode: object, timeout: object, *, keep_waiting: object = True) -> Leniency:
    if mode not in [each.value for each in Mode]:
        raise rejected("mode", f"must be abort, wait or keep, got {brief(mode)}")
    keeps = check_flag("keep_waiting", keep_waiting)
    if timeout is None:
        return Leniency(Mode(mode), None, aborts_waiting=mode == Mode.ABORT.value and not keeps)
    if mode != Mode.WAIT.value:
        raise rejected("timeout", f"is for mode wait, not {mode}")
    try:
        return Leniency(Mode.WAIT, number(timeout, 0, MAX_SECONDS))
    except ValueError as exc:
        raise rejected("timeout", str(exc)) from None


def tags_of(tags: Collection[str] | None) -> frozenset[Tag]:
    """The tags; all of them for None, one for a string."""
    if tags is None:
        return ALL_TAGS
    try:
        chosen = frozenset(map(Tag, (tags,) if isinstance(tags, str) else tags))
    except (TypeError, ValueError):
        chosen = frozenset()
    if not chosen:
        known = ", ".join(sorted(tag.value for tag in Tag))
        raise rejected("tags", f"must be some of {known}, got {brief(tags)}")
    return chosen


def path_of(path: object) -> str:
    text = str(path) if isinstance(path, str | Path) else ""
    if not text or len(text) > MAX_PATH or not text.isprintable():  # lone surrogates are not
        raise rejected("path", f"must be a file or directory, got {brief(path)}")
    return text
