"""Everything that objects still hold when all callers have gone, found by a walk over their attributes.

The walk needs no list of the engine's parts: a container that is added to one of them is checked from then on. `KEPT`
names the containers that are not empty in an engine at rest.
"""

from __future__ import annotations

import enum
import functools
from collections import deque
from collections.abc import Iterator, MutableMapping, MutableSet
from collections.abc import Set as AbstractSet
from typing import Any

import trio

from trioengine.actors.engine import Engine
from trioengine.actors.power_change import PowerChange
from trioengine.core.config import EngineConfig
from trioengine.testing.fuzz import inside
from trioengine.testing.simulated_worker import SimulatedWorker
from trioengine.worker.scheduling.sequence import Limits, Sequence

_CONTAINERS = (MutableMapping, MutableSet, list, deque, bytearray)
_TENANTS = (inside.SessionActor, inside.Request, PowerChange, Sequence)  # whose time is over
_FOREIGN = ("trioengine.testing.", "trioengine.hub.", "trioengine.text.")  # modules whose objects are not the engine's
_CONSTANTS = (EngineConfig, Limits)
_OF_A_POOL = ("free", "ref_counts", "cached", "contents", "by_digest", "by_branch")
KEPT = frozenset(  # by the attributes that lead to them
    {
        *("engine.observers", "engine.gate.ledger.finish_reasons", "engine.gate.ledger.abort_causes"),
        *("engine.gate.ledger._states", "engine.grammars._good", "engine.adapters.by_name"),
        "worker._adapters._loaded",
        # the prefix cache and the encoder cache
        *(f"worker._scheduler.blocks.{pool}._{name}" for pool in ("full", "windowed") for name in _OF_A_POOL),
        *(f"worker._scheduler.blocks.states.{name}" for name in ("_free", "_kept")),
        *(f"worker._scheduler._waiters.pictures.{name}" for name in ("_pictures", "_unused")),
    }
)

_KEPT_AT_THE_END = KEPT | {"engine.recovery._suspects", "engine.recovery.probed"}  # no worker has come for them


def check_empty(engine: Engine, worker: SimulatedWorker | None) -> None:
    """All callers have gone: no container has anything in it, and no session, request or change is referred to.

    The worker, if any, is well and at rest.
    """
    roots: list[tuple[str, object]] = [("engine", engine.runtime)]
    if worker is not None:
        roots.append(("worker", worker.core))
    kept, seen = _KEPT_AT_THE_END if worker is None else KEPT, set[int]()
    left = [found for name, root in roots for found in _walk(name, root, kept, seen)]
    assert not left, f"all callers have gone, and {'; '.join(left)}"


def check_idle_session(engine: Engine, session: inside.SessionActor) -> None:
    """At rest, and the session has no request: it refers to none that it had, nor to a change."""
    shared = {id(value) for _, value in (*_attributes(engine.runtime), *_attributes(engine.runtime.gate))}
    left = [*_walk("session", session, frozenset(), shared)]
    assert not left, f"{session} has no request, and {'; '.join(left)}"


def _walk(path: str, owner: Any, kept: AbstractSet[str], seen: set[int]) -> Iterator[str]:
    seen.add(id(owner))
    for name, value in _attributes(owner):
        kind = _kind_of(value.__class__)
        if kind is _Kind.OTHER or id(value) in seen:
            continue
        where = f"{path}.{name}"
        if where in kept:
            seen.add(id(value))
        elif kind is _Kind.CONTAINER:
            if len(value):
                yield f"{where} has {len(value)}: {value!r:.200}"
        elif kind is _Kind.TENANT:
            yield f"{where} is {value!r:.200}"
        else:
            yield from _walk(where, value, kept, seen)


def _attributes(owner: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(owner, "__dict__", {}).items()
    for name in _slots(owner.__class__):
        if hasattr(owner, name):
            yield name, getattr(owner, name)


@functools.cache
def _slots(kind: type[Any]) -> tuple[str, ...]:
    names: list[str] = []
    for each in kind.__mro__:
        slots = each.__dict__.get("__slots__", ())
        names += (slots,) if isinstance(slots, str) else slots
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


class _Kind(enum.Enum):
    """The meaning of an attribute's type to a walk."""

    CONTAINER = "container"
    TENANT = "tenant"
    PART = "part"
    OTHER = "other"


@functools.cache
def _kind_of(kind: type[Any]) -> _Kind:
    module = kind.__module__
    is_ours = module.startswith("trioengine.") and not module.startswith(_FOREIGN)
    if issubclass(kind, _CONTAINERS):
        return _Kind.CONTAINER
    if issubclass(kind, _TENANTS):
        return _Kind.TENANT
    return _Kind.PART if is_ours and not issubclass(kind, (type, *_CONSTANTS)) else _Kind.OTHER


def check_tasks(above: trio.lowlevel.Task) -> None:
    """All callers have gone: no task of a session is left below the engine's."""
    left = [task.name for task in _below(above) if task.name.startswith("session-")]
    assert not left, f"all callers have gone, and tasks are left: {left}"


def _below(above: trio.lowlevel.Task) -> Iterator[trio.lowlevel.Task]:
    for nursery in above.child_nurseries:
        for task in nursery.child_tasks:
            yield task
            yield from _below(task)
